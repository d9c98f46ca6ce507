"""`agp` (Li et al. 2023): important channels get no noise, so ε = ∞ whatever the others get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS, shape_of
from xcal.privacy.calibration import Plan, PlanShape, plan_paper
from xcal.training.agp import AgpState, agp_step
from xcal.training.cam_layer import cam_layer_of, require_trained
from xcal.training.local import Bench, StepRecord


@lru_cache(maxsize=64)
def mean_of_band(shape: PlanShape, rho: float, band: float) -> float:
    """The mean of the published band [σ_min, σ_max]: the noise the paper gives this rival."""
    plan = plan_paper(shape, rho=rho, band=band)
    return (plan.sigma_min + plan.sigma_max) / 2


@dataclass(frozen=True)
class AdaptiveGradientProtection:
    name: str = "agp"
    private: bool = False
    pooled: bool = False
    uses: frozenset[str] = COMMON_KEYS | {
        "epsilon",
        "delta",
        "clip",
        "chunk",
        "rho",
        "band",
        "protected",
    }

    def sigma(self, experiment: Experiment, units: int, own_rounds: int) -> float:
        shape = shape_of(experiment, units, own_rounds)
        return mean_of_band(shape, experiment.rho, experiment.band)

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan | None:
        self.sigma(experiment, units, own_rounds)  # refuses a target that no noise reaches
        return None

    def check_network(self, network: nn.Module, experiment: Experiment) -> None:
        require_trained(network, self.name)

    def load_state(self, saved: dict[str, Any] | None) -> AgpState:
        if saved is None or saved["channels"] is None:
            return AgpState()
        return AgpState(tuple(saved["channels"]))

    def begin_round(self, state: AgpState) -> AgpState:
        return AgpState()

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: AgpState
    ) -> tuple[AgpState, StepRecord]:
        return agp_step(
            bench,
            step,
            sigma=self.sigma(experiment, bench.data.units, bench.own_rounds),
            share=experiment.protected,
            layer=cam_layer_of(bench.model),
            state=state,
        )

    def epsilon_paper(
        self, experiment: Experiment, plan: Plan | None, state: AgpState
    ) -> float | None:
        return None


AGP = AdaptiveGradientProtection()
