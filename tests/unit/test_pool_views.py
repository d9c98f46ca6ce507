"""`pool_views`: a network that reads the mean over an image's views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xcal
from xcal.dp.clipping import ClippingEngine
from xcal.errors import UserError
from xcal.explain.gradcam import gradcam_maps
from xcal.models.backbone import split_backbone
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.small import small
from xcal.models.views import POOLED, FixedView, OverViews

IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("view", POOLED["mirrored-turns"])
def test_a_map_is_turned_back_onto_its_image(view: FixedView) -> None:
    assert torch.equal(view.undo(view.of(IMAGES)), IMAGES)


def test_the_views_differ_and_the_plain_one_is_first() -> None:
    for views in POOLED.values():
        shown = [view.of(IMAGES) for view in views]
        assert torch.equal(shown[0], IMAGES)
        assert all(not torch.equal(a, b) for i, a in enumerate(shown) for b in shown[:i])
        assert all(one.shape == IMAGES.shape for one in shown)


def test_the_head_reads_the_mean_of_what_it_would_read_of_each_view() -> None:
    network = small(4, seed=1).double()
    images = IMAGES.double()
    pooled = OverViews(network, "turns")
    each = torch.stack([network(view.of(images)) for view in POOLED["turns"]])
    # Logits are affine in what the head reads, so their mean is the mean's.
    assert torch.allclose(pooled(images), each.mean(0), atol=1e-12)


def test_a_turned_image_has_the_same_logits_and_a_turned_map() -> None:
    network = OverViews(small(4, seed=1).double(), "mirrored-turns")
    images = IMAGES.double()
    turned = FixedView(mirrored=True, turns=1)
    assert torch.allclose(network(images), network(turned.of(images)), atol=1e-12)
    maps = gradcam_maps(network, images)
    there = gradcam_maps(network, turned.of(images))
    assert torch.allclose(turned.of(maps.unsqueeze(1)), there.unsqueeze(1), atol=1e-5)


@pytest.mark.parametrize("train", ["head", "last:1", "all"])
def test_clipped_sums_equal_one_image_at_a_time(train: str) -> None:
    network: nn.Module
    if train == "all":
        network = OverViews(small(3, seed=2).double(), "shifts")
    else:
        inner = efficientnet_b0(3, norm="frozen", trainable=train, seed=2).double().eval()
        network = OverViews(inner, "shifts")
    images, labels = IMAGES.double(), torch.tensor([0, 2, 1])
    found = ClippingEngine(network).clipped_sum(images, labels, clip=0.05)
    weights = {n: p for n, p in network.named_parameters() if p.requires_grad}
    expected = {n: torch.zeros_like(p) for n, p in weights.items()}
    for image, label in zip(images, labels, strict=True):
        loss = nn.functional.cross_entropy(network(image[None]), label[None])
        slopes = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.sqrt(sum((s**2).sum() for s in slopes))
        for name, slope in zip(weights, slopes, strict=True):
            expected[name] += slope * min(1.0, 0.05 / float(norm))
    for name, value in expected.items():
        assert torch.allclose(found.gradients[name], value, atol=1e-10), name


def test_what_is_frozen_is_asked_once_and_kept_merged() -> None:
    inner = efficientnet_b0(3, norm="frozen", trainable="head", seed=2).eval()
    network = OverViews(inner, "turns")
    split = split_backbone(network)
    assert split is not None
    kept = split.begin(IMAGES)
    assert kept.shape == (3, 1280)
    assert torch.equal(split.forward_head(kept), network(IMAGES))
    seen = split_backbone(network, seen="map")
    assert seen is not None
    assert seen.begin(IMAGES).shape == (3, 1280, 1, 1)


def test_a_network_that_is_no_sequence_is_refused() -> None:
    class Tangled(nn.Module):
        cam_layer = "a"

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 2, 1)

    with pytest.raises(UserError, match="segments"):
        OverViews(Tangled(), "turns")


def test_a_run_with_pooled_views_trains_and_loads(tmp_path) -> None:
    xcal.run(
        tmp_path / "run",
        method="fl-dp",
        pool_views="turns",
        pixels=32,
        train_images=90,
        rounds=1,
        expected_batch_size=16,
        road_images=0,
        road_test_images=4,
        validation_images=10,
        unit="record",
    )
    network = xcal.load(tmp_path / "run").model
    turned = FixedView(turns=1).of(IMAGES)
    assert torch.allclose(network(IMAGES), network(turned), atol=1e-5)
