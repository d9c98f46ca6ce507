"""`dp-fedavg`: a trusted server clips whole updates and adds the noise (McMahan et al. 2018)."""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xcal.config import Experiment
from xcal.dp.account import Account
from xcal.dp.accounting import COUNT_SENSITIVITY, joint_sigma
from xcal.dp.calibration import Plan, PlanShape, plan_fixed
from xcal.dp.ledger.rows import Release
from xcal.dp.mechanism import ChargedStep, Mechanism
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.methods.context import ReplayKey, digest_tensors
from xcal.methods.fl import PlainSteps

Update = dict[str, Tensor]  # float64: what one client changed


@dataclass(frozen=True)
class ServerContext:
    """The tools of a trusted server in one round."""

    method: str
    round: int
    noise: NoiseSource
    account: Account
    participants: int  # m: the constant divisor, whoever answers
    replay: ReplayKey | None = None  # under seeded noise only
    charges: list[Mechanism] = field(default_factory=list)  # of this round

    def charge(self, mechanism: Mechanism, *, inputs: str | None) -> ChargedStep:
        """Pay for what this round will release, durably."""
        charged = mechanism.charge(
            self.account, self.round, 0, inputs=inputs, noise=self.noise, key=self.key
        )
        self.charges.append(mechanism)
        return charged

    def key(self, block: str) -> NoiseKey:
        return NoiseKey("server", self.method, self.round, 0, block)

    def inputs(self, updates: Sequence[Mapping[str, Tensor]], *settings: object) -> str | None:
        """Digest of all that determines this round's release; None under secure noise."""
        if self.replay is None:
            return None
        sent = [digest_tensors(sorted(u.items())) for u in updates]
        text = repr((sent, self.replay.context, self.key(""), self.participants, settings))
        return hmac.new(self.replay.secret, text.encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class CentralRelease:
    """What one round releases, and the norms that stay inside."""

    mean: Update
    fraction: float | None  # noisy share of the updates within the clipping norm


def update_norm(update: Mapping[str, Tensor]) -> float:
    """Over all coordinates; infinite where one of them is not finite."""
    total = math.fsum(float(v.square().sum()) for v in update.values())
    return math.sqrt(total) if math.isfinite(total) else math.inf


def private_mean(
    context: ServerContext,
    updates: Sequence[Update],
    *,
    clip: float,
    sigma: float,
    sigma_count: float | None = None,
) -> CentralRelease:
    """Σ clip(update, S)/m plus N(0, (σS/m)²) on every coordinate: charge, then release.

    Zeroing one client moves the sum by at most S and the centered count by at most ½, so both
    together are one Gaussian of multiplier 1/σ_eff² = 1/σ² + 1/(2σ_b)², charged without
    amplification: who takes part is known. An update that is zero or not finite contributes
    exactly 0 to both.
    Raises `BudgetExhausted`, with nothing charged, where the budget does not cover it.
    """
    releases = [Release("update", sigma * clip, clip)]
    if sigma_count is not None:
        releases.append(Release("count", sigma_count, COUNT_SENSITIVITY))
    effective = joint_sigma(*(r.noise / r.sensitivity for r in releases))
    charged = context.charge(
        Mechanism(1.0, effective, tuple(releases)),
        inputs=context.inputs(updates, clip, sigma, sigma_count),
    )
    total = {name: torch.zeros_like(value) for name, value in updates[0].items()}
    within = 0.0
    for update in updates:
        norm = update_norm(update)
        # A client that sends nothing counts as nothing: it is the neighbor of one that does.
        if norm == 0 or not math.isfinite(norm):
            continue
        within += (1.0 if norm <= clip else 0.0) - COUNT_SENSITIVITY
        factor = 1.0 if norm <= clip else clip / norm * (1 - 1e-12)
        for name, value in update.items():
            total[name] += factor * value
    noisy = charged.release_tensors("update", total, sensitivity=clip).tensors
    fraction = None
    if sigma_count is not None:
        fraction = 0.5 + charged.release_scalar("count", within) / context.participants
    return CentralRelease({n: v / context.participants for n, v in noisy.items()}, fraction)


def client_level_shape(experiment: Experiment, participants: int) -> PlanShape:
    """T rounds, each a plain Gaussian: who takes part is known, so nothing is amplified."""
    return PlanShape(
        epsilon=experiment.epsilon,
        delta=experiment.delta,
        units=participants,
        batch=participants,
        rounds=experiment.rounds,
        unit="client",
    )


@dataclass(frozen=True)
class RawUpdates(PlainSteps):
    """The clients' side of a central method: plain SGD; the guarantee is the server's.

    The server is trusted and sees raw updates: at record level, against it, ε = ∞, and so it stands
    in every client's own ledger.
    """

    private: bool = False
    ignores: frozenset[str] = frozenset({"sites"})


@dataclass(frozen=True)
class CentralNoise(RawUpdates):
    name: str = "dp-fedavg"
    title: str = "DP-FedAvg, trusted server"

    def server_plan(self, experiment: Experiment, participants: int) -> Plan:
        return plan_fixed(
            client_level_shape(experiment, participants), self.name, experiment.accountant
        )

    def load_server_state(self, saved: dict[str, Any] | None, experiment: Experiment) -> None:
        return None

    def server_step(
        self,
        context: ServerContext,
        experiment: Experiment,
        plan: Plan,
        updates: Sequence[Update],
        state: None,
    ) -> tuple[Update, None]:
        found = private_mean(
            context, updates, clip=experiment.max_grad_norm, sigma=plan.sigma_static
        )
        return found.mean, None


DP_FEDAVG = CentralNoise()
