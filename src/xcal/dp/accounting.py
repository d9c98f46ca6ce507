"""Rényi cost of one Poisson-subsampled Gaussian step, and its conversion to (ε, δ).

The formulas are those of dp-accounting (Mironov, Talwar, Zhang 2019, §3.3), evaluated for a whole
array of noise multipliers at once: the filter needs thousands of costs at one order, and one scalar
call of the library takes 0.3 to 37 ms. The library stays the authority: `CostTable` compares
itself with it each time one is built, `reference_cost` is what `xcal ledger verify` recomputes
with, and the tests hold the two to nine digits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import dp_accounting
import numpy as np
from absl import logging as absl_logging
from dp_accounting import rdp
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

MAX_SERIES_TERMS = 1000
# What floating point may lose in one cost (log-gamma at order 4,096 is the worst of it); added so
# that a sum of costs errs only upwards.
ABSOLUTE_CUSHION = 1e-13
RELATIVE_CUSHION = 1e-12


def _default_orders() -> tuple[float, ...]:
    fractional = [1 + x / 100 for x in range(2, 100, 2)] + [2 + x / 10 for x in range(1, 80)]
    fractional = [a for a in fractional if a != int(a)]
    whole = [float(a) for a in range(2, 257)]
    large, a = [], 256.0
    while a < 8192:
        a = float(math.ceil(a * 1.02))
        large.append(a)
    return tuple(sorted({round(a, 6) for a in fractional + whole + large}))


# ε = 0.05 needs orders near 225 and the paper's ε_s = 0.005 needs thousands; lists that stop at
# 64, as many libraries' do, cannot calibrate either.
ORDERS: tuple[float, ...] = _default_orders()


def _log_sum(values: Floats) -> Floats:
    """log Σ exp over the first axis, for finite or -inf entries."""
    top = values.max(axis=0)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        result: Floats = safe + np.log(np.exp(values - safe).sum(axis=0))
    return result


def _log_comb(n: Floats | float, k: Floats) -> Floats:
    result: Floats = (
        special.gammaln(n + 1.0) - special.gammaln(k + 1.0) - special.gammaln(n - k + 1.0)
    )
    return result


@lru_cache(maxsize=1024)
def _log_combs(order: float, terms: int) -> Floats:
    """log |C(order, i)| for i from 0, a column: every cost at this order needs the same ones."""
    result = _log_comb(order, np.arange(terms, dtype=np.float64)[:, None])
    result.flags.writeable = False
    return result


def _log_moment_whole(rate: float, sigmas: Floats, order: int) -> Floats:
    i = np.arange(order + 1, dtype=np.float64)[:, None]
    log_coefficient = (
        _log_combs(float(order), order + 1) + i * math.log(rate) + (order - i) * math.log1p(-rate)
    )
    return _log_sum(log_coefficient + (i * i - i) / (2 * sigmas[None, :] ** 2))


def _log_moment_fractional(rate: float, sigma: Floats, order: Floats) -> Floats:
    """For pairs (σ, order): one pass over the series serves them all, some terms at a time."""
    z0 = sigma**2 * math.log(1 / rate - 1) + 0.5
    log_rate, log_rest = math.log(rate), math.log1p(-rate)
    result = np.empty_like(sigma)
    left = np.arange(len(sigma))  # the pairs whose series goes on: most end early, a few never
    # Signs of C(order, i) are dropped on purpose: the magnitudes' sum bounds the moment above.
    known, at = np.unique(order, return_inverse=True)
    combs = np.hstack([_log_combs(float(a), MAX_SERIES_TERMS) for a in known])
    total = last0 = last1 = np.full_like(sigma, -np.inf)
    terms = max(1, min(64, 2**15 // len(sigma)))
    for first in range(0, MAX_SERIES_TERMS, terms):
        i = np.arange(first, min(first + terms, MAX_SERIES_TERMS), dtype=np.float64)[:, None]
        coefficient = combs[first : first + len(i), at]
        j = order - i
        # log ½erfc(x/√2) = log Φ(−x)
        s0 = (
            coefficient
            + i * log_rate
            + j * log_rest
            + (i * i - i) / (2 * sigma**2)
            + special.log_ndtr((z0 - i) / sigma)
        )
        s1 = (
            coefficient
            + j * log_rate
            + i * log_rest
            + (j * j - j) / (2 * sigma**2)
            + special.log_ndtr((j - z0) / sigma)
        )
        sums = np.logaddexp.accumulate(np.vstack([total, np.logaddexp(s0, s1)]))[1:]
        falling = (s0 < np.vstack([last0, s0[:-1]])) & (s1 < np.vstack([last1, s1[:-1]]))
        ended = falling & (np.maximum(s0, s1) < sums - 30)
        over = ended.any(axis=0)
        result[left[over]] = sums[ended.argmax(axis=0), np.arange(len(left))][over]
        if over.all():
            return result
        kept = (left, at, sigma, order, z0, sums[-1], s0[-1], s1[-1], falling[-1])
        left, at, sigma, order, z0, total, last0, last1, last_fell = (x[~over] for x in kept)
    # Where the series is slow, the library gives up. Its terms fall at least like i^-2 (order > 1),
    # so all that is left is at most N times the last one.
    tail = math.log(MAX_SERIES_TERMS) + np.logaddexp(last0, last1)
    result[left] = np.where(last_fell, np.logaddexp(total, tail), np.inf)
    return result


def _costs(rate: float, sigma: Floats, order: Floats) -> Floats:
    """Costs of pairs (σ, order), upper bounds, not yet cushioned."""
    if rate == 1:
        return order / (2 * sigma**2)
    result = np.empty_like(sigma)
    whole = order == np.floor(order)
    if not whole.all():
        part = ~whole
        result[part] = _log_moment_fractional(rate, sigma[part], order[part]) / (order[part] - 1)
    for a in np.unique(order[whole]):
        same = order == a
        result[same] = _log_moment_whole(rate, sigma[same], int(a)) / (a - 1)
    return result


def step_costs(rate: float, sigmas: Floats | Sequence[float], order: float) -> Floats:
    """Upper bounds on the Rényi divergence, at `order`, of one step at each multiplier.

    One step releases a sum to which one unit adds at most 1 (in norm), with N(0, σ²) on every
    coordinate, over a Poisson sample of the given rate; neighbors differ by zeroing one unit.
    """
    return _checked_costs(rate, np.atleast_1d(np.asarray(sigmas, dtype=np.float64)), order)


def _checked_costs(rate: float, sigma: Floats, order: float | Floats) -> Floats:
    sigma = np.asarray(sigma, dtype=np.float64)  # whole numbers would truncate every cost
    orders = np.broadcast_to(np.asarray(order, dtype=np.float64), sigma.shape)
    if not 0 < rate <= 1:
        raise ValueError(f"the sampling rate must be in (0, 1], not {rate}")
    if (sigma <= 0).any():
        raise ValueError("noise multipliers must be positive")
    if (orders <= 1).any():
        raise ValueError(f"the Rényi order must be above 1, not {orders.min()}")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cost = _costs(rate, sigma, orders)
    result: Floats = np.maximum(np.where(np.isnan(cost), np.inf, cost), 0.0)
    return result * (1 + RELATIVE_CUSHION) + ABSOLUTE_CUSHION


def step_cost(rate: float, sigma: float, order: float) -> float:
    """`step_costs` for one multiplier."""
    return float(step_costs(rate, [sigma], order)[0])


@lru_cache(maxsize=4096)
def _cost_profile(rate: float, sigma: float, orders: tuple[float, ...]) -> Floats:
    return _checked_costs(rate, np.full(len(orders), sigma), np.array(orders))


def cost_profile(rate: float, sigma: float, orders: Sequence[float] = ORDERS) -> Floats:
    """The cost of one step at every order."""
    return _cost_profile(float(rate), float(sigma), tuple(orders))


def cost_matrix(rate: float, sigmas: Floats, orders: Sequence[float]) -> Floats:
    """Costs of one step at every multiplier (rows) and every order (columns)."""
    grid, columns = np.meshgrid(sigmas, np.array(orders), indexing="ij")
    return _checked_costs(rate, grid.ravel(), columns.ravel()).reshape(grid.shape)


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Keep dp-accounting's warnings from the user."""
    # The library warns about orders whose series does not converge and then leaves them out:
    # nothing the user could act on.
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(before)


