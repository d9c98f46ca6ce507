"""The step of AGP (Li et al. 2023): the channels that explanations rest on get no noise.

There is no finite ε for it, at any noise: the protected channels' gradients leave as they are, and
which channels those are was read from private images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xcal.explain.gradcam import channel_weights
from xcal.privacy.noise import release_tensors
from xcal.training.cam_layer import CamLayer, most_important
from xcal.training.local import Bench, StepRecord
from xcal.training.steps import clipped_sum

IMPORTANCE_UNITS = 256  # expected number of units whose maps decide which channels matter


@dataclass(frozen=True)
class AgpState:
    """The channels protected in this round; None before its first step. Made of private images."""

    channels: tuple[int, ...] | None = None


def channel_importance(bench: Bench) -> Tensor:
    """Mean magnitude of Grad-CAM's channel weights over a draw of the client's own images.

    Of several views the plain one counts. All zero where nobody was drawn.
    """
    # Step −1 of the round: no step's own draw shares its randomness.
    rate = min(1.0, IMPORTANCE_UNITS / bench.data.units)
    batch = bench.data.draw(rate, bench.noise, bench.key(-1, "importance"))
    shown = batch.images if batch.plain is None else batch.pictures(batch.plain)
    weights = channel_weights(bench.model, shown).double()
    finite = weights[torch.isfinite(weights).all(dim=1)]
    return finite.abs().sum(dim=0) / max(len(finite), 1)


def agp_step(
    bench: Bench, step: int, *, sigma: float, share: float, layer: CamLayer, state: AgpState
) -> tuple[AgpState, StepRecord]:
    """One step: clip as ever, noise everywhere but on the protected channels' convolution.

    Importance is computed once a round, at its first step, from the weights received.
    """
    if state.channels is None:
        state = AgpState(most_important(channel_importance(bench), share) if share > 0 else ())
    assert state.channels is not None
    clipped = clipped_sum(bench, bench.draw(step))
    sums, scale = clipped.gradients, sigma * clipped.bound.sensitivity
    noisy = release_tensors(sums, scale, bench.noise, bench.key(step, "gradient"))
    spared = torch.tensor(state.channels, dtype=torch.long)
    for name in layer.convolution:
        noisy[name][spared] = sums[name][spared]
    bench.optimiser.step({name: value.div_(bench.batch) for name, value in noisy.items()})
    return state, StepRecord(bench.round, step, sigma, None, 0.0)
