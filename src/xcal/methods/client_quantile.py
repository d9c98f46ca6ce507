"""`adaptive-clip` with `level = "client"`: the trusted server's S follows a quantile.

Andrew et al. (2021) on top of `dp-fedavg`: one count a round, of the updates within S, as a
coordinate of the joint release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xcal.config import Experiment
from xcal.methods.base import COMMON_KEYS
from xcal.methods.dp_fedavg import RawUpdates, client_level_shape
from xcal.privacy.calibration import Plan, plan_fixed
from xcal.training.adaptive import ClipState, QuantileRule
from xcal.training.central import ServerBench, Update, private_mean


@dataclass(frozen=True)
class ClientQuantile(RawUpdates):
    """The guarantee of `dp-fedavg`, the count included: 1/z² = 1/σ² + 1/(2σ_b)²."""

    name: str = "adaptive-clip"
    uses: frozenset[str] = COMMON_KEYS | {
        "epsilon",
        "delta",
        "accountant",
        "clip",
        "level",
        "quantile",
        "clip_rate",
        "kappa_b",
        "count_noise",
    }

    def rule(self, experiment: Experiment) -> QuantileRule:
        return QuantileRule(
            quantile=experiment.quantile,
            rate=experiment.clip_rate,
            start=experiment.clip,
            kappa_b=experiment.kappa_b,
            fixed_noise=experiment.count_noise,
        )

    def server_plan(self, experiment: Experiment, participants: int) -> Plan:
        """Refuses a `count_noise` whose count alone would cost more than a round may."""
        plan = plan_fixed(
            client_level_shape(experiment, participants), self.name, experiment.accountant
        )
        sigma, sigma_count = self.rule(experiment).multipliers(plan.sigma_static)
        return replace(
            plan,
            sigma_ref=sigma,
            sigma_min=sigma,
            sigma_max=sigma,
            sigma_count=sigma_count,
            signal_price=sigma / plan.sigma_static - 1,
        )

    def load_server_state(self, saved: dict[str, Any] | None, experiment: Experiment) -> ClipState:
        return ClipState(experiment.clip) if saved is None else ClipState(**saved)

    def server_step(
        self,
        bench: ServerBench,
        experiment: Experiment,
        plan: Plan,
        updates: Sequence[Update],
        state: ClipState,
    ) -> tuple[Update, ClipState]:
        assert state.clip is not None
        rule = self.rule(experiment)
        found = private_mean(
            bench, updates, clip=state.clip, sigma=plan.sigma_ref, sigma_count=plan.sigma_count
        )
        assert found.fraction is not None
        return found.mean, ClipState(rule.following(state.clip, found.fraction))


ADAPTIVE_CLIP_AT_SERVER = ClientQuantile()
