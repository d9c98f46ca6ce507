"""Stand-ins for the operations that hold trainable parameters.

Inside `Recorder` the calls `conv2d`, `linear`, `group_norm` and `batch_norm` that use a trainable
parameter run as autograd functions of our own: the same forward pass; a backward pass that hands
on the input gradient only and leaves per-unit weight gradients in a `Book`. The parameters
themselves never enter the graph, so a parameter that is found there after the forward pass was
used in some way no rule covers, and `refuse_other_uses` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xcal.dp.clipping.convolution import ConvShape
from xcal.dp.clipping.geometry import PLAIN, Geometry
from xcal.dp.clipping.layers import Convolution, FrozenNorm, GroupNorm, Linear, apply
from xcal.dp.clipping.tape import Book, Units
from xcal.errors import UserError
from xcal.plugins import MANUAL

INSTEAD_OF_BATCH_NORM = (
    "use GroupNorm, or keep it in evaluation mode with statistics that do not move (norm = 'frozen'"
    " for networks of this software, FrozenBatchNorm2d of xcal.models.layers in one of your own;"
    f" {MANUAL})"
)


class Recorder(TorchFunctionMode):
    """While entered, every use of a trainable parameter by a known operation is recorded.

    `names` maps the identity of each trainable parameter to its name; `anchor` is a scalar that
    requires a gradient, so that the graph starts at the first recorded operation and no earlier:
    frozen layers before it cost no backward pass.
    """

    def __init__(self, names: Mapping[int, str], images: int, book: Book, anchor: Tensor) -> None:
        super().__init__()
        self._names = names
        self._images = images
        self._book = book
        self._anchor = anchor
        self._rules: dict[Any, Callable[..., Tensor | None]] = {
            F.conv2d: self._conv2d,
            F.linear: self._linear,
            F.group_norm: self._group_norm,
            F.batch_norm: self._batch_norm,
            F.instance_norm: self._instance_norm,
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
        return func(*args, **(kwargs or {}))

    def _name(self, parameter: Tensor | None) -> str | None:
        return None if parameter is None else self._names.get(id(parameter))

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
        self._book.uses.update(used)
        return True

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor | None:
        names = self._name(weight), self._name(bias)
        if x.dim() != 4:
            if names != (None, None):
                raise UserError(
                    f"the convolution with parameter {names[0] or names[1]!r} is given a "
                    f"{x.dim()}-dimensional input: give batches of images (B, C, H, W)"
                )
            return None
        if not self._enter(x, "convolution", *names):
            return None
        kernel, spread = _two(weight.shape[2:]), _two(dilation)
        if isinstance(padding, str):
            x, pads = _named_padding(x, padding, kernel, spread)
        else:
            pads = _two(padding)
        shape = ConvShape(kernel, _two(stride), pads, spread, groups, _four(weight.shape))
        return apply(Convolution, x, self._anchor, weight, bias, shape, names, self._book)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        names = self._name(weight), self._name(bias)
        if not self._enter(x, "linear layer", *names):
            return None
        if x.dim() != 2:
            raise UserError(
                f"the linear layer with parameter {names[0] or names[1]!r} is given a "
                f"{x.dim()}-dimensional input: only (images, features) has a per-image rule"
            )
        return apply(Linear, x, self._anchor, weight, bias, names, self._book)

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
        book, anchor = self._book, self._anchor
        return apply(GroupNorm, x, anchor, weight, bias, num_groups, eps, names, book)

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
        book, anchor = self._book, self._anchor
        mean, var = running_mean, running_var
        return apply(FrozenNorm, x, anchor, weight, bias, mean, var, eps, names, book)

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
        return None


@dataclass(frozen=True)
class Recorded:
    """One forward and backward pass: the book it wrote and what it showed, in image order."""

    book: Book
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
) -> Recorded:
    """Run the network forward and back once on the weighted sum of cross-entropies.

    `forward` stands for the network where `images` have been through its frozen beginning.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    book = Book(units, images.device, geometry)
    with torch.enable_grad():
        anchor = images.new_zeros((), requires_grad=True)
        with _captured(model, capture) as caught, Recorder(names, len(images), book, anchor):
            logits = (forward or model)(images)
        if logits.dim() != 2 or len(logits) != len(images):
            raise UserError(
                f"the network gives outputs of shape {tuple(logits.shape)} for {len(images)} "
                "images: it must give one row of class scores per image"
            )
        known = (labels >= 0) & (labels < logits.shape[1])
        losses = F.cross_entropy(logits, labels.where(known, 0), reduction="none")
        total = (losses * weights).sum()
        refuse_other_uses(total, names)
        if total.requires_grad:
            # The anchor's own gradient is nothing; asking for it visits every recorded operation
            # and spares the rest of the graph.
            torch.autograd.grad(total, [anchor], allow_unused=True)
    finite = known & torch.isfinite(losses.detach())
    return Recorded(book, logits.detach(), caught[-1] if caught else None, finite)


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
            raise UserError(
                f"parameter {name!r} is used by an operation that has no per-sample gradient "
                "rule: freeze it (requires_grad = False), or use Conv2d, Linear or GroupNorm"
            )
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def _two(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value if len(value) == 2 else (value[0], value[0])
    return first, second


def _four(shape: Sequence[int]) -> tuple[int, int, int, int]:
    a, b, c, d = shape
    return a, b, c, d


def _named_padding(
    x: Tensor, padding: str, kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """'valid' and 'same' as symmetric padding, after padding `x` by the odd pixel if there is."""
    if padding == "valid":
        return x, (0, 0)
    high, wide = (spread * (size - 1) for spread, size in zip(dilation, kernel, strict=True))
    if high % 2 or wide % 2:
        x = F.pad(x, (0, wide % 2, 0, high % 2))
    return x, (high // 2, wide // 2)
