"""Partitions: complete, disjoint, whole groups, equal sizes, reproducible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcal.data.catalog import Images
from xcal.data.partition import Partition, partition
from xcal.errors import UserError

KINDS = ["iid", "label", "label-extreme", "covariate"]


def make_images(labels: list[int], groups: list[int]) -> Images:
    n = len(labels)
    return Images(
        pixels=np.zeros((n, 1, 1, 3), np.uint8),
        labels=np.array(labels, np.int64),
        groups=np.array(groups, np.int64),
        ids=np.array([str(i) for i in range(n)]),
    )


@st.composite
def image_sets(draw: st.DrawFn) -> Images:
    n = draw(st.integers(1, 120))
    labels = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, draw(st.integers(0, 40))), min_size=n, max_size=n))
    return make_images(labels, groups)


kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32 - 1)
concentrations = st.sampled_from([1e-3, 0.1, 0.5, 10.0])


def held(parts: Partition) -> list[list[int]]:
    return [shard.indices.tolist() for shard in parts.shards]


@settings(max_examples=60, deadline=None)
@given(image_sets(), st.integers(1, 12), kinds, concentrations, seeds, st.booleans())
def test_every_image_stands_at_exactly_one_client(images, clients, kind, c, seed, keep_groups):
    n_groups = len(np.unique(images.groups))
    arguments = {"kind": kind, "concentration": c, "seed": seed, "keep_groups": keep_groups}
    if (n_groups if keep_groups else len(images)) < clients:
        with pytest.raises(UserError):
            partition(images, clients, **arguments)
        return
    parts = partition(images, clients, **arguments)
    everyone = np.concatenate([shard.indices for shard in parts.shards])
    assert np.sort(everyone).tolist() == list(range(len(images)))
    assert all(held(parts))
    assert not parts.shared_units
    clients_of_group = [set() for _ in range(int(images.groups.max()) + 1)]
    for client, shard in enumerate(parts.shards):
        for group in images.groups[shard.indices]:
            clients_of_group[group].add(client)
    torn = any(len(at) > 1 for at in clients_of_group)
    assert parts.groups_split == torn
    assert not (keep_groups and torn)

    sizes = np.array([len(shard.indices) for shard in parts.shards])
    largest = np.bincount(images.groups).max() if keep_groups else 1
    if kind == "label-extreme":
        assert np.abs(sizes - sizes.mean()).max() <= largest
    else:
        assert sizes.max() - sizes.min() <= largest
    if not keep_groups:
        assert sizes.max() - sizes.min() <= 1


@settings(max_examples=60, deadline=None)
@given(
    image_sets(),
    st.integers(1, 8),
    kinds,
    seeds,
    st.integers(1, 120),
    st.sampled_from(["record", "group"]),
)
def test_a_quota_is_met_exactly(images, clients, kind, seed, quota, unit):
    available = len(np.unique(images.groups)) if unit == "group" else len(images)
    arguments = {"kind": kind, "seed": seed, "units_per_client": quota, "unit": unit}
    if quota > available:
        with pytest.raises(UserError, match="units_per_client"):
            partition(images, clients, **arguments)
        return
    parts = partition(images, clients, **arguments)
    units = [
        images.groups[shard.indices] if unit == "group" else shard.indices for shard in parts.shards
    ]
    assert [len(np.unique(u)) for u in units] == [quota] * clients
    for shard in parts.shards:
        assert len(np.unique(shard.indices)) == len(shard.indices)
    everywhere = np.concatenate([np.unique(u) for u in units])
    assert parts.shared_units == (len(np.unique(everywhere)) < len(everywhere))
    if quota * clients > available:
        assert parts.shared_units
    if unit == "group":
        # A group that is there is there whole.
        for shard in parts.shards:
            whole = np.flatnonzero(np.isin(images.groups, images.groups[shard.indices]))
            assert shard.indices.tolist() == whole.tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 8), kinds, seeds, st.integers(1, 50), concentrations)
def test_images_are_shared_only_where_there_are_too_few(n, clients, kind, seed, quota, c):
    images = make_images([i % 4 for i in range(n)], list(range(n)))
    if quota > n:
        return
    parts = partition(
        images, clients, kind=kind, concentration=c, seed=seed, units_per_client=quota
    )
    assert parts.shared_units == (quota * clients > n)


@settings(max_examples=50, deadline=None)
@given(image_sets(), kinds, seeds)
def test_the_same_seed_gives_the_same_partition(images, kind, seed):
    clients = min(3, len(np.unique(images.groups)))
    first = partition(images, clients, kind=kind, seed=seed)
    state = np.random.get_state()[1].copy()
    second = partition(images, clients, kind=kind, seed=seed)
    assert held(first) == held(second)
    assert (np.random.get_state()[1] == state).all()


def test_label_shift_follows_the_concentration():
    images = make_images([i % 4 for i in range(2000)], list(range(2000)))

    def skew(kind: str, concentration: float = 0.5) -> float:
        shares = []
        for shard in partition(images, 4, kind=kind, concentration=concentration, seed=1).shards:
            counts = np.bincount(images.labels[shard.indices], minlength=4)
            shares.append(counts.max() / counts.sum())
        return float(np.mean(shares))

    assert skew("iid") < 0.32
    assert skew("label", 100.0) < 0.35
    assert skew("label", 0.1) > 0.5
    assert skew("label-extreme") == 1.0


def test_mixed_groups_are_still_shifted_by_their_commonest_class():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(300), 5)
    images = make_images(rng.integers(0, 4, 1500).tolist(), groups.tolist())
    parts = partition(images, 4, kind="label-extreme", seed=0)
    shares = [
        np.bincount(images.labels[s.indices], minlength=4).max() / len(s.indices)
        for s in parts.shards
    ]
    assert not parts.groups_split
    assert min(shares) > 0.4


def test_brightness_rises_linearly_over_clients():
    images = make_images([0] * 50, list(range(50)))
    levels = [s.brightness for s in partition(images, 5, kind="covariate", seed=0).shards]
    assert np.allclose(levels, [0.6, 0.8, 1.0, 1.2, 1.4])
    assert [s.brightness for s in partition(images, 1, kind="covariate", seed=0).shards] == [1.0]
    assert {s.brightness for s in partition(images, 5, kind="iid", seed=0).shards} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients"),
        ({"clients": 2, "kind": "dirichlet"}, "kind"),
        ({"clients": 2, "kind": "label", "concentration": 0.0}, "concentration"),
        ({"clients": 2, "kind": "label", "concentration": float("nan")}, "concentration"),
        ({"clients": 2, "units_per_client": 0}, "units_per_client"),
        ({"clients": 2, "unit": "group", "keep_groups": False}, "keep_groups"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments, message):
    images = make_images([0] * 10, list(range(10)))
    with pytest.raises(UserError, match=message):
        partition(images, **arguments)
