"""`fl-dp`: DP-SGD at the constant multiplier that exactly spends ε."""

from __future__ import annotations

from dataclasses import dataclass

from xcal.config import Experiment
from xcal.dp.calibration import Plan
from xcal.methods.base import LocalMethod, plan_constant, shape_of
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import dp_step


@dataclass(frozen=True)
class StaticNoise(LocalMethod):
    name: str = "fl-dp"
    title: str = "DP-SGD, static noise"
    sums_under_masks: bool = True

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        return plan_constant(experiment, shape_of(experiment, units, own_rounds), self.name)

    def step(
        self, context: StepContext, step: int, experiment: Experiment, plan: Plan, state: None
    ) -> tuple[None, StepRecord]:
        return None, dp_step(context, step, sigma=plan.sigma_static)


FL_DP = StaticNoise()
