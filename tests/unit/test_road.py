"""ROAD: the imputation against a dense solve, the ranks, and scores that are known beforehand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from road_timing import time_road
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.explain import imputation
from xcal.explain.imputation import impute, neighbor_sum
from xcal.explain.road import (
    RoadSettings,
    removal_order,
    removed_pixels,
    road,
    saliency_for_ranking,
)

torch.set_num_threads(1)


def dense_imputation(image: NDArray[np.float64], removed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The same system written pixel by pixel and solved without any structure."""
    height, width = removed.shape
    pixels = [tuple(pixel) for pixel in np.argwhere(removed)]
    matrix = np.zeros((len(pixels), len(pixels)))
    right_side = np.zeros((len(pixels), image.shape[0]))
    for row, (y, x) in enumerate(pixels):
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                there = (y + down, x + right)
                if (down, right) == (0, 0) or not (
                    0 <= there[0] < height and 0 <= there[1] < width
                ):
                    continue
                weight = 1 / 12 if down and right else 1 / 6
                matrix[row, row] += weight
                if removed[there]:
                    matrix[row, pixels.index(there)] -= weight
                else:
                    right_side[row] += weight * image[:, there[0], there[1]]
    return np.linalg.solve(matrix, right_side).T


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_imputation_equals_a_dense_solve(seed: int, height: int, width: int, share: float) -> None:
    generator = np.random.default_rng(seed)
    image = generator.normal(size=(3, height, width))
    removed = generator.random((height, width)) < share
    removed[generator.integers(height), generator.integers(width)] = False
    np.testing.assert_allclose(
        impute(image, removed), dense_imputation(image, removed), rtol=1e-9, atol=1e-10
    )


def test_imputation_by_hand() -> None:
    # One hole in the middle: (1/6 * direct + 1/12 * diagonal) over weights that sum to 1.
    image = np.array([[[1.0, 2.0, 3.0], [4.0, 99.0, 6.0], [7.0, 8.0, 9.0]]])
    removed = np.zeros((3, 3), dtype=bool)
    removed[1, 1] = True
    assert impute(image, removed) == pytest.approx((2 + 4 + 6 + 8) / 6 + (1 + 3 + 7 + 9) / 12)
    # A hole in the corner has two direct and one diagonal neighbor.
    removed = np.zeros((3, 3), dtype=bool)
    removed[0, 0] = True
    expected = ((2 + 4) / 6 + 99 / 12) / (2 / 6 + 1 / 12)
    assert impute(image, removed) == pytest.approx(expected)
    # Two holes in a row of four between 0 and 3 lie on the straight line.
    row = np.array([[[0.0, -5.0, -5.0, 3.0]]])
    assert impute(row, np.array([[False, True, True, False]])) == pytest.approx(
        np.array([[1.0, 2.0]])
    )


def test_imputation_keeps_to_the_range_of_what_is_left() -> None:
    generator = np.random.default_rng(5)
    image = generator.random((3, 16, 16))
    removed = generator.random((16, 16)) < 0.8
    values = impute(image, removed)
    for channel, imputed in zip(image, values, strict=True):
        assert channel[~removed].min() - 1e-12 <= imputed.min()
        assert imputed.max() <= channel[~removed].max() + 1e-12


def test_removed_pixels_are_not_looked_at() -> None:
    generator = np.random.default_rng(6)
    image = generator.random((2, 8, 8))
    removed = generator.random((8, 8)) < 0.5
    spoilt = np.where(removed, np.nan, image)
    np.testing.assert_array_equal(impute(spoilt, removed), impute(image, removed))


def test_nothing_and_everything_removed() -> None:
    assert impute(np.ones((3, 4, 4)), np.zeros((4, 4), dtype=bool)).shape == (3, 0)
    with pytest.raises(ValueError, match="nothing to impute from"):
        impute(np.ones((3, 4, 4)), np.ones((4, 4), dtype=bool))


def test_neighbor_weights_sum_to_one_inside() -> None:
    degree = neighbor_sum(np.ones((1, 4, 5)))[0]
    assert degree[1:-1, 1:-1] == pytest.approx(1)
    assert degree[0, 0] == pytest.approx(2 / 6 + 1 / 12)
    assert degree[0, 2] == pytest.approx(3 / 6 + 2 / 12)


