"""Per-image weight gradients of convolutions, and their norms without forming them.

Shapes: images `x` (B, I, H, W), output gradients `g` (B, O, Ho, Wo), weights (O, I/groups, k, l).
A fully connected layer is the case of one pixel and a 1x1 kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

# The cost, in units of one multiply-add of a large matrix product, of touching one number of a
# Gram matrix while its shifted slices are added up. It only decides which way is taken.
_GRAM_TOUCH = 4.0

# At most this many numbers are unfolded at a time, so that im2col never dominates the memory.
_UNFOLD_LIMIT = 1 << 21


@dataclass(frozen=True)
class ConvShape:
    """The geometry of one convolution call; paddings are symmetric."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    weight_shape: tuple[int, int, int, int]

    @property
    def pointwise(self) -> bool:
        """A 1x1 kernel that reads every pixel once: a matrix product, no unfolding."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def depthwise(self) -> bool:
        """One input and one output channel per group."""
        return self.groups > 1 and self.weight_shape[0] == self.groups and self.weight_shape[1] == 1


def input_gradient(g: Tensor, x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The gradient with respect to the images."""
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, shape.stride, shape.padding, shape.dilation,
        False, [0, 0], shape.groups, [True, False, False],
    )[0]  # fmt: skip
    return gradient


