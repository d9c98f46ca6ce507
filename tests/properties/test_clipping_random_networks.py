"""Random small networks of every supported layer: the engine equals one unit at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from random_networks import CLASSES, networks
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.reference import norm, one_at_a_time, unit_gradients


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    model=networks(),
    count=st.integers(1, 6),
    pixels=st.integers(5, 11),
    grouped=st.booleans(),
    chunk=st.sampled_from([2, 100]),
    quantile=st.floats(0.0, 1.2),
    seed=st.integers(0, 2**31),
)
def test_equals_one_unit_at_a_time(model, count, pixels, grouped, chunk, quantile, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 2, pixels, pixels, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    units = torch.randint(0, 3, (count,), generator=generator) if grouped else None
    lengths = [norm(g) for g in unit_gradients(model, images, labels, units)]
    clip = max(lengths) * quantile + 1e-3
    engine = ClippingEngine(model, chunk=chunk)
    found = engine.clipped_sum(images, labels, clip=clip, units=units)
    expected = one_at_a_time(model, images, labels, clip=clip, units=units)
    assert set(found.gradients) == set(expected)
    scale = max([1.0, *(float(part.abs().max()) for part in expected.values())])
    for name, part in expected.items():
        assert found.gradients[name].shape == part.shape
        assert float((found.gradients[name] - part).abs().max()) <= 1e-10 * scale, name
    for length, measured in zip(lengths, found.norms.tolist(), strict=True):
        assert abs(length - measured) <= 1e-10 * max(1.0, length)


@settings(max_examples=40, deadline=None)
@given(
    model=networks(),
    mean=st.sampled_from([0.0, 10.0, 1e3]),
    spread=st.sampled_from([1e-2, 1.0, 1e2]),
    clip=st.floats(1e-3, 10.0),
    seed=st.integers(0, 2**31),
)
def test_in_float32_no_unit_exceeds_the_clip(model, mean, spread, clip, seed):
    model = model.float()
    generator = torch.Generator().manual_seed(seed)
    images = mean + spread * torch.randn(5, 2, 9, 9, generator=generator)
    labels = torch.randint(0, CLASSES, (5,), generator=generator)
    units = torch.tensor([0, 1, 1, 2, 3])
    engine = ClippingEngine(model)
    for unit in range(4):
        own = units == unit
        alone = engine.clipped_sum(
            images[own], labels[own], clip=clip, units=torch.zeros(int(own.sum()), dtype=torch.long)
        )
        assert norm(alone.gradients) <= clip
