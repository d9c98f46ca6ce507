"""`dp-fedavg`: a trusted server clips whole updates and adds the noise (McMahan et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS
from xcal.privacy.calibration import Plan, PlanShape, plan_fixed
from xcal.training.central import ServerBench, Update, private_mean
from xcal.training.local import Bench, StepRecord
from xcal.training.steps import sgd_step


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
class RawUpdates:
    """The clients' side of a central method: plain SGD; the guarantee is the server's.

    The server is trusted and sees raw updates: at record level, against it, ε = ∞, and so it stands
    in every client's own ledger.
    """

    private: bool = False
    pooled: bool = False

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan | None:
        return None

    def load_state(self, saved: dict[str, Any] | None) -> None:
        return None

    def begin_round(self, state: None) -> None:
        return None

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: None
    ) -> tuple[None, StepRecord]:
        return None, sgd_step(bench, step)

    def epsilon_paper(self, experiment: Experiment, plan: Plan | None, state: None) -> float | None:
        return None


@dataclass(frozen=True)
class CentralNoise(RawUpdates):
    name: str = "dp-fedavg"
    uses: frozenset[str] = COMMON_KEYS | {"epsilon", "delta", "accountant", "clip"}

    def server_plan(self, experiment: Experiment, participants: int) -> Plan:
        return plan_fixed(
            client_level_shape(experiment, participants), self.name, experiment.accountant
        )

    def load_server_state(self, saved: dict[str, Any] | None, experiment: Experiment) -> None:
        return None

    def server_step(
        self,
        bench: ServerBench,
        experiment: Experiment,
        plan: Plan,
        updates: Sequence[Update],
        state: None,
    ) -> tuple[Update, None]:
        found = private_mean(bench, updates, clip=experiment.clip, sigma=plan.sigma_static)
        return found.mean, None


DP_FEDAVG = CentralNoise()
