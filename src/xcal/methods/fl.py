"""`centralized` and `fl`: no privacy, so ε = ∞."""

from __future__ import annotations

from dataclasses import dataclass

from xcal.config import Experiment
from xcal.methods.base import PRIVATE_KEYS, LocalMethod
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import sgd_step


class PlainSteps(LocalMethod):
    """Local steps without noise: nothing to plan, nothing to remember."""

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> None:
        return None

    def step(
        self, context: StepContext, step: int, experiment: Experiment, plan: None, state: None
    ) -> tuple[None, StepRecord]:
        return None, sgd_step(context, step)


@dataclass(frozen=True)
class PlainSgd(PlainSteps):
    """Plain SGD at every client, averaged; or, pooled, at one client that holds everything."""

    name: str
    title: str
    pooled: bool
    private: bool = False
    ignores: frozenset[str] = PRIVATE_KEYS


CENTRALIZED = PlainSgd("centralized", "Centralized", pooled=True)
FL = PlainSgd("fl", "FedAvg, no privacy", pooled=False)
