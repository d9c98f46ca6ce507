"""Clipping holds for weights a hostile server would choose, and for networks that cheat."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from support import TINY, Micro
from xcal.config import make_experiment
from xcal.errors import UserError
from xcal.federation.setup import prepare
from xcal.training.clipping import ClippingEngine
from xcal.training.clipping.book import squared_lengths


class Wide(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pre = nn.Conv2d(3, channels, 1, bias=False)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.head = nn.Linear(channels, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(self.pre(images)).mean(dim=(2, 3)))


@pytest.mark.parametrize("power", [1e17, 1e10, 1.0, 1e-10, 1e-17])
@pytest.mark.parametrize("per_unit", [1, 3])
def test_products_that_underflow_do_not_hide_a_norm(power: float, per_unit: int) -> None:
    """Huge activations times vanishing output gradients: the weight gradient is neither."""
    channels = 128
    network = Wide(channels)
    with torch.no_grad():
        network.pre.weight.fill_(power)
        network.conv.weight.zero_()
        network.head.weight.fill_(5.0)
        network.head.weight[1].neg_()
        network.head.bias.copy_(torch.tensor([50.0, 0.0]))
    images, labels = torch.ones(per_unit, 3, 5, 5), torch.zeros(per_unit, dtype=torch.long)
    units = torch.zeros(per_unit, dtype=torch.long)
    for clip in (1.0, 1e-2, 1e-4, 1e-9):
        found = ClippingEngine(network).clipped_sum(
            images, labels, clip=clip, units=units, n_units=1
        )
        squares = [float(g.double().square().sum()) for g in found.gradients.values()]
        assert math.sqrt(sum(squares)) <= clip


@pytest.mark.parametrize("size", [100, 16_384, 1_179_648, 2_359_296])
def test_long_rows_are_measured_to_a_millionth(size: int) -> None:
    for value in (0.1, 0.37, 1e-4, 3.0):
        row = torch.full((1, 1, size), value)
        exact = float(row[0, 0, 0].double()) ** 2 * size
        assert float(squared_lengths(row)) == pytest.approx(exact, rel=2e-5)


class Careless(Micro):
    cheat = "mix"

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.drop = nn.Dropout(0.5 if self.cheat == "module" else 0.0)

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(self.drop(images))
        if self.cheat == "mix":
            return logits - logits.mean(dim=0)
        if self.cheat == "chance":
            return nn.functional.dropout(logits, 0.5, self.training)
        return logits


def careless(classes: int, *, seed: int | None = None) -> nn.Module:
    return Careless(classes)


@pytest.mark.parametrize(
    ("cheat", "says"), [("mix", "mixes"), ("chance", "at random"), ("module", "'drop'")]
)
def test_networks_that_mix_or_draw_are_refused(
    cheat: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "cheat", cheat)
    monkeypatch.setattr("support.careless", careless, raising=False)
    with pytest.raises(UserError, match=says):
        prepare(make_experiment({**TINY, "method": "xcal", "network": "support:careless"}))
