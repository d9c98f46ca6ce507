"""`adaptive-clip`: static noise, and a clipping norm that follows a quantile (Andrew et al. 2021).

Each step also releases how many of its units lay within C, as a coordinate of the same joint
release, and the next step's C follows: C ← C·exp(−η(b̃ − γ)). Too many within (b̃ > γ) lowers C, too
few raises it. Nothing else of the norms leaves the step, and C never depends on a step's own data.
With `level = "client"` a trusted server does the same with whole updates, one count a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from xcal.config import Experiment, Positive, sent
from xcal.dp.accounting import COUNT_SENSITIVITY
from xcal.dp.calibration import Plan, plan_fixed
from xcal.dp.clipping import Bound, ClippedSum
from xcal.dp.distributed import Part
from xcal.dp.ledger.rows import Release
from xcal.dp.mechanism import ChargedStep
from xcal.errors import UserError
from xcal.methods.base import (
    LocalMethod,
    Method,
    QuantileParameters,
    SharedSum,
    gradient_sum,
    plan_constant,
    shape_of,
)
from xcal.methods.client_data import Batch
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.dp_fedavg import (
    RawUpdates,
    ServerContext,
    Update,
    client_level_shape,
    private_mean,
)
from xcal.methods.step_parts import (
    clipped_sum,
    contributing_units,
    gradient_release,
    release_gradient,
    shared_step,
)

# C stays a number that float32 can work with, whatever a long run of noise does to it.
SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6


@dataclass(frozen=True)
class QuantileRule:
    """Public constants: which quantile γ, how fast η, from which C, and the count's noise.

    The count gets noise of deviation `fixed_noise`, or κ_b times the gradient's multiplier.
    """

    quantile: float = 0.5
    rate: float = 0.2
    start: float = 1.0
    kappa_b: float = 5.0
    fixed_noise: float | None = None

    def following(self, clip: float, fraction: float) -> float:
        """The next C, from this one and the released fraction b̃ of units within it."""
        # Bounded before exp, so that no noise overflows it.
        move = min(max(-self.rate * (fraction - self.quantile), -50.0), 50.0)
        return min(max(clip * math.exp(move), SMALLEST_CLIP), LARGEST_CLIP)

    def multipliers(self, sigma_eff: float) -> tuple[float, float]:
        """(σ, σ_b) of a step that releases gradient and count and costs σ_eff.

        1/σ_eff² = 1/σ² + 1/(2σ_b)²: with σ_b = κ_b·σ that always has a solution; with σ_b given it
        has one only where σ_eff < 2σ_b.
        """
        if self.fixed_noise is None:
            sigma = sigma_eff * math.sqrt(1 + (COUNT_SENSITIVITY / self.kappa_b) ** 2)
            return sigma, self.kappa_b * sigma
        twice = self.fixed_noise / COUNT_SENSITIVITY
        if not sigma_eff < twice:
            raise UserError(
                f"count_noise = {self.fixed_noise:g} would let the count alone cost more than a"
                f" whole step may (multiplier {sigma_eff:.4g}): it must exceed"
                f" {sigma_eff * COUNT_SENSITIVITY:.4g}, better {5 * sigma_eff:.3g} or so; or leave"
                " it out and set kappa_b."
            )
        return 1 / math.sqrt(1 / sigma_eff**2 - 1 / twice**2), self.fixed_noise


@dataclass(frozen=True)
class ClipState:
    """C of the next step: a function of released counts. None: the configured start."""

    clip: float | None = None


def count_release(sigma_count: float) -> Release:
    return Release("count", sigma_count, COUNT_SENSITIVITY)


def centered_count(norms: NDArray[np.float64], clip: float, counted: NDArray[np.bool_]) -> float:
    """Σ(1[norm ≤ C] − ½) over the counted units: zeroing one unit moves it by at most ½."""
    return float(np.where(norms <= clip, 0.5, -0.5)[counted].sum())


def _within(sums: ClippedSum, batch: Batch) -> float:
    counted = contributing_units(sums, batch)
    return centered_count(sums.norms.cpu().numpy(), sums.bound.norm, counted)


def release_fraction(
    context: StepContext, charged: ChargedStep, sums: ClippedSum, counted: NDArray[np.bool_]
) -> float:
    """b̃: the noisy share of units within C, over the expected count B."""
    centered = centered_count(sums.norms.cpu().numpy(), sums.bound.norm, counted)
    return 0.5 + charged.release_scalar("count", centered) / context.batch


def quantile_step(
    context: StepContext, step: int, rule: QuantileRule, state: ClipState, *, sigma_eff: float
) -> tuple[ClipState, StepRecord]:
    """One DP-SGD step that also releases the count: one joint release, charged before the draw."""
    clip = rule.start if state.clip is None else state.clip
    bound = Bound(clip)
    sigma, sigma_count = rule.multipliers(sigma_eff)
    charged = context.charge(
        step,
        (gradient_release(bound, sigma), count_release(sigma_count)),
        sigma_eff,
        settings=(sigma, sigma_count, clip),
    )
    batch = charged.draw(context.data)
    sums = clipped_sum(context, batch, bound)
    fraction = release_fraction(context, charged, sums, contributing_units(sums, batch))
    release_gradient(context, charged, sums)
    record = StepRecord(context.round, step, sigma, None, context.share_spent, clip=clip)
    return ClipState(rule.following(clip, fraction)), record


class AdaptiveClipParameters(QuantileParameters):
    """The keys of `adaptive-clip`."""

    level: Literal["record", "client"] = sent(
        "record", description="adaptive-clip: at the client, or on updates at the server"
    )
    count_noise: Positive | None = sent(
        None, description="adaptive-clip: deviation σ_b of the count's noise, instead of κσ"
    )


def quantile_rule(experiment: QuantileParameters) -> QuantileRule:
    """The rule of the experiment's keys; `clip` is the C it starts from."""
    return QuantileRule(
        quantile=experiment.quantile,
        rate=experiment.clip_rate,
        start=experiment.max_grad_norm,
        kappa_b=experiment.kappa_b,
        fixed_noise=getattr(experiment, "count_noise", None),
    )


