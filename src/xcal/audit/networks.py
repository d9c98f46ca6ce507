"""The network that gradient inversion was first shown on: LeNet with smooth activations.

Gradients of smooth networks without normalization carry the picture itself, brightness and all, so
an attack that fails here because of the noise fails because of the noise and not because of the
network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xcal.models.layers import laid_out


class SmoothLeNet(nn.Module):
    """5×5 convolutions with sigmoids down to an 8×8 map, then one linear layer on all of it."""

    cam_layer = "body"
    head_layer: str | None = None  # no average pooling: maps come by autograd

    def __init__(self, classes: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stride in strides:
            layers += [nn.Conv2d(before, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
            before = 12
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(12 * 8 * 8, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).flatten(1))
        return logits


def _build(classes: int, strides: tuple[int, ...], seed: int | None) -> nn.Module:
    network = laid_out(lambda: SmoothLeNet(classes, strides))
    generator = torch.Generator().manual_seed(0 if seed is None else seed)
    with torch.no_grad():
        # A fifth of the reach that the attack's authors chose: sigmoids that do not saturate leak
        # more, and the attack should be given its best case.
        for parameter in network.parameters():
            parameter.uniform_(-0.1, 0.1, generator=generator)
    return network


def lenet32(classes: int, *, seed: int | None = None) -> nn.Module:
    """For pictures of 32 pixels a side."""
    return _build(classes, (2, 2, 1), seed)


def lenet64(classes: int, *, seed: int | None = None) -> nn.Module:
    """For pictures of 64 pixels a side."""
    return _build(classes, (2, 2, 2), seed)
