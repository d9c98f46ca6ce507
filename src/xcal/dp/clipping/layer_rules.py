"""The stand-ins: autograd functions that keep the gradients of their parameters apart by image.

Each computes what the library's own operation computes. Backward, each hands on the gradient of
its input only and leaves those of its parameters in a `Tape`, under their `names` (None: frozen).
The anchor is an input without influence; it makes the output require a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from xcal.dp.clipping.convolution import (
    ConvShape,
    forward,
    gram_is_cheaper,
    input_gradient,
    per_image_weight_gradient,
    without_skipped_pixels,
)
from xcal.dp.clipping.precision import autocast_type, no_autocast, single
from xcal.dp.clipping.tape import Tape


def apply(
    function: type[torch.autograd.Function],
    x: Tensor,
    anchor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *rest: object,
) -> Tensor:
    """Call a stand-in with the parameters cut from the graph; under autocast, as autocast does.

    There a product (`rounds`) is of numbers in half precision. Norms are computed in float32 and
    hand on the precision that they were given, as they do inside the library.
    """
    weight = None if weight is None else weight.detach()
    bias = None if bias is None else bias.detach()
    run: Callable[..., Tensor] = function.apply
    half = autocast_type(x.device)
    if half is None or not x.is_floating_point() or x.dtype == torch.float64:
        return run(x, anchor, weight, bias, *rest)
    with no_autocast(x.device):
        if not getattr(function, "rounds", False):
            return run(single(x), anchor, weight, bias, *rest).to(x.dtype)
        weight, bias = (None if p is None else p.to(half) for p in (weight, bias))
        return run(x.to(half), anchor, weight, bias, *rest)


class Convolution(torch.autograd.Function):
    rounds = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: ConvShape,
        names: tuple[str | None, str | None],
        tape: Tape,
    ) -> Tensor:
        y, patches = forward(x, weight, bias, shape)
        ctx.save_for_backward(x, weight, patches)
        ctx.shape, ctx.names, ctx.tape = shape, names, tape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, patches = ctx.saved_tensors
        shape, tape = ctx.shape, ctx.tape
        weight_name, bias_name = ctx.names
        exact = single(g)
        if bias_name is not None:
            tape.add_rows(bias_name, exact.sum((2, 3)))
        if weight_name is not None:
            read, reading = without_skipped_pixels(single(x), shape)
            scaled = tape.by_channel(weight_name, exact)
            if gram_is_cheaper(g, read, reading):
                patches = None if patches is None else single(patches)
                tape.add_pair(weight_name, scaled, read, reading, patches)
            else:
                tape.add_parts(weight_name, per_image_weight_gradient(scaled, read, reading))
        onward = input_gradient(g, x, weight, shape) if ctx.needs_input_grad[0] else None
        return onward, None, None, None, None, None, None


class Linear(torch.autograd.Function):
    """On (B, features) or (B, …, features): then every place is a pixel of a 1x1 convolution."""

    rounds = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        names: tuple[str | None, str | None],
        tape: Tape,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.names, ctx.tape = names, tape
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tape = ctx.tape
        weight_name, bias_name = ctx.names
        exact = single(g)
        if bias_name is not None:
            tape.add_rows(bias_name, _over_places(exact))
        if weight_name is not None:
            shape = ConvShape((1, 1), (1, 1), (0, 0), (1, 1), 1, (*weight.shape, 1, 1))
            outer, inner = _as_pixels(exact), _as_pixels(single(x))
            inner = tape.by_input(weight_name, inner)
            scaled = tape.by_channel(weight_name, outer)
            if x.dim() == 2 or gram_is_cheaper(outer, inner, shape):
                tape.add_pair(weight_name, scaled, inner, shape)
            else:
                tape.add_parts(weight_name, per_image_weight_gradient(scaled, inner, shape))
        return (g @ weight if ctx.needs_input_grad[0] else None), None, None, None, None, None


def _over_places(g: Tensor) -> Tensor:
    """(B, …, features) summed over all places between."""
    return g if g.dim() == 2 else g.reshape(len(g), -1, g.shape[-1]).sum(1)


def _as_pixels(x: Tensor) -> Tensor:
    """(B, …, features) as (B, features, places, 1), the memory as it is."""
    return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2).unsqueeze(3)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: list[int],
        eps: float,
        names: tuple[str | None, str | None],
        tape: Tape,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.names, ctx.tape = shape, names, tape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        between = tuple(range(1, x.dim() - len(ctx.shape)))
        if bias_name is not None:
            ctx.tape.add_rows(bias_name, g.sum(between) if between else g)
        if weight_name is not None:
            rows = (x - mean).mul_(rstd).mul_(g)
            ctx.tape.add_rows(weight_name, rows.sum(between) if between else rows)
        onward = None
        if ctx.needs_input_grad[0]:
            onward = torch.ops.aten.native_layer_norm_backward(
                g.contiguous(), x, ctx.shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return onward, None, None, None, None, None, None, None


class Embedding(torch.autograd.Function):
    """`F.embedding(ids, weight)`; the gradient of `padding` is 0, as in the library."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        _anchor: Tensor,
        weight: Tensor,
        _bias: None,
        padding: int | None,
        name: str,
        tape: Tape,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.name, ctx.tape, ctx.table = padding, name, tape, len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        read = ids.reshape(len(ids), -1)
        g = g.reshape(*read.shape, g.shape[-1])
        if ctx.padding is not None:
            g = g.masked_fill((read == ctx.padding % ctx.table).unsqueeze(-1), 0)
        ctx.tape.add_lookup(ctx.name, g, read, ctx.table)
        return None, None, None, None, None, None, None


class GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        names: tuple[str | None, str | None],
        tape: Tape,
    ) -> Tensor:
        batch, channels = x.shape[:2]
        x = x.contiguous()
        pixels = x[0, 0].numel() if batch else 0
        y, mean, rstd = torch.native_group_norm(
            x, weight, bias, batch, channels, pixels, groups, eps
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.names, ctx.tape = groups, names, tape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        batch, channels = x.shape[:2]
        # As one image of batch x channels channels, the library's sums over images fall away and
        # what it returns for the affine map is per image.
        onward, scale_rows, shift_rows = torch.ops.aten.native_group_norm_backward(
            g.contiguous().view(1, batch * channels, -1),
            x.view(1, batch * channels, -1),
            mean.view(1, -1),
            rstd.view(1, -1),
            None if weight is None else weight.repeat(batch),
            1,
            batch * channels,
            x[0, 0].numel(),
            batch * ctx.groups,
            [bool(ctx.needs_input_grad[0]), weight_name is not None, bias_name is not None],
        )
        if weight_name is not None:
            ctx.tape.add_rows(weight_name, scale_rows.view(batch, channels))
        if bias_name is not None:
            ctx.tape.add_rows(bias_name, shift_rows.view(batch, channels))
        onward = onward.view(x.shape) if ctx.needs_input_grad[0] else None
        return onward, None, None, None, None, None, None, None


class FrozenNorm(torch.autograd.Function):
    """Batch norm with fixed statistics: an affine map of each channel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        names: tuple[str | None, str | None],
        tape: Tape,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.names, ctx.tape = names, tape
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        weight_name, bias_name = ctx.names
        per_channel = (1, -1, *([1] * (x.dim() - 2)))
        pixels = tuple(range(2, x.dim()))
        if weight_name is not None:
            centered = x - mean.view(per_channel)
            rows = (centered.mul_(g).sum(pixels) if pixels else centered * g) * rstd
            ctx.tape.add_rows(weight_name, rows)
        if bias_name is not None:
            ctx.tape.add_rows(bias_name, g.sum(pixels) if pixels else g)
        onward = None
        if ctx.needs_input_grad[0]:
            slope = rstd if weight is None else rstd * weight
            onward = g * slope.view(per_channel)
        return onward, None, None, None, None, None, None, None, None
