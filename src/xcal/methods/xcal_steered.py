"""`xcal-steered`: noise moved in time by the explanation signal, one joint release a step.

What `xcal` named in the first edition. Studies here found it nowhere better than static noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from xcal.config import Experiment, Positive, Whole, sent
from xcal.dp.accounting import SCORE_SENSITIVITY, CostTable, joint_factor, multiplier_table
from xcal.dp.calibration import Plan, plan_xcal
from xcal.dp.clipping import Bound, ClippedSum
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.rows import Release
from xcal.explain.signal import SignalSettings, scores
from xcal.methods.adaptive_clip import QuantileRule, count_release, quantile_rule, release_fraction
from xcal.methods.agp_dp import ChannelParameters, ChannelRule, cam_layer_of, check_channels
from xcal.methods.base import LocalMethod, QuantileParameters, SignalParameters, shape_of
from xcal.methods.client_data import Batch, mean_by_unit
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import (
    clipped_sum,
    contributing_units,
    gradient_release,
    release_gradient,
    sums_with_components,
)

TAU = 0.05


class SteeredParameters(SignalParameters, ChannelParameters, QuantileParameters):
    """The keys of `xcal-steered`."""

    w: float = sent(0.5, ge=0, lt=1, description="how far the signal moves a share")
    kappa: Positive = sent(5.0, description="price of the signal: 1/(2κ²) more noise")
    slow_tau: float = sent(0.01, ge=1e-6, le=1, description="smoothing of s̄")
    reference: Literal["running", "absolute"] = sent(
        "running", description="what s is held against"
    )
    contrast: Positive = sent(0.1, description="smallest Δ, the scale of s − s̄")
    shares: Literal["plan", "left"] = sent(
        "plan",
        description="what a step takes its share of: the plan, with a floor for every later step,"
        " or what is left, as the first edition did",
    )
    signal_every: Whole = sent(4, description="a signal every k-th step")
    signal_fraction: float = sent(
        1.0, ge=1e-6, le=1, description="share p of the drawn units that enter the signal"
    )
    signal_source: Literal["model", "constant", "noise", "decay", "rise"] = sent(
        "model", description="the model, or what replaces it at the same cost, to see what it does"
    )
    geometry: Literal["none", "importance"] = sent(
        "none",
        description="xcal-steered: noise alike everywhere, or less on the channels that matter",
    )
    clipping: Literal["fixed", "quantile"] = sent(
        "fixed", description="xcal-steered: clip always to C, or follow a quantile of the norms"
    )


@dataclass(frozen=True)
class SteeredRule:
    """Public constants of our method (method.md §4)."""

    plan: Plan
    signal: SignalSettings
    tau: float = 0.05
    slow_tau: float = 0.01
    w: float = 0.5
    kappa: float = 5.0
    reference: str = "running"
    contrast: float = 0.1
    shares: str = "plan"
    signal_every: int = 1
    signal_fraction: float = 1.0
    with_signal: bool = True
    source: str = "model"  # or what stands in the signal's place: a constant, noise, a schedule
    channels: ChannelRule | None = None  # where the noise goes; None: alike everywhere
    quantile: QuantileRule | None = None  # how C follows the norms; None: it is fixed


@dataclass(frozen=True)
class SteeredState:
    """What our method remembers between steps: functions of releases. Lives with the budget."""

    fast: float = 0.0  # exponential averages of the released mean, started at 0 …
    slow: float = 0.0
    signals: int = 0  # … and corrected by how many releases they hold
    clip: float | None = None  # C of the next step, where it follows a quantile
    channels: tuple[int, ...] | None = None  # spared in this round, by the weights received

    def updated(self, mean: float, rule: SteeredRule) -> SteeredState:
        return replace(
            self,
            fast=(1 - rule.tau) * self.fast + rule.tau * mean,
            slow=(1 - rule.slow_tau) * self.slow + rule.slow_tau * mean,
            signals=self.signals + 1,
        )


def smoothing_noise(rule: SteeredRule) -> float:
    """Deviation of s − s̄ that comes from the signal's own noise: known beforehand."""
    assert rule.plan.sigma_signal is not None
    one = rule.plan.sigma_signal / (rule.signal_fraction * rule.plan.batch)
    a, b = rule.tau, rule.slow_tau
    variance = a / (2 - a) + b / (2 - b) - 2 * a * b / (1 - (1 - a) * (1 - b))
    return one * math.sqrt(max(variance, 0.0))