def _with_count(plan: Plan, rule: QuantileRule) -> Plan:
    """The plan of gradient (or update) and count together."""
    sigma, sigma_count = rule.multipliers(plan.sigma_static)
    return replace(
        plan,
        sigma_ref=sigma,
        sigma_min=sigma,
        sigma_max=sigma,
        sigma_count=sigma_count,
        signal_price=sigma / plan.sigma_static - 1,
    )


@dataclass(frozen=True)
class RecordQuantile(LocalMethod):
    name: str = "adaptive-clip"
    title: str = "Adaptive clipping"
    sums_under_masks: bool = True
    parameters: type[Experiment] = AdaptiveClipParameters

    def variant(self, experiment: AdaptiveClipParameters) -> Method:
        """Itself, or the one at the server."""
        return ADAPTIVE_CLIP_AT_SERVER if experiment.level == "client" else self

    def plan(self, experiment: AdaptiveClipParameters, units: int, own_rounds: int) -> Plan:
        plan = plan_constant(experiment, shape_of(experiment, units, own_rounds), self.name)
        return _with_count(plan, quantile_rule(experiment))

    def load_state(self, saved: dict[str, Any] | None) -> ClipState:
        return ClipState() if saved is None else ClipState(**saved)  # C lives with the budget

    def step(
        self,
        context: StepContext,
        step: int,
        experiment: AdaptiveClipParameters,
        plan: Plan,
        state: ClipState,
    ) -> tuple[ClipState, StepRecord]:
        rule = quantile_rule(experiment)
        if context.sharing is not None:  # C comes with the request: the server has the counts
            clip, sigma = context.sharing.clip, context.sharing.sigma
            shared = self.shared_sum(experiment, context.model, sigma, clip)
            record = shared_step(
                context, step, shared, lambda sums, batch: {"count": _within(sums, batch)}
            )
            return state, replace(record, clip=clip)
        return quantile_step(context, step, rule, state, sigma_eff=plan.sigma_static)

    def shared_sum(
        self, experiment: AdaptiveClipParameters, model: nn.Module, sigma: float, clip: float
    ) -> SharedSum:
        """Gradient and count, one joint release of multiplier `sigma`."""
        gradient, count = quantile_rule(experiment).multipliers(sigma)
        part = Part("count", 1, COUNT_SENSITIVITY, count / COUNT_SENSITIVITY)
        return gradient_sum(model, gradient, Bound(clip), part)

    def following_clip(
        self, experiment: AdaptiveClipParameters, clip: float, sums: Mapping[str, float]
    ) -> float:
        return quantile_rule(experiment).following(clip, 0.5 + sums["count"])


@dataclass(frozen=True)
class ClientQuantile(RawUpdates):
    """The guarantee of `dp-fedavg`, the count included: 1/z² = 1/σ² + 1/(2σ_b)²."""

    name: str = "adaptive-clip"
    title: str = "Adaptive clipping, trusted server"
    parameters: type[Experiment] = AdaptiveClipParameters

    def server_plan(self, experiment: AdaptiveClipParameters, participants: int) -> Plan:
        """Refuses a `count_noise` whose count alone would cost more than a round may."""
        shape = client_level_shape(experiment, participants)
        return _with_count(
            plan_fixed(shape, self.name, experiment.accountant), quantile_rule(experiment)
        )

    def load_server_state(self, saved: dict[str, Any] | None, experiment: Experiment) -> ClipState:
        return ClipState(experiment.max_grad_norm) if saved is None else ClipState(**saved)

    def server_step(
        self,
        context: ServerContext,
        experiment: AdaptiveClipParameters,
        plan: Plan,
        updates: Sequence[Update],
        state: ClipState,
    ) -> tuple[Update, ClipState]:
        assert state.clip is not None
        found = private_mean(
            context, updates, clip=state.clip, sigma=plan.sigma_ref, sigma_count=plan.sigma_count
        )
        assert found.fraction is not None
        rule = quantile_rule(experiment)
        return found.mean, ClipState(rule.following(state.clip, found.fraction))


ADAPTIVE_CLIP = RecordQuantile()
ADAPTIVE_CLIP_AT_SERVER = ClientQuantile()
