"""Which parameters belong to the channels of the feature map that explanations are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xcal.errors import UserError
from xcal.explain.gradcam import head_weight_of
from xcal.methods.context import trainable


@dataclass(frozen=True)
class CamLayer:
    """The convolution whose output channels are the feature map's, and the norm that follows it.

    Only parameters that train are named. Entry k along the first axis of each belongs to channel k.
    """

    channels: int
    convolution: tuple[str, ...]  # weight and, where it has one, bias
    norm: tuple[str, ...]  # scale and shift of the norm between the convolution and the map


def cam_layer_of(model: nn.Module) -> CamLayer:
    """The CAM layer's parameters.

    The convolution is the last one within the module named by `cam_layer`, or, where that module
    holds none, the last one before it; modules are taken in the order in which the network lists
    them, which is the order of every network shipped here.
    """
    name = str(getattr(model, "cam_layer", ""))
    modules = dict(model.named_modules())
    if name not in modules or not name:
        raise UserError(
            f"The network {type(model).__name__} names no cam_layer of its own: set cam_layer to"
            " the dotted name of the module whose output is explained."
        )
    order = list(modules)
    inside = [n for n in order if n == name or n.startswith(f"{name}.")]
    before = order[: order.index(name)]
    for candidates in (inside, before):
        found = [n for n in candidates if isinstance(modules[n], nn.Conv2d)]
        if found:
            break
    else:
        raise UserError(f"The network has no convolution up to its cam_layer {name!r}.")
    last = found[-1]
    convolution = modules[last]
    assert isinstance(convolution, nn.Conv2d)
    channels = convolution.out_channels
    following = order[order.index(last) + 1 : order.index(inside[-1]) + 1]
    norm = next((n for n in following if _normalizes(modules[n], channels)), None)
    trained = trainable(model)

    def own(module: str) -> tuple[str, ...]:
        names = (f"{module}.weight", f"{module}.bias")
        return tuple(n for n in names if n in trained)

    return CamLayer(channels, own(last), () if norm is None else own(norm))


def _normalizes(module: nn.Module, channels: int) -> bool:
    if isinstance(module, nn.GroupNorm):
        return module.num_channels == channels
    return isinstance(module, _BatchNorm) and module.num_features == channels


def require_trained(model: nn.Module, method: str) -> CamLayer:
    """The CAM layer of a network in which its convolution trains; others are refused."""
    layer = cam_layer_of(model)
    if not layer.convolution:
        raise UserError(
            f"{method} spares channels of the CAM layer's convolution, which does not train here:"
            " set train to 'all' or 'last:1', or choose another method."
        )
    head = head_weight_of(model)
    if head is not None and head.shape[1] != layer.channels:
        raise UserError(
            f"The convolution before cam_layer {model.cam_layer!r} gives {layer.channels} channels"
            f" and the head reads {head.shape[1]}: name a cam_layer whose channels the head reads."
        )
    return layer


def most_important(importance: Tensor, share: float) -> tuple[int, ...]:
    """The ⌈share · channels⌉ channels of highest importance, ascending; ties go to the first.

    What is not a number counts as unimportant.
    """
    values = importance.detach().double().cpu().nan_to_num(0.0)
    count = min(len(values), math.ceil(share * len(values) - 1e-9))
    order = torch.argsort(values, descending=True, stable=True)
    return tuple(sorted(order[:count].tolist()))
