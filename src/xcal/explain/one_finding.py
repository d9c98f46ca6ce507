"""One finding of a network that tells several at once, as a question of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OneFinding(nn.Module):
    """The network with two answers, (N, 2): that the finding is absent, and that it is there.

    Their softmax is the finding's own probability, and a map of the second is a map of the finding.
    """

    head_layer = None  # not one linear layer any more: maps are made of gradients

    def __init__(self, network: nn.Module, finding: int) -> None:
        super().__init__()
        self.network, self.finding = network, finding
        layer = getattr(network, "cam_layer", None)
        self.cam_layer = None if layer is None else f"network.{layer}"
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        there = self.network(images)[:, self.finding]
        return torch.stack([torch.zeros_like(there), there], dim=1)
