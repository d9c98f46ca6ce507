"""What must hold of the signal for every image: the bounds that its privacy rests on."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support import image_scores
from xcal.explain.gradcam import forward_with_features
from xcal.explain.signal import (
    Components,
    SignalSettings,
    batch_score,
    components,
    mask_images,
    scores,
    top_cells,
)

torch.set_num_threads(1)

seeds = st.integers(0, 2**31 - 1)
weights = st.floats(0, 10)
shares = st.floats(0.01, 1)
anything = st.floats(allow_nan=True, allow_infinity=True, width=32)


class TinyNet(nn.Module):
    cam_layer = "body"
    head_layer = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))


def tiny_net(seed: int) -> TinyNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyNet().double()


def random_maps(n: int, seed: int) -> Tensor:
    """Non-negative maps, many of them sparse, as a ReLU leaves them."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(n, 1, 1, generator=generator)
    return (torch.randn(n, 5, 5, generator=generator) - shift).relu()


@settings(deadline=None)
@given(st.lists(st.tuples(anything, anything, anything), max_size=8), weights, weights, weights)
def test_scores_lie_in_the_unit_interval_whatever_comes(
    rows: list[tuple[float, float, float]], alpha: float, beta: float, gamma: float
) -> None:
    parts = Components(*torch.tensor(rows, dtype=torch.float64).view(-1, 3).T)
    result = scores(parts, alpha, beta, gamma)
    assert ((result >= 0) & (result <= 1)).all()
    assert 0 <= batch_score(parts, alpha, beta, gamma) <= 1
    broken = [not all(math.isfinite(value) for value in row) for row in rows]
    assert (result[torch.tensor(broken, dtype=torch.bool)] == 0).all()


@settings(deadline=None)
@given(seeds, shares, st.booleans())
def test_cells_are_the_largest_ones(seed: int, q: float, positive_only: bool) -> None:
    maps = random_maps(4, seed)
    cells = top_cells(maps, q, positive_only=positive_only)
    k = math.ceil(round(q * 25, 9))
    for values, chosen in zip(maps.flatten(1), cells.flatten(1), strict=True):
        if values.max() == 0:
            assert not chosen.any()
            continue
        quantum = values.max() / 2**16
        if chosen.any() and not chosen.all():
            assert values[chosen].min() >= values[~chosen].max() - quantum
        positive = int((values > quantum).sum())
        assert chosen.sum() >= min(k, positive)


@settings(deadline=None)
@given(seeds, shares)
def test_choice_of_cells_survives_rounding(seed: int, q: float) -> None:
    # Maps on a coarse grid: equal values stay equal after noise far below the quantum.
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randint(0, 5, (4, 5, 5), generator=generator).double() / 4
    noisy = maps * (1 + 1e-7 * (2 * torch.rand(maps.shape, generator=generator).double() - 1))
    for positive_only in (True, False):
        assert torch.equal(
            top_cells(maps, q, positive_only=positive_only),
            top_cells(noisy, q, positive_only=positive_only),
        )


@settings(deadline=None)
@given(seeds, shares, st.floats(1e-3, 1e3))
def test_choice_of_cells_ignores_the_scale_of_a_map(seed: int, q: float, scale: float) -> None:
    maps = random_maps(4, seed).double()
    rescaled = maps * 2.0 ** round(math.log2(scale))  # a power of two rounds nothing
    assert torch.equal(
        top_cells(maps, q, positive_only=True), top_cells(rescaled, q, positive_only=True)
    )


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(0, 4), st.sampled_from(["imagenet", "image-mean"]), st.booleans())
def test_an_image_is_scored_alone(seed: int, index: int, fill: str, positive_only: bool) -> None:
    model = tiny_net(seed)
    images = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(seed)).double()
    choice = SignalSettings(fill=fill, positive_only=positive_only)
    together = image_scores(model, images, *forward_with_features(model, images), choice)
    alone = images[index : index + 1]
    single = image_scores(model, alone, *forward_with_features(model, alone), choice)
    torch.testing.assert_close(together[index], single[0], rtol=0, atol=1e-12)
    assert ((together >= 0) & (together <= 1)).all()


@settings(max_examples=40, deadline=None)
@given(
    seeds,
    st.integers(0, 4),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from(["imagenet", "image-mean"]),
)
def test_a_broken_image_harms_only_itself(seed: int, index: int, broken: float, fill: str) -> None:
    model = tiny_net(seed)
    images = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(seed)).double()
    choice = SignalSettings(fill=fill)
    sound = image_scores(model, images, *forward_with_features(model, images), choice)
    images[index, 0, 2, 3] = broken
    result = image_scores(model, images, *forward_with_features(model, images), choice)
    assert result[index] == 0
    others = torch.arange(5) != index
    assert torch.equal(result[others], sound[others])


@settings(deadline=None)
@given(seeds, st.integers(0, 3), weights, weights, weights)
def test_one_image_moves_the_sum_of_scores_by_at_most_one(
    seed: int, index: int, alpha: float, beta: float, gamma: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 10 * torch.randn(4, 3, generator=generator)
    masked = 10 * torch.randn(4, 3, generator=generator)
    maps = random_maps(4, seed)
    cells = top_cells(maps, 0.2, positive_only=True)
    whole = scores(components(logits, maps, cells, masked), alpha, beta, gamma)
    kept = torch.arange(4) != index
    rest = scores(
        components(logits[kept], maps[kept], cells[kept], masked[kept]), alpha, beta, gamma
    )
    assert torch.equal(whole[kept], rest)
    assert 0 <= whole.sum() - rest.sum() <= 1 + 1e-12


@settings(deadline=None)
@given(seeds)
def test_masking_touches_covered_pixels_only(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(3, 2, 7, 9, generator=generator) + 1
    cells = torch.rand(3, 2, 3, generator=generator) > 0.5
    masked = mask_images(images, cells, 0.0)
    assert torch.equal(masked[masked != 0], images[masked != 0])
    assert ((masked == 0).any(dim=1) == (masked == 0).all(dim=1)).all()
