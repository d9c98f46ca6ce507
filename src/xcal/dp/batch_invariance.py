"""Whether a network treats every image by itself: no memory, no neighbors, no chance.

Clipping bounds what one unit adds to a sum. A network that remembers an image, in a running buffer
or in an attribute, carries it into the next step past every bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from xcal.dp.clipping.named import named_modules
from xcal.errors import UserError

# torch's own bookkeeping in a module's __dict__; parameters are what trains, and may change.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))


class DependentNetwork(UserError):
    """A network in which one image's influence cannot be bounded."""


def _values(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Tensor | int | float | complex | str | bytes):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _values(f"{name}[{key!r}]", one)
    elif isinstance(value, list | tuple | set | frozenset):
        yield f"{name} length", len(value)
        for number, one in enumerate(value):
            yield from _values(f"{name}[{number}]", one)
    elif value is None:
        yield name, "None"


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(type(one) in _PLAIN for one in value)
    return type(value) in _PLAIN


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_Content = tuple[str, Tensor | None]


def _content(value: object) -> _Content:
    """A tensor's bits as whole numbers, of which none is unlike itself and zero has no sign."""
    if not isinstance(value, Tensor):
        return repr(value), None
    flat = value.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int64))
    return f"{value.shape}{value.dtype}{value.device}", words


def _differ(one: _Content | None, other: _Content | None) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return True
    return one[1] is not None and other[1] is not None and not torch.equal(one[1], other[1])


class Remembered:
    """All that a network could remember an image in, as it was when this was made.

    Buffers, and plain attributes of its modules that are numbers, strings, tensors or collections
    of them. Its parameters are not among them.
    """

    def __init__(self, network: nn.Module) -> None:
        tables = _tables(network)
        self._keys = list(chain.from_iterable(tables))
        self._values = list(chain.from_iterable(map(dict.values, tables)))
        self._plain: dict[str, str] = {}
        self._mutable: dict[str, object] = {}
        for path, module in named_modules(network):
            for key, value in (*module._buffers.items(), *vars(module).items()):
                if key in _INTERNAL:
                    continue
                if _is_plain(value):
                    self._plain[f"{path}[{key!r}]"] = repr(value)
                else:
                    self._mutable[f"{path}[{key!r}]"] = value
        self._contents = {
            name: (text, None if words is None else words.clone())
            for name, (text, words) in self._now().items()
        }

    def _now(self) -> dict[str, _Content]:
        """What is now in the objects that can change in their place."""
        found = (pair for name, value in self._mutable.items() for pair in _values(name, value))
        return {name: _content(value) for name, value in found}

    def _consists_of(self, network: nn.Module) -> bool:
        """Whether the network has the very same objects: then only their contents can differ."""
        tables = _tables(network)
        if list(chain.from_iterable(tables)) != self._keys:
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, tables)), self._values))

    def first_change(self, network: nn.Module) -> str | None:
        """The name of something in which the network is not as it was; None: in nothing."""
        before, now, changed = self._contents, self, set[str]()
        if not self._consists_of(network):
            now = Remembered(network)
            changed = {name for name, _ in now._plain.items() ^ self._plain.items()}
        after = now._now()
        changed |= {n for n in before.keys() | after.keys() if _differ(before.get(n), after.get(n))}
        return min(changed, default=None)


def _tables(network: nn.Module) -> list[dict[str, Any]]:
    return [t for _, module in named_modules(network) for t in (module._buffers, vars(module))]


def check_remembers_nothing(network: nn.Module, before: Remembered) -> None:
    """Refuse a network that changed, but for its parameters, since `before` was made."""
    changed = before.first_change(network)
    if changed is not None:
        raise DependentNetwork(
            f"The network remembers what it sees (its {changed} changed in a forward pass), so"
            " one image's influence cannot be bounded: use layers without running state, such as"
            " GroupNorm."
        )


def check_independence(network: nn.Module, side: int, rows: int = 3) -> None:
    """Refuse a network whose answer to an image depends on others, on earlier ones or on chance.

    Looked at on made-up images, in training mode, on copies: three of them, and `rows` together.
    What it cannot see is that a network begins to do so later, which is why a client looks again
    after every step.
    """
    source = torch.Generator().manual_seed(0)
    like = next(network.parameters(), torch.zeros(0))

    def made_up(count: int, scale: float) -> Tensor:
        drawn = scale * torch.randn(count, 3, side, side, generator=source)
        return drawn.to(like.device, like.dtype)

    images, strangers = made_up(3, 1.0), made_up(4, 30.0)
    fresh = _copy(network)
    before = Remembered(fresh)
    together = _answers(fresh, images)
    check_remembers_nothing(fresh, before)
    later = _copy(network)
    _answers(later, strangers)
    _answers(later, strangers[:1], grad=True)
    scale = 1 + float(together.abs().max())
    crowd = torch.cat([images, made_up(max(0, rows - len(images)), 1.0)])
    for other, why, tolerance in (
        (_answers(fresh, images), "answers at random", 1e-6),
        (_answers(later, images), "answers by what it saw before", 1e-6),
        (
            torch.cat([_answers(fresh, image[None]) for image in images]),
            "mixes the images of a batch",
            1e-3,
        ),
        (_answers(fresh, crowd)[: len(images)], "mixes the images of a batch", 1e-3),
    ):
        if not torch.allclose(together, other, rtol=0.0, atol=tolerance * scale, equal_nan=True):
            raise DependentNetwork(
                f"The network {why}, so one image's influence cannot be bounded."
            )


def _copy(network: nn.Module) -> nn.Module:
    try:
        copy = deepcopy(network)
    except Exception as error:
        raise DependentNetwork(
            "The network cannot be copied, so it cannot be told whether one image's influence is"
            f" bounded ({type(error).__name__})."
        ) from None
    return copy.train()


def _answers(network: nn.Module, images: Tensor, *, grad: bool = False) -> Any:
    with torch.set_grad_enabled(grad):
        answers = network(images)
        if grad:
            answers.sum().backward()
            network.zero_grad(set_to_none=True)
    return answers.detach()
