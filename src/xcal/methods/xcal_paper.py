"""`xcal-paper`: Algorithm 1 as published, charged what is true of a shared batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, SIGNAL_KEYS, shape_of, signal_settings
from xcal.privacy.calibration import Plan, plan_paper
from xcal.training.local import Bench, StepRecord
from xcal.training.xcal import PaperRule, PaperState, paper_epsilons, paper_step

PAPER_TAU = 0.2


@dataclass(frozen=True)
class PublishedXcal:
    name: str = "xcal-paper"
    private: bool = True
    pooled: bool = False
    uses: frozenset[str] = COMMON_KEYS | PRIVATE_KEYS | SIGNAL_KEYS | {"rho", "band"}

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        shape = shape_of(experiment, units, own_rounds)
        return plan_paper(shape, rho=experiment.rho, band=experiment.band)

    def rule(self, experiment: Experiment, plan: Plan) -> PaperRule:
        return PaperRule(
            plan,
            signal_settings(experiment, positive_only=False),
            tau=PAPER_TAU if experiment.tau is None else experiment.tau,
            band=experiment.band,
        )

    def load_state(self, saved: dict[str, Any] | None) -> PaperState:
        if saved is None:
            return PaperState()
        return PaperState(saved["s"], tuple(saved["gradient_costs"]), saved["signals"])

    def begin_round(self, state: PaperState) -> PaperState:
        return state.new_round()

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: PaperState
    ) -> tuple[PaperState, StepRecord]:
        assert plan is not None
        return paper_step(bench, step, self.rule(experiment, plan), state)

    def epsilon_paper(
        self, experiment: Experiment, plan: Plan | None, state: PaperState
    ) -> float | None:
        assert plan is not None
        return sum(paper_epsilons(self.rule(experiment, plan), state))


XCAL_PAPER = PublishedXcal()
