"""`agp` (Li et al. 2023): the channels that explanations rest on get no noise, so ε = ∞.

There is no finite ε for it, at any noise: the protected channels' gradients leave as they are, and
which channels those are was read from private images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.dp.calibration import PlanShape, plan_paper
from xcal.dp.clipping.precision import double
from xcal.dp.noise import release_tensors
from xcal.explain.gradcam import channel_weights, head_weight_of
from xcal.methods.agp_dp import (
    CamLayer,
    ChannelState,
    SparesChannels,
    cam_layer_of,
    most_important,
    require_trained,
)
from xcal.methods.base import BandParameters, SparedParameters, shape_of
from xcal.methods.client_data import Batch
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import batch_forward, clipped_sum

IMPORTANCE_UNITS = 256  # expected number of units whose maps decide which channels matter


def channel_importance(context: StepContext) -> Tensor:
    """Mean magnitude of Grad-CAM's channel weights over a draw of the client's own images.

    Of several views the plain one counts. All zero where nobody was drawn.
    """
    # Step −1 of the round: no step's own draw shares its randomness.
    rate = min(1.0, IMPORTANCE_UNITS / context.data.units)
    batch = context.data.draw(rate, context.noise, context.key(-1, "importance"))
    plain = batch if batch.plain is None else batch.only(batch.plain)
    weights = double(_channel_weights(context, plain))
    finite = weights[torch.isfinite(weights).all(dim=1)]
    return finite.abs().sum(dim=0) / max(len(finite), 1)


def _channel_weights(context: StepContext, batch: Batch) -> Tensor:
    """Grad-CAM's weights of each image's channels; from kept features where only a head trains."""
    head = head_weight_of(context.model)
    forward, inputs = batch_forward(context, batch)
    if head is None or forward is context.model or not len(batch.labels):
        return channel_weights(context.model, batch.images)
    with torch.no_grad():
        return head[forward(inputs).argmax(dim=1)]


def agp_step(
    context: StepContext,
    step: int,
    *,
    sigma: float,
    share: float,
    layer: CamLayer,
    state: ChannelState,
) -> tuple[ChannelState, StepRecord]:
    """One step: clip as ever, noise everywhere but on what belongs to the protected channels.

    Importance is computed once a round, at its first step, from the weights received and from
    private images.
    """
    if state.channels is None:
        state = ChannelState(
            most_important(channel_importance(context), share) if share > 0 else ()
        )
    assert state.channels is not None
    clipped = clipped_sum(context, context.draw(step))
    sums, scale = clipped.gradients, sigma * clipped.bound.sensitivity
    noisy = release_tensors(sums, scale, context.noise, context.key(step, "gradient"))
    spared = torch.tensor(state.channels, dtype=torch.long)
    for name in layer.convolution:
        noisy[name][spared] = sums[name][spared]
    if layer.head is not None:
        noisy[layer.head][:, spared] = sums[layer.head][:, spared]
    context.optimizer.step({name: value.div_(context.batch) for name, value in noisy.items()})
    return state, StepRecord(context.round, step, sigma, None, 0.0)


@lru_cache(maxsize=64)
def band_mean(shape: PlanShape, rho: float, band: float) -> float:
    """The mean of the published band [σ_min, σ_max]: the noise the paper gives this rival."""
    plan = plan_paper(shape, rho=rho, band=band)
    return (plan.sigma_min + plan.sigma_max) / 2


class AgpParameters(BandParameters, SparedParameters):
    """The keys of `agp`."""


@dataclass(frozen=True)
class AdaptiveGradientProtection(SparesChannels):
    name: str = "agp"
    title: str = "AGP, no guarantee"
    private: bool = False
    parameters: type[Experiment] = AgpParameters
    ignores: frozenset[str] = frozenset({"accountant", "sites"})

    def sigma(self, experiment: AgpParameters, units: int, own_rounds: int) -> float:
        shape = shape_of(experiment, units, own_rounds)
        return band_mean(shape, experiment.rho, experiment.band)

    def plan(self, experiment: AgpParameters, units: int, own_rounds: int) -> None:
        self.sigma(experiment, units, own_rounds)  # refuses a target that no noise reaches
        return

    def check_network(self, network: nn.Module, experiment: Experiment) -> None:
        require_trained(network, self.name)

    def step(
        self,
        context: StepContext,
        step: int,
        experiment: AgpParameters,
        plan: None,
        state: ChannelState,
    ) -> tuple[ChannelState, StepRecord]:
        return agp_step(
            context,
            step,
            sigma=self.sigma(experiment, context.data.units, context.own_rounds),
            share=experiment.protected,
            layer=cam_layer_of(context.model),
            state=state,
        )


AGP = AdaptiveGradientProtection()