def _event(rate: float, sigma: float) -> Any:
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    return gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)


@lru_cache(maxsize=4096)
def reference_cost(rate: float, sigma: float, order: float) -> float:
    """The same cost from dp-accounting: slow, independent of `step_costs`.

    Where the library's series does not converge (fractional orders, little noise), the moment is
    integrated numerically instead.
    """
    whole = order == int(order)
    with quiet_library():
        accountant = rdp.RdpAccountant(
            [int(order) if whole else order], dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        )
        accountant.compose(_event(rate, sigma))
        cost = float(accountant.rdp[0])
    return cost if math.isfinite(cost) else _integrated_cost(rate, sigma, order)


def _integrated_cost(rate: float, sigma: float, order: float) -> float:
    """log E[((1 − q) + q·exp((2z − 1)/2σ²))^α], z ~ N(0, σ²), over α − 1, on a fine grid."""
    z = np.linspace(-12 * sigma, order + 12 * sigma, 200_001)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * sigma**2))
    density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    logs = order * ratio + density
    top = float(logs.max())
    total = float(np.trapezoid(np.exp(logs - top), z))
    return (top + math.log(total)) / (order - 1)


def budget_at(order: float, epsilon: float, delta: float) -> float:
    """The largest total cost at `order` that still converts to (ε, δ): R of method.md §4.4.

    R = ε − ln((α−1)/α) + (ln δ + ln α)/(α−1).
    """
    return (
        epsilon - math.log((order - 1) / order) + (math.log(delta) + math.log(order)) / (order - 1)
    )


