"""The discrete Gaussian N_Z(0, s²), exactly: P(x) ∝ exp(−x²/2s²) over the whole numbers.

An exact sampler decides from random bits alone, however many it takes. Here a first word chooses a
sign and a cell of 1/256 of a deviation by the inverse of its distribution, a second one a place in
the cell, which is kept with probability e^{−γ}. Whether a word decides is certified: where it lies
too near to a boundary for the arithmetic at hand, further bits are drawn and compared in longer
numbers, until they decide. That happens once in some 10¹¹ numbers; all others are numpy's work.
"""

from __future__ import annotations

import bisect
import decimal
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Words = Callable[[int], NDArray[np.uint64]]  # so many random 64-bit words, never the same again
Integers = NDArray[np.int64]

CELLS = 256  # of a deviation
LEAST_SCALE, LARGEST_SCALE = 1 << 10, 1 << 32
BLOCK = 1 << 16
_CELL_BITS = 63  # of the first word; the last one is the sign
_KEEP_BITS = 40  # of the second word; the others choose the place in the cell
# How far float64's exp(−γ) and γ itself may be off, sixteen times over: `exp` is right to an ulp
# or two (2⁻⁵²), which tests/statistical/test_discrete.py holds it to.
_FLOAT_ERROR = 2.0**-48


def discrete_gaussian(words: Words, count: int, scale: int) -> Integers:
    """`count` independent draws of N_Z(0, scale²); `scale` a power of two from 2¹⁰ to 2³².

    Exact, if words are uniform and independent: sign, cell c and place j = tW (W the width of a
    cell, t in [0, 1)) come with probability ∝ e^{−c²/2·256²}, and are kept with probability
    e^{−γ}, γ = t(2c + t)/2·256², so that |x| = cW + j has weight e^{−x²/2s²}. Of the two zeros one
    is thrown away.
    """
    if scale & (scale - 1) or not LEAST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"the scale must be a power of two from 2^10 to 2^32, not {scale}")
    out = np.empty(count, dtype=np.int64)
    for start in range(0, count, BLOCK):
        block = out[start : start + BLOCK]
        missing = np.arange(len(block))
        while len(missing):
            drawn, kept = _candidates(words, len(missing), scale // CELLS)
            block[missing[kept]] = drawn[kept]
            missing = missing[~kept]
    return out


def _candidates(words: Words, count: int, width: int) -> tuple[Integers, NDArray[np.bool_]]:
    """Draws, and which of them are kept."""
    first, second = words(count), words(count)
    cell = _cells(words, first >> np.uint64(64 - _CELL_BITS))
    place = (second & np.uint64(width - 1)).astype(np.int64)
    part = place / width
    chance = np.exp(-part * (2 * cell + part) / (2 * CELLS**2))
    bits = (second >> np.uint64(64 - _KEEP_BITS)).astype(np.float64)  # exact: 40 of them
    kept = (bits + 1) * 2.0**-_KEEP_BITS <= chance - _FLOAT_ERROR
    unsure = ~kept & (bits * 2.0**-_KEEP_BITS < chance + _FLOAT_ERROR)
    for k in np.flatnonzero(unsure):
        t = Fraction(int(place[k]), width)
        gamma = t * (2 * int(cell[k]) + t) / (2 * CELLS**2)
        kept[k] = below_exp(words, int(bits[k]), _KEEP_BITS, gamma)
    size = cell * width + place
    negative = (first & np.uint64(1)).astype(bool)
    return np.where(negative, -size, size), kept & ~(negative & (size == 0))


def _cells(words: Words, bits: NDArray[np.uint64]) -> Integers:
    """The cell of every uniform that begins with these bits."""
    below, above = _small_table()
    cell = np.searchsorted(below, bits, side="right")
    # Certain where all that may follow these bits lies between the two boundaries of the cell.
    sure = (cell < len(below)) & (
        (cell == 0) | (above[np.minimum(np.maximum(cell, 1), len(above)) - 1] <= bits)
    )
    for k in np.flatnonzero(~sure):
        cell[k] = cell_of(words, int(bits[k]), _CELL_BITS)
    return cell.astype(np.int64)


def cell_of(words: Words, value: int, bits: int) -> int:
    """The same for one uniform, of which `value` has the first `bits` bits, in longer numbers."""
    while True:
        below, above = boundaries(bits)
        cell = bisect.bisect_right(below, value)
        if cell < len(below) and (cell == 0 or above[cell - 1] <= value):
            return cell
        value, bits = _longer(words, value, bits)


def below_exp(words: Words, value: int, bits: int, gamma: Fraction) -> bool:
    """Whether the uniform that begins with `value`, of `bits` bits, lies below e^{−γ}, γ ≥ 0."""
    while gamma:
        with decimal.localcontext(prec=bits // 3 + 30) as context:
            power = Decimal(gamma.numerator) / Decimal(gamma.denominator)
            # Off by less than a unit of the last place but ten, whatever division and exp round.
            chance = (-power).exp(context) * Decimal(2) ** bits
            error = Decimal(2) ** bits * Decimal(10) ** (10 - context.prec)
            if value + 1 <= chance - error:
                return True
            if value >= chance + error:
                return False
        value, bits = _longer(words, value, bits)
    return True


def _longer(words: Words, value: int, bits: int) -> tuple[int, int]:
    return value << 64 | int(words(1)[0]), bits + 64


@lru_cache(maxsize=8)
def boundaries(bits: int) -> tuple[list[int], list[int]]:
    """The cells' upper ends as parts of 2^bits, rounded down and up so that no end lies outside.

    Cell c has weight e^{−c²/2·256²}. Cells so far out that all of them together have less than
    2^−bits are left out: who comes to them asks for more bits.
    """
    with decimal.localcontext(prec=bits // 3 + 40) as context:
        last = int((Decimal(2 * CELLS**2) * (bits + 20)).sqrt()) + 1
        weights = [(Decimal(-c * c) / (2 * CELLS**2)).exp(context) for c in range(last)]
        total = sum(weights, Decimal(0))
        # Of `last` weights each is right to 10^−prec, of their sums each to `last` times that; what
        # is left out is less than 2^−bits−20. 2⁻¹⁶ of a unit is far more than both.
        error = Decimal(2) ** -16
        below, above, reached = [], [], Decimal(0)
        for weight in weights:
            reached += weight
            end = reached / total * Decimal(2) ** bits
            below.append(int(end - error))
            above.append(int(end + error) + 1)
    return below, above


@lru_cache(maxsize=1)
def _small_table() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    below, above = boundaries(_CELL_BITS)
    return np.array(below, dtype=np.uint64), np.array(above, dtype=np.uint64)
