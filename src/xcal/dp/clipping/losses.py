"""One loss per sample: cross-entropy, or any function that the user gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xcal.dp.sampling import filled_up
from xcal.errors import UserError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output (B, …), target (B, …)) → one number per sample, (B,)."""


def per_sample(loss: Loss | None, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample's loss, and whether its target is one that the loss knows.

    Without a `loss` the targets say which: class numbers and soft targets, cross-entropy; whole
    numbers of the output's own shape, a 0 or 1 for each finding, binary cross-entropy.
    """
    several = (
        targets.dim() > 1 and targets.shape == output.shape and not targets.is_floating_point()
    )
    if loss is None:
        return _findings(output, targets) if several else _cross_entropy(output, targets)
    losses = loss(output, targets.to(output.dtype) if several else targets)
    if not isinstance(losses, Tensor) or losses.shape != output.shape[:1]:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UserError(
            f"the loss gives {shape} for {len(output)} samples: it must give one number per sample"
            " (reduction='none', then the mean over everything but the first dimension)"
        )
    return losses, torch.ones_like(losses, dtype=torch.bool)


def _findings(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean binary cross-entropy of a sample's findings."""
    known = ((targets == 0) | (targets == 1)).flatten(1).all(1)
    truth = targets.clamp(0, 1).to(output.dtype)
    losses = F.binary_cross_entropy_with_logits(output, truth, reduction="none")
    return losses.flatten(1).mean(1), known


def _cross_entropy(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """With class numbers, or with soft targets of the output's own shape.

    An output of (B, classes, …) has a class at every place: a sample's loss is their mean.
    """
    if output.dim() < 2:
        raise UserError(
            f"the network gives outputs of shape {tuple(output.shape)} for {len(targets)} images: "
            "it must give one row of class scores per image, or give a loss of your own"
        )
    if targets.is_floating_point():
        if targets.shape != output.shape:
            raise UserError(
                f"float targets of shape {tuple(targets.shape)} come with outputs of shape "
                f"{tuple(output.shape)}: cross-entropy takes class numbers (integers) or one share "
                "per class; for anything else give a loss of your own"
            )
        known = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
        losses = F.cross_entropy(output, targets, reduction="none")
    else:
        places = (len(output), *output.shape[2:])
        if targets.shape != places:
            raise UserError(
                f"{len(output)} images come with labels of shape {tuple(targets.shape)}: give one "
                "class number per image"
                + (f" and place, of shape {places}" if len(places) > 1 else "")
            )
        targets = targets.long()
        fits = (targets >= 0) & (targets < output.shape[1])
        losses = F.cross_entropy(output, targets.where(fits, 0), reduction="none")
        known = fits.flatten(1).all(1) if len(places) > 1 else fits
    return (losses.flatten(1).mean(1) if losses.dim() > 1 else losses), known


def check_independent(loss: Loss, output: Tensor, targets: Tensor) -> None:
    """Refuse a loss in which a sample's number depends on the others: looked at on made-up outputs.

    A mean over the batch hidden in it would make a unit's gradient depend on who else was drawn.
    """
    source = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, *output.shape[1:], generator=source)
    made_up = drawn.to(output.device, output.dtype)
    own = filled_up(targets[:3], 3)
    with torch.no_grad():
        together, _ = per_sample(loss, made_up, own)
        alone = [per_sample(loss, made_up[i : i + 1], own[i : i + 1])[0] for i in range(3)]
    if not torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-6, equal_nan=True):
        raise UserError(
            "the loss of a sample depends on the others of its batch, so no sample's influence can "
            "be bounded: compute it for each sample by itself"
        )
