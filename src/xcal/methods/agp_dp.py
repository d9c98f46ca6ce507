"""`agp-dp`: AGP's aim with a guarantee: static noise in a geometry made of released weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, shape_of
from xcal.privacy.calibration import Plan, plan_fixed
from xcal.training.clipping import Bound
from xcal.training.geometry import ChannelRule, check_channels, round_geometry
from xcal.training.local import Bench, StepRecord
from xcal.training.steps import dp_step


@dataclass(frozen=True)
class ChannelState:
    """The channels spared in this round, by the weights received; None before its first step."""

    channels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ProtectedChannels:
    name: str = "agp-dp"
    private: bool = True
    pooled: bool = False
    uses: frozenset[str] = COMMON_KEYS | PRIVATE_KEYS | {"protected", "protection"}

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        return plan_fixed(shape_of(experiment, units, own_rounds), self.name, experiment.accountant)

    def check_network(self, network: nn.Module, experiment: Experiment) -> None:
        check_channels(network, self.name)

    def load_state(self, saved: dict[str, Any] | None) -> ChannelState:
        if saved is None or saved["channels"] is None:
            return ChannelState()
        return ChannelState(tuple(saved["channels"]))

    def begin_round(self, state: ChannelState) -> ChannelState:
        return ChannelState()

    def step(
        self,
        bench: Bench,
        step: int,
        experiment: Experiment,
        plan: Plan | None,
        state: ChannelState,
    ) -> tuple[ChannelState, StepRecord]:
        assert plan is not None
        rule = ChannelRule(experiment.protected, experiment.protection)
        if state.channels is None:  # the round's first step: the model is still the one received
            state = ChannelState(rule.choose(bench.model))
        assert state.channels is not None
        bound = Bound(bench.clip, round_geometry(bench.model, rule, state.channels))
        return state, dp_step(bench, step, sigma=plan.sigma_static, bound=bound)

    def epsilon_paper(
        self, experiment: Experiment, plan: Plan | None, state: ChannelState
    ) -> float | None:
        return None


AGP_DP = ProtectedChannels()
