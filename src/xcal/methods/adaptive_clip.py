"""`adaptive-clip`: static noise, and a clipping norm that follows a quantile (Andrew et al. 2021).

At record level the client's own DP-SGD clips unit gradients to a quantile of their norms; at client
level a trusted server clips whole updates (`client_quantile.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, Method, shape_of
from xcal.methods.client_quantile import ADAPTIVE_CLIP_AT_SERVER
from xcal.privacy.calibration import Plan, plan_fixed
from xcal.training.adaptive import ClipState, QuantileRule, quantile_step
from xcal.training.local import Bench, StepRecord

QUANTILE_KEYS = frozenset({"quantile", "clip_rate", "kappa_b"})


def quantile_rule(experiment: Experiment) -> QuantileRule:
    """The rule of the experiment's keys; `clip` is the C it starts from."""
    return QuantileRule(
        quantile=experiment.quantile,
        rate=experiment.clip_rate,
        start=experiment.clip,
        kappa_b=experiment.kappa_b,
    )


@dataclass(frozen=True)
class RecordQuantile:
    name: str = "adaptive-clip"
    private: bool = True
    pooled: bool = False
    uses: frozenset[str] = COMMON_KEYS | PRIVATE_KEYS | QUANTILE_KEYS | {"level", "count_noise"}

    def variant(self, experiment: Experiment) -> Method:
        """Itself, or the one at the server."""
        return ADAPTIVE_CLIP_AT_SERVER if experiment.level == "client" else self

    def rule(self, experiment: Experiment) -> QuantileRule:
        return replace(quantile_rule(experiment), fixed_noise=experiment.count_noise)

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        plan = plan_fixed(shape_of(experiment, units, own_rounds), self.name, experiment.accountant)
        sigma, sigma_count = self.rule(experiment).multipliers(plan.sigma_static)
        return replace(
            plan,
            sigma_ref=sigma,
            sigma_min=sigma,
            sigma_max=sigma,
            sigma_count=sigma_count,
            signal_price=sigma / plan.sigma_static - 1,
        )

    def load_state(self, saved: dict[str, Any] | None) -> ClipState:
        return ClipState() if saved is None else ClipState(**saved)

    def begin_round(self, state: ClipState) -> ClipState:
        return state  # C lives as long as the budget

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: ClipState
    ) -> tuple[ClipState, StepRecord]:
        assert plan is not None
        rule = self.rule(experiment)
        return quantile_step(bench, step, rule, state, sigma_eff=plan.sigma_static)

    def epsilon_paper(
        self, experiment: Experiment, plan: Plan | None, state: ClipState
    ) -> float | None:
        return None


ADAPTIVE_CLIP = RecordQuantile()
