"""A network that is handed over as an object instead of by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xcal.errors import UserError

Builder = Callable[..., nn.Module]


def builder_of(model: Any, layer: nn.Module | str | None = None) -> Builder:
    """A function (classes, *, seed) that makes the network, as every network is made.

    `model` is a module, of which every caller gets a copy with its weights as they are now, or a
    function or class that makes one: of `(classes, *, seed)`, `(classes)` or nothing. What it draws
    from torch's generator is fixed by the seed. `layer` names the CAM layer where the network does
    not do so itself.
    """
    make = model
    if isinstance(model, nn.Module):
        original = copy.deepcopy(model)  # whatever becomes of the caller's
        layer = _name_of(model, layer)

        def make() -> nn.Module:
            return copy.deepcopy(original)

    elif not callable(model):
        raise UserError(
            f"The model is a {type(model).__name__}: give a torch.nn.Module, a function that makes"
            " one, or its name as network."
        )
    elif isinstance(layer, nn.Module):
        raise UserError("The layer of a network that is yet to be made: give its dotted name.")

    def build(classes: int, *, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _named(_call(make, classes, seed), layer)

    return build


def _call(make: Callable[..., Any], classes: int, seed: int) -> Any:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return make(classes)
    for given, by_name in (((classes,), {"seed": seed}), ((classes,), {}), ((), {})):
        try:
            signature.bind(*given, **by_name)
        except TypeError:
            continue
        return make(*given, **by_name)
    raise UserError(
        f"The function that makes the model takes {signature}: it must take (classes, *, seed),"
        " (classes) or nothing."
    )


def _name_of(model: nn.Module, layer: nn.Module | str | None) -> str | None:
    if not isinstance(layer, nn.Module):
        return layer
    for name, module in model.named_modules():
        if module is layer:
            return name
    raise UserError(f"The layer given is no module of the network {type(model).__name__}.")


def _named(network: Any, layer: str | None) -> Any:
    """With the attributes that every network has here; what is not a network is refused later."""
    if isinstance(network, nn.Module):
        if layer is not None:
            network.cam_layer, network.head_layer = layer, None  # type: ignore[assignment]
        for attribute in ("cam_layer", "head_layer"):
            if not hasattr(network, attribute):
                setattr(network, attribute, None)
    return network
