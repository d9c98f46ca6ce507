"""`agp-dp`: AGP's aim with a guarantee: less noise on the channels that explanations rest on.

Their importance comes from the received model alone, which is public, so that the weights of the
geometry are known before any step of the round draws its data, and the guarantee is the filter's as
ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xcal.config import Experiment, sent
from xcal.dp.calibration import Plan
from xcal.dp.clipping import PLAIN, Bound, Geometry
from xcal.dp.clipping.named import trainable
from xcal.dp.clipping.precision import double
from xcal.errors import UserError
from xcal.explain.gradcam import head_weight_of
from xcal.methods.base import (
    LocalMethod,
    SharedSum,
    SparedParameters,
    gradient_sum,
    plan_constant,
    shape_of,
)
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import dp_step


@dataclass(frozen=True)
class CamLayer:
    """The convolution whose output channels are the feature map's, and the norm that follows it.

    Only parameters that train are named. Entry k along the first axis of each belongs to channel k.
    Where the map is frozen and only a linear head on its average trains, `head` is that head's
    matrix, and what belongs to channel k is its column k.
    """

    channels: int
    convolution: tuple[str, ...]  # weight and, where it has one, bias
    norm: tuple[str, ...]  # scale and shift of the norm between the convolution and the map
    head: str | None = None


def cam_layer_of(model: nn.Module) -> CamLayer:
    """The parameters that make the explained map, or that alone read it where it is frozen.

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

    made = CamLayer(channels, own(last), () if norm is None else own(norm))
    head = f"{getattr(model, 'head_layer', None)}.weight"
    if made.convolution or made.norm or head not in trained:
        return made
    return CamLayer(trained[head].shape[1], (), (), head)


def _normalizes(module: nn.Module, channels: int) -> bool:
    if isinstance(module, nn.GroupNorm):
        return module.num_channels == channels
    return isinstance(module, _BatchNorm) and module.num_features == channels


def require_trained(model: nn.Module, method: str) -> CamLayer:
    """The CAM layer, where it or a linear head on it trains; other networks are refused."""
    layer = cam_layer_of(model)
    if not layer.convolution and layer.head is None:
        raise UserError(
            f"{method} spares channels of the CAM layer's convolution, which does not train here:"
            " set train to 'all', 'last:1' or 'head', or choose another method."
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
    values = double(importance.detach()).cpu().nan_to_num(0.0)
    count = min(len(values), math.ceil(share * len(values) - 1e-9))
    order = torch.argsort(values, descending=True, stable=True)
    return tuple(sorted(order[:count].tolist()))


class ChannelParameters(SparedParameters):
    """The keys of a geometry that spares channels."""

    protection: float = sent(
        2.0, ge=1, le=16, description="how many times less noise than the others the spared get"
    )


@dataclass(frozen=True)
class ChannelRule:
    """Public constants: the share r of channels to spare, and how many times less noise they get.

    The channels' weights are d and P·d with (1 − r)/d² + r/(P·d)² = 1: the variance of the noise on
    the CAM layer, summed over its coordinates, is what it is without a geometry, and every other
    layer has weight 1. So at one σ all that differs from static noise is where it lies.
    """

    share: float = 0.2
    protection: float = 2.0

    @property
    def off(self) -> bool:
        return self.share == 0 or self.protection == 1

    def choose(self, model: nn.Module) -> tuple[int, ...]:
        """The channels to spare, by the received model; none where the rule is off."""
        return () if self.off else most_important(released_importance(model), self.share)

    def geometry(self, layer: CamLayer, channels: tuple[int, ...]) -> Geometry:
        """Weights of the CAM layer's convolution and norm, or of a head's columns, by channel."""
        if self.off or not channels:
            return PLAIN
        spared = len(channels) / layer.channels
        low = math.sqrt((1 - spared) + spared / self.protection**2)
        weights = [low] * layer.channels
        for k in channels:
            weights[k] = low * self.protection
        if layer.head is not None:
            return Geometry(inputs={layer.head: tuple(weights)})
        return Geometry({name: tuple(weights) for name in (*layer.convolution, *layer.norm)})


def released_importance(model: nn.Module) -> Tensor:
    """How much the classes differ in each channel: the length of its centered head weights.

    Grad-CAM weighs channel k of class j by W_jk/(HW). What is common to all classes moves no
    prediction, so it is taken off first.
    """
    head = head_weight_of(model)
    if head is None:
        raise UserError(
            f"The network {type(model).__name__} has no head_layer whose weights tell which"
            " channels matter: choose a network with global average pooling and one linear"
            " layer, or another method."
        )
    weights = double(head)
    return (weights - weights.mean(dim=0)).square().sum(dim=0).sqrt()


def check_channels(model: nn.Module, method: str) -> None:
    """Refuse a network in which no channel could be spared."""
    require_trained(model, method)
    released_importance(model)


@dataclass(frozen=True)
class ChannelState:
    """The channels spared in this round; None before its first step."""

    channels: tuple[int, ...] | None = None


class SparesChannels(LocalMethod):
    """A method that remembers the channels of one round, and chooses anew in the next."""

    def load_state(self, saved: dict[str, Any] | None) -> ChannelState:
        if saved is None or saved["channels"] is None:
            return ChannelState()
        return ChannelState(tuple(saved["channels"]))

    def begin_round(self, state: ChannelState) -> ChannelState:
        return ChannelState()


@dataclass(frozen=True)
class ProtectedChannels(SparesChannels):
    name: str = "agp-dp"
    title: str = "AGP with a guarantee"
    sums_under_masks: bool = True
    parameters: type[Experiment] = ChannelParameters

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        return plan_constant(experiment, shape_of(experiment, units, own_rounds), self.name)

    def check_network(self, network: nn.Module, experiment: Experiment) -> None:
        check_channels(network, self.name)

    def shared_sum(
        self, experiment: ChannelParameters, model: nn.Module, sigma: float, clip: float
    ) -> SharedSum:
        """In the scaled space: there the noise is the same on every coordinate."""
        rule = ChannelRule(experiment.protected, experiment.protection)
        geometry = rule.geometry(cam_layer_of(model), rule.choose(model))
        return gradient_sum(model, sigma, Bound(clip, geometry))

    def step(
        self,
        context: StepContext,
        step: int,
        experiment: ChannelParameters,
        plan: Plan,
        state: ChannelState,
    ) -> tuple[ChannelState, StepRecord]:
        rule = ChannelRule(experiment.protected, experiment.protection)
        if state.channels is None:  # the round's first step: the model is still the one received
            state = ChannelState(rule.choose(context.model))
        assert state.channels is not None
        bound = Bound(context.clip, rule.geometry(cam_layer_of(context.model), state.channels))
        return state, dp_step(context, step, sigma=plan.sigma_static, bound=bound)


AGP_DP = ProtectedChannels()
