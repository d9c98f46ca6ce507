"""What a record-level promise means for a person with several images."""

from __future__ import annotations

import math

from xcal.privacy.calibration import Plan


def group_epsilon(plan: Plan, images: int) -> float | None:
    """ε, at the plan's δ, for a person with `images` images in a record-level run; None: none.

    Group privacy of (ε′, δ′): (kε′, δ′(e^{kε′} − 1)/(e^{ε′} − 1)), with ε′ = ε(δ′) at the filter's
    order and δ′ chosen so that the second term equals the plan's δ. A smaller δ′ helps only while k
    is below the order.
    """
    if images == 1:
        return plan.epsilon
    if images >= plan.order:
        return None

    def log_excess(log_delta: float) -> float:
        epsilon = _epsilon_at_log(plan, log_delta)
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
        if log_excess(middle) > 0:
            high = middle
        else:
            low = middle
    return images * _epsilon_at_log(plan, low)


def _epsilon_at_log(plan: Plan, log_delta: float) -> float:
    a = plan.order
    return max(1e-12, plan.budget + math.log((a - 1) / a) - (log_delta + math.log(a)) / (a - 1))


def _log_expm1(x: float) -> float:
    return x + math.log1p(-math.exp(-x)) if x > 1e-9 else math.log(x)
