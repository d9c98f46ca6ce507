"""What a record-level promise means for a person with several images."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from xcal.dp.accounting import ORDERS, cost_profile
from xcal.dp.calibration import Plan


def group_epsilon(plan: Plan, images: int) -> float | None:
    """ε, at the plan's δ, for a person with `images` images in a record-level run; None: none.

    Group privacy of (ε′, δ′): (kε′, δ′(e^{kε′} − 1)/(e^{ε′} − 1)), with ε′ = ε(δ′) at the filter's
    order, or at the best one where the plan was fixed beforehand, and δ′ chosen so that the second
    term equals the plan's δ. A smaller δ′ helps only while k is below the order.
    """
    if images == 1:
        return plan.epsilon
    orders, costs = _costs(plan)
    if images >= orders[-1]:
        return None
    constant = costs + np.log((orders - 1) / orders) - np.log(orders) / (orders - 1)

    def epsilon_at_log(log_delta: float) -> float:
        return max(1e-12, float((constant - log_delta / (orders - 1)).min()))

    def log_excess(log_delta: float) -> float:
        epsilon = epsilon_at_log(log_delta)
        total = _log_expm1(images * epsilon) - _log_expm1(epsilon)
        return log_delta + total - math.log(plan.delta)

    high = math.log(plan.delta)
    low = high
    while log_excess(low) > 0:
        low = 2 * low
        if low < -1e6:
            return None
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if log_excess(middle) > 0:
            high = middle
        else:
            low = middle
    return images * epsilon_at_log(low)


def _costs(plan: Plan) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Orders at which the whole run's Rényi divergence is bounded, and the bounds."""
    if plan.accountant == "renyi":
        return np.array([plan.order]), np.array([plan.budget])
    return np.array(ORDERS), plan.steps * cost_profile(plan.sample_rate, plan.sigma_static)


def _log_expm1(x: float) -> float:
    return x + math.log1p(-math.exp(-x)) if x > 1e-9 else math.log(x)
