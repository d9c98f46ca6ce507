"""The discrete Gaussian: its distribution, and that every decision is the exact one."""

from __future__ import annotations

import decimal
import itertools
import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from xcal.dp import discrete
from xcal.dp.discrete import below_exp, boundaries, cell_of, discrete_gaussian
from xcal.dp.noise import NoiseKey, SecureNoise, SeededNoise
from xcal.dp.noise_ahead import SecureNoiseAhead

SCALE = 1 << 10


def key(step: int = 0) -> NoiseKey:
    return NoiseKey("0", "fl-dp", 0, step, "gradient")


def probabilities(scale: int, reach: int) -> np.ndarray:
    x = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-(x**2) / (2 * scale**2))
    return weights / weights.sum()


class Scripted:
    """Words from a list; more than it has are refused."""

    def __init__(self, words: list[int]) -> None:
        self.words = list(words)

    def __call__(self, count: int) -> np.ndarray:
        taken, self.words = self.words[:count], self.words[count:]
        assert len(taken) == count
        return np.array(taken, dtype=np.uint64)


@pytest.mark.parametrize("source", [SeededNoise(5), SecureNoise(), SecureNoiseAhead()])
def test_the_distribution_is_the_discrete_gaussians_value_by_value(source: SeededNoise) -> None:
    n = 400_000
    drawn = source.discrete_normals(key(), n, SCALE)
    reach = 8 * SCALE
    assert drawn.dtype == np.int64 and np.abs(drawn).max() < reach
    expected = probabilities(SCALE, reach) * n
    # Every whole number within two deviations on its own: parity and borders of cells would show.
    counts = np.bincount(drawn + reach, minlength=2 * reach + 1)
    inner = slice(reach - 2 * SCALE, reach + 2 * SCALE + 1)
    statistic = float(((counts[inner] - expected[inner]) ** 2 / expected[inner]).sum())
    degrees = 4 * SCALE + 1
    assert abs(statistic - degrees) < 6 * math.sqrt(2 * degrees)
    # And the tails, by eighths of a deviation.
    edges = np.arange(-5 * SCALE, 5 * SCALE + 1, SCALE // 8)
    cumulative = np.concatenate([[0.0], np.cumsum(expected)])
    bins = np.histogram(drawn, np.concatenate([[-reach], edges, [reach + 1]]))[0]
    ends = cumulative[np.concatenate([[0], edges + reach, [2 * reach + 1]])]
    wide = np.diff(ends)
    assert (
        stats.chisquare(
            bins[wide > 0.01], wide[wide > 0.01] * n / wide[wide > 0.01].sum(), sum_check=False
        ).pvalue
        > 1e-6
    )


def test_moments_at_a_fine_scale_and_independence_of_neighbors() -> None:
    scale, n = 1 << 24, 300_000
    x = SeededNoise(1).discrete_normals(key(), n, scale) / scale
    for order, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**order).mean() - moment) < 6 * math.sqrt(variance / n), order
    assert abs((x[1:] * x[:-1]).mean()) < 6 / math.sqrt(n)
    low = SeededNoise(2).discrete_normals(key(), n, scale) & 0xFF  # the lowest byte is uniform
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-6


def test_a_seed_gives_the_same_numbers_and_a_key_serves_once() -> None:
    one, other = SeededNoise(3), SeededNoise(3)
    first = one.discrete_normals(key(), 100_000, SCALE)
    assert np.array_equal(first, other.discrete_normals(key(), 100_000, SCALE))
    with pytest.raises(RuntimeError):
        one.discrete_normals(key(), 10, SCALE)
    secure = SecureNoise()
    assert not np.array_equal(
        secure.discrete_normals(key(), 100, SCALE), secure.discrete_normals(key(), 100, SCALE)
    )


