"""The noise has the deviation it claims, no less and no more; draws have the rate they claim.

Whatever could fail by chance under the secure source does so about once in 10⁹ times; the seeded
one always gives the same answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from xcal.data.images import Images
from xcal.dp.noise import (
    GRID_BITS,
    NoiseKey,
    NoiseSource,
    SecureNoise,
    SeededNoise,
    release_grid,
    release_scalar,
    release_tensors,
)
from xcal.dp.sampling import poisson_draw
from xcal.methods.client_data import LocalData

RARE = 1e-9  # chance of a wrong refusal, on each side

SOURCES: dict[str, Callable[[], NoiseSource]] = {
    "seeded": lambda: SeededNoise(20),
    "secure": SecureNoise,
}


@pytest.fixture(params=SOURCES)
def source(request) -> NoiseSource:
    return SOURCES[request.param]()


def key(step: int = 0, block: str = "gradient", client: str = "0") -> NoiseKey:
    return NoiseKey(client, "xcal", 0, step, block)


def has_deviation(noise: np.ndarray, sigma: float) -> bool:
    """Chi-square test, both sides, of Σ(noise/σ)² for independent N(0, σ²)."""
    total = float(np.square(noise / sigma).sum())
    low, high = stats.chi2.ppf([RARE, 1 - RARE], len(noise))
    return bool(low <= total <= high)


def assert_gaussian(noise: np.ndarray, sigma: float) -> None:
    assert has_deviation(noise, sigma)
    assert not has_deviation(noise, sigma * 2 / 3)
    assert not has_deviation(noise, sigma * 3 / 2)
    limit = stats.norm.isf(RARE) * sigma / math.sqrt(len(noise))
    assert abs(float(noise.mean())) < limit
    assert stats.kstest(noise, "norm", args=(0, sigma)).pvalue > RARE


def independent(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the correlation is what chance allows."""
    return abs(float(np.corrcoef(a, b)[0, 1])) < stats.norm.isf(RARE) / math.sqrt(len(a))


# --- what is released -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.37, 4.31, 900.0])
def test_tensors_get_noise_of_the_stated_deviation(source, scale):
    sums = {
        "weight": torch.linspace(-5, 5, 40_000).reshape(100, 400),
        "bias": torch.zeros(10_001),
        "scalar": torch.tensor(3.0),
    }
    before = {name: value.clone() for name, value in sums.items()}
    released = release_tensors(sums, scale, source, key())
    assert set(released) == set(sums)
    noise = [(released[n].double() - sums[n].double()).flatten().numpy() for n in sums]
    assert_gaussian(np.concatenate(noise), scale)
    for part in noise[:2]:  # every block, not only all of them together
        assert_gaussian(part, scale)
    for name, value in sums.items():
        assert torch.equal(value, before[name])
        assert released[name].shape == value.shape
        assert released[name].dtype == torch.float32


@pytest.mark.parametrize("scale", [0.02, 10.8])
def test_scalars_get_noise_of_the_stated_deviation(source, scale):
    noise = [
        release_scalar(1.25, scale, source, key(step, "signal")) - 1.25 for step in range(4000)
    ]
    assert_gaussian(np.array(noise), scale)


@pytest.mark.parametrize("scale", [1e-6, 0.4, 1.0, 4.3, 7e4])
def test_releases_lie_on_the_public_grid(source, scale):
    grid = release_grid(scale)
    assert math.log2(grid).is_integer()
    assert scale / 2 < grid * 2**GRID_BITS <= scale  # fine enough not to change the noise
    sums = {"a": torch.linspace(-3, 3, 500) * scale}
    tensor = release_tensors(sums, scale, source, key())["a"].double()
    assert torch.equal(tensor / grid, (tensor / grid).round())
    value = release_scalar(0.123 * scale, scale, source, key(1, "signal")) / grid
    assert value == round(value)


def test_no_noise_is_no_noise(source):
    sums = {"a": torch.tensor([0.1, -0.2])}
    released = release_tensors(sums, 0.0, source, key())
    assert torch.equal(released["a"], sums["a"])
    assert released["a"].data_ptr() != sums["a"].data_ptr()
    assert release_scalar(0.1, 0.0, source, key(1)) == 0.1


# --- the sources ----------------------------------------------------------------------------------


# Odd sizes and sizes around a block's border take other paths through the secure source.
@pytest.mark.parametrize("count", [1, 2, 7, 65_535, 65_536, 65_537, 131_075])
def test_any_number_of_normals(source, count):
    normals = source.normals(key(), count)
    assert normals.shape == (count,)
    assert normals.dtype == torch.float32
    assert bool(torch.isfinite(normals).all())
    if count > 1000:
        assert_gaussian(normals.double().numpy(), 1.0)
        assert_gaussian(normals[-1000:].double().numpy(), 1.0)
        assert len(torch.unique(normals)) > 0.99 * count


def test_neighboring_normals_are_independent(source):
    normals = source.normals(key(), 60_000).double().numpy()
    for lag in (1, 2, 30_000):  # 30,000: the other half of a Box–Muller pair
        assert independent(normals[:-lag], normals[lag:])
        assert independent(np.abs(normals[:-lag]), np.abs(normals[lag:]))