def share_factor(state: SteeredState, rule: SteeredRule) -> float:
    """m: how much more or less than an even share the next step may spend."""
    if not rule.with_signal or rule.w == 0 or state.signals < 1 / rule.tau:
        return 1.0
    s = state.fast / (1 - (1 - rule.tau) ** state.signals)
    # Smoothed first, clipped only here, where it is used.
    s = min(max(s, 0.0), 1.0)
    if rule.reference == "absolute":
        return 1 + rule.w * (2 * s - 1)
    usual = state.slow / (1 - (1 - rule.slow_tau) ** state.signals)
    usual = min(max(usual, 0.0), 1.0)
    contrast = max(rule.contrast, 3 * smoothing_noise(rule))
    return 1 + rule.w * min(max((s - usual) / contrast, -1.0), 1.0)


# Public schedules by the sign of their shares' slope; named after the noise, which goes against it.
SCHEDULES = {"decay": 1, "rise": -1}


def scheduled_factor(rule: SteeredRule, steps_left: int) -> float:
    """m of a public schedule: shares go from 1 ∓ w to 1 ± w on a line, R in all."""
    total = rule.plan.steps
    now = total - steps_left
    slope = SCHEDULES[rule.source] * rule.w

    def height(step: float) -> float:
        return 1 + slope * (2 * (step + 0.5) / total - 1)

    # Heights lie on a line, so those still to come have the mean of the first and the last.
    return height(now) / ((height(now) + height(total - 1)) / 2)


def share_of_plan(rule: SteeredRule, factor: float, spent: float, steps_left: int) -> float:
    """m times an even share of the plan, saved shares spread over what is left.

    Shares of what is left starve the last steps where m stays above 1, just when the model should
    settle. So no step may take what later ones need at m = 1 − w: none has more noise than that.
    """
    even = rule.plan.budget / rule.plan.steps
    saved = max(even * (rule.plan.steps - steps_left) - spent, 0.0)
    floor = (1 - rule.w) * even * (steps_left - 1)
    return min(factor * (even + saved / max(steps_left, 1)), rule.plan.budget - spent - floor)


def next_effective_sigma(
    state: SteeredState, rule: SteeredRule, spent: float, steps_left: int, table: CostTable
) -> tuple[float, float]:
    """The next step's σ_eff and its cost, from releases and public constants (method.md §4.5)."""
    left = rule.plan.budget - spent
    if rule.source in SCHEDULES:
        share = left / max(steps_left, 1) * scheduled_factor(rule, steps_left)
    elif rule.shares == "left":
        share = left / max(steps_left, 1) * share_factor(state, rule)
    else:
        share = share_of_plan(rule, share_factor(state, rule), spent, steps_left)
    k = table.cheapest_within(min(share, left))
    if k is None:
        raise BudgetExhausted("what is left pays for no step of the grid")
    return float(table.sigmas[k]), float(table.costs[k])


def next_bound(
    context: StepContext, rule: SteeredRule, state: SteeredState
) -> tuple[SteeredState, Bound]:
    """C and D of the next step, from earlier releases and the round's received weights only."""
    clip = context.clip
    if rule.quantile is not None:
        clip = rule.quantile.start if state.clip is None else state.clip
    if rule.channels is None:
        return state, Bound(clip)
    if state.channels is None:  # the round's first step: the model is still the one received
        state = replace(state, channels=rule.channels.choose(context.model))
    assert state.channels is not None
    return state, Bound(clip, rule.channels.geometry(cam_layer_of(context.model), state.channels))


def steered_step(
    context: StepContext, step: int, rule: SteeredRule, state: SteeredState
) -> tuple[SteeredState, StepRecord]:
    """One step of our method: one joint release of gradient, signal and count, used one step later.

    Where the noise goes and how C is chosen are parts of the rule, each of them optional.
    """
    assert context.account is not None
    plan = rule.plan
    table = multiplier_table(plan.sample_rate, plan.order, plan.sigma_static)
    number = context.first_step + step

    # 0. What one unit may contribute, and where the noise goes: C and D.
    state, bound = next_bound(context, rule, state)

    # 1. σ is fixed by what was released before this step: the signal read here acts on the next.
    carries_signal = rule.with_signal and number % rule.signal_every == 0
    sigma_eff, _ = next_effective_sigma(
        state, rule, context.account.filter.spent, plan.steps - number, table
    )
    kappa_b = None if rule.quantile is None else rule.quantile.kappa_b
    sigma = sigma_eff * joint_factor(rule.kappa if carries_signal else None, kappa_b)
    sigma_signal = rule.kappa * SCORE_SENSITIVITY * sigma
    sigma_count = None if kappa_b is None else kappa_b * sigma
    releases = [gradient_release(bound, sigma)]
    if carries_signal:
        releases.append(Release("signal", sigma_signal, SCORE_SENSITIVITY))
    if sigma_count is not None:
        releases.append(count_release(sigma_count))

    # 2. Charge, durably: one subsampled Gaussian, 1/σ_eff² = 1/σ² + Δ_u²/σ_s² + 1/(2σ_b)².
    charged = context.charge(
        step,
        tuple(releases),
        sigma_eff,
        settings=(
            (sigma, sigma_signal, sigma_count),
            (bound.norm, bound.geometry.digest()),
            (carries_signal, rule.signal, rule.source),
        ),
        priced=table,
    )

    # 3. One Poisson batch gives all: clipped gradients, their norms, the score of every unit.
    batch = charged.draw(context.data)
    if carries_signal and rule.source == "model":
        sums, centered, counted = _gradient_and_scores(context, step, batch, rule, bound)
    else:  # a replaced signal costs the same and says nothing of the images
        sums, centered = clipped_sum(context, batch, bound), 0.0
        counted = contributing_units(sums, batch)

    # 4. Release them; the optimizer, the averages and the next C see nothing else.
    mean = None
    if carries_signal:
        mean = 0.5 + charged.release_scalar("signal", centered) / (
            rule.signal_fraction * context.batch
        )
        mean = 0.5 if rule.source == "constant" else mean
        state = state.updated(mean, rule)
    if rule.quantile is not None:
        fraction = release_fraction(context, charged, sums, counted)
        state = replace(state, clip=rule.quantile.following(bound.norm, fraction))
    release_gradient(context, charged, sums)
    return state, StepRecord(
        context.round,
        step,
        sigma,
        mean,
        context.share_spent,
        clip=None if rule.quantile is None else bound.norm,
    )


