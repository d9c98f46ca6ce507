"""The network `small`: its contract with explanations and with privacy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xcal.models.small import small


def test_parts_are_those_that_private_training_handles():
    network = small(4, seed=0)
    allowed = (nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.AdaptiveAvgPool2d, nn.Linear)
    leaves = [m for m in network.modules() if not list(m.children())]
    assert all(isinstance(m, allowed) for m in leaves)
    assert not list(network.buffers())
    assert 20_000 <= sum(p.numel() for p in network.parameters()) <= 100_000


@pytest.mark.parametrize("pixels", [28, 64, 128])
def test_the_cam_layer_feeds_the_head_through_average_pooling(pixels):
    network = small(3, seed=1)
    images = torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    seen = []
    hook = network.get_submodule(network.cam_layer).register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.detach())
    )
    logits = network(images)
    hook.remove()
    assert logits.shape == (2, 3)
    (features,) = seen
    assert (features >= 0).all()
    assert min(features.shape[2:]) >= min(8, pixels // 8)
    head = network.get_submodule(network.head_layer)
    assert torch.allclose(logits, head(features.mean((2, 3))), atol=1e-5)


def test_weights_follow_the_seed_and_leave_the_global_state_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, again, other, unseeded = small(4, seed=7), small(4, seed=7), small(4, seed=8), small(4)
    assert torch.equal(torch.random.get_rng_state(), before)
    same = zip(one.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert not torch.equal(one.head.weight, unseeded.head.weight)
    assert all(torch.isfinite(p).all() and p.requires_grad for p in unseeded.parameters())


def test_an_image_is_classified_alike_whatever_stands_beside_it():
    network = small(4, seed=0).train()
    images = torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    together = network(images)
    alone = torch.cat([network(image[None]) for image in images])
    assert torch.allclose(together, alone, atol=1e-5)
