"""The parts of a step: plain SGD, DP-SGD at a given multiplier, gradients with scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.dp.clipping import Bound, ClippedSum, joined
from xcal.dp.clipping.losses import per_sample
from xcal.dp.clipping.named import trainable
from xcal.dp.clipping.precision import in_half, single
from xcal.dp.ledger.rows import Release
from xcal.dp.mechanism import ChargedStep
from xcal.dp.sampling import filled_up
from xcal.errors import UserError
from xcal.explain.gradcam import forward_with_features, head_weight_of
from xcal.explain.signal import (
    NO_CELLS,
    Components,
    SignalSettings,
    cell_components,
    image_components,
)
from xcal.methods.base import SharedSum, gradient_sum
from xcal.methods.client_data import Batch, Rows
from xcal.methods.context import StepContext, StepRecord

FEW_MAPS = 64
"""Maps read at a time: more would take new memory from the system at every step."""


def sgd_step(context: StepContext, step: int) -> StepRecord:
    """One step without privacy: the same Poisson draw and divisor B as the private ones."""
    batch = context.draw(step)
    parameters = trainable(context.model)
    gradient = {name: torch.zeros_like(p) for name, p in parameters.items()}
    # A unit's loss is the mean over its images, as in the private step.
    share = 1.0 / torch.bincount(batch.units, minlength=batch.n_units)[batch.units]
    everyone = torch.arange(len(batch.labels), device=batch.labels.device)
    for rows in torch.split(everyone, context.chunk) if len(everyone) else ():
        part = batch.only(rows)
        forward, inputs = batch_forward(context, part)
        with in_half(part.labels.device, context.half):
            losses, _ = per_sample(context.loss, forward(inputs), part.labels)
        total = (single(losses) * share[rows]).sum() / context.batch
        slopes = torch.autograd.grad(total, list(parameters.values()))
        gradient = {n: g + slope for (n, g), slope in zip(gradient.items(), slopes, strict=True)}
    context.optimizer.step(gradient)
    return StepRecord(context.round, step, 0.0, None, 0.0)


def batch_forward(
    context: StepContext, batch: Batch, capture: str | None = None
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """What gives the batch's logits, and its input: the network's rest where that is enough."""
    rows, split = batch.inputs, context.split
    if split is None or not isinstance(rows, Rows) or not rows.through_backbone:
        return context.model, batch.images
    if capture is not None and not split.passes(context.model.get_submodule(capture)):
        return context.model, batch.images  # what is to be seen lies in the frozen backbone
    return split.forward_head, rows.activations()


def clipped_sum(
    context: StepContext, batch: Batch, bound: Bound | None = None, *, capture: str | None = None
) -> ClippedSum:
    """The sum of the batch's clipped unit gradients; what is not finite contributes exactly 0.

    Units are held to `bound`, by default to the configured norm in the plain geometry.
    """
    assert context.engine is not None
    bound = bound or Bound(context.clip)
    # Also where some drawn units are left out: how the others are summed does not tell.
    alone = batch.one_row_each
    parts = []
    for first, last, part in _in_portions(context, batch):
        forward, inputs = batch_forward(context, part, capture)
        parts.append(
            context.engine.clipped_sum(
                inputs,
                part.labels,
                clip=bound.norm,
                geometry=bound.geometry,
                units=None if alone else part.units - first,
                n_units=None if alone else last - first,
                capture=capture,
                forward=forward,
                loss=context.loss,
            )
        )
    sums = joined(parts)
    return sums.of_units(batch.units, batch.n_units) if alone else sums


def _in_portions(context: StepContext, batch: Batch) -> Iterator[tuple[int, int, Batch]]:
    """(first unit, unit after the last, their rows): whole units, about a chunk of rows at a time.

    Only rows that are not there yet are worth it: the engine takes what is there in chunks itself.
    """
    if not isinstance(batch.inputs, Rows) or len(batch.inputs) <= context.chunk:
        yield 0, batch.n_units, batch
        return
    ends = torch.bincount(batch.units, minlength=batch.n_units).cumsum(0).tolist()
    first, taken = 0, 0
    for unit in range(batch.n_units):
        is_last = unit + 1 == batch.n_units
        if is_last or ends[unit + 1] - taken > context.chunk:
            rows = torch.arange(taken, ends[unit], device=batch.units.device)
            yield first, unit + 1, batch.only(rows)
            first, taken = unit + 1, ends[unit]


def gradient_release(bound: Bound, sigma: float) -> Release:
    """What the ledger records of the gradient: noise σC on a sum that one unit moves by C."""
    return Release("gradient", sigma * bound.sensitivity, bound.sensitivity)


def release_gradient(
    context: StepContext, charged: ChargedStep, sums: ClippedSum, noise: float | None = None
) -> dict[str, Tensor]:
    """Σ clipped + N(0, σ²C²) on every coordinate, over the constant B, into the optimizer.

    C is what the sum was really clipped to. Noise and the public grid belong to the scaled space;
    going back from there is post-processing. `noise`: more than was charged for. Returns what the
    optimizer saw.
    """
    bound = sums.bound
    released = charged.release_tensors(
        "gradient", sums.gradients, sensitivity=bound.sensitivity, noise=noise
    )
    mean = released.then(bound.geometry.undo).then(
        lambda values: {name: value.div_(context.batch) for name, value in values.items()}
    )
    context.optimizer.step(mean)
    return mean.tensors


def dp_step(
    context: StepContext, step: int, *, sigma: float, bound: Bound | None = None
) -> StepRecord:
    """One DP-SGD step at a multiplier fixed beforehand: charge, draw, clip, release.

    `bound` must be fixed beforehand too. An empty draw is a noise-only step, charged like any
    other.
    """
    bound = bound or Bound(context.clip)
    if context.sharing is not None:
        sharing = context.sharing
        return shared_step(context, step, gradient_sum(context.model, sharing.sigma, bound))
    charged = context.charge(
        step,
        (gradient_release(bound, sigma),),
        sigma,
        settings=(sigma, bound.norm, bound.geometry.digest()),
    )
    batch = charged.draw(context.data)
    sums = clipped_sum(context, batch, bound)
    release_gradient(context, charged, sums)
    return StepRecord(context.round, step, sigma, None, context.share_spent)


Beside = Callable[[ClippedSum, Batch], dict[str, float]]


def shared_step(
    context: StepContext, step: int, shared: SharedSum, beside: Beside | None = None
) -> StepRecord:
    """The same sum, of which this site gives its part: whole numbers with its share of the noise.

    They leave under masks only. What all sites' parts make is the server's to apply. `beside`: the
    values of the parts that are not the gradient, which their own sensitivities bound.
    """
    sharing, bound = context.sharing, shared.bound
    assert sharing is not None
    grid = sharing.grid(*shared.parts)
    charged = context.charge_share(step, grid, settings=(bound.norm, bound.geometry.digest()))
    batch = charged.draw(context.data)
    sums = clipped_sum(context, batch, bound)
    # By name: a server that was resumed has its weights in another order.
    flat = torch.cat([sums.gradients[n].reshape(-1) for n in sorted(trainable(context.model))])
    values: dict[str, Tensor | float] = {"gradient": flat}
    if beside is not None:
        values |= beside(sums, batch)
    most = {p.name: p.sensitivity for p in shared.parts} | {"gradient": sums.bound.sensitivity}
    numbers = charged.contribute(values, sensitivities=most)
    sharing.given.append((grid, numbers))
    return StepRecord(context.round, step, sharing.sigma, None, context.share_spent)


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
        sums = clipped_sum(context, batch, bound)
        by_cells = settings.cover == "cells" and context.data.has_maps
        if by_cells and isinstance(batch.inputs, Rows):
            return sums, _by_cells(context, batch.inputs, sums.logits, chosen, settings), chosen
        return sums, _looked_at(context, batch, chosen, settings), chosen
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


def _by_cells(
    context: StepContext, rows: Rows, logits: Tensor, chosen: Tensor, settings: SignalSettings
) -> Components:
    """The components of the chosen images from their maps, without a pass where those are kept."""
    head_weight = head_weight_of(context.model)
    if head_weight is None:
        raise UserError(NO_CELLS)
    found = []
    for some in _portions(chosen, context.rows or FEW_MAPS):
        maps = filled_up(context.data.maps(rows.take(some)), context.rows)
        answers = filled_up(logits[some], context.rows)
        parts = cell_components(maps, answers, head_weight, settings)
        found.append(parts.only(slice(len(some))))
    return Components.joined(found, chosen.device)


def sums_with_components(
    context: StepContext,
    batch: Batch,
    entering: NDArray[np.bool_],
    settings: SignalSettings,
    bound: Bound,
) -> tuple[ClippedSum, Components, Tensor, NDArray[np.bool_]]:
    """As `forward_with_components`, and the broken units, which contribute nothing to the sum.

    Broken is a unit whose gradient or score is not finite.
    """
    sums, parts, chosen = forward_with_components(context, batch, entering, settings, bound)
    bad = ~torch.isfinite(parts.logit_drop + parts.margin + parts.concentration)
    broken: NDArray[np.bool_] = sums.dropped.cpu().numpy().astype(bool)
    broken[batch.units[chosen].cpu().numpy()[bad.cpu().numpy()]] = True
    if bool((broken & ~sums.dropped.cpu().numpy()).any()):
        left_out = torch.from_numpy(broken).to(batch.units.device)
        sums = clipped_sum(context, batch.without(left_out), bound)
    return sums, parts, chosen, broken


def contributing_units(sums: ClippedSum, batch: Batch) -> NDArray[np.bool_]:
    """Per drawn unit, whether it has an image and everything about it was finite."""
    present = torch.bincount(batch.units, minlength=batch.n_units) > 0
    mask: NDArray[np.bool_] = (present & ~sums.dropped).cpu().numpy()
    return mask
