"""Clipping holds for weights a hostile server would choose, and for networks that cheat."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from support import TINY, Micro
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.tape import squared_lengths
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.setup import prepare


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


def length(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


class Flat(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.flatten(1))


@pytest.mark.parametrize("huge", [1e12, 1e17, 1e20, 1e25, 1e30, 1e37])
@pytest.mark.parametrize("clip", [1.0, 1e-6])
def test_one_huge_image_of_a_unit_does_not_hide_another(huge: float, clip: float) -> None:
    """Beside the square of the huge one the other's underflows, but its gradient is the unit's."""
    head = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:, 7] = torch.tensor([1.0, -1.0])
    images = torch.zeros(2, 8, 1, 1)
    images[0, 0], images[1, 7] = 1e6, huge  # undecided, and certain
    found = ClippingEngine(Flat(head)).clipped_sum(
        images, torch.tensor([0, 0]), clip=clip, units=torch.tensor([0, 0]), n_units=1
    )
    assert length(found.gradients) <= clip


@pytest.mark.parametrize("power", [1e10, 1e17, 1e19, 1e22, 3e22, 1e23])
@pytest.mark.parametrize("clip", [1.0, 1e-6])
def test_a_norm_beyond_float32_is_not_rounded_up_to_one_that_counts(
    power: float, clip: float
) -> None:
    """Scaled down by 10^45, a factor in float32 has no bits left to be right with."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        first.weight.zero_()
        second.weight.zero_()
        first.weight[0, 0] = 1e-30
        second.weight[:, 0] = torch.tensor([power, -power])
    images = torch.zeros(3, 4, 1, 1)
    images[:, 0], images[:, 1] = 1.0, power
    engine = ClippingEngine(Flat(first, second))
    found = engine.clipped_sum(images, torch.zeros(3, dtype=torch.long), clip=clip)
    assert length(found.gradients) <= 3 * clip
    together = torch.zeros(3, dtype=torch.long)
    for chunk in (1, 256):  # a unit larger than a chunk is clipped in another place
        one = ClippingEngine(Flat(first, second), chunk=chunk).clipped_sum(
            images, torch.zeros(3, dtype=torch.long), clip=clip, units=together, n_units=1
        )
        assert length(one.gradients) <= clip


class TwoPixels(nn.Module):
    """A pointwise layer whose output gradients at its two pixels are opposite."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.head = nn.Linear(2 * channels, 2, bias=False)
        self.head.weight.requires_grad_(False)
        signs = torch.tensor([1.0, -1.0]).repeat(channels)
        with torch.no_grad():
            self.conv.weight.zero_()
            self.head.weight.copy_(torch.stack([signs, -signs]))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).flatten(1))


# Found by a search over two numbers: the roundings of float32 inner products of so many equal
# numbers all go the same way, and hid three quarters of the norm behind two terms that cancel.
COHERENT = {
    128: (3.947321891784668, 3.9571900367736816),
    256: (1.9075360298156738, 1.9145803451538086),
    512: (1.8997864723205566, 1.9089128971099854),
    1280: (3.5492467880249023, 3.5775938034057617),
}


@pytest.mark.parametrize("channels", COHERENT)
@pytest.mark.parametrize("clip", [1.0, 1e-2, 1e-6])
def test_roundings_that_agree_do_not_hide_a_norm(channels: int, clip: float) -> None:
    image = torch.tensor(COHERENT[channels]).expand(1, channels, 1, 2).contiguous()
    found = ClippingEngine(TwoPixels(channels)).clipped_sum(image, torch.tensor([0]), clip=clip)
    assert length(found.gradients) <= clip


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 64, 3, padding=1, stride=2, bias=False)
        self.third = nn.Conv2d(64, 64, 1, bias=False)
        self.head = nn.Linear(64, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(images))).mean(dim=(2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 2, bias=False)
        self.first = nn.Linear(4, 16)
        self.token = nn.Parameter(torch.ones(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gamma = nn.Parameter(torch.ones(16))
        self.second = nn.Linear(16, 40, bias=False)
        self.norm = nn.LayerNorm(40)
        self.head = nn.Linear(40, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.up(images)[..., ::3, ::3].flatten(2).mT)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.gamma * self.attention(x, x, x)[0]
        return self.head(self.norm(self.second(x)).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Layers, Transformer])
def test_no_weights_at_all_carry_a_unit_past_the_norm(kind: type[nn.Module]) -> None:
    """Weights, channels and pixels of every size at once, as somebody who searches would try."""
    generator = torch.Generator().manual_seed(5)
    seen = 0
    for trial in range(150):
        network, reach = kind(), 1.0 + trial % 30

        def sizes(*shape: int, reach: float = reach) -> Tensor:
            exponents = (2 * torch.rand(*shape, generator=generator) - 1) * reach
            return torch.pow(10.0, exponents) * torch.randn(*shape, generator=generator)

        with torch.no_grad():
            for parameter in network.parameters():
                width = parameter.shape[0]
                parameter.mul_(sizes(width).view(-1, *[1] * (parameter.dim() - 1)))
        images = torch.rand(4, 3, 6, 6, generator=generator) * (
            torch.rand(4, 1, 6, 6, generator=generator) < 0.5
        )
        labels = torch.randint(3, (4,), generator=generator)
        clip = 10.0 ** -(trial % 4)
        engine = ClippingEngine(network)
        for units in (torch.arange(4), torch.tensor([0, 0, 1, 1]), torch.zeros(4).long()):
            count = int(units.max()) + 1
            for unit in range(count):
                of_it = units == unit
                found = engine.clipped_sum(
                    images[of_it],
                    labels[of_it],
                    clip=clip,
                    units=torch.zeros(int(of_it.sum())).long(),
                    n_units=1,
                )
                assert length(found.gradients) <= clip
                seen += bool(found.norms[0] > clip and not found.dropped[0])
    assert seen > 100  # it was clipping that held them, not dropping


def test_a_unit_is_measured_alike_beside_whatever_other_unit() -> None:
    """How one unit's norm is computed must not depend on another's numbers."""
    torch.manual_seed(3)
    network = Layers()
    images = torch.rand(3, 3, 6, 6)
    labels = torch.tensor([0, 1, 2])
    engine = ClippingEngine(network)
    beside = images.clone()
    beside[1] *= 1e12
    here = engine.clipped_sum(images, labels, clip=1.0).norms
    there = engine.clipped_sum(beside, labels, clip=1.0).norms
    assert torch.equal(here[[0, 2]], there[[0, 2]])


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
        prepare(make_experiment({**TINY, "method": "xcal-steered", "network": "support:careless"}))
