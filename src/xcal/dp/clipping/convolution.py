"""Per-image weight gradients of convolutions, and their norms without forming them.

Shapes: images `x` (B, I, H, W), output gradients `g` (B, O, Ho, Wo), weights (O, I/groups, k, l).
A fully connected layer is the case of one pixel and a 1x1 kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from xcal.dp.clipping.precision import double

# Explicit gradients are written once and read twice more, and memory is slow: touching one of
# their numbers costs about as much as this many multiply-adds of a matrix product.
_TOUCHES = 8

# Where the largest entry of a Gram matrix is within 2^±50, what underflows beside it is nothing.
_SAFE_EXPONENT = 50

# The part of the margin of clipping that one source of rounding may use: this, of a squared norm.
_DOUBT = 5e-4

# No network that trains has inputs of a layer near this: see `unmeasurable`.
_LARGEST_INPUT = 2.0**60

# Output maps of at most this many pixels are tiny: see `forward`.
_TINY_MAP = 8

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


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: ConvShape
) -> tuple[Tensor, Tensor | None]:
    """The convolution, and the patches it was made from if there were any.

    On tiny maps the weights outweigh the images: unfolding these is cheap, and one matrix product
    beats the library, forward and, with the same patches, in `summed_weight_gradient`.
    """
    made = _output_size(x, shape)
    if shape.groups > 1 or shape.pointwise or math.prod(made) > _TINY_MAP or not len(x):
        y = torch.conv2d(x, weight, bias, shape.stride, shape.padding, shape.dilation, shape.groups)
        return y, None
    patches = _patches(x, shape).transpose(1, 2).reshape(-1, math.prod(shape.weight_shape[1:]))
    y = patches @ weight.flatten(1).T
    if bias is not None:
        y += bias
    return y.view(len(x), *made, -1).permute(0, 3, 1, 2).contiguous(), patches


def summed_weight_gradient(
    g: Tensor, x: Tensor, shape: ConvShape, patches: Tensor | None = None
) -> Tensor:
    """The weight gradient summed over all images, as in an ordinary backward pass."""
    if shape.pointwise and g.shape[2] * g.shape[3] == 1:
        return (g.flatten(1).T @ x.flatten(1)).view(shape.weight_shape)
    if shape.pointwise and g.stride(1) == x.stride(1) == 1:
        # Places of a linear layer: their features stand side by side in memory.
        outer, inner = (part.flatten(2).transpose(1, 2).flatten(0, 1) for part in (g, x))
        return (outer.T @ inner).view(shape.weight_shape)
    if patches is not None:
        outer = g.flatten(2).transpose(0, 1).reshape(g.shape[1], -1)
        return (outer @ patches).view(shape.weight_shape)
    return _library_weight_gradient(g, x, shape, shape.weight_shape, shape.groups)


def without_skipped_pixels(x: Tensor, shape: ConvShape) -> tuple[Tensor, ConvShape]:
    """The same weight gradient with the pixels a strided 1x1 kernel never reads left out."""
    if shape.kernel != (1, 1) or shape.padding != (0, 0) or shape.stride == (1, 1):
        return x, shape
    down, right = shape.stride
    return x[:, :, ::down, ::right].contiguous(), replace(shape, stride=(1, 1))


def per_image_weight_gradient(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """The weight gradient of every image, in parts: (T, B, N) with T x N weights.

    `part.transpose(0, 1)` of an image's (T, N) block, read row by row, is in the order of the
    weights. Ways that work tap by tap give one part a tap and spare a reordering; others give one.
    """
    if shape.groups == 1:
        return _dense_rows(g, x, shape)
    # The library is slow on depthwise kernels that are large, or larger than the map.
    if shape.depthwise and (math.prod(shape.kernel) > 9 or g.shape[2] * g.shape[3] <= 4):
        return _depthwise_by_taps(g, x, shape)
    return _images_as_groups(g, x, shape)


def gram_is_cheaper(g: Tensor, x: Tensor, shape: ConvShape) -> bool:
    """Whether norms should come from Gram matrices rather than from the gradients themselves.

    Decided by the layer's shape alone, never by the batch size: Poisson batches differ every step,
    and the same layer should always be summed in the same order.
    """
    if shape.groups != 1:
        return False
    seen, made = x.shape[2] * x.shape[3], g.shape[2] * g.shape[3]
    gram = seen**2 * x.shape[1] + made**2 * g.shape[1]
    return gram < _TOUCHES * math.prod(shape.weight_shape)


def gram_squared_norms(g: Tensor, x: Tensor, shape: ConvShape, *, alike: bool = False) -> Tensor:
    """Upper bounds, tight to rounding, of units' squared weight-gradient norms, in float64.

    `g` is (U, m, O, Ho, Wo) and `x` is (U, m, I, H, W): U units of m images each. The weight
    gradient of a unit is the sum over output pixels p of g_p times the patch a_p, so its squared
    norm is the sum over pairs of pixels of (g_p . g_q)(a_p . a_q). Where activations share a large
    mean those terms cancel, and rounding may hide the norm: with R = sum_p |g_p| |a_p|, inner
    products of n numbers are wrong by up to n eps/2 of R^2, and weights can be chosen so that all
    roundings go the same way. So the products are formed in float64 wherever float32 leaves a doubt
    that counts; of one unit after the other where units are to be measured `alike`, to the bit,
    however many others are in doubt.
    """
    images = g.shape[1]
    if shape.pointwise and images * g.shape[3] * g.shape[4] == 1:
        return double(g.flatten(1)).square().sum(1) * double(x.flatten(1)).square().sum(1)
    unit = torch.finfo(g.dtype).eps / 2
    outer, inner = _out_gram(g), _patch_gram(x, shape)
    squared, reach = _norms_from_grams(outer, inner)
    summands = g.shape[2] + x.shape[2] + math.prod(shape.kernel) + 8
    # Each unit by itself: whether another one is measured so must not depend on it.
    badly = summands * unit * reach > _DOUBT * squared
    # A square of a small number underflows, at one pixel or at all of them, and hides a norm that
    # a huge factor makes large. In float64 no square of a float32 does, nor a product of two.
    badly |= ~(_well_scaled(outer) & _well_scaled(inner)).to(badly.device)
    doubtful = badly.nonzero().flatten()
    at_once = 1 if alike else max(len(doubtful), 1)
    for ids in torch.split(doubtful, at_once) if len(doubtful) else ():
        exact = _out_gram(double(g[ids])), _patch_gram(double(x[ids]), shape)
        squared[ids], reach[ids] = _norms_from_grams(*exact)
    return torch.maximum(squared, _hidden(outer.shape[1], unit) * reach)


def _hidden(pixels: int, unit: float) -> float:
    """The share of R^2 below which no squared norm is believed.

    The clipped sum is formed in float32, where terms that cancel leave up to `pixels` roundings of
    their size: under a smaller norm than this a unit would be scaled up to where those count. No
    more than a 64th of what terms of random signs have, for units of very many pixels.
    """
    return min((pixels * unit / _DOUBT) ** 2, 1 / (64 * pixels))


def unmeasurable(x: Tensor) -> Tensor:
    """Per image (B, …), whether its inputs are too large for its clipped gradient to be formed.

    An output gradient that is scaled down to the clipping norm is rounded to a multiple of 2^-149
    at worst, and that error is multiplied by the input: below 2^60 it is nothing, at 2^127 it is
    more than the smallest clipping norms.
    """
    # Of the ways to find the largest, by far the fastest; what is no number stays one.
    return ~(x.flatten(1).abs().amax(1) < _LARGEST_INPUT)


def _norms_from_grams(outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms and R^2 of units, in float64."""
    squared = torch.einsum("upq,upq->u", double(outer), double(inner))
    lengths = double(outer.diagonal(dim1=1, dim2=2)) * double(inner.diagonal(dim1=1, dim2=2))
    reach = lengths.clamp_min(0).sqrt().sum(1).square()
    return squared.clamp_min(0), reach


