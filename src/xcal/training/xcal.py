"""The paper's Algorithm 1 and our method, each from top to bottom in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.explain.gradcam import forward_with_features
from xcal.explain.inference import filled_up
from xcal.explain.signal import (
    Components,
    SignalSettings,
    batch_score,
    image_components,
    scores,
)
from xcal.privacy.accounting import (
    ORDERS,
    CostTable,
    best_epsilon,
    budget_at,
    cost_matrix,
    cost_profile,
    joint_sigma,
)
from xcal.privacy.calibration import SCORE_SENSITIVITY, Plan, joint_factor
from xcal.privacy.filter import BudgetExhausted
from xcal.privacy.ledger_rows import Release
from xcal.training.adaptive import (
    QuantileRule,
    contributing_units,
    count_release,
    release_fraction,
)
from xcal.training.clipping import Bound, ClippedSum
from xcal.training.geometry import ChannelRule, round_geometry
from xcal.training.local import Batch, Bench, StepRecord, mean_by_unit
from xcal.training.steps import clipped_sum, gradient_release, release_gradient

# --- ours -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class XcalRule:
    """Public constants of our method (METHOD §4)."""

    plan: Plan
    signal: SignalSettings
    tau: float = 0.05
    slow_tau: float = 0.01
    w: float = 0.5
    kappa: float = 5.0
    reference: str = "running"
    contrast: float = 0.1
    signal_every: int = 1
    signal_fraction: float = 1.0
    with_signal: bool = True
    source: str = "model"  # or what stands in the signal's place: a constant, noise, a schedule
    channels: ChannelRule | None = None  # where the noise goes; None: alike everywhere
    quantile: QuantileRule | None = None  # how C follows the norms; None: it is fixed


@dataclass(frozen=True)
class XcalState:
    """What our method remembers between steps: functions of releases. Lives with the budget."""

    fast: float = 0.0  # exponential averages of the released mean, started at 0 …
    slow: float = 0.0
    signals: int = 0  # … and corrected by how many releases they hold
    clip: float | None = None  # C of the next step, where it follows a quantile
    channels: tuple[int, ...] | None = None  # spared in this round, by the weights received

    def updated(self, mean: float, rule: XcalRule) -> XcalState:
        return replace(
            self,
            fast=(1 - rule.tau) * self.fast + rule.tau * mean,
            slow=(1 - rule.slow_tau) * self.slow + rule.slow_tau * mean,
            signals=self.signals + 1,
        )

    def new_round(self) -> XcalState:
        return replace(self, channels=None)  # all else lives on


def smoothing_noise(rule: XcalRule) -> float:
    """Deviation of s − s̄ that comes from the signal's own noise: known beforehand."""
    assert rule.plan.sigma_signal is not None
    one = rule.plan.sigma_signal / (rule.signal_fraction * rule.plan.batch)
    a, b = rule.tau, rule.slow_tau
    variance = a / (2 - a) + b / (2 - b) - 2 * a * b / (1 - (1 - a) * (1 - b))
    return one * math.sqrt(max(variance, 0.0))


def share_factor(state: XcalState, rule: XcalRule) -> float:
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


def scheduled_factor(rule: XcalRule, steps_left: int) -> float:
    """m of a public schedule: shares go from 1 ∓ w to 1 ± w on a line, R in all."""
    total = rule.plan.steps
    now = total - steps_left
    slope = SCHEDULES[rule.source] * rule.w

    def height(step: float) -> float:
        return 1 + slope * (2 * (step + 0.5) / total - 1)

    # Heights lie on a line, so those still to come have the mean of the first and the last.
    return height(now) / ((height(now) + height(total - 1)) / 2)


def next_effective_sigma(
    state: XcalState, rule: XcalRule, spent: float, steps_left: int, table: CostTable
) -> tuple[float, float]:
    """The next step's σ_eff and its cost, from releases and public constants only (METHOD §4.5)."""
    left = rule.plan.budget - spent
    scheduled = rule.source in SCHEDULES
    factor = scheduled_factor(rule, steps_left) if scheduled else share_factor(state, rule)
    share = min(left / max(steps_left, 1) * factor, left)
    k = table.cheapest_within(share)
    if k is None:
        raise BudgetExhausted("what is left pays for no step of the grid")
    return float(table.sigmas[k]), float(table.costs[k])


