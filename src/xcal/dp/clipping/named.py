"""A network's modules, parameters and buffers by name, without walking it anew at every step.

torch's own `named_modules` and `named_parameters` build every name again with each call, which on a
deep frozen backbone takes longer than a step of the small head that trains on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from weakref import WeakKeyDictionary

from torch import Tensor, nn

Named = tuple[tuple[str, nn.Module], ...]


class _Layout:
    """Names as they were when the network consisted of just these `parts`, which are kept alive."""

    def __init__(self, model: nn.Module, parts: list[object]) -> None:
        self.parts = parts
        # Not the network itself, which would never be freed.
        self.modules: Named = tuple(named for named in model.named_modules() if named[0])
        self.parameters = tuple(model.named_parameters())
        self.buffers = tuple(model.named_buffers())


_LAYOUTS: WeakKeyDictionary[nn.Module, _Layout] = WeakKeyDictionary()


def _parts(model: nn.Module) -> list[object]:
    """Everything that names depend on, in a fixed order."""
    found: list[object] = []
    seen, waiting = {id(model)}, [model]
    while waiting:
        module = waiting.pop()
        for own in (module._parameters, module._buffers, module._modules):
            found.extend(own)
            found.extend(own.values())
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


def _layout(model: nn.Module) -> _Layout:
    parts, known = _parts(model), _LAYOUTS.get(model)
    if known is None or len(parts) != len(known.parts) or not all(map(is_, parts, known.parts)):
        known = _LAYOUTS[model] = _Layout(model, parts)
    return known


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`."""
    yield "", model
    yield from _layout(model).modules


def named_parameters(model: nn.Module) -> tuple[tuple[str, nn.Parameter], ...]:
    """As `model.named_parameters()`."""
    return _layout(model).parameters


def named_buffers(model: nn.Module) -> tuple[tuple[str, Tensor], ...]:
    """As `model.named_buffers()`."""
    return _layout(model).buffers


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, noised and sent, by name."""
    return {name: p for name, p in named_parameters(model) if p.requires_grad}
