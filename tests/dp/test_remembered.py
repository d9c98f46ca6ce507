"""What counts as remembering: any change but of parameters, wherever it is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from xcal.dp.batch_invariance import DependentNetwork, Remembered, check_remembers_nothing


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.register_buffer("mean", torch.tensor([0.0, 1.0, float("nan")]))
        self.register_buffer("later", None)
        self.count, self.size, self.words = 5, (3, 3), ["a"]
        self.kept = {"last": torch.zeros(2)}
        self.alone = torch.zeros(2, dtype=torch.complex64)


def _set(name: str, value: object) -> Callable[[Keeper], object]:
    return lambda network: setattr(network, name, value)


CHANGES: dict[str, Callable[[Keeper], object]] = {
    "a buffer": lambda n: n.mean.add_(1),
    "a buffer, unseen by autograd": lambda n: n.mean.data[0].fill_(2),
    "a buffer, through its memory": lambda n: n.mean.numpy().__setitem__(1, 7.0),
    "the sign of a zero": lambda n: n.mean.data[0].neg_(),
    "a buffer further down": lambda n: n.layer[1].num_batches_tracked.add_(1),
    "a buffer that was none": _set("later", torch.ones(1)),
    "another tensor as buffer": _set("mean", torch.ones(3)),
    "the shape of a buffer": lambda n: n.mean.resize_(1, 3),
    "a new buffer": lambda n: n.register_buffer("new", torch.ones(1)),
    "a number": _set("count", 6),
    "the kind of a number": _set("count", 5.0),
    "a tuple": _set("size", (3, 4)),
    "a new attribute": _set("seen", 1),
    "an attribute that goes": lambda n: delattr(n, "count"),
    "a list": lambda n: n.words.append("b"),
    "what a list holds": lambda n: n.words.__setitem__(0, "b"),
    "a tensor in a dictionary": lambda n: n.kept["last"].add_(1),
    "a tensor as attribute": lambda n: n.alone.add_(1j),
    "a number where a tensor was": _set("alone", 0),
    "an attribute of a part": lambda n: setattr(n.layer[0], "seen", "x"),
    "the mode": lambda n: n.layer.eval(),
    "a further part": lambda n: n.add_module("more", nn.ReLU()),
}
NO_CHANGES: dict[str, Callable[[Keeper], object]] = {
    "nothing": lambda n: None,
    "a parameter": lambda n: n.layer[0].weight.data.add_(1),
    "another object of the same value": _set("count", int("5")),
    "another list of the same words": _set("words", ["a"]),
    "another tensor of the same bits": lambda n: setattr(n, "mean", n.mean.clone()),
    "a gradient": lambda n: setattr(n.layer[0].weight, "grad", torch.ones(4, 3, 3, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str) -> None:
    network = Keeper()
    before = Remembered(network)
    CHANGES[change](network)
    with pytest.raises(DependentNetwork, match="remembers what it sees"):
        check_remembers_nothing(network, before)


@pytest.mark.parametrize("change", NO_CHANGES)
def test_nothing_else_is(change: str) -> None:
    network = Keeper()
    before = Remembered(network)
    NO_CHANGES[change](network)
    check_remembers_nothing(network, before)


def test_the_change_is_named() -> None:
    network = Keeper()
    before = Remembered(network)
    network.layer[1].running_mean.add_(1)
    assert before.first_change(network) == "layer.1['running_mean']"
