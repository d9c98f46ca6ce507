"""Draws larger than what goes through the network at once: the same sums, in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from private_loop import N, data, network, private, train
from xcal.dp.clipping import OpenPass
from xcal.dp.refusals import Refused

CLIP = 0.3


def focal(output: Tensor, target: Tensor) -> Tensor:
    p = F.cross_entropy(output, target, reduction="none")
    return (1 - torch.exp(-p)) ** 2 * p


LOSSES: dict[str, Any] = {
    "cross-entropy": (None, nn.CrossEntropyLoss()),
    "several findings": (torch.arange(3 * N).view(N, 3).double() % 2, nn.BCEWithLogitsLoss()),
    "own function": (None, focal),
}


def gradients(
    at_once: int | None,
    *,
    kind: str = "cross-entropy",
    groups: list[int] | None = None,
    module: Callable[[], nn.Module] = network,
    images: Tensor | None = None,
    call: Callable[[nn.Module, Tensor], Any] = lambda model, x: model(x),
) -> list[Tensor]:
    """One step's released gradient, all units drawn, next to no noise."""
    targets, criterion = LOSSES[kind]
    shown, labels = data(targets)[:]
    shown = (shown if images is None else images).double()
    model = module().double()
    engine = xcal.PrivacyEngine(seed=0, max_physical_batch_size=at_once)
    model_, _, criterion_, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(shown, labels), batch_size=N),
        noise_multiplier=1e-12,
        max_grad_norm=CLIP,
        groups=groups,
    )
    x, y = next(iter(loader))
    torch.manual_seed(11)
    criterion_(call(model_, x), y).backward()
    return [p.grad for p in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert any(bool(g.any()) for g in one)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["cross-entropy", "several findings", "own function"])
@pytest.mark.parametrize("at_once", [1, 7, 39])
def test_parts_add_up_to_the_whole(kind: str, at_once: int) -> None:
    assert_same(gradients(at_once, kind=kind), gradients(None, kind=kind))


@pytest.mark.parametrize("at_once", [2, 7])
def test_units_stay_whole(at_once: int) -> None:
    """Of three records each, in any order; also those larger than a part."""
    groups = [(7 * i) % N // 3 for i in range(N)]
    assert_same(gradients(at_once, groups=groups), gradients(None, groups=groups))


def test_a_record_that_is_not_finite_spoils_nothing() -> None:
    images = data()[:][0]
    images[5] = float("nan")
    images[9, 0, 0, 0] = float("inf")
    assert_same(gradients(6, images=images), gradients(None, images=images))


def test_several_calls_of_one_draw() -> None:
    def twice(model: nn.Module, x: Tensor) -> Tensor:
        answer: Tensor = model(x) + 0.5 * model(-x)
        return answer

    assert_same(gradients(9, call=twice), gradients(None, call=twice))


def test_no_more_than_so_many_go_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    model = network()
    model[0].register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    recorded: list[int] = []
    first = OpenPass.finish

    def finish(self: OpenPass, losses: Tensor) -> Any:
        recorded.append(len(losses))
        return first(self, losses)

    monkeypatch.setattr(OpenPass, "finish", finish)
    made = private(
        xcal.PrivacyEngine(seed=0, max_physical_batch_size=5),
        module=model,
        loader=DataLoader(data(), batch_size=N),
        epochs=3,
    )
    recorded.clear()  # without the rows that were made up before
    assert train(made, epochs=3) == 3
    assert max(seen) <= 5 and recorded == [5] * 24  # 40 records in 8 parts, three times


def dropping() -> nn.Module:
    return nn.Sequential(network(), nn.Dropout(0.5))


def test_dropout_draws_the_same_both_times() -> None:
    """Where it did not, a gradient would be of other outputs than the losses."""
    model = dropping().double()
    images, labels = data()[:]
    engine = xcal.PrivacyEngine(seed=0, max_physical_batch_size=8)
    model_, _, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=lambda output, _: output.sum(1),
        data_loader=DataLoader(TensorDataset(images.double(), labels), batch_size=N),
        noise_multiplier=1e-14,
        max_grad_norm=1e3,
    )
    x, y = next(iter(loader))
    output = model_(x)
    kept = (output.detach() != 0).double()  # which outputs were not dropped
    state = torch.get_rng_state()
    criterion(output, y).backward()
    assert torch.equal(state, torch.get_rng_state())
    whole = network().double()
    want = torch.autograd.grad((whole(x) * kept * 2).sum(), list(whole.parameters()))
    for p, g in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad * N, g, rtol=1e-9, atol=1e-9)


def test_under_autocast() -> None:
    found = []
    for at_once in (None, 7):
        model = network()
        engine = xcal.PrivacyEngine(seed=0, max_physical_batch_size=at_once)
        model_, _, criterion, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=N),
            noise_multiplier=1e-6,
            max_grad_norm=CLIP,
        )
        x, y = next(iter(loader))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model_(x), y)
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float((found[0] - found[1]).norm()) < 1e-2 * float(found[0].norm())


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(x.flatten(1))
        return answer - answer.mean(0)


def test_what_mixes_rows_is_refused_all_the_same() -> None:
    with pytest.raises(Refused):
        gradients(7, module=Mixing)


def test_what_cannot_be_taken_apart_says_how_to_take_it_whole() -> None:
    def chained(model: nn.Module, x: Tensor) -> Tensor:
        return model(x + model(x).sum(1).view(-1, 1, 1, 1))

    with pytest.raises(Refused, match="max_physical_batch_size"):
        gradients(7, call=chained)


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_a_number_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(Refused):
        xcal.PrivacyEngine(max_physical_batch_size=value)
