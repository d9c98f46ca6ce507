"""A loss of the user's own in the place of cross-entropy, held to what clipping rests on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.dp.apart import check_losses_apart
from xcal.dp.clipping.losses import Loss, per_sample
from xcal.dp.refusals import Refused
from xcal.errors import UserError
from xcal.plugins import MANUAL, OwnCodeError, load_object, own_code


def loss_of(experiment: Experiment) -> Loss | None:
    """The experiment's loss, one number per image; None: cross-entropy.

    `package.module:name` is a function of (logits, labels) that gives one number per image, or a
    torch loss, whose reduction is then none: the mean over a batch is taken by the private step,
    and that over an image's findings here.
    """
    if experiment.loss is None:
        return None
    found: Any = load_object(experiment.loss, "loss")
    if isinstance(found, nn.Module) and any(p.requires_grad for p in found.parameters()):
        raise OwnCodeError(
            f"The loss {experiment.loss!r} trains parameters of its own, which nothing would clip:"
            " make them part of the network."
        )
    if isinstance(found, type) or not callable(found):
        raise OwnCodeError(
            f"The loss {experiment.loss!r} is neither a function of (logits, labels) nor a"
            f" torch loss: see {MANUAL}."
        )
    if hasattr(found, "reduction"):
        found = copy.copy(found)
        found.reduction = "none"
        return _PerImage(found)
    loss: Loss = found
    return loss


class _PerImage:
    """A torch loss, one number per image: several, of its findings, are averaged."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        losses = self._loss(output, targets)
        several = isinstance(losses, Tensor) and losses.dim() > 1
        return losses.flatten(1).mean(1) if several else losses


def check_loss(experiment: Experiment, classes: int, multi_label: bool = False) -> None:
    """Refuse a loss that does not give one number per image, by that image alone."""
    loss = loss_of(experiment)
    if loss is None or experiment.loss is None:
        return
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(5, classes, generator=source, requires_grad=True)
    labels = torch.arange(5) % classes
    if multi_label:
        labels = (torch.rand(5, classes, generator=source) < 0.5).long()

    def numbers(some: Tensor, truth: Tensor) -> Tensor:
        return per_sample(loss, some, truth)[0]

    with own_code("loss", experiment.loss, "a trial on made-up logits", let=(Refused,)):
        try:
            losses = numbers(logits, labels)
            check_losses_apart(numbers, (logits.detach(), labels), {}, losses)
        except (UserError, Refused) as problem:
            raise OwnCodeError(f"The loss {experiment.loss!r} cannot be used: {problem}") from None
        if not losses.requires_grad:
            raise OwnCodeError(f"The loss {experiment.loss!r} has no gradient by the logits.")
