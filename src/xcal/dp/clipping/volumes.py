"""Convolutions other than plain ones of images: of volumes, and transposed ones.

A transposed convolution's weight gradient is that of the convolution back, from its output gradient
to its input: the two change places, and the same arithmetic does for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from operator import ge
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from xcal.dp.clipping.convolution import (
    ConvShape,
    gram_is_cheaper,
    per_image_weight_gradient,
    without_skipped_pixels,
)
from xcal.dp.clipping.precision import single
from xcal.dp.clipping.tape import Tape


@dataclass(frozen=True)
class VolumeShape:
    """The geometry of one convolution call in any number of dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    added: tuple[int, ...] = ()
    """Pixels that a transposed convolution adds at the far end (`output_padding`)."""

    def one_more(self) -> VolumeShape:
        """The same with one more dimension, in which nothing happens."""
        return VolumeShape(
            (1, *self.kernel),
            (1, *self.stride),
            (0, *self.padding),
            (1, *self.dilation),
            self.groups,
            self.transposed,
            (0, *self.added) if self.added else (),
        )

    def flat(self, weight: Tensor) -> ConvShape | None:
        """As a convolution of images, if that is what it is."""
        if len(self.kernel) != 2 or any(map(ge, self.added, self.stride)):
            return None
        (k, l), (s, t), (p, q), (d, e) = self.kernel, self.stride, self.padding, self.dilation
        outputs, inputs = weight.shape[:2]
        return ConvShape((k, l), (s, t), (p, q), (d, e), self.groups, (outputs, inputs, k, l))


class Volume(torch.autograd.Function):
    rounds = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: VolumeShape,
        names: tuple[str | None, str | None],
        tape: Tape,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.names, ctx.tape = shape, names, tape
        return torch.convolution(x, weight, bias, *_how(shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shape, tape = ctx.shape, ctx.tape
        weight_name, bias_name = ctx.names
        exact = single(g)
        if bias_name is not None:
            tape.add_rows(bias_name, exact.flatten(2).sum(2))
        if weight_name is not None:
            seen = single(x)
            outer, inner = (seen, exact) if shape.transposed else (exact, seen)
            _write(tape, weight_name, tape.by_channel(weight_name, outer), inner, weight, shape)
        onward = None
        if ctx.needs_input_grad[0]:
            onward = torch.ops.aten.convolution_backward(
                g, x, weight, None, *_how(shape), [True, False, False]
            )[0]
        return onward, None, None, None, None, None, None


def _how(shape: VolumeShape) -> tuple[Any, ...]:
    added = list(shape.added or [0] * len(shape.kernel))
    lists = (list(shape.stride), list(shape.padding), list(shape.dilation))
    return *lists, shape.transposed, added, shape.groups


def _write(
    tape: Tape, name: str, outer: Tensor, inner: Tensor, weight: Tensor, shape: VolumeShape
) -> None:
    flat = shape.flat(weight)
    if flat is not None:
        inner, flat = without_skipped_pixels(inner, flat)
        if gram_is_cheaper(outer, inner, flat):
            tape.add_pair(name, outer, inner, flat)
        else:
            tape.add_parts(name, per_image_weight_gradient(outer, inner, flat))
        return
    made = outer.shape[2:]
    outer = outer.flatten(2)
    # With its patches side by side it is a linear layer on as many places as it makes pixels.
    unfolded = ConvShape(
        (1, 1), (1, 1), (0, 0), (1, 1), 1, (len(weight), math.prod(weight.shape[1:]), 1, 1)
    )
    places = inner.new_empty(1).expand(1, unfolded.weight_shape[1], outer.shape[2], 1)
    if shape.groups == 1 and gram_is_cheaper(outer.unsqueeze(3), places, unfolded):
        patches = torch.stack(list(_seen_by_taps(inner, shape, made)), dim=2)
        tape.add_pair(name, outer.unsqueeze(3), patches.flatten(1, 2).unsqueeze(3), unfolded)
        return
    batch, groups = len(outer), shape.groups
    rows = outer.new_empty(math.prod(shape.kernel), batch, math.prod(weight.shape[:2]))
    apart = outer.reshape(batch * groups, -1, outer.shape[2])
    for tap, seen in enumerate(_seen_by_taps(inner, shape, made)):
        other = seen.reshape(batch * groups, -1, outer.shape[2])
        rows[tap] = torch.bmm(apart, other.transpose(1, 2)).view(batch, -1)
    tape.add_parts(name, rows)


def _seen_by_taps(x: Tensor, shape: VolumeShape, made: torch.Size) -> Iterator[Tensor]:
    """For each tap of the kernel, what it meets at every output pixel, (B, channels, pixels)."""
    edges: list[int] = []
    for axis, (kernel, stride, padding, dilation) in enumerate(
        zip(shape.kernel, shape.stride, shape.padding, shape.dilation, strict=True)
    ):
        reach = dilation * (kernel - 1) + stride * (made[axis] - 1) + 1
        edges = [padding, max(0, reach - padding - x.shape[2 + axis]), *edges]
    padded = F.pad(x, edges)
    for taps in product(*(range(kernel) for kernel in shape.kernel)):
        at = (
            slice(tap * d, tap * d + s * (m - 1) + 1, s)
            for tap, d, s, m in zip(taps, shape.dilation, shape.stride, made, strict=True)
        )
        yield padded[:, :, *at].flatten(2)
