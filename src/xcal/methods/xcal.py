"""`xcal`: our method, one joint release a step and shares of what is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from xcal.config import Experiment
from xcal.methods.adaptive_clip import QUANTILE_KEYS, quantile_rule
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, SIGNAL_KEYS, shape_of, signal_settings
from xcal.privacy.calibration import Plan, plan_xcal
from xcal.training.geometry import ChannelRule, check_channels
from xcal.training.local import Bench, StepRecord
from xcal.training.xcal import XcalRule, XcalState, xcal_step

OUR_TAU = 0.05


@dataclass(frozen=True)
class OurXcal:
    name: str = "xcal"
    private: bool = True
    pooled: bool = False
    uses: frozenset[str] = (
        COMMON_KEYS
        | PRIVATE_KEYS
        | SIGNAL_KEYS
        | {"w", "kappa", "slow_tau", "reference", "contrast", "signal_every", "signal_fraction"}
        | {"signal_source", "geometry", "protected", "protection", "clipping"}
        | QUANTILE_KEYS
    )

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        shape = shape_of(experiment, units, own_rounds)
        kappa_b = experiment.kappa_b if experiment.clipping == "quantile" else None
        return plan_xcal(shape, kappa=experiment.kappa, w=experiment.w, kappa_b=kappa_b)

    def check_network(self, network: nn.Module, experiment: Experiment) -> None:
        if experiment.geometry == "importance":
            check_channels(network, "geometry = 'importance'")

    def rule(self, experiment: Experiment, plan: Plan) -> XcalRule:
        return XcalRule(
            plan,
            signal_settings(experiment, positive_only=True),
            tau=OUR_TAU if experiment.tau is None else experiment.tau,
            slow_tau=experiment.slow_tau,
            w=experiment.w,
            kappa=experiment.kappa,
            reference=experiment.reference,
            contrast=experiment.contrast,
            signal_every=experiment.signal_every,
            signal_fraction=experiment.signal_fraction,
            source=experiment.signal_source,
            channels=ChannelRule(experiment.protected, experiment.protection)
            if experiment.geometry == "importance"
            else None,
            quantile=quantile_rule(experiment) if experiment.clipping == "quantile" else None,
        )

    def load_state(self, saved: dict[str, Any] | None) -> XcalState:
        if saved is None:
            return XcalState()
        channels = saved.get("channels")
        return XcalState(**{**saved, "channels": None if channels is None else tuple(channels)})

    def begin_round(self, state: XcalState) -> XcalState:
        return state.new_round()  # s and C live as long as the budget

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: XcalState
    ) -> tuple[XcalState, StepRecord]:
        assert plan is not None
        return xcal_step(bench, step, self.rule(experiment, plan), state)

    def epsilon_paper(
        self, experiment: Experiment, plan: Plan | None, state: XcalState
    ) -> float | None:
        return None


XCAL = OurXcal()