def _well_scaled(gram: Tensor) -> Tensor:
    """Per unit, whether its largest product is far from the ends of what a number can hold."""
    peaks = gram.diagonal(dim1=1, dim2=2).amax(1)
    return (peaks > 2.0**-_SAFE_EXPONENT) & (peaks < 2.0**_SAFE_EXPONENT)


def _out_gram(g: Tensor) -> Tensor:
    """Inner products g_p . g_q of all pairs of output pixels of a unit, (U, m*Ho*Wo, m*Ho*Wo)."""
    columns = g.transpose(1, 2).reshape(g.shape[0], g.shape[2], -1)
    return torch.bmm(columns.transpose(1, 2), columns)


def _patch_gram(x: Tensor, shape: ConvShape) -> Tensor:
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
    made = math.prod(total.shape[1:4])
    return total.reshape(units, made, made)


def _tap_slices(padded: int, axis: int, shape: ConvShape) -> list[slice]:
    """For each tap of the kernel along one axis, the padded pixels it meets."""
    kernel, stride, dilation = shape.kernel[axis], shape.stride[axis], shape.dilation[axis]
    made = (padded - dilation * (kernel - 1) - 1) // stride + 1
    starts = (tap * dilation for tap in range(kernel))
    return [slice(start, start + stride * (made - 1) + 1, stride) for start in starts]


