"""`centralized` and `fl`: no privacy, so ε = ∞."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS
from xcal.privacy.calibration import Plan
from xcal.training.local import Bench, StepRecord
from xcal.training.steps import sgd_step


@dataclass(frozen=True)
class PlainSgd:
    """Plain SGD at every client, averaged; or, pooled, at one client that holds everything."""

    name: str
    pooled: bool
    private: bool = False
    uses: frozenset[str] = COMMON_KEYS

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


CENTRALIZED = PlainSgd("centralized", pooled=True)
FL = PlainSgd("fl", pooled=False)
