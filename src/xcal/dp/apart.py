"""Whether network and criterion treat every row of a batch by itself.

Clipping bounds what one unit adds. Where a row's output depends on other rows, a unit also moves
what others add, and nothing bounds that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from xcal.dp.refusals import Refused

_ROWS = 3
_TOLERANCE = 1e-3


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
        return torch.randn(_ROWS, *t.shape[1:], generator=source).to(t)

    shown, named = mapped(args, made_up), mapped(dict(kwargs), made_up)
    try:
        copy = _still(deepcopy(module))
    except Exception as error:
        raise Refused(
            "network",
            "The network cannot be copied, so it cannot be told whether it mixes the rows of a"
            f" batch ({type(error).__name__}): keep tensors with a history out of its attributes.",
        ) from None

    def answer(inputs: Any, others: Any) -> list[Tensor]:
        with torch.no_grad():
            found = tensors(copy(*inputs, **others))
        return [t for t in found if t.dim() and t.is_floating_point()]

    together = answer(shown, named)
    if not all(_alike(a, b) for a, b in zip(together, answer(shown, named), strict=True)):
        copy.eval()  # draws at random in some way of its own: look at it where it does not
        together = answer(shown, named)
    for row in range(_ROWS):
        alone = answer(_one(shown, row, _ROWS), _one(named, row, _ROWS))
        for whole, part in zip(together, alone, strict=True):
            if len(whole) != _ROWS or not _alike(whole[row : row + 1], part):
                raise Refused(
                    "network",
                    "The network mixes the rows of a batch: what it answers to one depends on the"
                    " others, so one unit's influence cannot be bounded. Let every row go through"
                    " by itself.",
                )


def check_losses_apart(
    criterion: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], all_: Tensor
) -> None:
    """Refuse a criterion whose loss of the first row depends on the others."""
    with torch.no_grad():
        alone = criterion(*_one(args, 0, len(all_)), **_one(dict(kwargs), 0, len(all_)))
    if isinstance(alone, Tensor) and not _alike(all_[:1].detach(), alone.flatten()):
        raise Refused(
            "criterion",
            "The criterion mixes the samples of a batch: the loss of one depends on the others, so"
            " one unit's influence cannot be bounded. Let it look at one sample at a time.",
        )


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
    atol = _TOLERANCE * scale
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
