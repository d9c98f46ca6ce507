"""`fl-dp`: DP-SGD at the constant multiplier that exactly spends ε."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, shape_of
from xcal.privacy.calibration import Plan, plan_fixed
from xcal.training.local import Bench, StepRecord
from xcal.training.steps import dp_step


@dataclass(frozen=True)
class StaticNoise:
    name: str = "fl-dp"
    private: bool = True
    pooled: bool = False
    uses: frozenset[str] = COMMON_KEYS | PRIVATE_KEYS

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        return plan_fixed(shape_of(experiment, units, own_rounds), accountant=experiment.accountant)

    def load_state(self, saved: dict[str, Any] | None) -> None:
        return None

    def begin_round(self, state: None) -> None:
        return None

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: None
    ) -> tuple[None, StepRecord]:
        assert plan is not None
        return None, dp_step(bench, step, sigma=plan.sigma_static)

    def epsilon_paper(self, experiment: Experiment, plan: Plan | None, state: None) -> float | None:
        return None


FL_DP = StaticNoise()
