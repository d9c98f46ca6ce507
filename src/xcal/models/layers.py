"""What the networks share: normalization that mixes nobody's data, what trains, first weights."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcal.dp.fix import FrozenBatchNorm2d, group_count
from xcal.errors import UserError

Norm = Literal["group", "frozen"]
NORMS = (nn.GroupNorm, nn.BatchNorm2d)
Network = TypeVar("Network", bound=nn.Module)


class HalvingMaxPool2d(nn.MaxPool2d):
    """The maximum over 3x3 windows at every second pixel, with edges padded.

    Where no gradient is wanted, one axis after the other and by whole slices: the same numbers,
    several times faster than the library, which also looks for where each maximum stood.
    """

    def __init__(self) -> None:
        super().__init__(3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or 0 in x.shape:
            return super().forward(x)
        return _halved(_halved(x.mT).mT).contiguous()


def _halved(x: Tensor) -> Tensor:
    """The maximum of each even column and its neighbors."""
    even, odd = x[..., ::2], x[..., 1::2]
    columns = even.shape[-1]
    before = F.pad(odd, (1, 0), value=-math.inf)[..., :columns]
    after = F.pad(odd, (0, columns - odd.shape[-1]), value=-math.inf)
    return torch.maximum(torch.maximum(even, after), before)


def norm_maker(norm: str) -> Callable[[int], nn.Module]:
    """The normalization layer of a network, by its name in settings."""
    if norm == "group":
        return lambda channels: nn.GroupNorm(group_count(channels), channels)
    if norm == "frozen":
        return FrozenBatchNorm2d
    raise UserError(f"norm is {norm!r}: choose 'group' (from scratch) or 'frozen' (published)")


def staged(
    build: Callable[..., Any],
    classes: int,
    *,
    norm: Norm = "group",
    output_stride: int = 32,
    trainable: str = "all",
    train_norm_affine: bool = False,
    seed: int | None = None,
    **more: Any,
) -> Any:
    """A network of stages with first weights drawn from `seed` (None: fresh entropy).

    `build` is given the classes, the maker of `norm`, the output stride and what else there is;
    `trainable` and `train_norm_affine` say what trains, as in `choose_trainable`.
    """
    if output_stride not in (16, 32):
        raise UserError(f"output_stride is {output_stride}: choose 32 or 16")
    maker = norm_maker(norm)
    model = initialized(lambda: build(classes, maker, output_stride, **more), seed)
    choose_trainable(model, trainable, train_norm_affine)
    return model


def laid_out(build: Callable[[], Network]) -> Network:
    """A network whose weights have memory and no values yet: constructors draw nothing.

    As `to_empty` does it, which would import torch's symbolic shapes for that: 0.7 s a process.
    """
    with torch.device("meta"):
        model = build()
    model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
    return model


def initialized(build: Callable[[], Any], seed: int | None) -> Any:
    """Build a network and draw its first weights from `seed` alone (None: fresh entropy).

    The global generator is neither read nor advanced: the network is laid out without memory, so
    that the layers' own constructors draw nothing, and filled afterwards.
    """
    model = laid_out(build)
    generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    for module in model.modules():
        _fill(module, generator)
    return model


@torch.no_grad()
def _fill(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        module.weight.normal_(0.0, math.sqrt(2.0 / fan_out), generator=generator)
        _fill_with(module.bias, 0.0)
    elif isinstance(module, nn.Linear):
        reach = 1.0 / math.sqrt(module.in_features)
        module.weight.uniform_(-reach, reach, generator=generator)
        _fill_with(module.bias, 0.0)
    elif isinstance(module, NORMS):
        _fill_with(module.weight, 1.0)
        _fill_with(module.bias, 0.0)
    if isinstance(module, nn.BatchNorm2d):
        module.reset_running_stats()
    if reset := getattr(module, "reset_constants", None):  # buffers that a file may bring
        reset()


def _fill_with(tensor: Tensor | None, value: float) -> None:
    if tensor is not None:
        tensor.fill_(value)


def choose_trainable(model: Any, trainable: str, train_norm_affine: bool) -> None:
    """Set what trains; everything else is frozen, costs no per-sample work and gets no noise.

    `all`, `head`, `head+norm` (the head and every normalization's scale and shift),
    `head+norm:k` (the same in the last k stages only), or `last:k`: the head and the last k
    stages. Scale and shift of frozen batch norms train only by `train_norm_affine` or `head+norm`.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    stages: Sequence[Sequence[nn.Module]] = model.stages()
    chosen: list[nn.Module] = [model.get_submodule(model.head_layer)]
    normalized: list[nn.Module] = []
    if trainable == "all":
        chosen.append(model)
    elif trainable.startswith("last:"):
        chosen += _last(stages, trainable)
    elif trainable.startswith("head+norm:"):
        normalized += _last(stages, trainable)
    elif trainable == "head+norm":
        normalized.append(model)
    elif trainable != "head":
        raise UserError(
            f"trainable is {trainable!r}: choose 'all', 'head', 'head+norm', 'head+norm:k' or"
            f" 'last:k' with k from 1 to {len(stages)}"
        )
    norms = {m for part in normalized for m in part.modules() if isinstance(m, NORMS)}
    others = {m for part in chosen for m in part.modules()}
    if not train_norm_affine:
        others = {m for m in others if not isinstance(m, nn.BatchNorm2d)}
    for module in norms | others:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)


def _last(stages: Sequence[Sequence[nn.Module]], trainable: str) -> list[nn.Module]:
    kind, _, text = trainable.partition(":")
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= len(stages):
        raise UserError(
            f"trainable is {trainable!r}: this network has stages {kind}:1 to {kind}:{len(stages)}"
        )
    return [module for stage in stages[-count:] for module in stage]