def _output_size(x: Tensor, shape: ConvShape) -> tuple[int, int]:
    high, wide = (
        (x.shape[2 + axis] + 2 * shape.padding[axis] - shape.dilation[axis] * (kernel - 1) - 1)
        // shape.stride[axis]
        + 1
        for axis, kernel in enumerate(shape.kernel)
    )
    return high, wide


def _dense_rows(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    batch, out_channels, in_channels = g.shape[0], g.shape[1], x.shape[1]
    if shape.pointwise:
        rows = torch.bmm(g.flatten(2), x.flatten(2).transpose(1, 2))
        return rows.view(1, batch, -1)
    if in_channels <= 4:
        return _images_as_groups(g, x, shape)
    if shape.stride == (1, 1) and g.shape[2] * g.shape[3] >= 64:
        return _dense_by_taps(g, x, shape)
    per_image = in_channels * math.prod(shape.kernel)
    step = max(1, _UNFOLD_LIMIT // (per_image * g.shape[2] * g.shape[3]))
    rows = g.new_empty(batch, out_channels, per_image)
    for start in range(0, batch, step):
        part = slice(start, start + step)
        patches = _patches(x[part], shape)
        torch.bmm(g[part].flatten(2), patches.transpose(1, 2), out=rows[part])
    return rows.view(1, batch, -1)


def _patches(x: Tensor, shape: ConvShape) -> Tensor:
    """What the kernel sees at each output pixel, (B, I*k*l, Ho*Wo)."""
    return F.unfold(x, shape.kernel, shape.dilation, shape.padding, shape.stride)


def _dense_by_taps(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """One matrix product per tap, and no unfolding: with rows of equal length, padding included,
    moving by a tap is moving by an offset in memory.
    """
    batch, out_channels, high, wide = g.shape
    in_channels, (pad_h, pad_w) = x.shape[1], shape.padding
    tall, row = x.shape[2] + 2 * pad_h, x.shape[3] + 2 * pad_w
    # The last taps of the last row read beyond it, where the output gradient is padded with 0.
    padded = x.new_zeros(batch, in_channels, tall * row + row - wide)
    inner = padded[:, :, : tall * row].view(batch, in_channels, tall, row)
    inner[:, :, pad_h : tall - pad_h, pad_w : row - pad_w] = x
    outer = F.pad(g, (0, row - wide)).view(batch, out_channels, high * row)
    down, right = shape.dilation
    rows = g.new_empty(math.prod(shape.kernel), batch, out_channels, in_channels)
    for tap, (i, j) in enumerate(product(range(shape.kernel[0]), range(shape.kernel[1]))):
        start = i * down * row + j * right
        moved = padded[:, :, start : start + high * row]
        torch.bmm(outer, moved.transpose(1, 2), out=rows[tap])
    return rows.flatten(2)


def _depthwise_by_taps(g: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Per tap, the product of the pixels it joins, channels side by side in memory."""
    outer = g.permute(0, 2, 3, 1).contiguous()
    inner = x.permute(0, 2, 3, 1).contiguous()
    downs = [_meeting(tap, 0, g.shape[2], x.shape[2], shape) for tap in range(shape.kernel[0])]
    rights = [_meeting(tap, 1, g.shape[3], x.shape[3], shape) for tap in range(shape.kernel[1])]
    rows = g.new_empty(math.prod(shape.kernel), g.shape[0], g.shape[1])
    for tap, ((out_h, in_h), (out_w, in_w)) in enumerate(product(downs, rights)):
        joined = outer[:, out_h, out_w] * inner[:, in_h, in_w]
        torch.sum(joined, (1, 2), out=rows[tap])
    return rows


def _meeting(tap: int, axis: int, made: int, seen: int, shape: ConvShape) -> tuple[slice, slice]:
    """Along one axis, the output pixels at which a tap meets the image, and the pixels it meets.

    Both are empty if the tap only ever sees padding.
    """
    stride = shape.stride[axis]
    offset = tap * shape.dilation[axis] - shape.padding[axis]
    first = max(0, -(offset // stride))
    last = min(made - 1, (seen - 1 - offset) // stride)
    if last < first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + offset
    return slice(first, last + 1), slice(start, start + stride * (last - first) + 1, stride)


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
    return rows.reshape(1, batch, -1)


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