def test_removal_takes_exactly_the_share_even_from_sparse_maps() -> None:
    saliency = np.zeros((10, 10))
    saliency[:6, :6] = np.arange(1, 37).reshape(6, 6)  # 64 % zeros
    order = removal_order(saliency, np.random.default_rng(0))
    for level, count in ((20, 20), (40, 40), (60, 60), (80, 80), (99.9, 99)):
        removed = removed_pixels(order, level, (10, 10))
        assert removed.sum() == count
        assert removed_pixels(order[::-1], level, (10, 10)).sum() == count
    most = removed_pixels(order, 36, (10, 10))
    assert most[:6, :6].all()
    assert not removed_pixels(order[::-1], 64, (10, 10))[:6, :6].any()


def test_ties_are_random_but_seeded() -> None:
    saliency = np.zeros((8, 8))
    first = removal_order(saliency, np.random.default_rng(1))
    assert np.array_equal(first, removal_order(saliency, np.random.default_rng(1)))
    assert not np.array_equal(first, removal_order(saliency, np.random.default_rng(2)))
    assert sorted(first) == list(range(64))
    assert not np.array_equal(first, np.arange(64))


def test_enlarging_a_flat_map_makes_no_order() -> None:
    saliency, constant, broken = saliency_for_ranking(torch.full((1, 3, 3), 1 / 3), (64, 64))
    assert np.ptp(saliency) == 0
    assert (constant, broken) == (1, 0)


class BlobClassifier(nn.Module):
    """Says 1 if the square in the middle is bright: its true attribution is that square."""

    def __init__(self, side: int = 20) -> None:
        super().__init__()
        weight = torch.zeros(side, side)
        weight[7:13, 7:13] = 1 / 36
        self.register_buffer("weight", weight)

    def forward(self, images: Tensor) -> Tensor:
        brightness = (images.mean(dim=1) * self.weight).sum(dim=(1, 2))
        logit = 20 * (brightness - 0.5)
        return torch.stack([torch.zeros_like(logit), logit], dim=1)