def epsilon_at(order: float, cost: float, delta: float) -> float:
    """ε of a total cost at one order: the inverse of `budget_at`, never below 0.

    Holds at a stopping time that depends on releases too, where the order was fixed before the
    first step (docs/guarantee.md §4).
    """
    return max(
        0.0,
        cost + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1),
    )


def best_epsilon(orders: Sequence[float], costs: Floats, delta: float) -> tuple[float, float]:
    """The smallest ε over the orders, and its order. For plans fixed before training only."""
    values = [epsilon_at(a, float(c), delta) for a, c in zip(orders, costs, strict=True)]
    k = int(np.argmin(values))
    return values[k], orders[k]


def epsilon_rdp(
    rate: float, sigma: float, steps: int, delta: float, *, whole_orders: bool = False
) -> float:
    """ε of `steps` equal steps, the tight conversion at the best order.

    `whole_orders`: only at those is the discrete Gaussian's cost proved (docs/guarantee.md §10).
    """
    costs = steps * cost_profile(rate, sigma)
    if whole_orders:
        chosen = [i for i, order in enumerate(ORDERS) if order == int(order)]
        return best_epsilon([ORDERS[i] for i in chosen], costs[chosen], delta)[0]
    return best_epsilon(ORDERS, costs, delta)[0]


SCORE_SENSITIVITY = 0.5  # Σ(u − ½) with u in [0, 1]: zeroing one unit moves it by at most ½
COUNT_SENSITIVITY = 0.5  # Σ(1[norm ≤ C] − ½): likewise


