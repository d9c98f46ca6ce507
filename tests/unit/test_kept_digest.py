"""Frozen weights are fingerprinted once, and again when something was written into them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from xcal.data.augment import View
from xcal.methods.client_data import Inputs
from xcal.methods.feature_store import FeatureStore
from xcal.models.backbone import Split, kept_digest, split_at_map, split_backbone
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18


def made(seed: int = 0) -> nn.Module:
    return efficientnet_b0(2, norm="frozen", trainable="head", head_reads="stages:4-6", seed=seed)


def split(network: nn.Module) -> Split:
    found = split_backbone(network)
    assert found is not None
    return found


def test_a_digest_follows_what_is_written() -> None:
    network = made()
    before = split(network).digest()
    assert split(network).digest() == before == split(made()).digest()
    assert split(made(1)).digest() != before
    weight = next(network.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    assert split(network).digest() != before
    with torch.no_grad():
        weight.copy_(kept)
    assert split(network).digest() == before
    mean = next(iter(network.buffers()))
    mean.add_(1)
    assert split(network).digest() != before


def test_it_is_taken_once_and_frees_what_it_was_taken_of() -> None:
    tensors, taken = [torch.zeros(2), torch.ones(3)], []

    def take() -> str:
        taken.append(1)
        return "digest"

    for _ in range(3):
        assert kept_digest("a", tensors, take) == "digest"
    assert len(taken) == 1
    kept_digest("b", tensors, take)
    kept_digest("a", tensors[:1], take)
    assert len(taken) == 3
    gone = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize("cut", [split_backbone, split_at_map])
def test_the_same_weights_at_another_stride_are_another_beginning(
    cut: Callable[..., Split | None], tmp_path: Path
) -> None:
    """Kept on disk or in memory, their features are not mistaken for one another."""
    pixels = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3), dtype=np.uint8)
    numbers, plain = np.arange(3), np.zeros(3, dtype=np.int64)
    store = FeatureStore(tmp_path)
    for stride in (32, 16):
        network = resnet18(2, norm="frozen", output_stride=stride, trainable="head", seed=0).eval()
        found = cut(network)
        assert found is not None
        for kept_in in (store, None):
            inputs = Inputs(pixels, (View(),), 1.0, "cpu", kept_in)
            assert inputs.keep(found, 1, 64)
            kept = inputs.activations(numbers, plain)
            torch.testing.assert_close(kept, found.begin(inputs.pictures(numbers, plain)))
