"""Frozen weights are fingerprinted once, and again when something was written into them."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from xcal.models.backbone import Split, kept_digest, split_backbone
from xcal.models.efficientnet import efficientnet_b0


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
