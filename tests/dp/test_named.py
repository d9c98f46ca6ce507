"""Names are those that torch gives, also after the network was changed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from xcal.dp.clipping.named import named_buffers, named_modules, named_parameters, trainable
from xcal.errors import UserError


def network() -> nn.Module:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    return nn.Sequential(inner, nn.BatchNorm2d(4), inner, nn.Flatten(), nn.LazyLinear(2))


def same_as_torch(model: nn.Module) -> bool:
    pairs = (
        (named_modules(model), model.named_modules()),
        (named_parameters(model), model.named_parameters()),
        (named_buffers(model), model.named_buffers()),
    )
    return all(
        [(n, id(x)) for n, x in ours] == [(n, id(x)) for n, x in theirs] for ours, theirs in pairs
    )


def test_names_follow_every_change() -> None:
    model = network()
    assert same_as_torch(model)
    model[3] = nn.Identity()
    assert same_as_torch(model)
    model[0][0].bias = None
    assert same_as_torch(model)
    model[0][0].weight = nn.Parameter(torch.zeros(4, 3, 3, 3))
    assert same_as_torch(model)
    model.register_buffer("seen", torch.zeros(1))
    assert same_as_torch(model)
    model.add_module("late", nn.Linear(2, 2))
    assert same_as_torch(model)
    del model.late
    assert same_as_torch(model)
    bias = model[1].bias  # the same object, in another place
    del model[1].bias
    model[1].register_buffer("bias", bias)
    assert same_as_torch(model)


def test_what_trains_is_looked_at_anew() -> None:
    model = nn.Linear(2, 2)
    assert list(trainable(model)) == ["weight", "bias"]
    model.bias.requires_grad_(False)
    assert list(trainable(model)) == ["weight"]


def test_a_network_is_freed() -> None:
    model = network()
    named_parameters(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("inside", "what"), [(False, "The network"), (True, "Its part '0'")])
def test_torchscript_is_refused_in_a_sentence(inside: bool, what: str) -> None:
    scripted = torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    network = nn.Sequential(scripted) if inside else scripted
    with pytest.raises(UserError, match=f"^{what} was made by TorchScript"):
        trainable(network)
