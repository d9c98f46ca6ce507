"""The engine equals one unit at a time, for the networks the project ships."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.reference import norm, one_at_a_time, unit_gradients
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18
from xcal.models.weights import load_published, read_weights

BUILDERS = {"resnet18": resnet18, "efficientnet_b0": efficientnet_b0}
SLOW_RESNET = [pytest.param("resnet18", marks=pytest.mark.slow), "efficientnet_b0"]
SLOW_EFFICIENTNET = ["resnet18", pytest.param("efficientnet_b0", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(count, pixels=32, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, pixels, pixels, generator=generator, dtype=dtype)
    return images, torch.randint(0, 5, (count,), generator=generator)


def assert_close(found, expected, tolerance=1e-10):
    assert list(found) == list(expected)
    scale = max(float(part.abs().max()) for part in expected.values())
    for name, part in expected.items():
        assert found[name].shape == part.shape, name
        worst = float((found[name] - part).abs().max())
        assert worst <= tolerance * max(1.0, scale), (name, worst)


@pytest.mark.parametrize("network", BUILDERS)
@pytest.mark.parametrize(
    ("norm_kind", "output_stride"),
    [
        ("group", 32),
        pytest.param("group", 16, marks=pytest.mark.slow),
        pytest.param("frozen", 32, marks=pytest.mark.slow),
        ("frozen", 16),
    ],
)
def test_both_networks_equal_one_image_at_a_time(network, norm_kind, output_stride):
    model = BUILDERS[network](
        5, norm=norm_kind, output_stride=output_stride, train_norm_affine=True, seed=1
    ).double()
    images, labels = batch(3)
    lengths = [norm(gradient) for gradient in unit_gradients(model, images, labels)]
    norms = torch.tensor(lengths, dtype=torch.float64)
    clip = float(norms.median())  # some units are clipped, some are not
    found = ClippingEngine(model).clipped_sum(images, labels, clip=clip)
    assert_close(found.gradients, one_at_a_time(model, images, labels, clip=clip))
    torch.testing.assert_close(found.norms, norms, rtol=1e-10, atol=0)
    assert not found.dropped.any()


@pytest.mark.parametrize("network", BUILDERS)
@pytest.mark.parametrize("trainable", ["head", "head+norm", "last:2"])
@pytest.mark.parametrize("norm_kind", ["group", "frozen"])
def test_frozen_parts_are_left_out(network, trainable, norm_kind):
    model = BUILDERS[network](5, norm=norm_kind, trainable=trainable, seed=2).double()
    images, labels = batch(2)
    found = ClippingEngine(model).clipped_sum(images, labels, clip=0.5)
    expected = one_at_a_time(model, images, labels, clip=0.5)
    assert_close(found.gradients, expected)
    assert set(found.gradients) == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("network", SLOW_EFFICIENTNET)
@pytest.mark.parametrize("chunk", [pytest.param(256, marks=pytest.mark.slow), 3])
def test_groups_of_images_give_one_clipped_gradient(network, chunk):
    model = BUILDERS[network](5, seed=3).double()
    images, labels = batch(8)
    units = torch.tensor([4, 0, 0, 2, 4, 4, 4, 1])  # unit 3 was not drawn, unit 4 exceeds a chunk
    found = ClippingEngine(model, chunk=chunk).clipped_sum(
        images, labels, clip=6.0, units=units, n_units=6, capture=model.cam_layer
    )
    assert_close(found.gradients, one_at_a_time(model, images, labels, clip=6.0, units=units))
    expected = [norm(g) for g in unit_gradients(model, images, labels, units)]
    torch.testing.assert_close(found.norms[:5], torch.tensor(expected, dtype=torch.float64))
    assert found.norms[5] == 0
    assert not found.dropped.any()
    with torch.no_grad():
        torch.testing.assert_close(found.logits, model(images))
        features = {}
        layer = model.get_submodule(model.cam_layer)
        handle = layer.register_forward_hook(lambda *hooked: features.update(map=hooked[2]))
        model(images)
        handle.remove()
    torch.testing.assert_close(found.features, features["map"])


@pytest.mark.parametrize("network", SLOW_RESNET)
def test_chunks_change_nothing(network):
    model = BUILDERS[network](5, seed=4).double()
    images, labels = batch(7)
    whole = ClippingEngine(model).clipped_sum(images, labels, clip=3.0, capture=model.cam_layer)
    parts = ClippingEngine(model, chunk=3).clipped_sum(
        images, labels, clip=3.0, capture=model.cam_layer
    )
    assert_close(parts.gradients, whole.gradients, 1e-12)
    torch.testing.assert_close(parts.norms, whole.norms)
    torch.testing.assert_close(parts.logits, whole.logits)
    torch.testing.assert_close(parts.features, whole.features)


@pytest.mark.parametrize("network", BUILDERS)
def test_without_clipping_it_is_the_ordinary_gradient(network):
    model = BUILDERS[network](5, seed=5).double()
    images, labels = batch(4)
    found = ClippingEngine(model).clipped_sum(images, labels, clip=float("inf"))
    loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="sum")
    ordinary = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    assert_close(found.gradients, dict(zip(names, ordinary, strict=True)))


@pytest.mark.parametrize("network", BUILDERS)
@pytest.mark.parametrize("brightness", [pytest.param(1.0, marks=pytest.mark.slow), 300.0])
def test_float32_contributions_stay_within_the_clip(network, brightness):
    """Explicit float32 gradients, scaled by the engine's factors, never exceed C."""
    clip = 1.0
    for norm_kind in ("group", "frozen"):
        model = BUILDERS[network](5, norm=norm_kind, train_norm_affine=True, seed=6)
        images, labels = batch(6, pixels=64, dtype=torch.float32)
        images = images * brightness + brightness
        found = ClippingEngine(model).clipped_sum(images, labels, clip=clip)
        factors = (clip / (1 + 1e-3) / found.norms).clamp_max(1)
        for factor, gradient in zip(factors, unit_gradients(model, images, labels), strict=True):
            assert float(factor) * norm(gradient) <= clip
        for one in range(2):
            part = slice(one, one + 1)
            alone = ClippingEngine(model).clipped_sum(images[part], labels[part], clip=clip)
            assert norm(alone.gradients) <= clip


@pytest.mark.data
@pytest.mark.skipif("XCAL_DATA" not in os.environ, reason="XCAL_DATA is not set")
def test_published_weights_load_and_are_clipped_right():
    path = Path(os.environ["XCAL_DATA"]) / "weights" / "efficientnet_b0-imagenet.pth"
    model = efficientnet_b0(5, norm="frozen", train_norm_affine=True, seed=7)
    head = model.classifier[1].weight.detach().clone()
    load_published(model, read_weights(path))
    assert torch.equal(model.classifier[1].weight, head)
    model = model.double()
    images, labels = batch(3, pixels=64)
    expected = one_at_a_time(model, images, labels, clip=2.0)
    found = ClippingEngine(model).clipped_sum(images, labels, clip=2.0)
    assert_close(found.gradients, expected)
