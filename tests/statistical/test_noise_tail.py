"""The far tail of the secure noise, by construction: no sample reaches it, so words are chosen.

Box–Muller's radius is √(−2 ln((k + 1)/2⁵³)) for the upper 53 bits k of a random word. With fewer
bits the tail would end early and be coarse: noise that can only be one of a few far values gives
away what it was added to.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from xcal.dp.noise import GRID_BITS, NoiseKey, SecureNoise

BITS = 53
KEY = NoiseKey("0", "xcal", 0, 0, "gradient")


class Chosen(SecureNoise):
    """The real transformation of words that the test chooses."""

    def __init__(self, words: list[int]) -> None:
        super().__init__()
        self._chosen = np.array(words, dtype=np.uint64)

    def _words(self, count: int):
        return self._chosen[:count].copy()


def radii(levels: list[int]) -> np.ndarray:
    """What the tensor path makes of these 53-bit numbers, at angle 0."""
    half = len(levels)
    words = [level << (64 - BITS) for level in levels] + [0] * ((half + 1) // 2)
    return Chosen(words).normals(KEY, 2 * half)[:half].double().numpy()


def scalar_radius(level: int) -> float:
    return Chosen([level << (64 - BITS), 0]).scalar(KEY)


def level_of(radius: float) -> int:
    """The largest level whose radius is at least this: P[R ≥ r] = e^(−r²/2) is its share."""
    return max(0, math.floor(2.0**BITS * math.exp(-(radius**2) / 2)) - 1)


def test_the_tail_reaches_as_far_as_its_bits_and_ends_finite():
    end = math.sqrt(2 * BITS * math.log(2))  # 8.57
    assert radii([0, 0])[0] == pytest.approx(end, rel=1e-6)
    assert scalar_radius(0) == pytest.approx(end, rel=1e-12)
    assert radii([2**BITS - 1, 0])[0] == 0.0
    # All beyond it has probability 2⁻⁵³ a pair of numbers: 1,000 million of them meet it with 1e-7.
    assert 2.0**-BITS * 1e9 / 2 < 1e-7


@pytest.mark.parametrize("radius", [0.5, 1.0, 3.0, 5.0, 6.5, 7.5, 8.0])
def test_every_radius_has_the_probability_of_a_gaussian_pair(radius):
    """Levels are equally likely, so how many lie at or beyond a radius is its probability."""
    level = level_of(radius)
    share = (level + 1) / 2.0**BITS
    assert share == pytest.approx(math.exp(-(radius**2) / 2), rel=0.01)
    for found in (radii([level, 0])[0], scalar_radius(level)):
        assert found == pytest.approx(radius, abs=1e-3)


def test_neighboring_radii_are_closer_than_the_grid_up_to_seven_and_a_half():
    """So that rounding to the public grid hides which of them it was."""
    grid = 2.0 ** -(GRID_BITS + 1)  # at most, in deviations of the noise
    for radius in (2.0, 4.0, 6.0, 7.0, 7.5):
        level = level_of(radius)
        step = scalar_radius(level) - scalar_radius(level + 1)
        assert 0 < step < grid
    # With 40 bits it would not be so from 6.5 on, where these have room to spare.
    coarse = math.sqrt(-2 * math.log(2.0**-40 * 700)) - math.sqrt(-2 * math.log(2.0**-40 * 701))
    assert coarse > grid


def test_all_53_bits_count_and_no_more():
    far = [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(radii(far))) == len(far)
    words = [(3 << 11) | low for low in (0, 1, 2**11 - 1)]
    assert len({Chosen([w, 0]).scalar(KEY) for w in words}) == 1


def test_the_angle_turns_all_the_way():
    half = 4
    turns = np.array([0, 2**30, 2**31, 3 * 2**30], dtype=np.uint32).view(np.uint64).tolist()
    words = [level_of(7.0) << 11] * half + turns
    normals = Chosen(words).normals(KEY, 2 * half).double().numpy()
    np.testing.assert_allclose(normals[:half], [7, 0, -7, 0], atol=1e-2)
    np.testing.assert_allclose(normals[half:], [0, 7, 0, -7], atol=1e-2)