def joint_factor(kappa: float | None = None, kappa_b: float | None = None) -> float:
    """σ_t/σ_eff of a step that also releases a signal priced by κ or a count priced by κ_b.

    With σ_s = κ·Δ_u·σ_t and σ_b = κ_b·σ_t, 1/σ_eff² = 1/σ_t² + Δ_u²/σ_s² + 1/(2σ_b)² gives
    √(1 + 1/κ² + 1/(2κ_b)²). None: not released.
    """
    signal = 0.0 if kappa is None else 1 / kappa**2
    count = 0.0 if kappa_b is None else (COUNT_SENSITIVITY / kappa_b) ** 2
    return math.sqrt(1 + signal + count)


def joint_sigma(*multipliers: float) -> float:
    """The one multiplier equivalent to several releases of one and the same batch.

    A unit moves release i by at most its sensitivity; with multipliers σ_i the stacked release is
    one Gaussian release with 1/σ² = Σ 1/σ_i². Infinite multipliers (nothing released) drop out.
    """
    inverse = math.fsum(1 / (m * m) for m in multipliers if math.isfinite(m))
    return math.inf if inverse == 0 else 1 / math.sqrt(inverse)


@dataclass(frozen=True)
class CostTable:
    """Costs at one rate and one order over a fixed public grid of multipliers, rising in σ.

    Answers "how little noise can this much budget pay for?" in about a microsecond.
    """

    rate: float
    order: float
    sigmas: Floats = field(repr=False)
    costs: Floats = field(repr=False)

    @staticmethod
    def build(rate: float, order: float, sigmas: Floats) -> CostTable:
        grid = np.sort(np.asarray(sigmas, dtype=np.float64))
        costs = step_costs(rate, grid, order)
        # The true cost falls as σ grows; rounding must not make a cheaper step look dearer.
        costs = np.maximum.accumulate(costs[::-1])[::-1]
        for k in {0, len(grid) // 2, len(grid) - 1}:
            expected = reference_cost(rate, float(grid[k]), order)
            # At fractional orders both bound the cost from above only: where rates are high and
            # noise is much, by a factor of hundreds. What must not be is that ours is below.
            most = expected * 2 + 1e-9 if order == int(order) else math.inf
            if not expected * (1 - 1e-9) - 1e-12 <= costs[k] <= most:
                raise ArithmeticError(
                    f"the cost at rate {rate}, σ {grid[k]}, order {order} is {costs[k]},"
                    f" but dp-accounting says {expected}"
                )
        return CostTable(rate, order, grid, costs)

    def cheapest_within(self, budget: float) -> int | None:
        """Index of the smallest multiplier that costs at most `budget`; None if there is none."""
        # costs fall along the grid, so -costs rises: the first index with cost <= budget
        k = int(np.searchsorted(-self.costs, -budget, side="left"))
        return k if k < len(self.costs) else None

    def at_least(self, sigma: float) -> int:
        """Index of the first multiplier of the grid that is not below `sigma`."""
        k = int(np.searchsorted(self.sigmas, sigma, side="left"))
        if k == len(self.sigmas):
            raise ValueError(f"σ = {sigma} lies above the grid's end {self.sigmas[-1]}")
        return k


@lru_cache(maxsize=64)
def geometric_table(rate: float, order: float, low: float, high: float, ratio: float) -> CostTable:
    """A cost table over a geometric grid; cached, since equal clients share it."""
    points = math.ceil(math.log(high / low) / math.log(ratio)) + 1
    return CostTable.build(rate, order, low * ratio ** np.arange(points, dtype=np.float64))


GRID_RATIO = 1.002  # neighboring multipliers of the public grid differ by 0.2 %
GRID_REACH = 100.0  # the grid ends at 100 × the static σ


def multiplier_table(rate: float, order: float, sigma_static: float) -> CostTable:
    """The public grid of effective multipliers around the static one, and their costs."""
    return geometric_table(rate, order, sigma_static / 8, sigma_static * GRID_REACH, GRID_RATIO)