def next_bound(bench: Bench, rule: XcalRule, state: XcalState) -> tuple[XcalState, Bound]:
    """C and D of the next step, from earlier releases and the round's received weights only."""
    clip = bench.clip
    if rule.quantile is not None:
        clip = rule.quantile.start if state.clip is None else state.clip
    if rule.channels is None:
        return state, Bound(clip)
    if state.channels is None:  # the round's first step: the model is still the one received
        state = replace(state, channels=rule.channels.choose(bench.model))
    assert state.channels is not None
    return state, Bound(clip, round_geometry(bench.model, rule.channels, state.channels))


def xcal_step(
    bench: Bench, step: int, rule: XcalRule, state: XcalState
) -> tuple[XcalState, StepRecord]:
    """One step of our method: one joint release of gradient, signal and count, used one step later.

    Where the noise goes and how C is chosen are parts of the rule, each of them optional.
    """
    assert bench.account is not None
    plan, table = rule.plan, rule.plan.table()
    number = bench.first_step + step

    # 0. What one unit may contribute, and where the noise goes: C and D.
    state, bound = next_bound(bench, rule, state)

    # 1. σ is fixed by what was released before this step: the signal read here acts on the next.
    carries_signal = rule.with_signal and number % rule.signal_every == 0
    sigma_eff, _ = next_effective_sigma(
        state, rule, bench.account.filter.spent, plan.steps - number, table
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
    charged = bench.charge(
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
    batch = charged.draw(bench.data)
    if carries_signal and rule.source == "model":
        sums, centred, counted = _gradient_and_scores(bench, step, batch, rule, bound)
    else:  # a replaced signal costs the same and says nothing of the images
        sums, centred = clipped_sum(bench, batch, bound), 0.0
        counted = contributing_units(sums, batch)

    # 4. Release them; the optimiser, the averages and the next C see nothing else.
    mean = None
    if carries_signal:
        mean = 0.5 + charged.release_scalar("signal", centred) / (
            rule.signal_fraction * bench.batch
        )
        mean = 0.5 if rule.source == "constant" else mean
        state = state.updated(mean, rule)
    if rule.quantile is not None:
        fraction = release_fraction(bench, charged, sums, counted)
        state = replace(state, clip=rule.quantile.following(bound.norm, fraction))
    release_gradient(bench, charged, sums)
    return state, StepRecord(
        bench.round,
        step,
        sigma,
        mean,
        bench.share_spent,
        clip=None if rule.quantile is None else bound.norm,
    )


def _gradient_and_scores(
    bench: Bench, step: int, batch: Batch, rule: XcalRule, bound: Bound
) -> tuple[ClippedSum, float, NDArray[np.bool_]]:
    """The clipped sum, Σ(u − ½) over the units that enter the signal, and which units count.

    A unit whose gradient or score is not finite contributes exactly 0 to everything.
    """
    entering = np.ones(batch.n_units, dtype=bool)
    if rule.signal_fraction < 1:
        uniforms = bench.noise.uniforms(bench.key(step, "entering"), batch.n_units)
        entering = uniforms < rule.signal_fraction
    sums, parts, chosen = _forward(bench, batch, entering, rule.signal, bound)
    u = scores(parts, rule.signal.alpha, rule.signal.beta, rule.signal.gamma)
    broken = _broken_units(sums, parts, batch, chosen)
    if bool((broken & ~sums.dropped.cpu().numpy()).any()):
        bad = torch.from_numpy(broken).to(batch.units.device)
        sums = clipped_sum(bench, batch.without(bad), bound)
    by_unit = mean_by_unit(u, batch.units[chosen], batch.n_units)
    counted = contributing_units(sums, batch) & ~broken
    return sums, centred_sum(by_unit, entering & counted), counted


def centred_sum(by_unit: NDArray[np.float64], counted: NDArray[np.bool_]) -> float:
    """Σ(u − ½) over the counted units: zeroing one unit moves it by at most ½."""
    return float((np.clip(by_unit, 0.0, 1.0) - 0.5)[counted].sum())


def _forward(
    bench: Bench,
    batch: Batch,
    entering: NDArray[np.bool_],
    settings: SignalSettings,
    bound: Bound,
) -> tuple[ClippedSum, Components, Tensor]:
    """Clipped sum, signal components and the images they belong to.

    From one training forward; but where the explained map lies in a frozen beginning whose
    activations are kept, only the images that enter the signal go through the whole network.
    """
    chosen = torch.from_numpy(entering).to(batch.units.device)[batch.units]
    if batch.plain is not None:
        chosen &= batch.plain  # the signal is that of the image as it is
    cam_layer = str(bench.model.cam_layer)
    if bench.split is not None and not bench.split.passes(bench.model.get_submodule(cam_layer)):
        return clipped_sum(bench, batch, bound), _looked_at(bench, batch, chosen, settings), chosen
    sums = clipped_sum(bench, batch, bound, capture=cam_layer)
    assert sums.features is not None
    found = [  # a chunk at a time: a draw may be larger than fits as pictures
        image_components(
            bench.model,
            batch.pictures(some),
            sums.logits[some],
            sums.features[some],
            settings,
            rows=bench.rows,
        )
        for some in _portions(chosen, bench.chunk)
    ]
    return sums, Components.joined(found, chosen.device), chosen


def _portions(chosen: Tensor, size: int) -> tuple[Tensor, ...]:
    """The numbers of the marked rows, at most `size` together."""
    return torch.split(chosen.nonzero().flatten(), size) if bool(chosen.any()) else ()


def _looked_at(bench: Bench, batch: Batch, chosen: Tensor, settings: SignalSettings) -> Components:
    """The components of the chosen images, a chunk at a time through the whole network."""
    found = []
    size = bench.rows or bench.chunk
    for some in _portions(chosen, size):
        images = filled_up(batch.pictures(some), bench.rows)
        with torch.no_grad():
            logits, features = forward_with_features(bench.model, images)
        parts = image_components(bench.model, images, logits, features, settings, rows=bench.rows)
        found.append(parts.first(len(some)))
    return Components.joined(found, chosen.device)


def _broken_units(
    sums: ClippedSum, parts: Components, batch: Batch, chosen: Tensor
) -> NDArray[np.bool_]:
    bad = ~torch.isfinite(parts.logit_drop + parts.margin + parts.concentration)
    broken: NDArray[np.bool_] = sums.dropped.cpu().numpy().astype(bool)
    broken[batch.units[chosen][bad].cpu().numpy()] = True
    return broken


def _only(parts: Components, kept: Tensor) -> Components:
    return Components(parts.logit_drop[kept], parts.margin[kept], parts.concentration[kept])


# --- the paper's ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperRule:
    """Public constants of Algorithm 1."""

    plan: Plan
    signal: SignalSettings
    tau: float = 0.2
    band: float = 0.2

    @property
    def delta_share(self) -> float:
        return self.plan.delta / 2 if self.plan.sigma_signal is not None else self.plan.delta

    @property
    def orders(self) -> tuple[float, ...]:
        """Orders for the paper's own accounting: those near the best ones."""
        return _orders_near(self.plan.order)


@lru_cache(maxsize=64)
def _orders_near(order: float) -> tuple[float, ...]:
    low, high = 1 + (order - 1) / 4, 1 + (order - 1) * 4
    return tuple(a for a in ORDERS if low <= a <= high)


@dataclass(frozen=True)
class PaperState:
    """s restarts at 0 each round (line 2); the accountants of lines 3 and 21 span all rounds."""

    s: float = 0.0
    gradient_costs: tuple[float, ...] = ()  # Σ over steps, at `PaperRule.orders`
    signals: int = 0

    def new_round(self) -> PaperState:
        return replace(self, s=0.0)


@dataclass(frozen=True)
class Band:
    """The public grid of multipliers [σ_min, σ_max] with what each costs by both accountings."""

    sigmas: NDArray[np.float64]
    joint: CostTable  # one release of signal and gradient at the plan's order, METHOD §3
    paper_costs: NDArray[np.float64]  # gradient alone, (σ, order)

    def at_least(self, sigma: float) -> int:
        return min(int(np.searchsorted(self.sigmas, sigma - 1e-12)), len(self.sigmas) - 1)


BAND_POINTS = 201


@lru_cache(maxsize=64)
def band_of(plan: Plan, orders: tuple[float, ...]) -> Band:
    sigmas = np.linspace(plan.sigma_min, plan.sigma_max, BAND_POINTS)
    signal = math.inf if plan.sigma_signal is None else plan.sigma_signal
    joint = np.array([joint_sigma(float(s), signal) for s in sigmas])
    return Band(
        sigmas,
        CostTable.build(plan.sample_rate, plan.order, joint),
        cost_matrix(plan.sample_rate, sigmas, orders),
    )


def paper_epsilons(rule: PaperRule, state: PaperState) -> tuple[float, float]:
    """ε of the gradients and of the signals so far, by the paper's accounting."""
    plan = rule.plan
    gradient = signal = 0.0
    if state.gradient_costs:
        gradient, _ = best_epsilon(rule.orders, np.array(state.gradient_costs), rule.delta_share)
    if state.signals and plan.sigma_signal is not None:
        profile = cost_profile(plan.sample_rate, plan.sigma_signal)
        signal, _ = best_epsilon(ORDERS, state.signals * profile, rule.delta_share)
    return gradient, signal


def _paper_admits(rule: PaperRule, costs: NDArray[np.float64]) -> bool:
    assert rule.plan.epsilon_gradient is not None
    epsilon = rule.plan.epsilon_gradient
    return any(
        c <= budget_at(a, epsilon, rule.delta_share)
        for a, c in zip(rule.orders, costs, strict=True)
    )


def paper_step(
    bench: Bench, step: int, rule: PaperRule, state: PaperState
) -> tuple[PaperState, StepRecord]:
    """One pass through lines 6–26 of Algorithm 1, paid for by what is true of a shared batch.

    Raises `BudgetExhausted` where either accounting has no room: the client then halts for good.
    """
    assert bench.account is not None
    plan = rule.plan
    band = band_of(plan, rule.orders)
    span = plan.sigma_max - plan.sigma_min

    # Before the draw: the lowest σ this step could choose (s̃ = 1), raised to what is admissible.
    lowest = plan.sigma_max - ((1 - rule.tau) * state.s + rule.tau) * span
    if plan.sigma_signal is None:  # ρ = 0: no signal, s stays 0
        lowest = plan.sigma_max
    low = band.at_least(lowest)
    account = bench.account
    while low < len(band.sigmas) and not account.filter.admits(float(band.joint.costs[low])):
        low += 1
    if low == len(band.sigmas):
        raise BudgetExhausted("no multiplier of the band is admissible")
    sigma_low = float(band.sigmas[low])

    # Charge (σ_s, σ_low), durably: a larger σ_step is a post-processing of this release.
    bound = Bound(bench.clip)
    releases = [gradient_release(bound, sigma_low)]
    if plan.sigma_signal is not None:
        releases.append(Release("signal", plan.sigma_signal, 1.0))
    charged = bench.charge(
        step,
        tuple(releases),
        float(band.joint.sigmas[low]),
        settings=(sigma_low, plan.sigma_signal, state.s, rule.signal, bound.norm),
        priced=band.joint,
    )

    batch = charged.draw(bench.data)  # line 5
    s = state.s
    signal = None
    if plan.sigma_signal is None:
        sums = clipped_sum(bench, batch, bound)
    else:
        # lines 6–8: prediction, Grad-CAM and top-q mask, from the training forward
        everyone = np.ones(batch.n_units, dtype=bool)
        sums, parts, chosen = _forward(bench, batch, everyone, rule.signal, bound)
        broken = _broken_units(sums, parts, batch, chosen)
        if bool((broken & ~sums.dropped.cpu().numpy()).any()):
            bad = torch.from_numpy(broken).to(batch.units.device)
            sums = clipped_sum(bench, batch.without(bad), bound)
        # lines 9–13: Δℓ, m, c and s_raw, clipped to [0, 1]; broken units are as good as absent
        whole = torch.from_numpy(~broken).to(batch.units.device)[batch.units[chosen]]
        raw = batch_score(
            _only(parts, whole), rule.signal.alpha, rule.signal.beta, rule.signal.gamma
        )
        # line 14: s̃ ← clip(s_raw + N(0, σ_s²), 0, 1)
        signal = min(max(charged.release_scalar("signal", raw), 0.0), 1.0)
        # line 15: s ← (1 − τ)s + τ s̃
        s = (1 - rule.tau) * s + rule.tau * signal
    # line 16: σ_step ← σ_max − s(σ_max − σ_min), never below what was charged
    k = max(band.at_least(plan.sigma_max - s * span), low)
    # lines 17–20: the paper's filter over gradients; a charge already made stands
    spent = np.array(state.gradient_costs or [0.0] * len(rule.orders))
    while k < len(band.sigmas) and not _paper_admits(rule, spent + band.paper_costs[k]):
        k += 1
    signals = state.signals + (plan.sigma_signal is not None)
    if k == len(band.sigmas):
        raise BudgetExhausted(
            "the paper's filter admits no multiplier of the band",
            replace(state, s=s, signals=signals),
        )
    # line 21: charge the paper's accountant
    state = PaperState(s, tuple((spent + band.paper_costs[k]).tolist()), signals)
    # lines 22–25: clip, add noise, update
    sigma = float(band.sigmas[k])
    release_gradient(bench, charged, sums, noise=sigma * bound.sensitivity)
    return state, StepRecord(bench.round, step, sigma, signal, bench.share_spent)
