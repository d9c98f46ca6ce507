"""Nine ways to break the guarantee on purpose, and which check must notice each.

A mutant replaces real code while the check runs: `XCAL_MUTANT=name pytest -p audit.mutants …`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import xcal.explain.signal
import xcal.privacy.account
import xcal.privacy.noise
import xcal.training.clipping
import xcal.training.local
import xcal.training.steps
import xcal.training.xcal
from xcal.privacy.account import Account
from xcal.privacy.accounting import CostTable, step_cost
from xcal.privacy.filter import RenyiFilter
from xcal.training.clipping import ClippingEngine

SHORT = "tests/audit/test_short_audit.py::"


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake."""

    name: str
    what: str
    plant: Callable[[pytest.MonkeyPatch], None]
    checks: tuple[str, ...]  # each must fail


def everywhere(patch: pytest.MonkeyPatch, original: Any, mutated: Any) -> None:
    """Replace a function in every module of ours that holds it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("xcal."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, attribute, mutated)


def half_noise(patch: pytest.MonkeyPatch) -> None:
    real = xcal.privacy.noise.release_tensors

    def mutated(sums: Any, scale: float, noise: Any, key: Any) -> Any:
        return real(sums, scale / 2, noise, key)

    everywhere(patch, real, mutated)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    real = ClippingEngine.clipped_sum

    def mutated(self: Any, *args: Any, clip: float, **options: Any) -> Any:
        return real(self, *args, clip=float("inf"), **options)

    patch.setattr(ClippingEngine, "clipped_sum", mutated)


def signal_not_charged(patch: pytest.MonkeyPatch) -> None:
    real = Account.pay

    def mutated(self: Account, *args: Any, **charge: Any) -> None:
        gradient = next(r for r in charge["releases"] if r.name == "gradient")
        sigma = gradient.noise / gradient.sensitivity
        order = self.terms.order
        assert order is not None
        charge |= {"sigma": sigma, "cost": step_cost(charge["rate"], sigma, order)}
        real(self, *args, **{**charge, "releases": (gradient,)})

    patch.setattr(Account, "pay", mutated)


def two_draws(patch: pytest.MonkeyPatch) -> None:
    real = xcal.training.xcal.band_of

    def mutated(plan: Any, orders: Any) -> Any:
        band = real(plan, orders)
        sigmas = np.array([plan.sigma_signal])
        signal = CostTable.build(plan.sample_rate, plan.order, sigmas).costs[0]
        alone = CostTable.build(plan.sample_rate, plan.order, band.sigmas).costs
        return replace(band, joint_sigmas=band.sigmas, joint_costs=alone + signal)

    everywhere(patch, real, mutated)


def budget_reset(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Account, charges: Any) -> RenyiFilter:
        assert self.terms.order is not None and self.terms.budget is not None
        return RenyiFilter(self.terms.order, self.terms.budget, 0.0)

    patch.setattr(Account, "_filter_after", mutated)


def drawn_divisor(patch: pytest.MonkeyPatch) -> None:
    real_draw = xcal.training.local.Bench.draw
    real_release = xcal.training.steps.release_gradient
    drawn = [1]

    def draw(self: Any, step: int) -> Any:
        batch = real_draw(self, step)
        drawn[0] = max(1, batch.n_units)
        return batch

    def release(bench: Any, *args: Any, **options: Any) -> None:
        real_release(replace(bench, batch=drawn[0]), *args, **options)

    patch.setattr(xcal.training.local.Bench, "draw", draw)
    everywhere(patch, real_release, release)


def private_fill(patch: pytest.MonkeyPatch) -> None:
    real = xcal.explain.signal.fill_values

    def mutated(images: torch.Tensor, fill: Any) -> torch.Tensor:
        return images.mean(dim=(0, 2, 3), keepdim=True)

    everywhere(patch, real, mutated)


def summed_group(patch: pytest.MonkeyPatch) -> None:
    real = xcal.training.local.mean_by_unit

    def mutated(values: torch.Tensor, units: torch.Tensor, n_units: int) -> Any:
        weights = values.double().cpu().numpy()
        return np.bincount(units.cpu().numpy(), weights=weights, minlength=n_units)

    everywhere(patch, real, mutated)


def noise_reused(patch: pytest.MonkeyPatch) -> None:
    real = Account.pay

    def mutated(self: Account, *args: Any, **charge: Any) -> None:
        real(self, *args, **{**charge, "inputs": None})  # no longer compared

    patch.setattr(Account, "pay", mutated)


SENSITIVITY = (
    "tests/properties/test_sensitivity.py::"
    "test_one_unit_moves_every_release_by_at_most_what_was_paid_for"
)
MUTANTS = (
    Mutant(
        "half-noise",
        "σ/2: half the noise that was charged",
        half_noise,
        (
            SHORT + "test_gradient_canaries_find_no_more_than_was_charged[fl-dp]",
            "tests/statistical/test_noise.py::test_tensors_get_noise_of_the_stated_deviation",
        ),
    ),
    Mutant(
        "no-clipping",
        "gradients are not clipped",
        no_clipping,
        (SHORT + "test_loud_pictures_are_not_found", SENSITIVITY + "[fl-dp-record]"),
    ),
    Mutant(
        "signal-free",
        "the signal is released but not charged",
        signal_not_charged,
        (SHORT + "test_every_release_of_a_step_was_charged[xcal]",),
    ),
    Mutant(
        "two-draws",
        "a shared batch is charged as two independent ones",
        two_draws,
        (
            SHORT + "test_every_release_of_a_step_was_charged[xcal-paper]",
            SENSITIVITY + "[xcal-paper-record]",
        ),
    ),
    Mutant(
        "budget-reset",
        "the budget starts anew every round",
        budget_reset,
        (
            SHORT + "test_charges_stay_within_the_budget_over_all_rounds[xcal]",
            "tests/properties/test_account.py::test_a_ledger_continues_over_processes",
        ),
    ),
    Mutant(
        "drawn-divisor",
        "sums are divided by the drawn batch size, at small n",
        drawn_divisor,
        (
            SHORT + "test_the_drawn_size_is_not_given_away",
            "tests/equivalence/test_steps.py::test_no_noise_and_no_clipping_is_plain_sgd",
        ),
    ),
    Mutant(
        "private-fill",
        "the fill value is the private images' mean",
        private_fill,
        (
            "tests/properties/test_signal_properties.py::test_an_image_is_scored_alone",
            "tests/unit/test_signal.py::test_fills",
        ),
    ),
    Mutant(
        "summed-group",
        "a group is scored as the sum over its images",
        summed_group,
        (
            "tests/properties/test_sensitivity.py::"
            "test_the_mean_of_a_unit_stays_in_its_range_and_among_its_own",
        ),
    ),
    Mutant(
        "noise-reused",
        "the noise of a redone step is reused with other weights",
        noise_reused,
        ("tests/properties/test_account.py::test_replay_with_other_inputs_is_refused",),
    ),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def pytest_configure() -> None:
    """As a plugin of pytest: plant the mutant that the environment names, for good."""
    name = os.environ.get("XCAL_MUTANT")
    if name:
        BY_NAME[name].plant(pytest.MonkeyPatch())
