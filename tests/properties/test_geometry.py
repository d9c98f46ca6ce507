"""Clipping in a scaled geometry: the definition, the sensitivity, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from random_networks import CLASSES, networks
from step_tools import charged, tiny_bench
from support import micro
from xcal.dp.clipping import PLAIN, Bound, ClippingEngine, Geometry
from xcal.dp.clipping.geometry import LARGEST_WEIGHT
from xcal.dp.clipping.reference import norm, one_at_a_time, unit_gradients
from xcal.dp.noise import NoiseKey, SeededNoise, release_grid, release_tensors
from xcal.methods.context import StepContext
from xcal.methods.step_parts import clipped_sum, release_gradient


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


WEIGHTS = st.sampled_from([1 / LARGEST_WEIGHT, 0.2, 0.9, 1.0, 1.7, 8.0, LARGEST_WEIGHT])


@st.composite
def geometries(draw, model):
    """For every parameter no weight, one weight, or one a channel."""
    chosen = {}
    for name, parameter in model.named_parameters():
        kind = draw(st.sampled_from(["none", "one", "channels"])) if parameter.requires_grad else ""
        if kind == "one":
            chosen[name] = (draw(WEIGHTS),)
        elif kind == "channels":
            chosen[name] = tuple(draw(WEIGHTS) for _ in range(len(parameter)))
    return Geometry(chosen)


def images_and_labels(count, pixels, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 2, pixels, pixels, generator=generator, dtype=dtype)
    return images, torch.randint(0, CLASSES, (count,), generator=generator), generator


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    model=networks(),
    count=st.integers(1, 6),
    pixels=st.integers(5, 11),
    grouped=st.booleans(),
    chunk=st.sampled_from([2, 100]),
    quantile=st.floats(0.0, 1.2),
    seed=st.integers(0, 2**31),
)
def test_equals_one_unit_at_a_time(data, model, count, pixels, grouped, chunk, quantile, seed):
    geometry = data.draw(geometries(model))
    images, labels, generator = images_and_labels(count, pixels, seed)
    units = torch.randint(0, 3, (count,), generator=generator) if grouped else None
    lengths = [norm(geometry.scaled(g)) for g in unit_gradients(model, images, labels, units)]
    clip = max(lengths) * quantile + 1e-3
    found = ClippingEngine(model, chunk=chunk).clipped_sum(
        images, labels, clip=clip, geometry=geometry, units=units
    )
    expected = one_at_a_time(model, images, labels, clip=clip, geometry=geometry, units=units)
    assert found.bound == Bound(clip, geometry)
    scale = max([1.0, *(float(part.abs().max()) for part in expected.values())])
    for name, part in expected.items():
        assert float((found.gradients[name] - part).abs().max()) <= 1e-10 * scale, name
    for length, measured in zip(lengths, found.norms.tolist(), strict=True):
        assert abs(length - measured) <= 1e-10 * max(1.0, length)


@settings(max_examples=10, deadline=None)
@given(model=networks(), seed=st.integers(0, 2**31), chunk=st.sampled_from([2, 100]))
def test_weights_of_one_change_no_bit(model, seed, chunk):
    model = model.float()
    images, labels, _ = images_and_labels(5, 9, seed, torch.float32)
    units = torch.tensor([0, 1, 1, 1, 2])
    ones = Geometry({n: (1.0,) * len(p) for n, p in model.named_parameters() if p.requires_grad})
    engine = ClippingEngine(model, chunk=chunk)
    plain = engine.clipped_sum(images, labels, clip=0.3, units=units)
    scaled = engine.clipped_sum(images, labels, clip=0.3, units=units, geometry=ones)
    assert torch.equal(plain.norms, scaled.norms)
    for name, value in plain.gradients.items():
        assert torch.equal(value, scaled.gradients[name])


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    model=networks(),
    mean=st.sampled_from([0.0, 10.0, 1e3]),
    spread=st.sampled_from([1e-2, 1.0, 1e2]),
    clip=st.floats(1e-3, 10.0),
    seed=st.integers(0, 2**31),
)
def test_in_float32_one_unit_moves_the_scaled_sum_by_at_most_the_clip(
    data, model, mean, spread, clip, seed
):
    """Alone, taken out of a draw, and recomputed with explicit gradients."""
    geometry = data.draw(geometries(model))
    model = model.float()
    images, labels, _ = images_and_labels(5, 9, seed, torch.float32)
    images = mean + spread * images
    units = torch.tensor([0, 1, 1, 2, 3])
    # Passes of one size, as clients with secure noise take them: in others a draw of one unit less
    # may round everybody's numbers differently (docs/guarantee.md §8).
    engine = ClippingEngine(model, rows=8)
    whole = engine.clipped_sum(images, labels, clip=clip, units=units, geometry=geometry)
    # Sums of four terms of length C are rounded to float32, whatever the geometry.
    rounding = 1e-5 * 4 * clip
    explicit = unit_gradients(model, images, labels, units)
    for unit in range(4):
        own = units == unit
        alone = engine.clipped_sum(
            images[own],
            labels[own],
            clip=clip,
            units=torch.zeros(int(own.sum()), dtype=torch.long),
            geometry=geometry,
        )
        assert norm(alone.gradients) <= clip
        rest = engine.clipped_sum(
            images[~own], labels[~own], clip=clip, units=units[~own], n_units=4, geometry=geometry
        )
        moved = {n: whole.gradients[n] - rest.gradients[n] for n in whole.gradients}
        assert norm(moved) <= clip + rounding
        measured = float(whole.norms[unit])
        if not bool(whole.dropped[unit]) and measured > 0:
            factor = min(1.0, clip / (1 + 1e-3) / measured)
            kept = geometry.scaled({n: factor * g for n, g in explicit[unit].items()})
            assert norm(kept) <= clip


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, 1e9, 1e-9])
def test_weights_that_are_no_weights_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Geometry({"conv.weight": (1.0, bad)})


def test_weights_must_fit_the_network() -> None:
    model = micro(3)
    for geometry, what in (
        (Geometry({"nothing": (2.0,)}), "not a parameter"),
        (Geometry({"conv.weight": (2.0, 2.0)}), "2 weights for 8 rows"),
    ):
        with pytest.raises(ValueError, match=what):
            ClippingEngine(model).clipped_sum(
                torch.zeros(1, 3, 16, 16), torch.zeros(1).long(), clip=1.0, geometry=geometry
            )


def context() -> StepContext:
    return tiny_bench()


GEOMETRY = Geometry({"conv.weight": (0.5,) * 4 + (2.0,) * 4, "head.weight": (4.0,)})


def test_noise_and_grid_belong_to_the_scaled_space() -> None:
    """What reaches the optimizer is D⁻¹ of scaled sum plus σC on every coordinate, on the grid."""
    at, clip, sigma = context(), 0.7, 3.0
    sums = clipped_sum(at, at.draw(0), Bound(clip, GEOMETRY))
    key = NoiseKey("0", "test", 0, 0, "gradient")
    expected = release_tensors(sums.gradients, sigma * clip, SeededNoise(3), key)
    before = {n: p.detach().clone() for n, p in at.model.named_parameters()}
    release_gradient(at, charged(at, 0, sigma, Bound(clip, GEOMETRY)), sums)
    weights = {"conv.weight": torch.tensor([0.5] * 4 + [2.0] * 4).view(8, 1, 1, 1)}
    for name, parameter in at.model.named_parameters():
        d = weights.get(name, torch.tensor(4.0 if name == "head.weight" else 1.0))
        # lr 1: the step is the gradient over B
        step = (before[name] - parameter.detach()).double() * 20 * d
        torch.testing.assert_close(step, expected[name].double(), rtol=0, atol=1e-4)
    grid = release_grid(sigma * clip)
    assert all(bool(((v / grid).round() * grid == v).all()) for v in expected.values())


def test_each_block_sees_its_share_of_the_noise() -> None:
    noise = SeededNoise(5)
    sums = {"conv.weight": torch.zeros(8, 500), "head.weight": torch.zeros(40, 100)}
    released = release_tensors(sums, 2.0, noise, NoiseKey("0", "m", 0, 0, "gradient"))
    back = GEOMETRY.undo(released)
    assert float(back["conv.weight"][:4].std()) == pytest.approx(4.0, rel=0.1)
    assert float(back["conv.weight"][4:].std()) == pytest.approx(1.0, rel=0.1)
    assert float(back["head.weight"].std()) == pytest.approx(0.5, rel=0.1)


def test_digests_tell_geometries_apart() -> None:
    assert PLAIN.digest() != GEOMETRY.digest()
    nearly = Geometry({**GEOMETRY.weights, "head.weight": (math.nextafter(4.0, 5.0),)})
    assert nearly.digest() != GEOMETRY.digest()
    again = Geometry(dict(reversed(list(GEOMETRY.weights.items()))))
    assert again.digest() == GEOMETRY.digest()
