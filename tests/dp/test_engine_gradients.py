"""What the optimizer is given: the clipped sum of unit gradients of any per-sample loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from private_loop import N, data, network

CLIP = 0.3


def targets(kind: str) -> Tensor:
    torch.manual_seed(5)
    if kind == "classes":
        return torch.randint(0, 3, (N,))
    if kind == "soft":
        return torch.rand(N, 3, dtype=torch.float64).softmax(1)
    if kind == "findings":
        return torch.randint(0, 2, (N, 3)).double()
    return torch.randn(N, 3, dtype=torch.float64) / 3  # fractions: cut to integers they would be 0


def focal(output: Tensor, target: Tensor) -> Tensor:
    """A function of the user's own: one number per sample."""
    p = F.cross_entropy(output, target, reduction="none")
    return (1 - torch.exp(-p)) ** 2 * p


LOSSES: dict[str, tuple[str, Callable[..., Any], Callable[..., Tensor]]] = {
    "cross-entropy": ("classes", nn.CrossEntropyLoss(), F.cross_entropy),
    "class weights": (
        "classes",
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 4.0]).double()),
        lambda o, t: F.cross_entropy(
            o, t, weight=torch.tensor([0.1, 1.0, 4.0]).double(), reduction="none"
        ).sum(),
    ),
    "label smoothing": (
        "classes",
        nn.CrossEntropyLoss(label_smoothing=0.3),
        lambda o, t: F.cross_entropy(o, t, label_smoothing=0.3),
    ),
    "soft targets": ("soft", nn.CrossEntropyLoss(), F.cross_entropy),
    "several findings": (
        "findings",
        nn.BCEWithLogitsLoss(),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t),
    ),
    "regression": ("numbers", nn.MSELoss(), lambda o, t: F.mse_loss(o, t)),
    "own function": ("classes", focal, lambda o, t: focal(o, t).sum()),
}


def expected(
    model: nn.Module, images: Tensor, labels: Tensor, groups: list[int], loss: Callable[..., Tensor]
) -> list[Tensor]:
    """One record at a time, by plain autograd; units are averaged, clipped, summed."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for unit in sorted(set(groups)):
        own = [i for i, g in enumerate(groups) if g == unit]
        parts = []
        for i in own:
            value = loss(model(images[i : i + 1]), labels[i : i + 1])
            parts.append(torch.autograd.grad(value, list(model.parameters())))
        mean = [torch.stack(column).mean(0) for column in zip(*parts, strict=True)]
        norm = float(torch.cat([g.flatten() for g in mean]).norm())
        for sum_, g in zip(total, mean, strict=True):
            sum_ += g * min(1.0, CLIP / norm)
    return total


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_is_that_of_one_record_at_a_time(name: str, by_group: bool) -> None:
    kind, criterion, loss = LOSSES[name]
    images, labels = data(targets(kind))[:]
    images = images.double()
    groups = [i // 3 for i in range(N)] if by_group else list(range(N))
    model = network().double()
    want = expected(model, images, labels, groups, loss)
    # One batch an epoch draws everyone; noise of 1e-13 is beyond what is compared.
    model_, _, criterion_, loader = xcal.PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(images, labels), batch_size=N),
        noise_multiplier=1e-12,
        max_grad_norm=CLIP,
        groups=groups if by_group else None,
    )
    x, y = next(iter(loader))
    assert len(x) == N
    criterion_(model_(x), y).backward()
    units = len(set(groups))
    for parameter, value in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, value / units, rtol=1e-10, atol=1e-10)


def test_a_record_that_is_not_finite_adds_nothing_and_spoils_nothing() -> None:
    images, labels = data()[:]
    images = images.double()
    broken = images.clone()
    broken[7] = float("nan")
    broken[11, 0, 0, 0] = float("inf")
    whole = [i for i in range(N) if i not in (7, 11)]
    model = network().double()
    want = expected(model, images[whole], labels[whole], whole, F.cross_entropy)
    model_, _, criterion, loader = xcal.PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(broken, labels), batch_size=N),
        noise_multiplier=1e-12,
        max_grad_norm=CLIP,
    )
    x, y = next(iter(loader))
    criterion(model_(x), y).backward()
    for parameter, value in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, value / N, rtol=1e-10, atol=1e-10)


def test_one_unit_moves_the_sum_by_at_most_its_norm() -> None:
    """In single precision, with outliers; whatever a unit holds, by `max_grad_norm` at most."""
    images, labels = data()[:]
    images[:3] *= 1e4
    groups = [i // 2 for i in range(N)]
    found = []
    for left_out in (None, 0):
        shown = images.clone()
        if left_out is not None:
            shown[:2] = float("nan")  # a null unit: drawn, and adds nothing
        model = network()
        model_, _, criterion, loader = xcal.PrivacyEngine(seed=0).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(reduction="sum"),
            loss_reduction="sum",
            data_loader=DataLoader(TensorDataset(shown, labels), batch_size=N),
            noise_multiplier=1e-9,
            max_grad_norm=CLIP,
            groups=groups,
        )
        x, y = next(iter(loader))
        criterion(model_(x), y).backward()
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    assert 0 < float((found[0] - found[1]).norm()) <= CLIP


def test_losses_of_one_draw_add_up() -> None:
    """Two heads' losses, one backward pass, one release."""
    images, labels = data()[:]
    model = network().double()
    want = expected(
        model,
        images.double(),
        labels,
        list(range(N)),
        lambda o, t: 0.5 * F.cross_entropy(o, t) + o.square().mean(),
    )
    model_, _, criterion, loader = xcal.PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=lambda o, t: F.cross_entropy(o, t, reduction="none"),
        data_loader=DataLoader(TensorDataset(images.double(), labels), batch_size=N),
        noise_multiplier=1e-12,
        max_grad_norm=CLIP,
    )
    x, y = next(iter(loader))
    output = model_(x)
    squared = type(criterion)(lambda o: o.square().mean(1), "mean", criterion._steps)
    (0.5 * criterion(output, y) + squared(output)).backward()
    for parameter, value in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, value / N, rtol=1e-10, atol=1e-10)
