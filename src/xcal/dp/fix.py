"""Networks with batch norm, made into ones whose per-sample gradients exist."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import UninitializedParameter

from xcal.errors import UserError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


_MOST_GROUPS = 32
_FEWEST_CHANNELS_A_GROUP = 4


def group_count(channels: int) -> int:
    """The most groups, up to 32, that divide the channels into groups of at least 4."""
    fitting = (g for g in range(_MOST_GROUPS, 0, -1) if channels % g == 0)
    return next((g for g in fitting if channels // g >= _FEWEST_CHANNELS_A_GROUP), 1)


def _fixed_map(norm: _NormBase, x: Tensor) -> Tensor | None:
    """Scale and shift, if a gradient goes through them that they do not keep for themselves.

    The gradient of batch norm also sums over all positions, which nobody reads here
    (`benchmarks/frozen_norm.py`).
    """
    if norm.weight is None or norm.weight.requires_grad or norm.bias.requires_grad:
        return None
    if (
        x.dtype != norm.weight.dtype
    ):  # under autocast, which batch norm computes in single precision
        return None
    mean, variance = norm.running_mean, norm.running_var
    if not (torch.is_grad_enabled() and x.requires_grad) or mean is None or variance is None:
        return None
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    shift = torch.addcmul(norm.bias, mean, scale, value=-1)
    shape = (-1, *(1 for _ in x.shape[2:]))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm as a public affine map: its statistics are read from a file and never updated.

    It stays in evaluation mode whatever mode the network around it is put in.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.training = False

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:
        return super().train(False)

    def forward(self, input: Tensor) -> Tensor:
        fixed = _fixed_map(self, input)
        return super().forward(input) if fixed is None else fixed


class FrozenBatchNorm(_BatchNorm):
    """Batch norm with fixed statistics, whatever mode the network around it is put in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.training = False

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)

    def forward(self, input: Tensor) -> Tensor:
        fixed = _fixed_map(self, input)
        return super().forward(input) if fixed is None else fixed

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of pixels, or none."""


@dataclass(frozen=True)
class Change:
    """One module that `fix` changed: its name, what it was and what it is now."""

    module: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.module or 'the network'}: {self.was} → {self.now}"


def fix(model: nn.Module, *, batch_norm: str = "group") -> tuple[nn.Module, list[Change]]:
    """A copy of the network without layers that mix the samples of a batch, and what was changed.

    Args:
        model: any network; it is not changed.
        batch_norm: "group" puts a GroupNorm with the same scale and shift in the place of every
            batch norm: its statistics are a sample's own, but they are others than those the
            weights were trained with. "frozen" keeps batch norms, in evaluation mode for good:
            their running statistics must come from public data, and no step changes them.
            Either way an instance norm stops tracking statistics.

    Returns:
        The copy, and one `Change` for every module that was changed: its name, what it was and
        what it is now.

    Raises:
        UserError: for another `batch_norm`, a lazy parameter without a shape, a batch norm of an
            unknown kind, or one that has no statistics to freeze.

    Guarantee: none by itself; what it returns can be clipped by `xcal.PrivacyEngine`, which checks
    that samples stay apart.

    Example:
        >>> import xcal
        >>> model, changes = xcal.fix(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))
        >>> print(changes[0])
        1: BatchNorm2d → GroupNorm(4, 16)
    """
    if batch_norm not in ("group", "frozen"):
        raise UserError(
            f"batch_norm is {batch_norm!r}: choose 'group' (GroupNorm instead) or 'frozen' (fixed "
            "statistics)"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UserError(
                f"parameter {name!r} has no shape yet: give the network a batch before you fix it"
            )
    model = deepcopy(model)
    changes: list[Change] = []
    made: dict[int, nn.Module] = {}  # a module that stands in several places stays one
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) not in made:
            put = _instead(name, module, batch_norm)
            if put is None:
                continue
            made[id(module)] = put
            changes.append(Change(name, type(module).__name__, _named(put)))
        if not name:
            model = made[id(module)]
        elif made[id(module)] is not module:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, made[id(module)])
    return model, changes


def _instead(name: str, module: nn.Module, batch_norm: str) -> nn.Module | None:
    """What takes the place of a module; None if it may stay as it is."""
    if not isinstance(module, _NormBase):
        return None
    if not isinstance(module, _BatchNorm):
        if module.running_mean is None:
            return None
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    if isinstance(module, FrozenBatchNorm2d | FrozenBatchNorm):
        return None
    if type(module) not in _KINDS:
        raise UserError(
            f"module {name!r} ({type(module).__name__}) is a batch norm of its own kind, and what "
            "else it does is not known: replace it yourself"
        )
    if batch_norm == "frozen":
        if module.running_mean is None:
            raise UserError(
                f"module {name!r} ({type(module).__name__}) has no running statistics to freeze: "
                "use batch_norm='group'"
            )
        frozen = FrozenBatchNorm(module.num_features, module.eps, affine=module.affine)
        frozen.load_state_dict(module.state_dict())
        frozen.weight, frozen.bias = module.weight, module.bias
        return frozen.to(module.running_mean)
    channels = module.num_features
    # On (B, channels) a group has no pixels, only channels to take statistics from.
    groups = 1 if isinstance(module, nn.BatchNorm1d) else group_count(channels)
    put = nn.GroupNorm(groups, channels, module.eps, module.affine)
    put.train(module.training)
    if module.affine:
        put.weight, put.bias = module.weight, module.bias
    return put


def _named(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm):
        return f"GroupNorm({module.num_groups}, {module.num_channels})"
    if isinstance(module, _BatchNorm):
        return f"{type(module).__name__} with fixed statistics"
    return f"{type(module).__name__} without running statistics"
