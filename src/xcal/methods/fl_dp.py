"""`fl-dp`: DP-SGD at the constant multiplier that exactly spends ε."""

from __future__ import annotations

from dataclasses import dataclass

from xcal.config import Experiment
from xcal.dp.calibration import Plan, plan_fixed, plan_static
from xcal.methods.base import LocalMethod, shape_of
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import dp_step


@dataclass(frozen=True)
class StaticNoise(LocalMethod):
    name: str = "fl-dp"
    title: str = "DP-SGD, static noise"
    sums_under_masks: bool = True

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        if experiment.trust == "masked":
            return plan_static(shape_of(experiment, units, own_rounds), whole_orders=True)
        return plan_fixed(shape_of(experiment, units, own_rounds), accountant=experiment.accountant)

    def step(
        self, context: StepContext, step: int, experiment: Experiment, plan: Plan, state: None
    ) -> tuple[None, StepRecord]:
        return None, dp_step(context, step, sigma=plan.sigma_static)


FL_DP = StaticNoise()