def test_the_tails_are_there(source):
    """Noise that is cut off gives away whoever reaches past the cut."""
    largest = float(source.normals(key(), 2_000_000).abs().max())
    assert 4.3 < largest < 8.0


def test_uniforms_are_uniform(source):
    uniforms = source.uniforms(key(), 50_000)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert stats.kstest(uniforms, "uniform").pvalue > RARE
    assert independent(uniforms[:-1], uniforms[1:])
    assert np.array_equal(uniforms * 2**53, np.round(uniforms * 2**53))


@pytest.mark.parametrize("rate", [0.0096, 0.05, 0.5])
def test_poisson_draws_have_the_rate_they_claim(source, rate):
    units, draws = 2_000, 60
    drawn = np.zeros((draws, units))
    for step in range(draws):
        drawn[step, poisson_draw(source.uniforms(key(step, "draw"), units), rate)] = 1
    total = int(drawn.sum())
    assert stats.binomtest(total, units * draws, rate).pvalue > RARE
    # Sizes vary as independent draws do: neither fixed nor bunched.
    spread = float(np.square(drawn.sum(axis=1) - units * rate).sum() / (units * rate * (1 - rate)))
    low, high = stats.chi2.ppf([RARE, 1 - RARE], draws)
    assert low < spread < high
    # Being drawn says nothing about the next draw: pairs of steps, no step in two of them.
    both = int((drawn[0::2] * drawn[1::2]).sum())
    assert stats.binomtest(both, units * draws // 2, rate**2).pvalue > RARE


def test_local_data_draws_units_at_the_rate(source):
    """Through the training's own draw, by groups of several images."""
    groups = np.repeat(np.arange(300), 3)
    count = len(groups)
    images = Images(
        np.zeros((count, 2, 2, 3), dtype=np.uint8),
        np.zeros(count, dtype=np.int64),
        groups,
        np.array([str(i) for i in range(count)]),
    )
    data = LocalData(images, unit="group", images_per_unit=2)
    drawn = 0
    for step in range(40):
        batch = data.draw(0.1, source, key(step, "draw"))
        assert len(batch.labels) == 2 * batch.n_units
        drawn += batch.n_units
    assert stats.binomtest(drawn, 300 * 40, 0.1).pvalue > RARE


# --- keys -----------------------------------------------------------------------------------------

OTHERS = [
    NoiseKey("1", "xcal", 0, 0, "gradient"),
    NoiseKey("0", "fl-dp", 0, 0, "gradient"),
    NoiseKey("0", "xcal", 1, 0, "gradient"),
    NoiseKey("0", "xcal", 0, 1, "gradient"),
    NoiseKey("0", "xcal", 0, 0, "signal"),
]


@pytest.mark.parametrize("other", OTHERS)
def test_two_keys_give_independent_streams(other):
    one, two = SeededNoise(3), SeededNoise(3)
    assert independent(one.normals(key(), 20_000).numpy(), two.normals(other, 20_000).numpy())
    one, two = SeededNoise(3), SeededNoise(3)
    assert independent(one.uniforms(key(), 20_000), two.uniforms(other, 20_000))


def test_two_seeds_give_independent_streams():
    one, two = SeededNoise(3).normals(key(), 20_000), SeededNoise(4).normals(key(), 20_000)
    assert independent(one.numpy(), two.numpy())


def test_the_same_key_of_the_same_seed_is_the_same_noise():
    one, two = SeededNoise(3), SeededNoise(3)
    assert torch.equal(one.normals(key(), 1000), two.normals(key(), 1000))
    assert one.scalar(key(1)) == two.scalar(key(1))
    assert np.array_equal(one.uniforms(key(2), 10), two.uniforms(key(2), 10))


def test_secure_draws_never_repeat():
    """Not for the same key, not in another source, not over all that was drawn."""
    first, second = SecureNoise(), SecureNoise()
    draws = [source.uniforms(key(), 20_000) for source in (first, first, second)]
    together = np.concatenate(draws)
    assert len(np.unique(together)) == len(together)
    for i in range(3):
        assert independent(draws[i], draws[i - 1])
    normals = [source.normals(key(), 20_000).numpy() for source in (first, first, second)]
    for i in range(3):
        assert independent(normals[i], normals[i - 1])
    assert len({source.scalar(key()) for source in (first, second) for _ in range(500)}) == 1000


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_draws_its_own(tmp_path):
    """Two workers forked from one must not add the same noise to two queries."""
    source = SecureNoise()
    source.uniforms(key(), 1)
    child = os.fork()
    if child == 0:
        np.save(tmp_path / "child.npy", source.uniforms(key(), 100))
        os._exit(0)
    os.waitpid(child, 0)
    assert not np.array_equal(np.load(tmp_path / "child.npy"), source.uniforms(key(), 100))


def test_nothing_touches_the_global_random_states(source):
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    source.normals(key(), 100)
    source.uniforms(key(1), 100)
    source.scalar(key(2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_global_seeds_do_not_touch_the_noise():
    """A secure source after a seed is as unpredictable as before."""
    states = np.random.get_state()
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            np.random.seed(0)
            drawn.append(SecureNoise().normals(key(), 1000))
    np.random.set_state(states)
    assert not torch.equal(*drawn)
