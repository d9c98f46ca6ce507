"""The exact slower rule, for modules that have no other: each sample by itself, with weights of
its own (`vmap`, all samples in one call; `loop`, one call a sample, for what vmap cannot do).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from xcal.dp.clipping.plain import Plain
from xcal.errors import UserError

WAYS = ("vmap", "loop")


class NoRule(UserError):
    """A trainable parameter is used in a way that no rule covers."""

    def __init__(self, parameter: str) -> None:
        module = parameter.rpartition(".")[0]
        super().__init__(
            f"parameter {parameter!r} (module {module!r}) is used by an operation that has no "
            "per-sample gradient rule: freeze it (requires_grad = False), use layers of torch.nn, "
            "or allow the slower exact rule (fallback='vmap')"
        )
        self.module = module


@dataclass
class Fallback:
    """How modules without a rule are worked through, and which ones those were so far."""

    way: str
    modules: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise UserError(f"fallback is {self.way!r}: choose 'vmap' or 'loop', or leave it out")

    def add(self, module: str) -> bool:
        """Whether this is a module that was not worked through in this way before."""
        new = module not in self.modules
        # Inside a larger one it is worked through with that.
        self.modules = {m for m in self.modules if not f"{m}.".startswith(f"{module}.")} | {module}
        return new

    @contextmanager
    def entered(self, model: nn.Module, plain: Plain, count: int) -> Iterator[None]:
        """While entered, these modules give every sample its own copy of their parameters."""
        changed = []
        try:
            for name in sorted(self.modules):
                module = model.get_submodule(name)
                if "forward" in vars(module):
                    raise UserError(
                        f"module {name!r} has a forward of its own as an attribute, so it cannot "
                        "be worked through one sample at a time: define it in the class"
                    )
                module.forward = _apart(name, module, self.way, plain, count)
                changed.append(module)
            yield
        finally:
            for module in changed:
                del module.forward


def _apart(name: str, module: nn.Module, way: str, plain: Plain, count: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        batched = [isinstance(one, Tensor) and not plain.constant(one) for one in leaves]
        if any(
            is_data and one.shape[:1] != (count,)
            for one, is_data in zip(leaves, batched, strict=True)
        ):
            raise UserError(
                f"module {name!r} is given something whose first dimension is not the {count} "
                "samples of the batch, so they cannot be told apart: keep the batch first"
            )
        copies = {n: plain.lift(p) for n, p in module.named_parameters() if p.requires_grad}
        given = [one for one, is_data in zip(leaves, batched, strict=True) if is_data]

        def single(own: dict[str, Tensor], *data: Tensor) -> Any:
            rest = iter(data)
            filled = [
                next(rest).unsqueeze(0) if is_data else one
                for one, is_data in zip(leaves, batched, strict=True)
            ]
            inner_args, inner_kwargs = tree_unflatten(filled, form)
            return functional_call(module, own, inner_args, inner_kwargs)

        mine = vars(module).pop("forward")
        try:
            with torch._C.DisableTorchFunction():
                with torch.no_grad():
                    whole = module(*args, **kwargs)
                if way == "vmap":
                    alone = _by_vmap(name, single, copies, given)
                else:
                    each = [
                        single({n: c[i] for n, c in copies.items()}, *(one[i] for one in given))
                        for i in range(count)
                    ]
                    alone = tree_map(lambda *parts: torch.stack(parts), *each)
                return tree_map(lambda own, all_: _together(name, own, all_), alone, whole)
        finally:
            module.forward = mine

    return forward


def _by_vmap(name: str, single: Callable[..., Any], copies: Any, given: list[Tensor]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow is what was asked for
            return vmap(single, randomness="different")(copies, *given)
    except RuntimeError as error:
        raise UserError(
            f"module {name!r} cannot be worked through by vmap "
            f"({str(error).splitlines()[0][:120]}): use fallback='loop'"
        ) from None


def _together(name: str, own: Tensor, whole: Tensor) -> Tensor:
    """Outputs of one sample each, (B, …, 1, …), with the batch where the module puts it."""
    differs = [d for d, (a, b) in enumerate(zip(own.shape[1:], whole.shape, strict=True)) if a != b]
    if len(own) == 1 and not differs:
        return own[0]
    if len(differs) != 1 or own.shape[1 + differs[0]] != 1 or whole.shape[differs[0]] != len(own):
        raise UserError(
            f"module {name!r} gives outputs in which the samples of the batch cannot be told apart"
        )
    return own.squeeze(1 + differs[0]).movedim(0, differs[0])
