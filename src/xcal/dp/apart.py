"""Whether network and criterion treat every row of a batch by itself.

Clipping bounds what one unit adds. Where a row's output depends on other rows, a unit also moves
what others add, and nothing bounds that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from xcal.dp.clipping.precision import single
from xcal.dp.refusals import Refused

_ROWS = 3
_TOLERANCE = 1e-3
_FEWEST, _SAMPLED = 8, 256  # numbers of a row
_KEPT = 100_000  # rows


def check_rows_apart(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a network that mixes the rows of a batch, as far as made-up rows show it.

    On a copy, on rows of the batch's shapes: made-up where they are real numbers, the batch's own
    where they are not (indices). Dropout is switched off for it.
    """
    source = torch.Generator().manual_seed(0)
    rows = next(len(t) for t in tensors((args, dict(kwargs))) if t.dim())
    some = torch.arange(_ROWS) % rows

    def made_up(t: Tensor) -> Tensor:
        if not t.dim() or len(t) != rows:
            return t
        if not t.is_floating_point():
            return t[some.to(t.device)]
        # Numbers in half precision are what autocast takes: here it is switched off.
        return single(torch.randn(_ROWS, *t.shape[1:], generator=source).to(t))

    shown, named = mapped(args, made_up), mapped(dict(kwargs), made_up)
    copy = _still(copied(module))

    def answer(inputs: Any, others: Any, seed: int = 0) -> list[Tensor]:
        devices = [t.device for t in tensors((inputs, others)) if t.is_cuda][:1]
        # What is drawn at random is the same each time; the loop's own randomness stays as it is.
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            found = tensors(copy(*inputs, **others))
        return [t for t in found if t.dim() and t.is_floating_point()]

    together = answer(shown, named)
    for row in range(_ROWS):
        # Among others, as many: also where rows are mixed at random.
        moved = answer(_others(shown, row), _others(named, row))
        if any(
            len(whole) != _ROWS or not _alike(whole[row], part[row])
            for whole, part in zip(together, moved, strict=True)
        ) and all(_alike(a, b) for a, b in zip(together, answer(shown, named), strict=True)):
            raise _mixes()
    if not all(_alike(a, b) for a, b in zip(together, answer(shown, named, 1), strict=True)):
        copy.eval()  # draws at random in some way of its own: look at it where it does not
        together = answer(shown, named)
    for row in range(_ROWS):
        alone = answer(_one(shown, row, _ROWS), _one(named, row, _ROWS))
        for whole, part in zip(together, alone, strict=True):
            if len(whole) != _ROWS or not _alike(whole[row : row + 1], part):
                raise _mixes()


def copied(module: nn.Module) -> nn.Module:
    """A copy to try things on; a network of which there is none is refused."""
    try:
        return deepcopy(module)
    except Exception as error:
        raise Refused(
            "network",
            "The network cannot be copied, so it cannot be told whether it mixes the rows of a"
            f" batch ({type(error).__name__}): keep tensors with a history out of its attributes.",
        ) from None


def _mixes() -> Refused:
    return Refused(
        "network",
        "The network mixes the rows of a batch: what it answers to one depends on the others, so"
        " one unit's influence cannot be bounded. Let every row go through by itself.",
    )


def _others(value: Any, row: int) -> Any:
    """The same row among others: those turned about, and numbers among them moved."""

    def changed(t: Tensor) -> Tensor:
        if not t.dim() or len(t) != _ROWS:
            return t
        other = t.roll(1, 0) * (-1.5 if t.is_floating_point() else 1)
        other[row] = t[row]
        return other

    return mapped(value, changed)


def check_losses_apart(
    criterion: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], all_: Tensor
) -> None:
    """Refuse a criterion whose losses depend on other rows: the first alone, then every other."""
    rows = len(all_)
    for part in (slice(0, 1), slice(0, rows, 2), slice(1, rows, 2)):

        def taken(t: Tensor, part: slice = part) -> Tensor:
            return t[part] if t.dim() and len(t) == rows else t

        with torch.no_grad():
            some = criterion(*mapped(args, taken), **mapped(dict(kwargs), taken))
        if isinstance(some, Tensor) and not _alike(all_[part].detach(), some.flatten()):
            raise Refused(
                "criterion",
                "The criterion mixes the samples of a batch: the loss of one depends on the others,"
                " so one unit's influence cannot be bounded. Let it look at one sample at a time.",
            )


class Shown:
    """The rows that a loader has handed out, by samples of their numbers.

    Rows of floats with enough numbers in them are known again where they come back unchanged. What
    the loop made of a row is not.
    """

    def __init__(self) -> None:
        self._known: dict[int, None] = {}  # the oldest first
        self._here: dict[tuple[int, ...], list[list[int]]] = {}

    def show(self, batch: Any) -> None:
        self._here = {}
        for t in tensors(batch):
            if _tellable(t):
                prints = _prints(t)
                self._here.setdefault(tuple(t.shape), []).append(prints)
                self._known.update(dict.fromkeys(prints))
        self._known.pop(0, None)
        for oldest in list(islice(self._known, max(0, len(self._known) - _KEPT))):
            del self._known[oldest]

    def elsewhere(self, given: Any) -> bool:
        """Whether rows were shown, most of those that are not what stood in their place."""
        for t in tensors(given):
            if _tellable(t):
                here = self._here.get(tuple(t.shape), [])
                found = enumerate(_prints(t))
                moved = [one for row, one in found if all(own[row] != one for own in here)]
                if 2 * sum(one in self._known for one in moved) > len(moved):
                    return True
        return False


def _tellable(t: Tensor) -> bool:
    return t.dim() > 1 and len(t) > 0 and t.is_floating_point() and t[0].numel() >= _FEWEST


def _prints(t: Tensor) -> list[int]:
    """A number for every row; 0 where it is the same all over, and could be anybody's."""
    flat = t.detach().reshape(len(t), -1)
    step = max(1, flat.shape[1] // _SAMPLED)
    some = flat[:, ::step].float().cpu().contiguous()
    even = (some == some[:, :1]).all(1).tolist()
    return [0 if e else hash(row.numpy().tobytes()) for row, e in zip(some, even, strict=True)]


def _still(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, _DropoutNd | nn.RReLU):
            part.eval()
    return module


def _one(value: Any, row: int, rows: int) -> Any:
    return mapped(value, lambda t: t[row : row + 1] if t.dim() and len(t) == rows else t)


def _alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    finite = first.nan_to_num(0.0, 0.0, 0.0)
    scale = 1 + float(finite.abs().max()) if finite.numel() else 1.0
    # In half precision one rounding is more than that.
    coarse = 4 * torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    atol = max(_TOLERANCE, coarse) * scale
    return torch.allclose(first, second, rtol=0.0, atol=atol, equal_nan=True)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in tuples, lists and mappings."""
    found: list[Tensor] = []
    mapped(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same structure of tuples, lists and mappings, with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: mapped(one, function) for key, one in value.items()}
        try:
            return type(value)(made)  # type: ignore[call-arg]
        except TypeError:
            return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, function) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(one, function) for one in value)
    return value
