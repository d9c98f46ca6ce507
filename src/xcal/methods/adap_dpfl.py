"""`adap-dpfl`: clipping norm and noise that move from round to round (Fu et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, shape_of
from xcal.privacy.calibration import Plan, plan_static
from xcal.training.adap import AdapRule, AdapState, adap_step
from xcal.training.local import Bench, StepRecord


@dataclass(frozen=True)
class AdaptiveNoise:
    name: str = "adap-dpfl"
    private: bool = True
    pooled: bool = False
    uses: frozenset[str] = COMMON_KEYS | PRIVATE_KEYS | {"clip_factor", "sigma_decay"}
    needs_validation: bool = True  # the noise follows the loss on public images

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        return plan_static(shape_of(experiment, units, own_rounds), self.name)

    def load_state(self, saved: dict[str, Any] | None) -> AdapState:
        return AdapState() if saved is None else AdapState(**saved)

    def begin_round(self, state: AdapState) -> AdapState:
        return state  # the step itself sees that a round begins

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: AdapState
    ) -> tuple[AdapState, StepRecord]:
        assert plan is not None
        rule = AdapRule(plan, experiment.clip, experiment.clip_factor, experiment.sigma_decay)
        return adap_step(bench, step, rule, state)

    def epsilon_paper(
        self, experiment: Experiment, plan: Plan | None, state: AdapState
    ) -> float | None:
        return None


ADAP_DPFL = AdaptiveNoise()
