"""A network's modules, parameters and buffers by name, without walking it anew at every step.

torch's own `named_modules` and `named_parameters` build every name again with each call, which on a
deep frozen backbone takes longer than a step of the small head that trains on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.jit import ScriptModule

from xcal.errors import UserError

Named = tuple[tuple[str, nn.Module], ...]

_tables_of = attrgetter("_parameters", "_buffers", "_modules")


def _all_same(some: Iterable[object], others: Iterable[object]) -> bool:
    return all(map(is_, some, others))


def _check_readable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ScriptModule):
            what = f"Its part {name!r}" if name else "The network"
            raise UserError(
                f"{what} was made by TorchScript, which hides what it computes, so one image's"
                " influence cannot be bounded. Give the module it was made from."
            )


class _Layout:
    """Names as they were when the network consisted of just these parts, which are kept alive."""

    def __init__(self, model: nn.Module) -> None:
        _check_readable(model)
        self._children = [module for module in model.modules() if module is not model]
        self._tables = self._now(model)
        self._parts = list(chain.from_iterable(table.values() for table in self._tables))
        self._keys = list(chain.from_iterable(self._tables))
        self._sizes = list(map(len, self._tables))
        # Not the network itself, which would never be freed.
        self.modules: Named = tuple(named for named in model.named_modules() if named[0])
        self.parameters = tuple(model.named_parameters())
        self.buffers = tuple(model.named_buffers())

    def _now(self, model: nn.Module) -> list[dict[str, object]]:
        return [*_tables_of(model), *chain.from_iterable(map(_tables_of, self._children))]

    def is_of(self, model: nn.Module) -> bool:
        """Whether everything that names depend on is what it was. Asked at every step."""
        tables = self._now(model)
        if not _all_same(tables, self._tables) or list(map(len, tables)) != self._sizes:
            return False
        if list(chain.from_iterable(tables)) != self._keys:
            return False
        return _all_same(chain.from_iterable(map(dict.values, tables)), self._parts)


_LAYOUTS: WeakKeyDictionary[nn.Module, _Layout] = WeakKeyDictionary()


def _layout(model: nn.Module) -> _Layout:
    known = _LAYOUTS.get(model)
    if known is None or not known.is_of(model):
        known = _LAYOUTS[model] = _Layout(model)
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
