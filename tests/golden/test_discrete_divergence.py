"""The proof of docs/guarantee.md §10 in numbers: discrete pairs, summed out, beside the costs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import logsumexp

from xcal.dp.accounting import ABSOLUTE_CUSHION, reference_cost, step_cost


def log_discrete(x: np.ndarray, center: float, scale: float) -> np.ndarray:
    """log P of N_Z(center, scale²) on a range that holds all that floats can see of it."""
    weights = -((x - center) ** 2) / (2 * scale**2)
    return weights - logsumexp(weights)


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return float(logsumexp(order * p + (1 - order) * q)) / (order - 1)


def subsampled(base: np.ndarray, shifted: np.ndarray, rate: float) -> np.ndarray:
    return np.logaddexp(math.log1p(-rate) + base, math.log(rate) + shifted)


CASES = list(itertools.product((0.6, 1.0, 3.0, 20.0), (1, 2, 3, 7), (0.01, 0.3, 0.9)))


@pytest.mark.parametrize(("scale", "shift", "rate"), CASES)
def test_at_whole_orders_the_cost_is_the_continuous_gaussians(
    scale: float, shift: int, rate: float
) -> None:
    for order in (2, 3, 5, 8, 16):
        reach = int(order * shift + 40 * scale) + 1
        x = np.arange(-reach, reach + shift + 1, dtype=np.float64)
        base, shifted = log_discrete(x, 0, scale), log_discrete(x, shift, scale)
        mixed = subsampled(base, shifted, rate)
        there, back = divergence(mixed, base, order), divergence(base, mixed, order)
        expected = reference_cost(rate, scale / shift, order)
        assert there == pytest.approx(expected, rel=1e-9, abs=1e-12)  # equal, not only bounded
        assert back <= there * (1 + 1e-9) + 1e-12  # the lemma of the two directions
        assert max(there, back) <= step_cost(rate, scale / shift, order) + 2 * ABSOLUTE_CUSHION


def test_at_other_orders_it_is_not_and_may_be_above() -> None:
    """Why plans under shared noise take whole orders: at α = 1.5 coarse noise costs more."""
    x = np.arange(-60, 61, dtype=np.float64)
    worse = []
    for scale, rate in itertools.product((0.3, 0.5, 0.7), (0.1, 0.5, 0.9)):
        base, shifted = log_discrete(x, 0, scale), log_discrete(x, 1, scale)
        mixed = subsampled(base, shifted, rate)
        fine = np.linspace(-40, 41, 400_001)
        p = -(fine**2) / (2 * scale**2)
        q = subsampled(p, -((fine - 1) ** 2) / (2 * scale**2), rate)
        norm = logsumexp(p)
        continuous = float(logsumexp(1.5 * q - 0.5 * p) - norm) / 0.5
        worse.append(divergence(mixed, base, 1.5) - continuous)
    assert max(worse) > 1e-5


@pytest.mark.parametrize("shift", [(1, 2), (3, 0), (2, 2)])
def test_in_two_dimensions_only_the_norm_counts(shift: tuple[int, int]) -> None:
    scale, rate = 1.3, 0.2
    x = np.arange(-70, 71, dtype=np.float64)
    base = log_discrete(x, 0, scale)[:, None] + log_discrete(x, 0, scale)[None, :]
    moved = log_discrete(x, shift[0], scale)[:, None] + log_discrete(x, shift[1], scale)[None, :]
    mixed = subsampled(base.ravel(), moved.ravel(), rate)
    for order in (2, 4, 7):
        expected = reference_cost(rate, scale / math.hypot(*shift), order)
        found = divergence(mixed, base.ravel(), order)
        assert found == pytest.approx(expected, rel=1e-9)
        assert divergence(base.ravel(), mixed, order) <= found * (1 + 1e-9)


def tau(scale: float, honest: int) -> float:
    """The bound of §10 on |ln P[Σξ = x] − ln P[N_Z(0, hs²) = x]|."""
    eta = [2.1 * math.exp(-2 * math.pi**2 * scale**2 * k / (k + 1)) for k in range(1, honest)]
    return sum(2 * math.atanh(min(e, 1 - 1e-16)) for e in eta)


@pytest.mark.parametrize("honest", [2, 3, 5])
@pytest.mark.parametrize("scale", [0.6, 0.8, 1.0])
def test_a_sum_of_discrete_gaussians_is_as_near_to_one_as_the_bound_says(
    scale: float, honest: int
) -> None:
    x = np.arange(-40, 41)
    one = np.exp(log_discrete(x.astype(float), 0, scale))
    total = one
    for _ in range(honest - 1):
        total = np.convolve(total, one)
    wide = np.arange(-40 * honest, 40 * honest + 1, dtype=np.float64)
    single = log_discrete(wide, 0, scale * math.sqrt(honest))
    seen = np.abs(wide) <= 4 * scale * math.sqrt(honest)  # where floats still see the ratio
    apart = np.abs(np.log(total[seen]) - single[seen]).max()
    assert apart <= tau(scale, honest) + 1e-9
    if scale == 0.6:
        assert apart > tau(scale, honest) / 20  # the bound is of the right size
    assert tau(1024, 50) == 0.0  # what is used: e to the power of minus ten million


def test_both_directions_by_the_lemma_at_any_order() -> None:
    """r ≥ 1, a = 1 + q(r − 1), b = 1 − q(1 − 1/r): a^α + r·b^α ≥ a^{1−α} + r·b^{1−α}."""
    for r, q, order in itertools.product(
        np.geomspace(1.0001, 1e3, 30), (1e-4, 0.01, 0.3, 0.7, 0.999), (1.01, 1.5, 2, 7, 30)
    ):
        a, b = 1 + q * (r - 1), 1 - q * (1 - 1 / r)
        assert a * b >= 1 - 1e-12 and a + r * b == pytest.approx(1 + r)
        left = np.logaddexp(order * math.log(a), math.log(r) + order * math.log(b))
        right = np.logaddexp((1 - order) * math.log(a), math.log(r) + (1 - order) * math.log(b))
        assert left >= right - 1e-9


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.01), (2.0, 0.1), (4.0, 0.01), (2.0, 0.5)])
def test_a_unit_at_two_sites_of_one_sum_costs_more_than_the_sum_of_both(
    sigma: float, rate: float
) -> None:
    """Its shares add up before the noise: at most rate 1 − (1 − q)² and multiplier σ/2."""
    shift = 8
    scale = sigma * shift
    for order in (2, 8):
        reach = int(2 * order * shift + 20 * scale)
        x = np.arange(-reach, reach + 1, dtype=np.float64)
        base, once, twice = (log_discrete(x, k * shift, scale) for k in range(3))
        drawn = (2 * math.log1p(-rate), math.log(2 * rate * (1 - rate)), 2 * math.log(rate))
        parts = [w + p for w, p in zip(drawn, (base, once, twice), strict=True)]
        found = divergence(logsumexp(parts, axis=0), base, order)
        assert found > 1.9 * 2 * step_cost(rate, sigma, order)
        assert found <= step_cost(1 - (1 - rate) ** 2, sigma / 2, order)
