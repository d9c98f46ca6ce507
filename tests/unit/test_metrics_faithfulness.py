"""Insertion and deletion, agreement, the sanity check, localization: known answers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.explain.faithfulness import (
    agreement,
    blurred,
    insertion_deletion,
    randomisation_check,
    rank_correlation,
)
from xcal.explain.gradcam import gradcam_maps
from xcal.explain.localization import localization

torch.set_num_threads(1)


class BlobClassifier(nn.Module):
    """Says 1 if the square in the middle is bright: its true attribution is that square."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.zeros(20, 20)
        weight[8:12, 8:12] = 1 / 16
        self.register_buffer("weight", weight)

    def forward(self, images: Tensor) -> Tensor:
        logit = 20 * ((images.mean(dim=1) * self.weight).sum(dim=(1, 2)) - 0.5)
        return torch.stack([torch.zeros_like(logit), logit], dim=1)


def blob_images(n: int = 3) -> Tensor:
    images = 0.05 * torch.randn(n, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    images[:, :, 8:12, 8:12] += 1
    return images


def test_deletion_falls_and_insertion_rises_at_once_for_the_truth() -> None:
    model, images = BlobClassifier(), blob_images()
    truth = model.weight.expand(3, -1, -1)
    best = insertion_deletion(model, images, truth, fill=0.0)
    worst = insertion_deletion(model, images, -truth, fill=0.0)
    assert (best.deletion_auc < 0.05).all()
    assert (best.insertion_auc > 0.95).all()
    assert (worst.deletion_auc > 0.9).all()
    assert (worst.insertion_auc < 0.2).all()
    assert best.deletion_curve.shape == (3, 21)
    # The ends do not depend on the map: the intact image, and nothing or everything restored.
    np.testing.assert_allclose(best.deletion_curve[:, 0], worst.deletion_curve[:, 0])
    np.testing.assert_allclose(best.insertion_curve[:, -1], best.deletion_curve[:, 0], rtol=1e-6)


def test_insertion_deletion_counts_what_is_degenerate() -> None:
    images, maps = blob_images(4), torch.rand(4, 5, 5)
    maps[0], maps[1, 0, 0] = 0.0, math.nan
    images[2, 0, 9, 9] = math.nan
    result = insertion_deletion(BlobClassifier(), images, maps, steps=4)
    assert (result.constant_maps, result.broken_maps, result.broken_images) == (1, 1, 1)
    assert result.deletion_auc[2] == result.insertion_auc[2] == 0
    assert np.isfinite(result.deletion_curve).all()
    again = insertion_deletion(BlobClassifier(), images, maps, steps=4)
    assert np.array_equal(result.deletion_curve, again.deletion_curve)


def test_insertion_deletion_without_images() -> None:
    result = insertion_deletion(
        BlobClassifier(), torch.zeros(0, 3, 20, 20), torch.zeros(0, 5, 5), steps=2
    )
    assert result.deletion_auc.shape == (0,)
    with pytest.raises(UserError, match="0 steps"):
        insertion_deletion(BlobClassifier(), blob_images(), torch.rand(3, 5, 5), steps=0)


def test_blur_keeps_flat_images_and_spreads_points() -> None:
    flat = torch.full((1, 2, 32, 24), 3.0)
    torch.testing.assert_close(blurred(flat), flat)
    point = torch.zeros(1, 1, 33, 33)
    point[0, 0, 16, 16] = 1
    soft = blurred(point)
    assert soft.sum() == pytest.approx(1, abs=1e-5)
    assert soft.max() < 0.1
    torch.testing.assert_close(soft, soft.transpose(2, 3))
    assert blurred(torch.ones(1, 1, 1, 1)).item() == pytest.approx(1)


def test_rank_correlation_is_spearmans() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 6, (2, 5, 30)).astype(float)
    expected = [spearmanr(a, b).statistic for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(rank_correlation(first, second), expected, atol=1e-12)
    assert rank_correlation(np.ones((1, 4)), np.arange(4.0)[None]).tolist() == [0.0]


def test_agreement_by_hand() -> None:
    maps = torch.arange(10.0).view(1, 2, 5)
    same = agreement(maps, 3 * maps)
    assert (same.rank_correlation[0], same.overlap[0]) == pytest.approx((1, 1))
    opposite = agreement(maps, maps.flip(1, 2))
    assert (opposite.rank_correlation[0], opposite.overlap[0]) == pytest.approx((-1, 0))
    # the top two of each have one cell in common, of three
    other = maps.clone()
    other[0, 1, 3] = 0.5
    assert agreement(maps, other).overlap[0] == pytest.approx(1 / 3)


def test_agreement_with_a_map_that_says_nothing_is_zero_and_counted() -> None:
    maps = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0))
    other = maps.clone()
    other[0], other[1], other[2, 1, 1] = 0.0, 2.0, math.nan
    result = agreement(maps, other)
    assert result.degenerate == 3
    assert result.rank_correlation.tolist() == pytest.approx([0, 0, 0, 1])
    assert result.overlap.tolist() == pytest.approx([0, 0, 0, 1])
    assert agreement(maps[:0], maps[:0]).overlap.shape == (0,)
    with pytest.raises(UserError, match="shapes"):
        agreement(maps, maps[:, :2])


class TinyNet(nn.Module):
    cam_layer = "body"
    head_layer = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))


def test_randomising_weights_changes_the_maps_but_not_the_model() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyNet()
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    maps = gradcam_maps(model, images)
    stages = randomisation_check(model, images, stages=3, seed=1)
    assert [stage.share for stage in stages] == pytest.approx([1 / 3, 2 / 3, 1])
    assert stages[-1].agreement.rank_correlation.mean() < 0.5
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(gradcam_maps(model, images), maps)
    again = randomisation_check(model, images, stages=3, seed=1)
    assert np.array_equal(stages[-1].agreement.overlap, again[-1].agreement.overlap)
    with pytest.raises(UserError, match="0 stages"):
        randomisation_check(model, images, stages=0)


def test_localization_by_hand() -> None:
    maps = torch.tensor([[[4.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
    regions = torch.zeros(2, 2, 2, dtype=torch.bool)
    regions[0, 0, 0], regions[1, 1, 1] = True, True
    result = localization(maps, regions)
    assert result.pointing == pytest.approx([1.0, 0.25])  # four highest pixels, one inside
    assert result.inside == pytest.approx([0.8, 0.25])
    assert result.area == pytest.approx([0.25, 0.25])


def test_a_flat_map_locates_by_chance_after_enlarging_too() -> None:
    regions = torch.zeros(1, 30, 30, dtype=torch.bool)
    regions[0, 3:9, 5:20] = True
    result = localization(torch.full((1, 7, 7), 1 / 3), regions)
    assert result.pointing[0] == pytest.approx(0.1)
    assert result.inside[0] == pytest.approx(0.1)


def test_localization_counts_empty_maps_and_missing_regions() -> None:
    maps = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    maps[0], maps[1, 0, 0] = 0.0, math.nan
    regions = torch.ones(4, 6, 6, dtype=torch.bool)
    regions[3] = False
    result = localization(maps, regions)
    assert (result.empty_maps, result.without_region) == (2, 1)
    assert result.pointing[:3].tolist() == [0, 0, 1]
    assert np.isnan(result.inside[3])
    summary = result.summary()
    assert summary["pointing"] == pytest.approx(1 / 3)
    json.dumps(summary, allow_nan=False)
    empty = localization(maps[:0], regions[:0]).summary()
    assert empty["inside"] is None
    with pytest.raises(UserError, match="one region"):
        localization(maps, regions[:2])