def summed_weight_gradient(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """The weight gradient summed over all images, as in an ordinary backward pass."""
    if shape.pointwise and g.shape[2] * g.shape[3] == 1:
        return (g.flatten(1).T @ x.flatten(1)).view(shape.weight_shape)
    return _library_weight_gradient(g, x, shape, shape.weight_shape, shape.groups)


def per_image_weight_gradient(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """The weight gradient of every image, (B, O, I/groups, k, l)."""
    if shape.groups == 1:
        return _dense_rows(g, x, shape)
    if shape.depthwise:
        return _depthwise_rows(g, x, shape)
    return _images_as_groups(g, x, shape)


def gram_is_cheaper(g: Tensor, x: Tensor, shape: ConvShape) -> bool:
    """Whether norms should come from Gram matrices rather than from the gradients themselves.

    Decided by the layer's shape alone, never by the batch size: Poisson batches differ every step,
    and the same layer should always be summed in the same order.
    """
    if shape.groups != 1:
        return False
    out_channels, in_channels, *_ = shape.weight_shape
    taps = shape.kernel[0] * shape.kernel[1]
    seen, made = x.shape[2] * x.shape[3], g.shape[2] * g.shape[3]
    gram = seen**2 * in_channels + made**2 * out_channels + _GRAM_TOUCH * taps * made**2
    explicit = made * out_channels * in_channels * taps
    return made <= 64 and gram < explicit


def gram_squared_norms(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Upper bounds, tight to rounding, of units' squared weight-gradient norms, in float64.

    `g` is (U, m, O, Ho, Wo) and `x` is (U, m, I, H, W): U units of m images each. The weight
    gradient of a unit is the sum over output pixels p of g_p times the patch a_p, so its squared
    norm is the sum over pairs of pixels of (g_p . g_q)(a_p . a_q). When activations share a large
    mean those terms cancel and rounding may hide part of the norm; the rounding error is at most
    proportional to (sum_p |g_p| |a_p|)^2, which the diagonals give for nothing, and is added. So
    a norm is never understated.
    """
    units, images = g.shape[:2]
    made = images * g.shape[3] * g.shape[4]
    outer = g.transpose(1, 2).reshape(units, g.shape[2], made)
    gram_out = torch.bmm(outer.transpose(1, 2), outer)
    gram_in = _patch_gram(x, shape, made)
    products = torch.einsum("upq,upq->u", gram_out, gram_in).double()
    lengths = gram_out.diagonal(dim1=1, dim2=2).clamp_min(0) * gram_in.diagonal(
        dim1=1, dim2=2
    ).clamp_min(0)
    reach = lengths.sqrt().sum(1).double().square()
    return products.clamp_min(0) + 8 * torch.finfo(g.dtype).eps * reach


def _patch_gram(x: Tensor, shape: ConvShape, made: int) -> Tensor:
    """Inner products a_p . a_q of all pairs of patches of a unit, (U, m*Ho*Wo, m*Ho*Wo).

    The Gram matrix of *pixels* is formed once; that of patches is the sum of its slices, shifted
    by the kernel's taps in both pixel indices at once.
    """
    units, images, channels, height, width = x.shape
    pixels = images * height * width
    columns = x.transpose(1, 2).reshape(units, channels, pixels)
    gram = torch.bmm(columns.transpose(1, 2), columns)
    if shape.pointwise:
        return gram
    gram = gram.view(units, images, height, width, images, height, width)
    pad_h, pad_w = shape.padding
    if pad_h or pad_w:
        edges = (pad_w, pad_w, pad_h, pad_h)
        gram = F.pad(gram, (*edges, 0, 0, *edges))
    rows = _tap_slices(gram.shape[2], 0, shape)
    cols = _tap_slices(gram.shape[3], 1, shape)
    total: Tensor | None = None
    for r, c in product(rows, cols):
        part = gram[:, :, r, c, :, r, c]
        total = part.contiguous() if total is None else total.add_(part)
    assert total is not None  # a kernel has at least one tap
    return total.reshape(units, made, made)


def _tap_slices(padded: int, axis: int, shape: ConvShape) -> list[slice]:
    """For each tap of the kernel along one axis, the padded pixels it meets."""
    kernel, stride, dilation = shape.kernel[axis], shape.stride[axis], shape.dilation[axis]
    made = (padded - dilation * (kernel - 1) - 1) // stride + 1
    starts = (tap * dilation for tap in range(kernel))
    return [slice(start, start + stride * (made - 1) + 1, stride) for start in starts]


def _dense_rows(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    batch, out_channels = g.shape[:2]
    outer = g.reshape(batch, out_channels, -1)
    if shape.pointwise:
        rows = torch.bmm(outer, x.reshape(batch, x.shape[1], -1).transpose(1, 2))
        return rows.view(batch, *shape.weight_shape)
    per_image = shape.weight_shape[1] * shape.kernel[0] * shape.kernel[1] * outer.shape[2]
    step = max(1, _UNFOLD_LIMIT // per_image)
    rows = g.new_empty(batch, out_channels, per_image // outer.shape[2])
    for start in range(0, batch, step):
        part = slice(start, start + step)
        patches = F.unfold(
            x[part], shape.kernel, dilation=shape.dilation, padding=shape.padding,
            stride=shape.stride,
        )  # fmt: skip
        torch.bmm(outer[part], patches.transpose(1, 2), out=rows[part])
    return rows.view(batch, *shape.weight_shape)


def _depthwise_rows(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    if shape.kernel[0] * shape.kernel[1] <= 9:
        return _images_as_groups(g, x, shape)
    # Large kernels: the library's own weight gradient is slow, shifted products are not.
    pad_h, pad_w = shape.padding
    padded = F.pad(x, (pad_w, pad_w, pad_h, pad_h)) if pad_h or pad_w else x
    rows = _tap_slices(padded.shape[2], 0, shape)
    cols = _tap_slices(padded.shape[3], 1, shape)
    taps = [torch.einsum("bchw,bchw->bc", g, padded[:, :, r, c]) for r, c in product(rows, cols)]
    return torch.stack(taps, dim=2).view(g.shape[0], *shape.weight_shape)


def _images_as_groups(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Every image becomes groups of its own, so that one library call keeps them apart."""
    batch = g.shape[0]
    out_channels, *rest = shape.weight_shape
    rows = _library_weight_gradient(
        g.reshape(1, -1, *g.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        shape,
        (batch * out_channels, *rest),
        batch * shape.groups,
    )
    return rows.view(batch, out_channels, *rest)


def _library_weight_gradient(
    g: Tensor, x: Tensor, shape: ConvShape, weight_shape: tuple[int, ...], groups: int
) -> Tensor:
    # Only the shape of the weights matters here: one number, expanded, stands for them.
    stand_in = g.new_empty(1).expand(weight_shape)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g, x, stand_in, None, shape.stride, shape.padding, shape.dilation,
        False, [0, 0], groups, [False, True, False],
    )[1]  # fmt: skip
    return gradient
