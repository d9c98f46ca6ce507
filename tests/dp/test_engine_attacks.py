"""Loops, networks and losses by which one unit would move more than its norm: refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import xcal
from private_loop import N, data, network, private, train
from xcal.dp.engine import Private
from xcal.dp.refusals import Refused


@pytest.fixture(autouse=True)
def no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds in the loop itself: much of it is refused before, by a rehearsal."""
    monkeypatch.setattr("xcal.dp.engine.rehearse", lambda *_: None)


def refused(code: str, call: Callable[[], Any]) -> None:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code == code, str(caught.value)


def nothing_released(made: Private) -> None:
    assert all(p.grad is None for p in made.module.parameters())


def first(made: Private) -> tuple[Tensor, Tensor]:
    x, y = next(iter(made.data_loader))
    assert len(x) > 2
    return x, y


# Between network and criterion.


@pytest.mark.parametrize(
    "mix",
    [
        lambda o: o - o.mean(0),
        lambda o: o.flip(0),
        lambda o: o + 0.01 * o.roll(1, 0),
        lambda o: o + o[:1],
    ],
    ids=["centered", "flipped", "rolled", "first row"],
)
@pytest.mark.parametrize("late", [False, True])
def test_outputs_combined_across_rows(mix: Callable[[Tensor], Tensor], late: bool) -> None:
    made = private()
    if late:  # after a first step that was as it should be
        train(made, most=1)
        made.optimizer.zero_grad()
    x, y = first(made)
    refused("other-rows", lambda: made.criterion(mix(made.module(x)), y).backward())
    nothing_released(made)


def test_a_consistency_loss_of_two_passes_is_taken_row_by_row_only() -> None:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().mean(1)

    made = private(criterion=distance)
    x, _ = first(made)
    a, b = made.module(x), made.module(x + 0.1)
    refused("other-rows", lambda: made.criterion(a, b.flip(0)).backward())
    a, b = made.module(x), made.module(x + 0.1)
    made.criterion(a, b).backward()
    made.optimizer.step()


class WithBalance(nn.Module):
    """Gives a number of the whole batch beside its scores, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x.flatten(1))
        return scores, scores.softmax(1).mean(0).square().sum()


def test_a_number_of_the_whole_batch_in_the_loss() -> None:
    def balanced(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target, reduction="none") + output[1]

    made = private(module=WithBalance(), criterion=balanced)
    x, y = first(made)
    refused("other-rows", lambda: made.criterion(made.module(x), y).backward())
    nothing_released(made)


def test_an_activation_caught_by_a_hook() -> None:
    module = network()
    kept: list[Tensor] = []
    module[2].register_forward_hook(lambda _m, _i, o: kept.append(o))

    def spread(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    made = private(module=module, criterion=spread)
    x, y = first(made)
    made.module(x)
    caught = kept[-1]
    refused("foreign-loss", lambda: caught.square().mean().backward())
    loss = made.criterion(made.module(x), y)
    loss.per_sample = loss.per_sample + kept[-1].mean(0).square().sum()
    refused("other-rows", loss.backward)
    nothing_released(made)


class TimeFirst(nn.Module):
    """A layer that sees (time, rows, features): time may happen to be as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.squeeze(1).transpose(0, 1)).mean(0)


def test_another_dimension_as_long_as_the_batch() -> None:
    met = 0
    for seed in range(20):
        made = private(xcal.PrivacyEngine(seed=seed), module=TimeFirst())
        x, y = next(iter(made.data_loader))
        if len(x) > 1:
            code = "other-rows" if len(x) == 6 else "network"
            refused(code, lambda made=made, x=x, y=y: made.criterion(made.module(x), y).backward())
            met += len(x) == 6
            nothing_released(made)
    assert met


def test_gradients_changed_on_their_way_by_the_batch() -> None:
    module = network()
    module[2].register_full_backward_hook(lambda _m, i, _o: (i[0] / i[0].norm(),))
    made = private(module=module)
    x, y = first(made)
    refused("other-rows", lambda: made.criterion(made.module(x), y).backward())
    nothing_released(made)


# The criterion.


def test_weights_by_the_classes_of_the_batch() -> None:
    """A class that stands alone in the first batch shows nothing; later ones do."""

    def balanced(output: Tensor, target: Tensor) -> Tensor:
        share = torch.bincount(target, minlength=3)[target]
        return F.cross_entropy(output, target, reduction="none") / share

    labels = torch.arange(N) % 3
    made = private(criterion=balanced, loader=DataLoader(data(labels), batch_size=8))
    made.criterion(torch.randn(3, 3), torch.tensor([0, 1, 2]))
    refused("criterion", lambda: made.criterion(torch.randn(4, 3), torch.tensor([0, 1, 2, 2])))


class Centered(nn.Module):
    """Takes a running mean of outputs away, as self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output - self.center, target, reduction="none")
        self.center = 0.9999 * self.center + 0.0001 * output.detach().mean(0)
        return losses


def test_a_criterion_that_remembers() -> None:
    made = private(criterion=Centered())
    x, y = first(made)
    refused("criterion", lambda: made.criterion(made.module(x), y))


# The network.


class _Hidden:
    """A parameter that no graph shows."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def detach(self) -> Tensor:
        return self.parameter.detach()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "grad":
            self.parameter.grad = value
        else:
            super().__setattr__(name, value)


