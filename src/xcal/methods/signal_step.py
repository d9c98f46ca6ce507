"""The forward pass of a step with a signal: clipped gradients and scores of the same draw."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.dp.clipping import Bound, ClippedSum
from xcal.dp.padding import filled_up
from xcal.explain.gradcam import forward_with_features
from xcal.explain.signal import Components, SignalSettings, image_components
from xcal.methods.client_data import Batch
from xcal.methods.context import StepContext
from xcal.methods.steps import clipped_sum


def forward_with_components(
    context: StepContext,
    batch: Batch,
    entering: NDArray[np.bool_],
    settings: SignalSettings,
    bound: Bound,
) -> tuple[ClippedSum, Components, Tensor]:
    """Clipped sum, signal components and the images they belong to.

    From one training forward; but where the explained map lies in a frozen backbone whose
    activations are kept, only the images that enter the signal go through the whole network.
    """
    chosen = torch.from_numpy(entering).to(batch.units.device)[batch.units]
    if batch.plain is not None:
        chosen &= batch.plain  # the signal is that of the image as it is
    cam_layer = str(context.model.cam_layer)
    if context.split is not None and not context.split.passes(
        context.model.get_submodule(cam_layer)
    ):
        return (
            clipped_sum(context, batch, bound),
            _looked_at(context, batch, chosen, settings),
            chosen,
        )
    sums = clipped_sum(context, batch, bound, capture=cam_layer)
    assert sums.features is not None
    found = [  # a chunk at a time: a draw may be larger than fits as pictures
        image_components(
            context.model,
            batch.pictures(some),
            sums.logits[some],
            sums.features[some],
            settings,
            rows=context.rows,
        )
        for some in _portions(chosen, context.chunk)
    ]
    return sums, Components.joined(found, chosen.device), chosen


def _portions(chosen: Tensor, size: int) -> tuple[Tensor, ...]:
    """The numbers of the marked rows, at most `size` together."""
    return torch.split(chosen.nonzero().flatten(), size) if bool(chosen.any()) else ()


def _looked_at(
    context: StepContext, batch: Batch, chosen: Tensor, settings: SignalSettings
) -> Components:
    """The components of the chosen images, a chunk at a time through the whole network."""
    found = []
    size = context.rows or context.chunk
    for some in _portions(chosen, size):
        images = filled_up(batch.pictures(some), context.rows)
        with torch.no_grad():
            logits, features = forward_with_features(context.model, images)
        parts = image_components(
            context.model, images, logits, features, settings, rows=context.rows
        )
        found.append(parts.only(slice(len(some))))
    return Components.joined(found, chosen.device)


def broken_units(
    sums: ClippedSum, parts: Components, batch: Batch, chosen: Tensor
) -> NDArray[np.bool_]:
    bad = ~torch.isfinite(parts.logit_drop + parts.margin + parts.concentration)
    broken: NDArray[np.bool_] = sums.dropped.cpu().numpy().astype(bool)
    broken[batch.units[chosen][bad].cpu().numpy()] = True
    return broken
