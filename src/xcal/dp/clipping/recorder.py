"""Stand-ins for the operations that hold trainable parameters.

Inside `TapeRecorder` the calls of layers (`conv2d`, `linear`, `layer_norm`, …) that use a trainable
parameter run as autograd functions of our own: the same forward pass; a backward pass that hands
on the input gradient only and leaves per-unit weight gradients in a `Tape`. Parameters that a
network adds, multiplies or concatenates itself are `plain.py`'s. The parameters themselves never
enter the graph of the loss, so a parameter that is found there after the forward pass was used in
some way no rule covers, and `refuse_other_uses` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xcal.dp.clipping.fallback import Fallback, NoRule
from xcal.dp.clipping.geometry import PLAIN, Geometry
from xcal.dp.clipping.layer_rules import (
    Convolution,
    Embedding,
    FrozenNorm,
    GroupNorm,
    LayerNorm,
    Linear,
    apply,
)
from xcal.dp.clipping.losses import Loss, per_sample
from xcal.dp.clipping.named import trainable
from xcal.dp.clipping.plain import Plain
from xcal.dp.clipping.precision import in_half, single
from xcal.dp.clipping.tape import Tape, Units
from xcal.dp.clipping.volumes import Volume, VolumeShape
from xcal.errors import UserError
from xcal.plugins import MANUAL

INSTEAD_OF_BATCH_NORM = (
    "use GroupNorm, or keep it in evaluation mode with statistics that do not move (norm = 'frozen'"
    " for networks of this software, FrozenBatchNorm2d of xcal.models.layers in one of your own;"
    f" {MANUAL})"
)


class TapeRecorder(TorchFunctionMode):
    """While entered, every use of a trainable parameter by a known operation is recorded.

    `anchor` is a scalar that requires a gradient, so that the graph starts at the first recorded
    operation and no earlier: frozen layers before it cost no backward pass.
    """

    def __init__(self, plain: Plain, images: int, tape: Tape, anchor: Tensor) -> None:
        super().__init__()
        self._plain = plain
        self._images = images
        self._tape = tape
        self._anchor = anchor
        self._time_first = False
        self._rules: dict[Any, Callable[..., Tensor | None]] = {
            F.conv1d: self._convolution(1),
            F.conv2d: self._convolution(2),
            F.conv3d: self._convolution(3),
            F.conv_transpose1d: self._transposed(1),
            F.conv_transpose2d: self._transposed(2),
            F.conv_transpose3d: self._transposed(3),
            F.linear: self._linear,
            F.group_norm: self._group_norm,
            F.batch_norm: self._batch_norm,
            F.instance_norm: self._instance_norm,
            F.layer_norm: self._layer_norm,
            F.rms_norm: self._rms_norm,
            F.embedding: self._embedding,
            F.prelu: self._prelu,
            F.multi_head_attention_forward: self._attention,
            torch.matmul: self._matmul,
            Tensor.matmul: self._matmul,
            Tensor.__matmul__: self._matmul,
        }

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = self._rules.get(func)
        if rule is not None:
            recorded = rule(*args, **(kwargs or {}))
            if recorded is not None:
                return recorded
        return self._plain.call(func, args, kwargs or {})

    def _name(self, parameter: Tensor | None) -> str | None:
        return self._plain.name(parameter)

    def _enter(self, x: Tensor, what: str, *names: str | None) -> bool:
        """Whether anything here is to be recorded; then rows of `x` must be the batch's images."""
        used = [name for name in names if name is not None]
        if not used:
            return False
        if x.shape[0] != self._images:
            raise UserError(
                f"the {what} with parameter {used[0]!r} sees {x.shape[0]} rows for "
                f"{self._images} images, so per-image gradients cannot be told apart: keep the "
                "batch as the first dimension, or freeze this layer"
            )
        self._tape.uses.update(used)
        return True

    def _convolution(self, dims: int) -> Callable[..., Tensor | None]:
        def convolution(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: int | Sequence[int] = 1,
            padding: str | int | Sequence[int] = 0,
            dilation: int | Sequence[int] = 1,
            groups: int = 1,
        ) -> Tensor | None:
            names = self._convolved(x, weight, bias, dims)
            if names is None:
                return None
            kernel, spread = tuple(weight.shape[2:]), _each(dilation, dims)
            if isinstance(padding, str):
                x, pads = _named_padding(x, padding, kernel, spread)
            else:
                pads = _each(padding, dims)
            shape = VolumeShape(kernel, _each(stride, dims), pads, spread, groups)
            return self._convolve(x, weight, bias, shape, names)

        return convolution

    def _transposed(self, dims: int) -> Callable[..., Tensor | None]:
        def transposed(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: int | Sequence[int] = 1,
            padding: int | Sequence[int] = 0,
            output_padding: int | Sequence[int] = 0,
            groups: int = 1,
            dilation: int | Sequence[int] = 1,
        ) -> Tensor | None:
            names = self._convolved(x, weight, bias, dims)
            if names is None:
                return None
            shape = VolumeShape(
                tuple(weight.shape[2:]),
                _each(stride, dims),
                _each(padding, dims),
                _each(dilation, dims),
                groups,
                transposed=True,
                added=_each(output_padding, dims),
            )
            return self._convolve(x, weight, bias, shape, names)

        return transposed

    def _convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dims: int
    ) -> tuple[str | None, str | None] | None:
        """The names of what trains in a convolution; None if nothing does."""
        names = self._name(weight), self._name(bias)
        if names != (None, None) and x.dim() != dims + 2:
            raise UserError(
                f"the convolution with parameter {names[0] or names[1]!r} is given a "
                f"{x.dim()}-dimensional input: give batches (B, C, …) of {dims + 2} dimensions"
            )
        return names if self._enter(x, "convolution", *names) else None

    def _convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: VolumeShape,
        names: tuple[str | None, str | None],
    ) -> Tensor:
        if len(shape.kernel) == 1:  # a line is an image one pixel high
            x, weight, shape = x.unsqueeze(2), weight.detach().unsqueeze(2), shape.one_more()
            return self._convolve(x, weight, bias, shape, names).squeeze(2)
        flat = None if shape.transposed else shape.flat(weight)
        if flat is not None:
            return apply(Convolution, x, self._anchor, weight, bias, flat, names, self._tape)
        return apply(Volume, x, self._anchor, weight, bias, shape, names, self._tape)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if self._plain.sources(x) is not None:
            return None
        names = self._name(weight), self._name(bias)
        if self._time_first and names != (None, None):
            # Inside attention: (time, images, features), or time and images in one.
            by_image = x.view(-1, self._images, x.shape[-1]).transpose(0, 1)
            self._enter(by_image, "attention", *names)
            y = apply(Linear, by_image, self._anchor, weight, bias, names, self._tape)
            return y.transpose(0, 1).contiguous().view(*x.shape[:-1], -1)
        if not self._enter(x, "linear layer", *names):
            return None
        if x.dim() < 2:
            raise UserError(
                f"the linear layer with parameter {names[0] or names[1]!r} is given a "
                f"{x.dim()}-dimensional input: give batches (B, …, features)"
            )
        return apply(Linear, x, self._anchor, weight, bias, names, self._tape)

    def _matmul(self, x: Tensor, weight: Tensor, **_: Any) -> Tensor | None:
        """x @ weight, as a linear layer."""
        if weight.dim() != 2 or x.dim() < 2 or self._plain.sources(weight) is None:
            return None
        return self._linear(x, self._plain.call(Tensor.t, (weight,), {}))

    def _attention(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The library's own attention, its layers recorded: there the batch stands second."""
        if query.dim() != 3 or query.shape[1] != self._images:
            return None
        self._time_first = True
        try:
            with self:
                return _unguarded_attention(query, *args, **kwargs)
        finally:
            self._time_first = False

    def _layer_norm(
        self,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor | None:
        names = self._name(weight), self._name(bias)
        if not self._enter(x, "layer norm", *names):
            return None
        if x.dim() == len(normalized_shape):
            raise UserError(
                f"the layer norm with parameter {names[0] or names[1]!r} normalizes over the "
                "images of a batch, which mixes people's data"
            )
        shape, tape = list(normalized_shape), self._tape
        return apply(LayerNorm, x, self._anchor, weight, bias, shape, eps, names, tape)

    def _rms_norm(
        self,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor | None:
        if weight is None or self._plain.sources(weight) is None:
            return None
        if x.dim() == len(normalized_shape):
            raise UserError("an RMS norm normalizes over the batch, which mixes people's data")
        normalized = F.rms_norm(x, normalized_shape, None, eps)
        scaled: Tensor = self._plain.call(torch.mul, (normalized, weight), {})
        return scaled

    def _prelu(self, x: Tensor, weight: Tensor) -> Tensor | None:
        if self._plain.sources(weight) is None or x.dim() < 2:
            return None
        slopes = self._plain.call(Tensor.view, (weight, -1, *[1] * (x.dim() - 2)), {})
        below: Tensor = self._plain.call(torch.mul, (x.clamp_max(0), slopes), {})
        return x.clamp_min(0) + below

    def _embedding(
        self,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:
        name = self._name(weight)
        if name is None:
            return None
        if max_norm is not None or scale_grad_by_freq:
            raise UserError(
                f"the embedding with parameter {name!r} uses max_norm or scale_grad_by_freq, by "
                "which one person's words change what others' do: build it without them"
            )
        if self._plain.constant(ids):
            # Positions, the same for all: a slice of the table, not a reading of data.
            made: Tensor = self._plain.call(F.embedding, (ids, weight, padding_idx), {})
            return made
        self._enter(ids, "embedding", name)
        padding, tape = padding_idx, self._tape
        return apply(Embedding, ids, self._anchor, weight, None, padding, name, tape)

    def _group_norm(
        self,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor | None:
        names = self._name(weight), self._name(bias)
        if not self._enter(x, "group norm", *names):
            return None
        tape, anchor = self._tape, self._anchor
        return apply(GroupNorm, x, anchor, weight, bias, num_groups, eps, names, tape)

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        names = self._name(weight), self._name(bias)
        if training or running_mean is None or running_var is None:
            raise UserError(
                "a batch norm uses the statistics of the batch, which mixes people's data: "
                + INSTEAD_OF_BATCH_NORM
            )
        if not self._enter(x, "batch norm", *names):
            return None
        tape, anchor = self._tape, self._anchor
        mean, var = running_mean, running_var
        return apply(FrozenNorm, x, anchor, weight, bias, mean, var, eps, names, tape)

    def _instance_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        if use_input_stats and running_mean is not None:
            raise UserError(
                "an instance norm updates running statistics from the images: build it with "
                "track_running_stats=False, or use group norm"
            )
        names = self._name(weight), self._name(bias)
        if not self._enter(x, "instance norm", *names):
            return None
        tape, anchor = self._tape, self._anchor
        if use_input_stats:
            groups = x.shape[1]
            return apply(GroupNorm, x, anchor, weight, bias, groups, eps, names, tape)
        return apply(
            FrozenNorm, x, anchor, weight, bias, running_mean, running_var, eps, names, tape
        )


# As torch has it, but for its first lines: they hand the whole call to whoever is listening, and
# what it consists of would go unheard.
_unguarded_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


@dataclass(frozen=True)
class RecordedPass:
    """One forward and backward pass: the tape it wrote and what it showed, in image order."""

    tape: Tape
    logits: Tensor
    features: Tensor | None
    finite: Tensor
    """Per image, whether its label is a class and its loss is finite."""


def record(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    weights: Tensor,
    units: Units,
    *,
    geometry: Geometry = PLAIN,
    capture: str | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    loss: Loss | None = None,
    fallback: Fallback | None = None,
    half: torch.dtype | None = None,
) -> RecordedPass:
    """Run the network forward and back once on the weighted sum of losses (cross-entropies).

    `forward` stands for the network where `images` have been through its frozen backbone. `half`:
    products are rounded to it on the way to the losses, and nothing of what the tape keeps.
    """
    while True:
        try:
            return _record(
                model, images, labels, weights, Tape(units, images.device, geometry),
                capture, forward or model, loss, fallback, half,
            )  # fmt: skip
        except NoRule as missing:
            if fallback is None or not fallback.add(missing.module):
                raise


def _record(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    weights: Tensor,
    tape: Tape,
    capture: str | None,
    forward: Callable[[Tensor], Tensor],
    loss: Loss | None,
    fallback: Fallback | None,
    half: torch.dtype | None,
) -> RecordedPass:
    names = {id(p): name for name, p in trainable(model).items()}
    with torch.enable_grad():
        anchor = weights.new_zeros((), requires_grad=True)
        plain = Plain(model, len(images), tape, anchor)
        slower = nullcontext() if fallback is None else fallback.entered(model, plain, len(images))
        recorder = TapeRecorder(plain, len(images), tape, anchor)
        precision = in_half(images.device, half)
        with precision, slower, _captured(model, capture) as caught, recorder:
            output = forward(images)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape[:1] != images.shape[:1]:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"the network gives outputs of shape {shape} for {len(images)} "
                "images: it must give one row of class scores per image"
            )
        with in_half(images.device, half):
            losses, known = per_sample(loss, logits, labels)
        total = (single(losses) * weights).sum()
        refuse_other_uses(total, names)
        if total.requires_grad:
            # The anchor's own gradient is nothing; asking for it visits every recorded operation
            # and spares the rest of the graph.
            torch.autograd.grad(total, [anchor], allow_unused=True)
        plain.settle()
    finite = known & torch.isfinite(losses.detach())
    return RecordedPass(
        tape, single(logits.detach()), single(caught[-1]) if caught else None, finite
    )


@contextmanager
def _captured(model: nn.Module, name: str | None) -> Iterator[list[Tensor]]:
    """Catch a copy of what the named module gives out, for as long as the context lasts."""
    caught: list[Tensor] = []
    if name is None:
        yield caught
        return
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise UserError(
            f"the network has no module {name!r} to take features from: name one of its modules"
        ) from None

    def catch(_: nn.Module, __: object, output: Tensor) -> None:
        caught.append(output.detach().clone())

    handle = module.register_forward_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def refuse_other_uses(output: Tensor, names: Mapping[int, str]) -> None:
    """Raise if a trainable parameter reached `output` past the rules above."""
    root = output.grad_fn
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise NoRule(name)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A number for every dimension."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) if len(value) == dims else (value[0],) * dims


def _named_padding(
    x: Tensor, padding: str, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """'valid' and 'same' as symmetric padding, after padding `x` by the odd pixel if there is."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    reach = [spread * (size - 1) for spread, size in zip(dilation, kernel, strict=True)]
    if any(one % 2 for one in reach):
        x = F.pad(x, [edge for one in reversed(reach) for edge in (0, one % 2)])
    return x, tuple(one // 2 for one in reach)
