"""A trusted server's own round: its site, its ledger, its noise.

The ledger is the same as a client's, with the client as its unit: charged, durably, before the
averaged model is released to anyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xcal.config import Experiment
from xcal.dp.account import Account
from xcal.dp.calibration import Plan
from xcal.dp.clipping.precision import double
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger import ledger as ledgers
from xcal.dp.ledger.rows import Head, Terms
from xcal.dp.mechanism import UnchargedRelease
from xcal.dp.noise import NoiseSource
from xcal.errors import UserError
from xcal.federation.aggregation import ServerRule, plain_rule
from xcal.federation.exchange import RoundReply, Weights
from xcal.federation.loaded_site import replay_key
from xcal.federation.request_refusals import paid_so_far
from xcal.federation.rounds import run_terms
from xcal.methods.base import CentralMethod, Method, save_state
from xcal.methods.context import ReplayKey
from xcal.methods.dp_fedavg import ServerContext, Update
from xcal.methods.registry import checked_server_plan
from xcal.plugins import OwnCodeError


@dataclass(frozen=True)
class ServerSite:
    """A server as its operator holds it: run, site, noise."""

    run: str
    site_dir: Path
    noise: NoiseSource

    @property
    def ledger_path(self) -> Path:
        return self.site_dir / "ledger.sqlite"

    def replay_key(self, experiment: Experiment) -> ReplayKey | None:
        return replay_key(self.noise, self.site_dir, lambda: (experiment.identity(),))


@dataclass(frozen=True)
class CentralState:
    """What a trusted server remembers between rounds: functions of its releases."""

    method: dict[str, Any] | None = None
    releases: int = 0
    halted: bool = False
    epsilon_spent: float = 0.0
    share_spent: float = 0.0
    ledger_rows: int = 0
    ledger_hash: str = ""


@dataclass(frozen=True)
class CentralRule:
    """The private mean of a central method.

    Guarantee: (ε, δ) of the plan for the whole contribution of one client, against all who receive
    models; none against the server itself. A round that is done again after a crash is, under
    seeded noise, the same release and not charged again, or refused; under secure noise it draws
    anew and is charged anew. Where the budget is exhausted the weights stay.
    """

    method: CentralMethod
    experiment: Experiment
    plan: Plan
    participants: int
    site: ServerSite

    def load_state(self, saved: dict[str, Any] | None) -> CentralState:
        if saved is not None:
            return CentralState(**saved)
        if not self.site.ledger_path.exists():
            terms = Terms(
                population=f"clients of {self.site.run}",
                unit=self.plan.unit,
                epsilon=self.plan.epsilon,
                delta=self.plan.delta,
                simulated=self.site.noise.name == "seeded",
            )
            ledgers.create(self.site.ledger_path, terms)
        return CentralState()

    def combine(
        self,
        round_number: int,
        weights: Weights,
        answers: Sequence[RoundReply],
        state: CentralState,
    ) -> tuple[Weights, CentralState]:
        expected = Head(state.ledger_rows, state.ledger_hash) if state.ledger_rows else None
        with ledgers.Ledger(self.site.ledger_path, expected=expected) as book:
            terms = run_terms(
                self.site.run, self.plan.unit, self.site.noise.name, self.method, self.plan
            )
            account = Account(book, terms, replayable=self.site.noise.name == "seeded")
            if any(r > round_number for r in account.rounds_paid):
                raise UserError(
                    f"The ledger {self.site.ledger_path} knows later rounds than this one: restore"
                    " the run's folder, or start a new run."
                )
            account.rewind(round_number, 0)
            inner = self.method.load_server_state(state.method, self.experiment)
            released: Update | None = None
            halted = state.halted or account.halted_before(round_number)
            # Who takes part is public, so a round that nobody answered needs no noise to hide it.
            if answers and not halted:
                context = ServerContext(
                    self.method.name,
                    round_number,
                    self.site.noise,
                    account,
                    self.participants,
                    self.site.replay_key(self.experiment),
                )
                try:
                    released, inner = self.method.server_step(
                        context, self.experiment, self.plan, _updates(weights, answers), inner
                    )
                except BudgetExhausted:
                    account.halt(round_number, 0)
                    halted = True
                except OwnCodeError as error:
                    told = paid_so_far("the server", account.steps_paid)
                    raise OwnCodeError(f"{error} {told}") from error
                if released is not None and len(context.charges) != 1:
                    raise UnchargedRelease(
                        f"The method {self.method.name!r} made {len(context.charges)} charges in a"
                        " round of the server where one is due: the run ends here, and nothing of"
                        " this round leaves."
                    )
            after = CentralState(
                save_state(inner),
                state.releases + (released is not None),
                halted,
                self.plan.odometer(account.spent),
                account.filter.share_spent,
                book.head.count,
                book.head.hash,
            )
        moved = {
            name: old.clone()
            if released is None
            else (double(old) + double(released[name].to(old.device))).to(old)
            for name, old in weights.items()
        }
        return moved, after

    def report(self, state: CentralState) -> dict[str, Any]:
        """The server's own line: never to be put into one column with record level."""
        return {
            "unit": self.plan.unit,
            "epsilon": self.plan.epsilon,
            "delta": self.plan.delta,
            "order": self.plan.order,
            "sigma": self.plan.sigma_ref,
            "participants": self.participants,
            **asdict(state),
        }


def _updates(weights: Weights, answers: Sequence[RoundReply]) -> list[Update]:
    """What each client changed, in float64 and in the clients' order."""
    return [
        {name: double(r.weights[name].to(old.device)) - double(old) for name, old in ordered}
        for ordered in [sorted(weights.items())]
        for r in answers
        if r.weights is not None
    ]


def check_rule(experiment: Experiment, method: Method, participants: int) -> Plan | None:
    """Refuse a server rule that cannot hold; the server's plan where it adds the noise."""
    if not isinstance(method, CentralMethod):
        if not method.pooled:
            plain_rule(experiment, participants)
        return None
    if experiment.aggregation != "mean":
        raise UserError(
            f"{method.name} bounds what one client adds to a mean; a"
            f" {experiment.aggregation} has no such bound, and the guarantee would be void: set"
            " aggregation = 'mean'."
        )
    method.load_server_state(None, experiment)  # which one of the user's own may refuse
    return checked_server_plan(method, experiment, participants)


def server_rule(
    experiment: Experiment,
    method: Method,
    participants: int,
    plan: Plan | None,
    site: ServerSite,
) -> ServerRule:
    """The rule of this experiment and method; `site` is touched only where the server pays."""
    if plan is not None and isinstance(method, CentralMethod):
        return CentralRule(method, experiment, plan, participants, site)
    if method.pooled:  # one client: whatever is asked for, its answer is the mean
        return plain_rule(experiment.model_copy(update={"aggregation": "mean"}), participants)
    return plain_rule(experiment, participants)