def blob_images(n: int = 12) -> Tensor:
    images = 0.05 * torch.randn(n, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    images[:, :, 7:13, 7:13] += 1
    return images


def test_the_true_attribution_of_a_linear_model_scores_near_the_best() -> None:
    model, images = BlobClassifier(), blob_images()
    truth = (model.weight * images.mean(dim=1)).relu()
    result = road(model, images, truth)
    assert 0.45 < result.road <= 0.5
    assert result.road_logit_percent > 50
    inverted = road(model, images, -truth)
    assert -0.5 <= inverted.road < -0.45
    assert inverted.road_logit_percent < -50
    # same ranks up to ties: the curves change places
    assert (result.lerf > -0.05).all()
    assert (result.morf < -0.9).all()


def test_a_random_attribution_scores_near_zero() -> None:
    images = blob_images(60)
    noise = torch.rand(60, 20, 20, generator=torch.Generator().manual_seed(1))
    result = road(BlobClassifier(), images, noise)
    assert abs(result.road) < 0.05
    assert (result.constant_maps, result.broken_maps, result.broken_images) == (0, 0, 0)


def test_scores_follow_from_the_curves() -> None:
    result = road(BlobClassifier(), blob_images(3), torch.rand(3, 20, 20))
    assert result.morf.shape == result.lerf.shape == (3, 4)
    assert result.scores == pytest.approx(((result.lerf - result.morf) / 2).mean(axis=1))
    assert result.road == pytest.approx(result.scores.mean())
    difference = (result.lerf_logit - result.morf_logit).mean() / 2
    assert result.road_logit_percent == pytest.approx(100 * difference / result.logit.mean())
    summary = result.summary()
    assert summary["road"] == result.road
    assert summary["levels"] == [20, 40, 60, 80]


class Surer(nn.Module):
    """The same answers, ten times as sure."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return 10 * self.model(images)


def test_confidence_alone_moves_road_and_not_the_matched_one() -> None:
    model, images = BlobClassifier(), blob_images(8)
    maps = torch.rand(8, 20, 20, generator=torch.Generator().manual_seed(2))
    one, surer = road(model, images, maps), road(Surer(model), images, maps)
    assert one.matched(1.0) == pytest.approx(one.scores)
    assert abs(surer.road - one.road) > 0.01
    assert surer.matched(10.0) == pytest.approx(one.scores)
    assert surer.matched(10 * 3.0) == pytest.approx(one.matched(3.0))


def test_degenerate_maps_are_counted_and_rank_nothing() -> None:
    images = blob_images(4)
    maps = torch.rand(4, 5, 5, generator=torch.Generator().manual_seed(0))
    maps[0], maps[1], maps[2, 0, 0] = 0.0, 2.5, math.nan
    result = road(BlobClassifier(), images, maps)
    assert (result.constant_maps, result.broken_maps, result.broken_images) == (2, 1, 0)
    assert np.isfinite(result.scores).all()


def test_a_broken_image_scores_zero_and_harms_no_other() -> None:
    images, maps = blob_images(4), torch.rand(4, 5, 5)
    sound = road(BlobClassifier(), images, maps)
    images[1, 0, 10, 10] = math.nan
    result = road(BlobClassifier(), images, maps)
    assert result.broken_images == 1
    assert result.scores[1] == 0
    others = [0, 2, 3]
    np.testing.assert_allclose(result.scores[others], sound.scores[others], rtol=0, atol=1e-9)


def test_same_seed_same_result_whatever_the_batch() -> None:
    images, maps = blob_images(7), torch.zeros(7, 5, 5)
    first = road(BlobClassifier(), images, maps, RoadSettings(seed=4))
    again = road(BlobClassifier(), images, maps, RoadSettings(seed=4))
    small = road(BlobClassifier(), images, maps, RoadSettings(seed=4, batch_size=3))
    part = road(BlobClassifier(), images[:2], maps[:2], RoadSettings(seed=4))
    other = road(BlobClassifier(), images, maps, RoadSettings(seed=5))
    assert np.array_equal(first.scores, again.scores)
    np.testing.assert_allclose(first.scores, small.scores, rtol=0, atol=1e-6)
    np.testing.assert_allclose(first.scores[:2], part.scores, rtol=0, atol=1e-6)
    assert not np.allclose(first.scores, other.scores, rtol=0, atol=1e-6)


def test_without_images_road_is_undefined() -> None:
    result = road(BlobClassifier(), torch.zeros(0, 3, 20, 20), torch.zeros(0, 5, 5))
    assert math.isnan(result.road)
    assert math.isnan(result.road_logit_percent)
    assert result.summary()["road"] is None


def test_another_class_can_be_asked_about() -> None:
    images, maps = blob_images(3), torch.rand(3, 20, 20)
    predicted = road(BlobClassifier(), images, maps)
    other = road(BlobClassifier(), images, maps, classes=torch.zeros(3, dtype=torch.long))
    assert predicted.classes.tolist() == [1, 1, 1]
    assert other.scores == pytest.approx(-predicted.scores)


@pytest.mark.parametrize(
    "wrong",
    [
        {"levels": ()},
        {"levels": (0,)},
        {"levels": (100,)},
        {"noise": -1.0},
        {"noise": math.nan},
        {"batch_size": 0},
    ],
)
def test_nonsense_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        RoadSettings(**wrong)


def test_maps_and_images_must_match() -> None:
    with pytest.raises(UserError, match="3 images and 2 maps"):
        road(BlobClassifier(), blob_images(3), torch.rand(2, 5, 5))


def test_the_number_of_blas_threads_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> set[int]:
        return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    seen = []
    real = imputation.dpbsv

    def noted(*words: Any, **options: Any) -> Any:
        seen.append(threads())
        return real(*words, **options)

    monkeypatch.setattr(imputation, "dpbsv", noted)
    with threadpool_limits(limits=2, user_api="blas"):
        before = threads()
        impute(np.zeros((1, 8, 8)), np.eye(8, dtype=bool))
        assert threads() == before
    assert seen == [{1}]


class PooledNet(nn.Module):
    cam_layer = "body"
    head_layer = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, stride=4)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))


def test_timing_says_what_was_timed() -> None:
    timing = time_road(PooledNet(), images=6, pixels=16, settings=RoadSettings(levels=(50,)))
    summary = timing.summary()
    assert (summary["images"], summary["pixels"], summary["levels"]) == (6, 16, [50])
    assert timing.total_seconds == timing.maps_seconds + timing.road_seconds > 0
    assert timing.imputation_seconds > 0
    assert timing.forward_seconds > 0
