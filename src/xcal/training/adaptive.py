"""A clipping norm that follows a quantile of the units' gradient norms (Andrew et al. 2021).

Each step also releases how many of its units lay within C, as a coordinate of the same joint
release, and the next step's C follows: C ← C·exp(−η(b̃ − γ)). Too many within (b̃ > γ) lowers C, too
few raises it. Nothing else of the norms leaves the step, and C never depends on a step's own data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from xcal.errors import UserError
from xcal.privacy.calibration import COUNT_SENSITIVITY
from xcal.privacy.ledger_rows import Release
from xcal.privacy.mechanism import ChargedStep
from xcal.training.clipping import Bound, ClippedSum
from xcal.training.local import Batch, Bench, StepRecord
from xcal.training.steps import clipped_sum, gradient_release, release_gradient

# C stays a number that float32 can work with, whatever a long run of noise does to it.
SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6


@dataclass(frozen=True)
class QuantileRule:
    """Public constants: which quantile γ, how fast η, from which C, and the count's noise.

    The count gets noise of deviation `fixed_noise`, or κ_b times the gradient's multiplier.
    """

    quantile: float = 0.5
    rate: float = 0.2
    start: float = 1.0
    kappa_b: float = 5.0
    fixed_noise: float | None = None

    def following(self, clip: float, fraction: float) -> float:
        """The next C, from this one and the released fraction b̃ of units within it."""
        # Bounded before exp, so that no noise overflows it.
        move = min(max(-self.rate * (fraction - self.quantile), -50.0), 50.0)
        return min(max(clip * math.exp(move), SMALLEST_CLIP), LARGEST_CLIP)

    def multipliers(self, sigma_eff: float) -> tuple[float, float]:
        """(σ, σ_b) of a step that releases gradient and count and costs σ_eff.

        1/σ_eff² = 1/σ² + 1/(2σ_b)²: with σ_b = κ_b·σ that always has a solution; with σ_b given it
        has one only where σ_eff < 2σ_b.
        """
        if self.fixed_noise is None:
            sigma = sigma_eff * math.sqrt(1 + (COUNT_SENSITIVITY / self.kappa_b) ** 2)
            return sigma, self.kappa_b * sigma
        twice = self.fixed_noise / COUNT_SENSITIVITY
        if not sigma_eff < twice:
            raise UserError(
                f"count_noise = {self.fixed_noise:g} would let the count alone cost more than a"
                f" whole step may (multiplier {sigma_eff:.4g}): it must exceed"
                f" {sigma_eff * COUNT_SENSITIVITY:.4g}, better {5 * sigma_eff:.3g} or so; or leave"
                " it out and set kappa_b."
            )
        return 1 / math.sqrt(1 / sigma_eff**2 - 1 / twice**2), self.fixed_noise


@dataclass(frozen=True)
class ClipState:
    """C of the next step: a function of released counts. None: the configured start."""

    clip: float | None = None


def count_release(sigma_count: float) -> Release:
    return Release("count", sigma_count, COUNT_SENSITIVITY)


def contributing_units(sums: ClippedSum, batch: Batch) -> NDArray[np.bool_]:
    """Per drawn unit, whether it has an image and everything about it was finite."""
    present = torch.bincount(batch.units, minlength=batch.n_units) > 0
    mask: NDArray[np.bool_] = (present & ~sums.dropped).cpu().numpy()
    return mask


def centred_count(norms: NDArray[np.float64], clip: float, counted: NDArray[np.bool_]) -> float:
    """Σ(1[norm ≤ C] − ½) over the counted units: zeroing one unit moves it by at most ½."""
    return float(np.where(norms <= clip, 0.5, -0.5)[counted].sum())


def release_fraction(
    bench: Bench, charged: ChargedStep, sums: ClippedSum, counted: NDArray[np.bool_]
) -> float:
    """b̃: the noisy share of units within C, over the expected count B."""
    centred = centred_count(sums.norms.cpu().numpy(), sums.bound.norm, counted)
    return 0.5 + charged.release_scalar("count", centred) / bench.batch


def quantile_step(
    bench: Bench, step: int, rule: QuantileRule, state: ClipState, *, sigma_eff: float
) -> tuple[ClipState, StepRecord]:
    """One DP-SGD step that also releases the count: one joint release, charged before the draw."""
    clip = rule.start if state.clip is None else state.clip
    bound = Bound(clip)
    sigma, sigma_count = rule.multipliers(sigma_eff)
    charged = bench.charge(
        step,
        (gradient_release(bound, sigma), count_release(sigma_count)),
        sigma_eff,
        settings=(sigma, sigma_count, clip),
    )
    batch = charged.draw(bench.data)
    sums = clipped_sum(bench, batch, bound)
    fraction = release_fraction(bench, charged, sums, contributing_units(sums, batch))
    release_gradient(bench, charged, sums)
    record = StepRecord(bench.round, step, sigma, None, bench.share_spent, clip=clip)
    return ClipState(rule.following(clip, fraction)), record
