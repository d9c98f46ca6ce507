"""Reading canaries off what a training releases."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import binom
from torch import Tensor, nn

from xcal.audit.canaries import Directions
from xcal.audit.one_client import flat, load_flat
from xcal.dp.clipping import Bound, ClippingEngine
from xcal.dp.clipping.named import trainable

Scores = NDArray[np.float64]


def mixture_ratio(
    z: Scores,
    *,
    steps: int,
    rate: float,
    deviation: float | Scores,
    shift: float | Scores = 1.0,
) -> Scores:
    """log-likelihood ratio of "in" against "out" of a sum of `steps` releases.

    Each step adds `shift` with probability `rate`; noise of the given deviation is on the sum.
    """
    times = np.arange(steps + 1)[:, None]
    weight = binom.logpmf(times, steps, rate) if rate < 1 else np.where(times == steps, 0, -np.inf)
    moved = times * np.broadcast_to(np.asarray(shift, dtype=np.float64), z.shape)[None]
    result: Scores = logsumexp(
        weight + moved * (2 * z - moved) / (2 * np.square(deviation)), axis=0
    )
    return result


QUIET = 0.4  # a block this far below the usual deviation is no accident


def quiet_blocks(model: nn.Module, released: Tensor) -> Tensor | None:
    """Deviation of every coordinate of a release, if some blocks carry far less noise than others.

    A block is what one output channel's filter holds, or else a whole tensor.
    """
    parameters = list(trainable(model).values())
    spreads, quiet = [], False
    usual = float(released.double().square().mean().sqrt())
    for piece, parameter in zip(
        torch.split(released.double(), [p.numel() for p in parameters]), parameters, strict=True
    ):
        by_row = parameter.dim() > 1 and parameter[0].numel() >= 16
        rows = piece.view(len(parameter), -1) if by_row else piece.view(1, -1)
        own = rows.square().mean(1, keepdim=True).sqrt()
        low = (own < QUIET * usual) & torch.tensor(rows.shape[1] >= 16)
        quiet = quiet or bool(low.any())
        spreads.append(torch.where(low, own, usual).expand_as(rows).flatten())
    return torch.cat(spreads).clamp_min(1e-9) if quiet else None


def _in_scaled_space(model: nn.Module, released: Tensor, bound: Bound) -> Tensor:
    """A released gradient sum as it was when the noise was added."""
    parameters = trainable(model)
    pieces = torch.split(released, [p.numel() for p in parameters.values()])
    named = {k: v.view_as(p) for (k, p), v in zip(parameters.items(), pieces, strict=True)}
    return flat(bound.geometry.scaled(named))


@dataclass
class GradientWatcher:
    """Reads every canary's direction off every released sum.

    Where some blocks turn out to carry far less noise than others, they are read with the weight
    they deserve: a method that spares some of them must not be saved by the rest.
    """

    directions: Directions
    bounds: list[Bound]  # what the engine was told, step by step
    readings: list[Scores] = field(default_factory=list)
    own_spread: list[Scores | None] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)

    def __call__(self, before: nn.Module, released: Tensor) -> None:
        seen = _in_scaled_space(before, released, self.bounds[-1]) / self.bounds[-1].norm
        spread = quiet_blocks(before, seen)
        if spread is None:
            self.readings.append(self.directions.read(seen))
            self.own_spread.append(None)
        else:
            reading, deviation = self.directions.read_weighted(seen, spread)
            self.readings.append(reading)
            self.own_spread.append(deviation)
        self.deviations.append(float(seen.double().std()))


@dataclass
class InputWatcher:
    """How far each canary's own gradient reaches into every released sum."""

    images: Tensor
    labels: Tensor
    readings: list[Scores] = field(default_factory=list)
    norms: list[Scores] = field(default_factory=list)

    def __call__(self, before: nn.Module, released: Tensor) -> None:
        slope, norm = reach(before, self.images, self.labels, released)
        self.readings.append(slope / np.maximum(norm, 1e-12))
        self.norms.append(norm)


_SHORT = 0.01  # in weight space


def reach(
    model: nn.Module, images: Tensor, labels: Tensor, direction: Tensor
) -> tuple[Scores, Scores]:
    """For every image the inner product of its loss's gradient with `direction`, and its norm."""
    # A central difference along a short way: two passes forward, whatever the network is made of.
    length = float(direction.double().norm()) or 1.0
    here = flat(trainable(model))
    ends = []
    for sign in (1, -1):
        load_flat(model, here + direction * (sign * _SHORT / length))
        ends.append(image_losses(model, images, labels))
    load_flat(model, here)
    slope = (ends[0] - ends[1]) * (length / (2 * _SHORT))
    norms = ClippingEngine(model).clipped_sum(images, labels, clip=1.0).norms
    return slope, norms.double().numpy()


def image_losses(model: nn.Module, images: Tensor, labels: Tensor) -> Scores:
    with torch.no_grad():
        found = F.cross_entropy(model(images), labels, reduction="none")
    result: Scores = found.double().numpy()
    return result
