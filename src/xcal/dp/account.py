"""One client's spending in one run: the filter decides, the ledger records, then it is released."""

from __future__ import annotations

from collections.abc import Sequence

from xcal.dp.filter import BudgetExhausted, Filter, RenyiFilter, StepFilter, add_up
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Charge, Head, Release, RunTerms, as_planned
from xcal.errors import UserError


class NoiseTooLow(UserError):
    """A step with less noise than the client's owner allows."""


class NotAsPlanned(UserError):
    """A step of another rate or less noise than the fixed plan that the run reserved."""


class Account:
    """What a training step pays with.

    `replayable` (seeded noise): a step that was paid for before a crash and is done again with the
    same inputs is the same release and is not charged again; with other inputs it is refused, since
    the same noise on two queries gives away their difference. Otherwise (secure noise) whatever is
    drawn anew is charged anew, and what was paid stays paid.

    `floor`: the lowest multiplier the client's owner allows, all releases of a step together.

    The run is entered into the ledger with its first charge: one that fails before has reserved
    nothing. Nobody can reserve in between, since the ledger is locked as long as it is open.
    """

    def __init__(
        self, ledger: Ledger, terms: RunTerms, *, replayable: bool, floor: float = 0.0
    ) -> None:
        if terms.order is None or terms.budget is None:
            raise ValueError(f"the method {terms.method!r} has no guarantee to account for")
        ledger.check(terms)
        self.terms = terms
        self._ledger = ledger
        self._floor = floor
        self._replayable = replayable
        self._charges = ledger.charges(terms.run)
        self._recorded = {(c.round, c.step): c for c in self._charges} if replayable else {}
        self._filter = self._filter_after(self._charges)
        self._all = self._filter  # everything recorded, whatever is being replayed
        self._last = max(((c.round, c.step) for c in self._charges), default=(-1, -1))

    def _filter_after(self, charges: Sequence[Charge]) -> Filter:
        assert self.terms.order is not None and self.terms.budget is not None
        order, budget, steps = self.terms.order, self.terms.budget, self.terms.steps
        spent = 0.0
        for charge in charges:
            spent = add_up(spent, charge.cost)
        if self.terms.accountant == "pld":
            return StepFilter(order, budget, steps, len(charges), spent)
        return RenyiFilter(order, budget, spent)

    @property
    def filter(self) -> Filter:
        """The budget as it stood before the next step: the only view a step may choose by."""
        return self._filter

    @property
    def spent(self) -> float:
        """Σρ of all that this run has recorded, replayed or not."""
        return self._all.spent

    @property
    def steps_paid(self) -> int:
        """How many steps this run has paid for."""
        return len(self._charges)

    @property
    def charges(self) -> Sequence[Charge]:
        """What this run has paid, in order."""
        return self._charges

    @property
    def next_step(self) -> int:
        """The first step of a run without rounds that was not paid for yet."""
        return self._last[1] + 1

    @property
    def rounds_paid(self) -> set[int]:
        """The rounds in which this run has paid for a step."""
        return {c.round for c in self._charges}

    @property
    def last_paid(self) -> tuple[int, int]:
        """The furthest round and step that this run has paid for; (-1, -1): none yet."""
        return self._last

    @property
    def head(self) -> Head:
        return self._ledger.head

    def halted_before(self, round_number: int) -> bool:
        """Whether this run was halted for good before the round.

        A halt within the round itself counts under secure noise; under seeded noise the round is
        replayed and comes to it again.
        """
        halt = self._ledger.halted_at(self.terms.run)
        return halt is not None and (not self._replayable or halt[0] < round_number)

    def rewind(self, round_number: int, step: int) -> None:
        """Before a round is taken up at `step`: see the budget as it stood then.

        Only where noise can be replayed. The recorded charges stay; a replayed step finds its own.
        """
        if self._replayable:
            before = [c for c in self._charges if (c.round, c.step) < (round_number, step)]
            self._filter = self._filter_after(before)

    def pay(
        self,
        round_number: int,
        step: int,
        *,
        rate: float,
        sigma: float,
        cost: float,
        releases: tuple[Release, ...],
        inputs: str | None,
    ) -> None:
        """Charge one step, durably, before any of it is released.

        Raises `BudgetExhausted`, with nothing written, where run or population has no room left.
        """
        if sigma < self._floor * (1 - 1e-9):  # a plan at the very floor was admitted
            raise NoiseTooLow(
                f"Step {step} of round {round_number} would use a multiplier of {sigma:.3g}, and"
                f" {self._floor:g} is the lowest allowed here: nothing was charged or released."
            )
        if not as_planned(self.terms, rate, sigma):
            raise NotAsPlanned(
                f"Step {step} of round {round_number} would draw at the rate {rate:.6g} with a"
                f" multiplier of {sigma:.6g}, and {self.terms.rate:.6g} and {self.terms.sigma:.6g}"
                " are planned: nothing was charged or released. A method that moves them plans with"
                " `plan_static`."
            )
        charge = Charge(self.terms.run, round_number, step, rate, sigma, cost, releases, inputs)
        known = self._recorded.get((round_number, step))
        if known is not None:
            if known != charge:
                raise UserError(
                    f"Step {step} of round {round_number} was paid for with other inputs than it"
                    " has now: the same noise must not serve two queries. Start a new run."
                )
            self._filter = self._filter.after(cost)
            return
        if self._replayable and (round_number, step) <= self._last:
            raise UserError(
                f"Step {step} of round {round_number} lies before steps that were paid for already:"
                " this run's files do not belong together. Start a new run."
            )
        after = self._all.after(cost)  # all that is recorded counts
        if not self._ledger.lifetime_admits(rate, sigma):
            raise BudgetExhausted("the population's lifetime budget does not cover another step")
        self._ledger.reserve(self.terms)
        self._ledger.charge(charge)
        self._charges.append(charge)
        self._last = max(self._last, (round_number, step))
        self._filter = self._all = after

    def halt(self, round_number: int, step: int) -> None:
        """Record that this run makes no further step."""
        self._ledger.reserve(self.terms)
        self._ledger.halt(self.terms.run, round_number, step)