def _gradient_and_scores(
    context: StepContext, step: int, batch: Batch, rule: SteeredRule, bound: Bound
) -> tuple[ClippedSum, float, NDArray[np.bool_]]:
    """The clipped sum, Σ(u − ½) over the units that enter the signal, and which units count.

    A unit whose gradient or score is not finite contributes exactly 0 to everything.
    """
    entering = np.ones(batch.n_units, dtype=bool)
    if rule.signal_fraction < 1:
        uniforms = context.noise.uniforms(context.key(step, "entering"), batch.n_units)
        entering = uniforms < rule.signal_fraction
    sums, parts, chosen, broken = sums_with_components(context, batch, entering, rule.signal, bound)
    u = scores(parts, rule.signal.alpha, rule.signal.beta, rule.signal.gamma)
    by_unit = mean_by_unit(u, batch.units[chosen], batch.n_units)
    counted = contributing_units(sums, batch) & ~broken
    return sums, centered_sum(by_unit, entering & counted), counted


def centered_sum(by_unit: NDArray[np.float64], counted: NDArray[np.bool_]) -> float:
    """Σ(u − ½) over the counted units: zeroing one unit moves it by at most ½."""
    return float((np.clip(by_unit, 0.0, 1.0) - 0.5)[counted].sum())


@dataclass(frozen=True)
class Steered(LocalMethod):
    name: str = "xcal-steered"
    title: str = "XCal-FL, noise steered in time"
    parameters: type[Experiment] = SteeredParameters

    def plan(self, experiment: SteeredParameters, units: int, own_rounds: int) -> Plan:
        shape = shape_of(experiment, units, own_rounds)
        kappa_b = experiment.kappa_b if experiment.clipping == "quantile" else None
        return plan_xcal(shape, kappa=experiment.kappa, w=experiment.w, kappa_b=kappa_b)

    def check_network(self, network: nn.Module, experiment: SteeredParameters) -> None:
        if experiment.geometry == "importance":
            check_channels(network, "geometry = 'importance'")

    def rule(self, experiment: SteeredParameters, plan: Plan) -> SteeredRule:
        return SteeredRule(
            plan,
            SignalSettings.of(experiment, positive_only=True),
            tau=TAU if experiment.tau is None else experiment.tau,
            slow_tau=experiment.slow_tau,
            w=experiment.w,
            kappa=experiment.kappa,
            reference=experiment.reference,
            contrast=experiment.contrast,
            shares=experiment.shares,
            signal_every=experiment.signal_every,
            signal_fraction=experiment.signal_fraction,
            source=experiment.signal_source,
            channels=ChannelRule(experiment.protected, experiment.protection)
            if experiment.geometry == "importance"
            else None,
            quantile=quantile_rule(experiment) if experiment.clipping == "quantile" else None,
        )

    def load_state(self, saved: dict[str, Any] | None) -> SteeredState:
        if saved is None:
            return SteeredState()
        channels = saved.get("channels")
        return SteeredState(**{**saved, "channels": None if channels is None else tuple(channels)})

    def begin_round(self, state: SteeredState) -> SteeredState:
        return replace(state, channels=None)  # s and C live as long as the budget

    def step(
        self,
        context: StepContext,
        step: int,
        experiment: SteeredParameters,
        plan: Plan,
        state: SteeredState,
    ) -> tuple[SteeredState, StepRecord]:
        return steered_step(context, step, self.rule(experiment, plan), state)


XCAL_STEERED = Steered()
