"""Parameters that a network adds, multiplies or concatenates by itself, and what it makes of them.

A *derived* tensor is a function of parameters and constants only: a slice, a reshaped scale, an
interpolated position embedding, a weight that is normalized anew in every pass. Where a parameter
or a derived tensor meets a batch, a copy of it per sample takes its place (`Lift`; no memory is
used), so that its gradient comes out per sample. What was derived is followed back to the
parameters afterwards, for every unit by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xcal.dp.clipping.named import named_buffers, named_parameters, trainable
from xcal.dp.clipping.tape import Tape


def _functions(names: str) -> frozenset[Any]:
    found = (getattr(place, name, None) for place in (torch, Tensor) for name in names.split())
    return frozenset(one for one in found if one is not None)


# Sample by sample, place by place: with one copy of a parameter per sample they do the same.
_ELEMENTWISE = _functions(
    "add add_ __add__ __radd__ __iadd__ sub sub_ subtract __sub__ __rsub__ __isub__ rsub mul mul_"
    " multiply __mul__ __rmul__ __imul__ div div_ divide true_divide __truediv__ __rtruediv__"
    " __rdiv__ __itruediv__ pow __pow__ maximum minimum where lerp addcmul addcdiv"
)
_JOINING = _functions("cat concat concatenate")
_EXPANDING = _functions("expand broadcast_to repeat tile")


class Lift(torch.autograd.Function):
    """A tensor once per sample; backward, its per-sample gradients go to `deliver`."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, value: Tensor, count: int, deliver: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.deliver = deliver
        return value.expand(count, *value.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        ctx.deliver(g)
        return None, None, None, None


class _Rows(torch.autograd.Function):
    """A derived tensor that has a row per sample already."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, value: Tensor, deliver: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.deliver = deliver
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        ctx.deliver(g)
        return None, None, None


class Plain:
    """Follows parameters through a forward pass of `count` samples, up to where they meet a batch.

    What it does not know as a constant (a buffer, or made without any tensor) counts as data, and a
    parameter that meets data in an operation without a rule stays in the graph, where
    `refuse_other_uses` finds it.
    """

    def __init__(self, model: nn.Module, count: int, tape: Tape, anchor: Tensor) -> None:
        self._named = trainable(model)
        self._names = {id(p): name for name, p in self._named.items()}
        self._count, self._tape, self._anchor = count, tape, anchor
        # Both by identity: what stands in them is kept, so that no identity is used twice.
        self._derived: dict[int, tuple[Tensor, int, frozenset[str]]] = {}
        self._constants: dict[int, Tensor] = {}
        self._before_expanding: dict[int, Tensor] = {}
        self._followed: dict[str, Tensor] = {}
        self._by_row: list[tuple[Tensor, Tensor]] = []
        for _, constant in (*named_buffers(model), *named_parameters(model)):
            if not constant.requires_grad:
                self._constants[_memory(constant)] = constant

    def sources(self, tensor: Tensor) -> frozenset[str] | None:
        """The parameters that a tensor is made of; None if it is neither one nor derived."""
        if not tensor.requires_grad:
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            return frozenset((name,))
        derived = self._derived.get(id(tensor))
        # Written into since then: who knows what.
        return None if derived is None or derived[1] != tensor._version else derived[2]

    def constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to hold nobody's data."""
        return not tensor.requires_grad and _memory(tensor) in self._constants

    def name(self, tensor: Tensor | None, *, first_axis: bool = True) -> str | None:
        """The name under which the tape keeps gradients of a weight; None if it does not train.

        A parameter in another shape has the parameter's own (with its `first_axis`, for the
        weights of channels); what is otherwise derived has one that `settle` resolves.
        """
        if tensor is None or (sources := self.sources(tensor)) is None:
            return None
        own = self._names.get(id(tensor))
        if own is None and len(sources) == 1:
            (only,) = sources
            if _same_memory(tensor, self._named[only], first_axis):
                own = only
        if own is not None:
            return own
        name = f"\0{id(tensor)}"
        self._followed[name] = tensor
        # Explicit rows, one per unit, are what can be followed back and added to others.
        self._tape.uses.update(dict.fromkeys((name, *sources), 2))
        return name

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Any operation that has no rule of its own."""
        tensors = list(_tensors((args, kwargs)))
        ours = [one for one in map(self.sources, tensors) if one is not None]
        known = len(ours) == len(tensors) or all(
            self.sources(one) is not None or self.constant(one) for one in tensors
        )
        if ours and not known:
            if func in _ELEMENTWISE and not (_writes(func) and self.sources(args[0])):
                args, kwargs = self._lifted(args, kwargs, tensors)
            elif func in _JOINING:
                args, kwargs = self._joined(args, kwargs)
            elif func is Tensor.expand_as:
                func, args, known = Tensor.expand, (args[0], args[1].shape), True
        result = func(*args, **kwargs)
        if known:
            self._keep(func, args, result, frozenset().union(*ours))
        elif _writes(func) and args and isinstance(args[0], Tensor):
            self._constants.pop(_memory(args[0]), None)
        return result

    def _keep(self, func: Any, args: Sequence[Any], result: Any, sources: frozenset[str]) -> None:
        for made in _tensors(result):
            if made.requires_grad and id(made) not in self._names:
                self._derived[id(made)] = made, made._version, sources
                if func in _EXPANDING and isinstance(args[0], Tensor):
                    if _rows_of(args[0], made):
                        self._before_expanding[id(made)] = args[0]
            elif not made.requires_grad:
                self._constants[_memory(made)] = made

    def lift(self, tensor: Tensor) -> Tensor:
        """(B, *shape): a parameter or a derived tensor once per sample."""
        name = self.name(tensor, first_axis=False)
        assert name is not None
        shape = self._named[name].shape if name in self._named else tensor.shape
        if name in self._named:
            self._tape.uses.update([name])

        def deliver(g: Tensor) -> None:
            self._tape.add_rows(name, g.reshape(len(g), *shape))

        return _apply(Lift, self._anchor, tensor.detach(), self._count, deliver)

    def _lifted(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Elementwise: parameters in the place where broadcasting puts them, for every sample."""
        dims = max(one.dim() for one in tensors)
        batch = [one for one in tensors if one.dim() == dims and self.sources(one) is None]
        if not any(len(one) == self._count for one in batch if dims):
            return args, kwargs

        def aligned(value: Any) -> Any:
            if not isinstance(value, Tensor) or self.sources(value) is None:
                return value
            if value.dim() == dims:
                return self._per_row(value)
            copies = self.lift(value)
            return copies.reshape(self._count, *[1] * (dims - 1 - value.dim()), *value.shape)

        return tuple(map(aligned, args)), {key: aligned(one) for key, one in kwargs.items()}

    def _joined(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        parts = kwargs.get("tensors", args[0] if args else ())
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if dim == 0 or any(len(one) != self._count or dim == -one.dim() for one in parts):
            return args, kwargs
        lifted = [one if self.sources(one) is None else self._per_row(one) for one in parts]
        return (lifted,), {"dim": dim}

    def _per_row(self, value: Tensor) -> Tensor:
        """A tensor whose first dimension is met by the samples: 1 for all, or a row for each."""
        if len(value) == 1 and self._count != 1:
            return self.lift(value)[:, 0]
        if len(value) != self._count:
            return value
        before = self._before_expanding.get(id(value))
        if before is not None:
            copies = self.lift(before)
            if before.dim() == value.dim():
                copies = copies[:, 0]
            return copies.expand(value.shape)
        if self._count == 1:
            return self.lift(value)[:, 0]
        self._tape.uses.update(dict.fromkeys(self.sources(value) or (), 2))

        def deliver(g: Tensor) -> None:
            self._by_row.append((value, g))

        return _apply(_Rows, self._anchor, value.detach(), deliver)

    def forget(self) -> dict[str, Tensor]:
        """Gradients by image of what has a row per sample already; then there are none."""
        found = {f"{number} by row": g for number, (_, g) in enumerate(self._by_row)}
        self._by_row = []
        return found

    def settle(self) -> None:
        """After the backward pass: what was derived, followed back to the parameters."""
        units = self._tape.units
        for name, value in self._followed.items():
            rows = self._tape.take(name)
            if rows is not None:
                self._follow(value, rows.view(-1, *value.shape))
        for value, g in self._by_row:
            of_image = units.of_image
            own = torch.arange(units.count, device=g.device) if of_image is None else of_image
            for unit in torch.unique(own).tolist():
                mask = (own == unit).view(-1, *[1] * (g.dim() - 1))
                alone = torch.where(mask, g, 0)
                self._follow(value, alone.unsqueeze(0), unit)

    def _follow(self, value: Tensor, rows: Tensor, unit: int | None = None) -> None:
        sources = self.sources(value)
        assert sources is not None
        names = sorted(sources)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some operations are followed one unit at a time
            found = torch.autograd.grad(
                value, [self._named[name] for name in names], rows,
                retain_graph=True, is_grads_batched=True, allow_unused=True,
            )  # fmt: skip
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None:
                self._tape.add_unit_rows(name, gradient, unit)


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    run: Callable[..., Tensor] = function.apply
    return run(*args)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _memory(tensor: Tensor) -> int:
    """What names the memory of a tensor and of all its views."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _same_memory(view: Tensor, whole: Tensor, first_axis: bool) -> bool:
    return (
        view.data_ptr() == whole.data_ptr()
        and view.numel() == whole.numel()
        and view.dtype == whole.dtype
        and view.is_contiguous()
        and whole.is_contiguous()
        and (not first_axis or view.shape[:1] == whole.shape[:1])
    )


def _rows_of(before: Tensor, after: Tensor) -> bool:
    """Whether `after` is one row, or the whole of `before`, repeated along its first dimension."""
    if before.dim() == after.dim():
        return before.dim() > 0 and len(before) == 1 and before.shape[1:] == after.shape[1:]
    return before.shape == after.shape[1:]


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name == "__setitem__" or name.startswith("__i")
