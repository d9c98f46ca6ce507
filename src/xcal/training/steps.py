"""The steps without a signal: plain SGD, and DP-SGD with a given noise multiplier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xcal.privacy.ledger_rows import Release
from xcal.privacy.noise import release_tensors
from xcal.training.clipping import ClippedSum
from xcal.training.local import Batch, Bench, StepRecord, trainable


def sgd_step(bench: Bench, step: int) -> StepRecord:
    """One step without privacy: the same Poisson draw and divisor B as the private ones."""
    batch = bench.draw(step)
    parameters = trainable(bench.model)
    if len(batch.labels) == 0:
        gradient = {name: torch.zeros_like(p) for name, p in parameters.items()}
    else:
        losses = F.cross_entropy(bench.model(batch.images), batch.labels, reduction="none")
        # A unit's loss is the mean over its images, as in the private step.
        share = 1.0 / torch.bincount(batch.units, minlength=batch.n_units)[batch.units]
        total = (losses * share).sum() / bench.batch
        gradient = dict(
            zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True)
        )
    bench.optimiser.step(gradient)
    return StepRecord(bench.round, step, 0.0, None, 0.0)


def clipped_sum(bench: Bench, batch: Batch, capture: str | None = None) -> ClippedSum:
    """The sum of the batch's clipped unit gradients; what is not finite contributes exactly 0."""
    assert bench.engine is not None
    return bench.engine.clipped_sum(
        batch.images,
        batch.labels,
        clip=bench.clip,
        units=batch.units,
        n_units=batch.n_units,
        capture=capture,
    )


def release_gradient(bench: Bench, step: int, sums: dict[str, Tensor], sigma: float) -> None:
    """Σ clipped + N(0, σ²C²) on every coordinate, over the constant B, into the optimiser."""
    scale = sigma * bench.clip if sigma > 0 else 0.0  # σ = 0 with C = ∞ is plain SGD, not NaN
    noisy = release_tensors(sums, scale, bench.noise, bench.key(step, "gradient"))
    bench.optimiser.step({name: value.div_(bench.batch) for name, value in noisy.items()})


def dp_step(bench: Bench, step: int, *, sigma: float, cost: float) -> StepRecord:
    """One DP-SGD step at a multiplier fixed beforehand: charge, draw, clip, release.

    An empty draw is a noise-only step, charged like any other.
    """
    assert bench.account is not None
    bench.account.pay(
        bench.round,
        step,
        rate=bench.rate,
        sigma=sigma,
        cost=cost,
        releases=(Release("gradient", sigma * bench.clip, bench.clip),),
        inputs=bench.inputs(step, sigma),
    )
    batch = bench.draw(step)
    sums = clipped_sum(bench, batch)
    release_gradient(bench, step, sums.gradients, sigma)
    return StepRecord(bench.round, step, sigma, None, bench.account.filter.share_spent)