class OwnBackward(torch.autograd.Function):
    """Writes the gradient of a weight by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: _Hidden) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.weight.grad = (g * ctx.x).sum(0)
        return g * ctx.weight.detach(), None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(36, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(OwnBackward.apply(self.body(x.flatten(1)), _Hidden(self.scale)))


def test_gradients_written_past_the_recorded_pass() -> None:
    made = private(module=Scaled())
    x, y = first(made)
    refused("network", lambda: made.criterion(made.module(x), y).backward())
    nothing_released(made)


class ManifoldMixup(nn.Module):
    """Mixes hidden rows at random, while training only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return self.head(x)


def test_rows_mixed_at_random_inside_the_network() -> None:
    made = private(module=ManifoldMixup())
    x, _ = first(made)
    refused("network", lambda: made.module(x))


class Later(nn.Module):
    """Begins to mix rows after a warm-up that the loop ends."""

    warm = True

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x if self.warm else x - x.mean(0))


def test_a_network_that_begins_to_mix_rows_is_found_at_the_next_look() -> None:
    module = Later()
    made = private(module=module)
    assert train(made, most=3) == 3
    module.warm = False
    refused("network", lambda: train(made))


@pytest.mark.parametrize("training", [True, False])
def test_statistics_do_not_move_in_passes_without_gradients(training: bool) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    module[1].eval()
    made = private(module=module)
    before = module[1].running_mean.clone()
    made.module.train(training)
    module[1].train()
    x, _ = data()[:8]
    with torch.no_grad():
        refused("network", lambda: made.module(x))
    assert torch.equal(before, module[1].running_mean)
    made.module.eval()
    assert made.module(x).shape == (8, 3)


# The loader.


def test_two_iterations_at_once() -> None:
    made = private()
    one = iter(made.data_loader)
    next(one)
    next(iter(made.data_loader))
    refused("loader", lambda: next(one))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[torch.arange(len(x)).roll(1)],
        lambda x: x[torch.zeros(len(x), dtype=torch.long)],
    ],
    ids=["order", "one row"],
)
@pytest.mark.parametrize("groups", [None, [i // 2 for i in range(N)]])
def test_rows_in_another_order(other: Callable[[Tensor], Tensor], groups: Any) -> None:
    made = private(groups=groups)
    x, _ = first(made)
    refused("other-rows", lambda: made.module(other(x)))
    made.module(x + 0.01 * torch.randn_like(x))  # augmented, each in its place


def test_a_batch_of_an_earlier_draw() -> None:
    made = private(loader=DataLoader(data(), batch_size=20))
    batches: dict[int, Tensor] = {}
    met = 0
    for _ in range(2):
        for x, y in made.data_loader:
            made.optimizer.zero_grad()
            if len(x) in batches:
                refused("other-rows", lambda x=x: made.module(batches[len(x)]))
                met += 1
            elif batches:
                old = torch.cat([*batches.values()] * 9)[: len(x)]
                refused("other-rows", lambda old=old: made.module(old))
                met += 1
            batches[len(x)] = x.clone()
            made.criterion(made.module(x), y).backward()
            made.optimizer.step()
    assert met


def _sorted(items: list[Any]) -> Any:
    return default_collate(sorted(items, key=lambda item: float(item[0].sum())))


def _mixed(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return 0.8 * x + 0.2 * x.roll(1, 0), y


def _doubled(items: list[Any]) -> Any:
    return default_collate([items[0], *items[:-1]])


@pytest.mark.parametrize("collate", [_sorted, _mixed, _doubled])
def test_collate_functions_that_do_not_keep_rows(collate: Any) -> None:
    refused("loader", lambda: private(loader=DataLoader(data(), batch_size=8, collate_fn=collate)))


# The optimizer, and precision.


def test_a_hook_that_changes_gradients_before_the_step() -> None:
    module = network()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    made = private(module=module, optimizer=plain)
    x, y = first(made)
    made.criterion(made.module(x), y).backward()

    def inject(*_: Any) -> None:
        for p in module.parameters():
            p.grad.add_(1.0)

    plain.register_step_pre_hook(inject)
    before = [p.detach().clone() for p in module.parameters()]
    refused("changed-gradients", made.optimizer.step)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_guard_that_was_taken_away_is_put_back() -> None:
    module = network()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    made = private(module=module, optimizer=plain)
    plain._optimizer_step_pre_hooks.clear()
    assert train(made, most=1) == 1
    refused("unwrapped-optimizer", plain.step)


def test_a_copy_of_the_optimizer() -> None:
    made = private()
    refused("option", lambda: copy.deepcopy(made.optimizer))
    assert train(made, most=1) == 1  # and nothing is left of it


def test_gradients_that_vanish_under_autocast() -> None:
    made = private()
    x, _ = first(made)
    with torch.autocast("cpu", dtype=torch.float16):
        refused("network", lambda: made.module(x))


class SetByData(nn.Module):
    """ActNorm, or the code book of a VQ-VAE: numbers of the batch in parameters, without noise."""

    def __init__(self, *, trained: bool, when: str) -> None:
        super().__init__()
        self.inside = network()
        self.scale = nn.Parameter(torch.ones(1, 6, 6), requires_grad=trained)
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (self.when == "training") == torch.is_grad_enabled() and self.training:
            self.scale.data.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return self.inside(x / self.scale.detach())


@pytest.mark.parametrize("when", ["training", "no_grad"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_network_that_writes_the_batch_into_its_parameters(trained: bool, when: str) -> None:
    module = SetByData(trained=trained, when=when)
    made = private(module=module)
    x, _ = next(iter(made.data_loader))
    with torch.set_grad_enabled(when == "training"), pytest.raises(Refused) as caught:
        made.module(x)
    assert caught.value.code == "network"
    assert torch.equal(module.scale.detach(), torch.ones(1, 6, 6))
