"""`torch.autocast` in bfloat16 around forward and loss: half precision stops at the clipping."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from private_loop import N, data, network, private
from xcal.dp.clipping import OpenPass
from xcal.dp.clipping.tape import Units

CLIP = 0.3


class Tokens(nn.Module):
    """What a ViT is made of: patches, a class token, positions, attention, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 8) / 3)
        self.places = nn.Parameter(torch.randn(1, 10, 8) / 3)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.token.expand(len(t), -1, -1), t], 1) + self.places
        n = self.norm(t)
        t = t + self.attention(n, n, n, need_weights=False)[0]
        answer: Tensor = self.head(t[:, 0])
        return answer


def tokens() -> nn.Module:
    torch.manual_seed(3)
    return Tokens()


def odd_layers() -> nn.Module:
    """Transposed and one-dimensional convolutions, an instance norm, a plain product."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.ConvTranspose2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.PReLU(3), nn.Flatten(2),
        nn.Conv1d(3, 4, 5, stride=4), nn.Flatten(), nn.Linear(60, 3),
    )  # fmt: skip


NETWORKS = {"convolutions": network, "tokens": tokens, "odd layers": odd_layers}


def one_at_a_time(model: nn.Module, images: Tensor, labels: Tensor, groups: list[int]) -> Tensor:
    """Unit gradients by plain autograd under autocast, clipped and added up in float64."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for unit in sorted(set(groups)):
        parts = []
        for i in (i for i, g in enumerate(groups) if g == unit):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = F.cross_entropy(model(images[i : i + 1]), labels[i : i + 1])
            found = torch.autograd.grad(value, list(model.parameters()))
            parts.append(torch.cat([g.flatten().double() for g in found]))
        mean = torch.stack(parts).mean(0)
        total += mean * min(1.0, CLIP / float(mean.norm()))
    return total


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_sum_is_that_of_one_record_at_a_time(name: str, inside: bool, by_group: bool) -> None:
    """`inside`: backward() is called within the context, too, which changes nothing."""
    images, labels = data()[:]
    groups = [i // 3 for i in range(N)] if by_group else list(range(N))
    model = NETWORKS[name]()
    want = one_at_a_time(model, images, labels, groups)
    model_, _, criterion, loader = xcal.PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(images, labels), batch_size=N),
        noise_multiplier=1e-6,
        max_grad_norm=CLIP,
        groups=groups if by_group else None,
    )
    x, y = next(iter(loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model_(x)
        loss = criterion(output, y)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert output.dtype == torch.bfloat16
    got = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    units = len(set(groups))
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    # bfloat16 keeps eight bits; the library rounds each weight gradient to them, this does not.
    assert float((got * units - want).norm()) < 2e-2 * float(want.norm())


def own_contribution(
    model: nn.Module, images: Tensor, labels: Tensor, clip: float, scale: float
) -> Tensor:
    """What one unit adds to the sum: a pass of its own."""
    opened = OpenPass(model, len(images), clip=clip, units=Units(1, torch.zeros_like(labels)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with opened.recording():
            output = model(images)
        losses = F.cross_entropy(output, labels, reduction="none") * scale
    sums = opened.finish(losses).gradients
    assert all(g.dtype == torch.float32 for g in sums.values())
    return torch.cat([g.flatten().double() for g in sums.values()])


@pytest.mark.parametrize("name", NETWORKS)
def test_what_leaves_the_clip_is_never_longer_than_its_norm(name: str) -> None:
    """Units of one and of several records, small and huge, gradients scaled over 60 decades."""
    model = NETWORKS[name]()
    source = torch.Generator().manual_seed(9)
    longest = 0.0
    for trial in range(30):
        rows = 1 + trial % 3
        images = torch.randn(rows, 1, 6, 6, generator=source) * 10.0 ** (trial % 7 - 3)
        labels = torch.randint(0, 3, (rows,), generator=source)
        clip = 10.0 ** (trial % 5 - 3)
        found = own_contribution(model, images, labels, clip, 10.0 ** (4 * (trial % 6) - 8))
        length = float(found.norm())
        assert length <= clip
        longest = max(longest, length / clip)
    assert longest > 0.99  # and it was clipped, not thrown away


def test_one_unit_moves_the_sum_by_at_most_its_norm() -> None:
    """In a whole batch, with outliers."""
    images, labels = data()[:]
    images[:3] *= 1e4
    found = []
    for shown in (images, images.clone()):
        if found:
            shown[0] = float("nan")  # a null unit: drawn, and adds nothing
        model = network()
        model_, _, criterion, loader = xcal.PrivacyEngine(seed=0).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(reduction="sum"),
            loss_reduction="sum",
            data_loader=DataLoader(TensorDataset(shown, labels), batch_size=N),
            noise_multiplier=1e-9,
            max_grad_norm=CLIP,
        )
        x, y = next(iter(loader))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model_(x), y)
        loss.backward()
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    assert 0 < float((found[0] - found[1]).norm()) <= CLIP


def test_a_loop_under_autocast_trains_and_is_charged() -> None:
    engine = xcal.PrivacyEngine(seed=0)
    model, optimizer, criterion, loader = private(engine)
    before = [p.clone() for p in model.parameters()]
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    assert engine.steps == 5 and 0 < engine.get_epsilon(1e-3) <= 5.0
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved) and all(p.dtype == torch.float32 for p in model.parameters())
