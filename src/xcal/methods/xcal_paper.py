"""`xcal-paper`: Algorithm 1 as published, charged what is true of a shared batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xcal.config import Experiment
from xcal.dp.accounting import (
    ORDERS,
    CostTable,
    best_epsilon,
    budget_at,
    cost_matrix,
    cost_profile,
    joint_sigma,
)
from xcal.dp.calibration import Plan, plan_paper
from xcal.dp.clipping import Bound
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.rows import Release
from xcal.explain.signal import SignalSettings, batch_score
from xcal.methods.base import BandParameters, LocalMethod, SignalParameters, shape_of
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import (
    clipped_sum,
    gradient_release,
    release_gradient,
    sums_with_components,
)

TAU = 0.2


class PaperParameters(SignalParameters, BandParameters):
    """The keys of `xcal-paper`."""


@dataclass(frozen=True)
class PaperRule:
    """Public constants of Algorithm 1."""

    plan: Plan
    signal: SignalSettings
    tau: float = TAU

    @property
    def delta_share(self) -> float:
        return self.plan.delta / 2 if self.plan.sigma_signal is not None else self.plan.delta

    @property
    def orders(self) -> tuple[float, ...]:
        """Orders for the paper's own accounting: those near the best ones."""
        beyond = self.plan.order - 1
        return tuple(a for a in ORDERS if 1 + beyond / 4 <= a <= 1 + beyond * 4)


@dataclass(frozen=True)
class PaperState:
    """s restarts at 0 each round (line 2); the accountants of lines 3 and 21 span all rounds."""

    s: float = 0.0
    gradient_costs: tuple[float, ...] = ()  # Σ over steps, at `PaperRule.orders`
    signals: int = 0


@dataclass(frozen=True)
class Band:
    """The public grid of multipliers [σ_min, σ_max] with what each costs by both accountings."""

    sigmas: NDArray[np.float64]
    joint: CostTable  # one release of signal and gradient at the plan's order, method.md §3
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
    context: StepContext, step: int, rule: PaperRule, state: PaperState
) -> tuple[PaperState, StepRecord]:
    """One pass through lines 6–26 of Algorithm 1, paid for by what is true of a shared batch.

    Raises `BudgetExhausted` where either accounting has no room: the client then halts for good.
    """
    assert context.account is not None
    plan = rule.plan
    band = band_of(plan, rule.orders)
    span = plan.sigma_max - plan.sigma_min

    # Before the draw: the lowest σ this step could choose (s̃ = 1), raised to what is admissible.
    lowest = plan.sigma_max - ((1 - rule.tau) * state.s + rule.tau) * span
    if plan.sigma_signal is None:  # ρ = 0: no signal, s stays 0
        lowest = plan.sigma_max
    low = band.at_least(lowest)
    account = context.account
    while low < len(band.sigmas) and not account.filter.admits(float(band.joint.costs[low])):
        low += 1
    if low == len(band.sigmas):
        raise BudgetExhausted("no multiplier of the band is admissible")
    sigma_low = float(band.sigmas[low])

    # Charge (σ_s, σ_low), durably: a larger σ_step is a post-processing of this release.
    bound = Bound(context.clip)
    releases = [gradient_release(bound, sigma_low)]
    if plan.sigma_signal is not None:
        releases.append(Release("signal", plan.sigma_signal, 1.0))
    charged = context.charge(
        step,
        tuple(releases),
        float(band.joint.sigmas[low]),
        settings=(sigma_low, plan.sigma_signal, state.s, rule.signal, bound.norm),
        priced=band.joint,
    )

    batch = charged.draw(context.data)  # line 5
    s = state.s
    signal = None
    if plan.sigma_signal is None:
        sums = clipped_sum(context, batch, bound)
    else:
        # lines 6–8: prediction, Grad-CAM and top-q mask, from the training forward
        everyone = np.ones(batch.n_units, dtype=bool)
        sums, parts, chosen, broken = sums_with_components(
            context, batch, everyone, rule.signal, bound
        )
        # lines 9–13: Δℓ, m, c and s_raw, clipped to [0, 1]; broken units are as good as absent
        whole = torch.from_numpy(~broken).to(batch.units.device)[batch.units[chosen]]
        raw = batch_score(parts.only(whole), rule.signal.alpha, rule.signal.beta, rule.signal.gamma)
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
    release_gradient(context, charged, sums, noise=sigma * bound.sensitivity)
    return state, StepRecord(context.round, step, sigma, signal, context.share_spent)


@dataclass(frozen=True)
class PublishedXcal(LocalMethod):
    name: str = "xcal-paper"
    title: str = "XCal-FL as published"
    parameters: type[Experiment] = PaperParameters

    def plan(self, experiment: PaperParameters, units: int, own_rounds: int) -> Plan:
        shape = shape_of(experiment, units, own_rounds)
        return plan_paper(shape, rho=experiment.rho, band=experiment.band)

    def rule(self, experiment: PaperParameters, plan: Plan) -> PaperRule:
        return PaperRule(
            plan,
            SignalSettings.of(experiment, positive_only=False),
            tau=TAU if experiment.tau is None else experiment.tau,
        )

    def load_state(self, saved: dict[str, Any] | None) -> PaperState:
        if saved is None:
            return PaperState()
        return PaperState(saved["s"], tuple(saved["gradient_costs"]), saved["signals"])

    def begin_round(self, state: PaperState) -> PaperState:
        return replace(state, s=0.0)

    def step(
        self,
        context: StepContext,
        step: int,
        experiment: PaperParameters,
        plan: Plan,
        state: PaperState,
    ) -> tuple[PaperState, StepRecord]:
        return paper_step(context, step, self.rule(experiment, plan), state)

    def epsilon_paper(
        self, experiment: PaperParameters, plan: Plan | None, state: PaperState
    ) -> float | None:
        assert plan is not None
        return sum(paper_epsilons(self.rule(experiment, plan), state))


XCAL_PAPER = PublishedXcal()