@pytest.mark.parametrize("scale", [0, 512, 1000, 1025, 1 << 33, -1024])
def test_other_scales_are_refused(scale: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        SecureNoise().discrete_normals(key(), 1, scale)


@pytest.mark.slow
def test_a_uniforms_cell_is_the_same_however_many_bits_decide_first() -> None:
    rng = random.Random(7)
    for _ in range(60):
        bits = [rng.getrandbits(64) for _ in range(6)]
        whole = 0
        for word in bits:
            whole = whole << 64 | word
        begun = whole >> (384 - 63)
        rest = [(whole >> (384 - 63 - 64 * (k + 1))) & (2**64 - 1) for k in range(5)]
        fast = int(discrete._cells(Scripted(rest), np.array([begun], dtype=np.uint64))[0])
        for first in (3, 17):
            start = whole >> (384 - first)
            more = [(whole >> (384 - first - 64 * (k + 1))) & (2**64 - 1) for k in range(5)]
            assert cell_of(Scripted(more), start, first) == fast
        # By definition: the distribution function at 60 digits.
        with decimal.localcontext(prec=120):
            weights = _weights()
            target = Decimal(whole) / Decimal(2) ** 384 * sum(weights)
            ends = itertools.accumulate(weights)
            cell = next(c for c, end in enumerate(ends) if target < end)
        assert cell == fast


_KNOWN: list[Decimal] = []


def _weights() -> list[Decimal]:
    if not _KNOWN:
        _KNOWN.extend((Decimal(-c * c) / (2 * 256**2)).exp() for c in range(3600))
    return _KNOWN


@pytest.mark.slow
def test_words_at_a_boundary_ask_for_more_bits_and_are_decided_on_either_side() -> None:
    below, above = boundaries(63)
    finer, _ = boundaries(127)
    for cell in (0, 1, 300, 2500):
        edge = finer[cell] >> 64  # the word within which the boundary lies
        rest = finer[cell] & (2**64 - 1)
        assert below[cell] <= edge < above[cell]
        on_left = Scripted([rest - 2, 0])
        assert discrete._cells(on_left, np.array([edge], dtype=np.uint64))[0] == cell
        assert len(on_left.words) == 1  # one more word was drawn
        on_right = Scripted([rest + 3, 0])
        assert discrete._cells(on_right, np.array([edge], dtype=np.uint64))[0] == cell + 1
    far = Scripted([2**64 - 1, 0, 0])  # beyond every cell of the short table
    assert discrete._cells(far, np.array([2**63 - 1], dtype=np.uint64))[0] > len(below)


def test_a_chance_of_e_to_minus_gamma_is_decided_exactly() -> None:
    for gamma in (Fraction(1, 3), Fraction(1, 2**40), Fraction(5), Fraction(39, 1000)):
        with decimal.localcontext(prec=150):
            power = Decimal(gamma.numerator) / Decimal(gamma.denominator)
            chance = int((-power).exp() * Decimal(2) ** 232)
        first, second, third, last = (
            chance >> 192,
            (chance >> 128) & (2**64 - 1),
            (chance >> 64) & (2**64 - 1),
            chance & (2**64 - 1),
        )
        assert below_exp(Scripted([second, third, last - 9, 0]), first, 40, gamma)
        assert not below_exp(Scripted([second, third, last + 9, 0]), first, 40, gamma)
        assert below_exp(Scripted([]), first // 2, 40, gamma)
    assert below_exp(Scripted([]), 2**40 - 1, 40, Fraction(0))


def test_floats_are_as_good_as_the_sampler_assumes() -> None:
    # Assumed: chance and γ in float64 are off by less than 2⁻⁴⁸, of which this is a sixteenth.
    rng = np.random.default_rng(0)
    cells, parts = rng.integers(0, 3300, 4000), rng.integers(0, 1 << 24, 4000) / (1 << 24)
    found = np.exp(-parts * (2 * cells + parts) / (2 * 256**2))
    with decimal.localcontext(prec=50):
        for cell, part, value in zip(cells, parts, found, strict=True):
            t = Decimal(float(part))
            exact = (-t * (2 * int(cell) + t) / (2 * 256**2)).exp()
            assert abs(Decimal(float(value)) - exact) < Decimal(2) ** -52


def test_draws_that_are_unsure_are_decided_by_further_words() -> None:
    # γ = t(2c + t)/2·256² of the cell 255, at its middle; the second word sits at the chance.
    width = 4
    below, _ = boundaries(63)
    first = (below[255] - 1) << 1
    t = Fraction(1, 2)
    with decimal.localcontext(prec=80):
        gamma = t * (2 * 255 + t) / (2 * 256**2)
        power = Decimal(gamma.numerator) / Decimal(gamma.denominator)
        chance = int((-power).exp() * Decimal(2) ** 104)
    second = (chance >> 64) << 24 | 2
    for rest, expected in ((-5, True), (5, False)):
        words = Scripted([first, second, (chance & (2**64 - 1)) + rest])
        drawn, kept = discrete._candidates(words, 1, width)
        assert not words.words  # the third was needed
        assert drawn[0] == 255 * width + 2 and bool(kept[0]) is expected


def test_of_two_zeros_one_is_thrown_away() -> None:
    for sign, expected in ((0, True), (1, False)):
        drawn, kept = discrete._candidates(Scripted([sign, 0]), 1, 4)
        assert drawn[0] == 0 and bool(kept[0]) is expected
    assert len(discrete_gaussian(SecureNoise()._words, 0, SCALE)) == 0
