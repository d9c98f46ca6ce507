"""The draws of a step: every unit for itself, nothing truncated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from xcal.data.normalize import IMAGENET_MEAN, IMAGENET_STD, to_tensor
from xcal.dp.sampling import UnitTable, cap_groups, images_of, poisson_draw

group_lists = st.lists(st.integers(-5, 20), min_size=1, max_size=80).map(
    lambda ids: np.array(ids, np.int64)
)
seeds = st.integers(0, 2**32 - 1)


@given(group_lists)
def test_a_table_holds_every_image_once_under_its_own_group(groups):
    table = UnitTable.groups(groups)
    assert table.n_units == len(np.unique(groups))
    assert np.sort(table.images).tolist() == list(range(len(groups)))
    for unit, group in enumerate(np.unique(groups)):
        images = table.images[table.starts[unit] : table.starts[unit + 1]]
        assert images.tolist() == np.flatnonzero(groups == group).tolist()


def test_records_are_units_of_one_image():
    table = UnitTable.records(5)
    assert (table.n_units, table.n_images, table.sizes.tolist()) == (5, 5, [1] * 5)
    assert UnitTable.of("record", np.array([7, 7])).n_units == 2
    assert UnitTable.of("group", np.array([7, 7])).n_units == 1


@given(st.integers(0, 200), st.floats(0, 1), seeds)
def test_a_unit_is_drawn_by_its_own_uniform_alone(n, rate, seed):
    uniforms = np.random.default_rng(seed).random(n)
    drawn = poisson_draw(uniforms, rate)
    assert drawn.tolist() == [i for i in range(n) if uniforms[i] < rate]


def test_rates_of_zero_and_one_draw_nobody_and_everybody():
    uniforms = np.random.default_rng(0).random(100)
    assert len(poisson_draw(uniforms, 0.0)) == 0
    assert len(poisson_draw(uniforms, 1.0)) == 100
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="rate"):
            poisson_draw(uniforms, rate)


def test_the_drawn_size_is_binomial():
    rng = np.random.default_rng(3)
    n, rate, steps = 400, 0.05, 4000
    sizes = np.array([len(poisson_draw(rng.random(n), rate)) for _ in range(steps)])
    edges = np.arange(8, 35)
    expected = stats.binom(n, rate).cdf(edges)
    assert np.abs((sizes[:, None] <= edges).mean(0) - expected).max() < 0.03


@settings(max_examples=200)
@given(group_lists, st.integers(1, 6), seeds, st.floats(0, 1))
def test_drawn_groups_give_up_to_k_of_their_own_images(groups, k, seed, rate):
    rng = np.random.default_rng(seed)
    table = UnitTable.groups(groups)
    drawn = poisson_draw(rng.random(table.n_units), rate)
    images, position = images_of(drawn, table, k, rng.random(len(groups)))
    assert len(np.unique(images)) == len(images) == len(position)
    names = np.unique(groups)
    assert (groups[images] == names[drawn[position]]).all()
    used = np.bincount(position, minlength=len(drawn))
    assert used.tolist() == np.minimum(table.sizes[drawn], k).tolist()
    assert (np.diff(position) >= 0).all()


@settings(max_examples=200)
@given(group_lists, st.integers(1, 4), seeds)
def test_a_groups_choice_does_not_depend_on_who_else_is_drawn(groups, k, seed):
    uniforms = np.random.default_rng(seed).random(len(groups))
    table = UnitTable.groups(groups)
    everyone = np.arange(table.n_units)
    images, position = images_of(everyone, table, k, uniforms)
    for unit in everyone:
        alone, zeros = images_of(np.array([unit]), table, k, uniforms)
        assert alone.tolist() == images[position == unit].tolist()
        assert not zeros.any()


def test_every_image_of_a_group_is_equally_likely():
    rng = np.random.default_rng(0)
    table = UnitTable.groups(np.array([0, 1, 1, 1, 1, 1]))
    counts = np.zeros(6)
    for _ in range(4000):
        images, _ = images_of(np.array([1]), table, 2, rng.random(6))
        counts[images] += 1
    assert counts[0] == 0
    assert np.abs(counts[1:] / 4000 - 0.4).max() < 0.035


def test_an_empty_draw_is_empty():
    images, position = images_of(np.array([], np.int64), UnitTable.records(4), 4)
    assert len(images) == len(position) == 0
    assert to_tensor(np.zeros((0, 8, 8, 3), np.uint8)).shape == (0, 3, 8, 8)


def test_a_choice_needs_uniforms_for_every_image():
    table = UnitTable.groups(np.array([0, 0, 0]))
    with pytest.raises(ValueError, match="needed"):
        images_of(np.array([0]), table, 2)
    with pytest.raises(ValueError, match="2 values for 3 images"):
        images_of(np.array([0]), table, 2, np.zeros(2))
    with pytest.raises(ValueError, match="at least 1"):
        images_of(np.array([0]), table, 0)


@given(group_lists, st.integers(1, 5), seeds)
def test_a_cap_is_enforced_and_costs_no_more_than_it_must(groups, cap, seed):
    kept = cap_groups(groups, cap, np.random.default_rng(seed))
    names, before = np.unique(groups, return_counts=True)
    assert np.unique(groups[kept]).tolist() == names.tolist()
    after = [(groups[kept] == name).sum() for name in names]
    assert after == np.minimum(before, cap).tolist()
    assert (np.diff(kept) > 0).all()


def test_tensors_are_normalized_by_public_constants():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)
    pixels.flags.writeable = False
    tensor = to_tensor(pixels)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    expected = (pixels / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    assert np.allclose(tensor.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-5)
    bright = to_tensor(pixels, brightness=1.4, mean=(0, 0, 0), std=(1, 1, 1))
    assert np.allclose(
        bright.numpy(), np.minimum(pixels / 255 * 1.4, 1).transpose(0, 3, 1, 2), atol=1e-5
    )
