"""Privacy-loss distributions: the δ of a plan whose rate and multiplier are fixed beforehand.

`steps` releases, each a Poisson-subsampled Gaussian of one rate and one multiplier, are dominated
by the product of `steps` equal pairs, whatever is chosen between them (docs/guarantee.md §3). The
pair is discretized by dp-accounting's Connect-the-Dots and composed by its FFT. Every step of that
errs upwards but the rounding of floats, and `delta_bound` adds a bound on it.

dp-accounting asks for δ point by point, in Python; `_hockey_stick` is the same for a whole grid.
The library stays the authority: each grid is compared with it where it is made, and
`reference_delta`, which `xcal ledger verify` recomputes with, takes nothing from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import dp_accounting
import numpy as np
from dp_accounting import pld
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from numpy.typing import NDArray
from scipy import special

from xcal.dp.accounting import quiet_library

Floats = NDArray[np.float64]
Direction: TypeAlias = Any  # dp-accounting's AdjacencyType: which of two neighbors has the unit
DIRECTIONS: tuple[Direction, Direction] = (
    privacy_loss_mechanism.AdjacencyType.REMOVE,
    privacy_loss_mechanism.AdjacencyType.ADD,
)
REMOVE, ADD = DIRECTIONS

POINTS = 5000  # of the grid between 0 and ε
POINTS_PER_ROOT = 70  # more where there are many steps: rounding K losses widens their sum by √K
MOST_POINTS = 100_000  # of one step's grid
UNIT_ROUNDOFF = 2.0**-53
# A planned multiplier is met to this much, which is what joint_sigma may round: plans are made and
# verified for steps that have so much less.
SIGMA_SLACK = 1e-9


def interval(rate: float, sigma: float, steps: int, epsilon: float) -> float:
    """The grid's spacing: a finer one over-counts less, and none counts too little.

    Against a spacing ten times finer it costs less than 0.05 % of ε at 0.05, 0.5, 5 and 50.
    """
    widest = math.log1p(rate * math.expm1(min(500.0, 10.5 / sigma + 0.5 / sigma**2)))
    span = widest - (math.log1p(-rate) if rate < 1 else -widest)
    return max(epsilon / max(POINTS, POINTS_PER_ROOT * math.sqrt(steps)), span / MOST_POINTS)


def _merged(rate: float, sigma: float, steps: int) -> tuple[float, int]:
    """Without subsampling K Gaussians are one of σ/√K, and nothing need be composed."""
    return (sigma / math.sqrt(steps), 1) if rate == 1 else (sigma, steps)


def _hockey_stick(rate: float, sigma: float, epsilons: Floats, direction: Direction) -> Floats:
    """δ of one step at each ε, negative ones too: E_P[(1 − e^{ε − L})₊].

    REMOVE: P = (1 − q)N(0, σ²) + qN(1, σ²) against N(0, σ²). ADD: the other way round. With x
    where the loss is ε, P's mass beyond it less e^ε times the other's.
    """
    result = np.zeros_like(epsilons)
    sign = 1.0 if direction is REMOVE else -1.0
    # (1 − q) + q·e^λ = e^{±ε} has a solution λ, the loss without subsampling, only here:
    reached = np.expm1(sign * epsilons) + rate > 0
    if direction is REMOVE:
        result[~reached] = -np.expm1(epsilons[~reached])
    e = epsilons[reached]
    x = 0.5 + np.log1p(np.expm1(sign * e) / rate) * sigma**2
    if direction is REMOVE:  # the mass above x
        first = (1 - rate) * special.ndtr(-x / sigma) + rate * special.ndtr((1 - x) / sigma)
        second = np.exp(e + special.log_ndtr(-x / sigma))
    else:  # the mass below x
        first = special.ndtr(x / sigma)
        inside = rate * special.ndtr((x - 1) / sigma) + (1 - rate) * first
        second = np.exp(e) * inside
    result[reached] = first - second
    return np.clip(result, 0.0, 1.0)


@lru_cache(maxsize=1024)  # a plan is held to what its calibration found
def _delta_bound(
    rate: float, sigma: float, steps: int, epsilon: float, spacing: float, direction: Direction
) -> float:
    loss = privacy_loss_mechanism.GaussianPrivacyLoss(
        sigma, sampling_prob=rate, adjacency_type=direction
    )
    ends = loss.connect_dots_bounds()
    low, high = math.floor(ends.epsilon_lower / spacing), math.ceil(ends.epsilon_upper / spacing)
    if high - low > 100 * MOST_POINTS:
        raise ArithmeticError(f"the losses at rate {rate}, σ {sigma} span more than a grid holds")
    grid = np.arange(low, high + 1) * spacing
    with np.errstate(over="ignore", invalid="ignore"):  # losses beyond floats: compared below
        deltas = _hockey_stick(rate, sigma, grid, direction)
    some = np.linspace(0, len(grid) - 1, 7).astype(int)
    expected = loss.get_delta_for_epsilon(grid[some])
    if not np.allclose(deltas[some], expected, rtol=1e-9, atol=1e-14):
        raise ArithmeticError(
            f"δ of one step at rate {rate}, σ {sigma} is {deltas[some]}, but dp-accounting says"
            f" {expected}"
        )
    one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(spacing, low, high, deltas)
    composed = one if steps == 1 else one.to_dense_pmf().self_compose(steps)
    found = float(composed.get_delta_for_epsilon(epsilon))
    return found + _rounding(steps, composed.size, spacing, float(deltas[0]))


def _rounding(steps: int, size: int, spacing: float, first: float) -> float:
    """How much too low floats can have made δ: derived in docs/guarantee.md §3.

    The transform of n numbers that sum to 1 errs by at most 8(1 + log₂ n) roundings in each
    coefficient, its K-th power K times that, and the result by √n times that in total. A step's
    probabilities are second differences of `first` … 0 over the spacing. 16: δ of one step itself.
    """
    transform = 8 * math.sqrt(size) * (1 + math.log2(max(size, 2)))
    differences = 6 * (1 + math.exp(spacing)) * first / math.expm1(spacing)
    return (steps + 1) * UNIT_ROUNDOFF * (transform + differences + 16)


def delta_bound(
    rate: float,
    sigma: float,
    steps: int,
    epsilon: float,
    directions: Sequence[Direction] = DIRECTIONS,
) -> float:
    """An upper bound on δ at ε of the whole plan, over both directions of the neighbors."""
    sigma, steps = _merged(rate, sigma, steps)
    spacing = interval(rate, sigma, steps, epsilon)
    if rate == 1:  # without subsampling the two are the same
        directions = (REMOVE,)
    return max(_delta_bound(rate, sigma, steps, epsilon, spacing, d) for d in directions)


@lru_cache(maxsize=1024)  # ledgers of equal clients ask the same
def reference_delta(rate: float, sigma: float, steps: int, epsilon: float) -> float:
    """δ at ε of the same plan from dp-accounting's own accountant, on the same grid."""
    spacing = interval(rate, *_merged(rate, sigma, steps), epsilon)
    return float(_accountant(rate, sigma, steps, spacing).get_delta(epsilon))


@lru_cache(maxsize=1024)
def epsilon_pld(rate: float, sigma: float, steps: int, delta: float) -> float:
    """ε of the plan at δ, by dp-accounting's own accountant at its usual spacing."""
    return float(_accountant(rate, sigma, steps, 1e-4).get_epsilon(delta))


def _accountant(rate: float, sigma: float, steps: int, spacing: float) -> pld.PLDAccountant:
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    event = gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    with quiet_library():
        accountant = pld.PLDAccountant(
            dp_accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=spacing
        )
        accountant.compose(event, steps)
    return accountant
