"""Ways to break the guarantee on purpose, and which check must notice each.

A mutant replaces real code while the check runs: `XCAL_MUTANT=name pytest -p audit.mutants …`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

import xcal.dp.accounting
import xcal.dp.distributed
import xcal.dp.filter
import xcal.dp.ledger.rows
import xcal.dp.noise
import xcal.dp.sampling
import xcal.federation.local
import xcal.federation.site_directory
import xcal.methods.adap_dpfl
import xcal.methods.adaptive_clip
import xcal.methods.client_data
import xcal.methods.dp_fedavg
import xcal.methods.step_parts
import xcal.methods.xcal_steered
from xcal.dp.account import Account
from xcal.dp.accounting import step_cost
from xcal.dp.clipping import Bound, ClippingEngine
from xcal.dp.distributed import ChargedShare
from xcal.dp.filter import StepFilter
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Release
from xcal.dp.mechanism import ChargedStep, Mechanism, ReleasedTensors
from xcal.dp.noise import NoiseKey, SecureNoise, SeededNoise
from xcal.explain.signal import fill_values
from xcal.federation.masks import MaskKeys, Roster
from xcal.federation.site_directory import SiteDirectory
from xcal.methods.agp_dp import ProtectedChannels
from xcal.methods.client_data import Inputs, LocalData
from xcal.methods.context import Optimizer, StepAverage, StepContext
from xcal.methods.xcal_steered import SteeredRule

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake."""

    name: str
    what: str
    plant: Callable[[pytest.MonkeyPatch], None]
    checks: tuple[str, ...]  # each must fail


def everywhere(patch: Patch, original: Any, mutated: Any) -> None:
    """Replace a function in every module of ours that holds it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("xcal."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, attribute, mutated)


def instead(patch: Patch, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method of a class by one that is given the real one first."""
    real = getattr(owner, name)

    def plant(mutated: Callable[..., Any]) -> None:
        patch.setattr(owner, name, lambda *args, **options: mutated(real, *args, **options))

    return plant


# --- noise and clipping ---------------------------------------------------------------------------


def half_noise(patch: Patch) -> None:
    real = xcal.dp.noise.release_tensors

    def mutated(sums: Any, scale: float, noise: Any, key: Any) -> Any:
        return real(sums, scale / 2, noise, key)

    everywhere(patch, real, mutated)


def no_clipping(patch: Patch) -> None:
    @instead(patch, ClippingEngine, "clipped_sum")
    def _(real: Any, self: Any, *args: Any, clip: float, **options: Any) -> Any:
        return real(self, *args, clip=float("inf"), **options)


def private_fill(patch: Patch) -> None:
    real = fill_values

    def mutated(images: torch.Tensor, fill: Any) -> torch.Tensor:
        return images.mean(dim=(0, 2, 3), keepdim=True)

    everywhere(patch, real, mutated)


def summed_group(patch: Patch) -> None:
    real = xcal.methods.client_data.mean_by_unit

    def mutated(values: torch.Tensor, units: torch.Tensor, n_units: int) -> Any:
        weights = values.double().cpu().numpy()
        return np.bincount(units.cpu().numpy(), weights=weights, minlength=n_units)

    everywhere(patch, real, mutated)


def neighbors_in_activations(patch: Patch) -> None:
    @instead(patch, Inputs, "activations")
    def _(real: Any, self: Inputs, *args: Any) -> Any:
        found = real(self, *args)
        return found - found.mean(dim=0) if len(found) else found


# --- what is charged ------------------------------------------------------------------------------


def signal_not_charged(patch: Patch) -> None:
    @instead(patch, Account, "pay")
    def _(real: Any, self: Account, *args: Any, **charge: Any) -> None:
        gradient = next(r for r in charge["releases"] if r.name == "gradient")
        sigma = gradient.noise / gradient.sensitivity
        order = self.terms.order
        assert order is not None
        charge |= {"sigma": sigma, "cost": step_cost(charge["rate"], sigma, order)}
        real(self, *args, **{**charge, "releases": (gradient,)})


def two_draws(patch: Patch) -> None:
    def charge(self: Mechanism, account: Any, *place: int, inputs: Any, **tools: Any) -> Any:
        sigmas = [r.noise / r.sensitivity for r in self.releases]
        order = account.filter.order
        account.pay(
            *place,
            rate=self.rate,
            sigma=max(sigmas),
            cost=sum(step_cost(self.rate, sigma, order) for sigma in sigmas),
            releases=self.releases,
            inputs=inputs,
        )
        return ChargedStep(self, **tools)

    patch.setattr(Mechanism, "charge", charge)


def other_order(patch: Patch) -> None:
    def cost(self: Mechanism, order: float) -> float:
        return step_cost(self.rate, self.sigma, 1 + (order - 1) / 2)

    patch.setattr(Mechanism, "cost", cost)


def empty_draw_free(patch: Patch) -> None:
    """A free look first: whether anybody would be drawn."""
    units = LocalData.draw

    @instead(patch, StepContext, "charge")
    def _(real: Any, self: StepContext, step: int, *args: Any, **options: Any) -> Any:
        batch = units(self.data, self.rate, self.noise, self.key(step, "draw"))
        if batch.n_units:
            charged = real(self, step, *args, **options)
        else:
            releases, sigma = args
            mechanism = Mechanism(self.rate, sigma, releases)
            charged = ChargedStep(mechanism, self.noise, lambda block: self.key(step, block))
            self.charges.append(step)
        charged.draw = lambda data: batch
        return charged


def draw_before_pay(patch: Patch) -> None:
    @instead(patch, StepContext, "charge")
    def _(real: Any, self: StepContext, step: int, *args: Any, **options: Any) -> Any:
        batch = self.data.draw(self.rate, self.noise, self.key(step, "draw"))
        charged = real(self, step, *args, **options)
        charged.draw = lambda data: batch
        return charged


def charge_after_release(patch: Patch) -> None:
    """The filter counts a step at once; the disk hears of it when the next one is charged."""
    waiting: dict[int, Any] = {}

    @instead(patch, Ledger, "charge")
    def _(real: Any, self: Ledger, charge: Any) -> None:
        if id(self) in waiting:
            real(self, waiting[id(self)])
        waiting[id(self)] = charge


def budget_reset(patch: Patch) -> None:
    @instead(patch, Account, "_filter_after")
    def _(real: Any, self: Account, charges: Any) -> Any:
        return real(self, ())


def plan_ignored(patch: Patch) -> None:
    everywhere(patch, xcal.dp.ledger.rows.as_planned, lambda run, rate, sigma: True)


def steps_uncounted(patch: Patch) -> None:
    patch.setattr(StepFilter, "admits", lambda self, cost: cost >= 0)


def odometer_reset(patch: Patch) -> None:
    def spent(self: Account) -> float:
        now = max(c.round for c in self._charges)
        return sum(c.cost for c in self._charges if c.round == now)

    patch.setattr(Account, "spent", property(spent))


def rounded_down(patch: Patch) -> None:
    real = xcal.dp.filter.add_up
    everywhere(patch, real, lambda total, cost: math.nextafter(total + cost, -math.inf))


def noise_reused(patch: Patch) -> None:
    @instead(patch, Account, "pay")
    def _(real: Any, self: Account, *args: Any, **charge: Any) -> None:
        real(self, *args, **{**charge, "inputs": None})  # no longer compared


def floor_ignored(patch: Patch) -> None:
    @instead(patch, Account, "pay")
    def _(real: Any, self: Account, *args: Any, **charge: Any) -> None:
        self._floor = 0.0
        real(self, *args, **charge)


# --- what is made of releases, and what is not ----------------------------------------------------


def _keeping(patch: Patch, name: str) -> dict[str, Any]:
    """What a `ChargedStep` was last given to release, before noise, by its name."""
    raw: dict[str, Any] = {}

    @instead(patch, ChargedStep, name)
    def _(real: Any, self: ChargedStep, what: str, value: Any, **options: Any) -> Any:
        raw[what] = value
        return real(self, what, value, **options)

    return raw


def raw_signal_traced(patch: Patch) -> None:
    raw = _keeping(patch, "release_scalar")
    real = xcal.methods.context.StepRecord

    def record(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        return made if made.signal is None else replace(made, signal=raw["signal"])

    patch.setattr(xcal.methods.xcal_steered, "StepRecord", record)


def raw_count_steers(patch: Patch) -> None:
    raw = _keeping(patch, "release_scalar")
    real = xcal.methods.adaptive_clip.release_fraction

    def mutated(context: Any, *args: Any) -> float:
        real(context, *args)
        return 0.5 + raw["count"] / context.batch

    everywhere(patch, real, mutated)


def raw_norms_steer(patch: Patch) -> None:
    raw = _keeping(patch, "release_tensors")
    real = xcal.methods.step_parts.release_gradient

    def mutated(context: Any, *args: Any, **options: Any) -> Any:
        real(context, *args, **options)
        return {name: value / context.batch for name, value in raw["gradient"].items()}

    patch.setattr(xcal.methods.adap_dpfl, "release_gradient", mutated)


def raw_momentum(patch: Patch) -> None:
    raw = _keeping(patch, "release_tensors")

    @instead(patch, Optimizer, "step")
    def _(real: Any, self: Optimizer, gradient: Any) -> None:
        real(self, gradient)
        for name, parameter in self._params.items():
            buffer = self._optimiser.state[parameter].get("momentum_buffer")
            if buffer is not None and "gradient" in raw:
                buffer.copy_(raw["gradient"][name])


def raw_average(patch: Patch) -> None:
    raw = _keeping(patch, "release_tensors")

    @instead(patch, StepAverage, "weights")
    def _(real: Any, self: StepAverage) -> Any:
        return {name: value - 0.1 * raw["gradient"][name] for name, value in real(self).items()}


def empty_draw_silent(patch: Patch) -> None:
    @instead(patch, ChargedStep, "release_tensors")
    def _(real: Any, self: ChargedStep, name: str, sums: Any, **options: Any) -> Any:
        if all(not bool(value.any()) for value in sums.values()):
            return ReleasedTensors({key: value.clone() for key, value in sums.items()})
        return real(self, name, sums, **options)


def drawn_divisor(patch: Patch) -> None:
    real_release = xcal.methods.step_parts.release_gradient
    drawn = [1]

    @instead(patch, ChargedStep, "draw")
    def _(real: Any, self: ChargedStep, units: Any) -> Any:
        batch = real(self, units)
        drawn[0] = max(1, batch.n_units)
        return batch

    def release(context: Any, *args: Any, **options: Any) -> Any:
        return real_release(replace(context, batch=drawn[0]), *args, **options)

    everywhere(patch, real_release, release)


def drawn_signal_divisor(patch: Patch) -> None:
    drawn = [1]

    @instead(patch, ChargedStep, "draw")
    def _(real: Any, self: ChargedStep, units: Any) -> Any:
        batch = real(self, units)
        drawn[0] = max(1, batch.n_units)
        return batch

    @instead(patch, ChargedStep, "release_scalar")
    def _(real: Any, self: ChargedStep, name: str, value: float) -> float:
        found = real(self, name, value)
        return found * 25 / drawn[0] if name == "signal" else found


def answered_divisor(patch: Patch) -> None:
    real = xcal.methods.dp_fedavg.private_mean

    def mutated(context: Any, updates: Any, **options: Any) -> Any:
        return real(replace(context, participants=len(updates)), updates, **options)

    everywhere(patch, real, mutated)


# --- C and D --------------------------------------------------------------------------------------


def own_count_clips(patch: Patch) -> None:
    """The norm that this step's own count asks for, in this step."""
    real = xcal.methods.adaptive_clip.clipped_sum

    def mutated(context: Any, batch: Any, bound: Any = None, **options: Any) -> Any:
        sums = real(context, batch, bound, **options)
        if bound is None:
            return sums
        usual = (
            float(sums.norms.double().sum()) / context.batch
        )  # over B: also where nobody is drawn
        middle = bound.norm * (0.5 + usual) / (1 + usual)  # never above what was charged for
        return real(context, batch, Bound(middle, bound.geometry), **options)

    patch.setattr(xcal.methods.adaptive_clip, "clipped_sum", mutated)


def count_not_centered(patch: Patch) -> None:
    real = xcal.methods.adaptive_clip.centered_count

    def mutated(norms: Any, clip: float, counted: Any) -> float:
        return float((norms <= clip)[counted].sum())

    everywhere(patch, real, mutated)


def _brightest(context: StepContext, channels: tuple[int, ...]) -> tuple[int, ...]:
    """As many channels as were chosen, by the client's own pictures."""
    count = len(context.model.get_parameter("conv.bias")) if hasattr(context.model, "conv") else 8
    first = int(context.data._images.pixels.astype(np.int64).sum()) % count
    return tuple(sorted((first + k) % count for k in range(len(channels))))


def private_geometry(patch: Patch) -> None:
    real = xcal.methods.xcal_steered.next_bound

    def mutated(context: StepContext, rule: SteeredRule, state: Any) -> Any:
        state, _ = real(context, rule, state)
        if state.channels:
            state = replace(state, channels=_brightest(context, state.channels))
        return real(context, rule, state)

    patch.setattr(xcal.methods.xcal_steered, "next_bound", mutated)


def private_channels(patch: Patch) -> None:
    @instead(patch, ProtectedChannels, "step")
    def _(
        real: Any,
        self: Any,
        context: StepContext,
        step: int,
        experiment: Any,
        plan: Any,
        state: Any,
    ):
        if state.channels is None:
            state = replace(state, channels=_brightest(context, (0,)))
        return real(self, context, step, experiment, plan, state)


def less_than_charged(patch: Patch) -> None:
    """The published rule's σ_step, not held to the lowest that was charged."""

    @instead(patch, ChargedStep, "_take")
    def _(real: Any, self: ChargedStep, name: str, sensitivity: Any, noise: Any) -> Any:
        taken = real(self, name, sensitivity, None)
        return taken if noise is None else Release(name, 0.9 * taken.noise, taken.sensitivity)


def scaled_fraction(patch: Patch) -> None:
    real = xcal.methods.xcal_steered._gradient_and_scores

    def mutated(context: Any, step: int, batch: Any, rule: SteeredRule, bound: Any) -> Any:
        sums, centered, counted = real(context, step, batch, rule, bound)
        return sums, centered / rule.signal_fraction, counted

    patch.setattr(xcal.methods.xcal_steered, "_gradient_and_scores", mutated)


# --- who is drawn ---------------------------------------------------------------------------------


def other_rate(patch: Patch) -> None:
    @instead(patch, LocalData, "draw")
    def _(real: Any, self: LocalData, rate: float, noise: Any, key: Any) -> Any:
        return real(self, min(1.0, 1.5 * rate), noise, key)


def other_rate_charged(patch: Patch) -> None:
    def draw(self: ChargedStep, units: Any) -> Any:
        return units.draw(min(1.0, 1.5 * self.mechanism.rate), self._noise, self._key("draw"))

    patch.setattr(ChargedStep, "draw", draw)


def _other_draw(patch: Patch, mutated: Callable[[Any, float, Any], Any]) -> None:
    real = xcal.dp.sampling.poisson_draw
    everywhere(patch, real, lambda uniforms, rate: mutated(uniforms, rate, real))


def fixed_size(patch: Patch) -> None:
    def drawn(uniforms: Any, rate: float, real: Any) -> Any:
        return np.sort(np.argsort(uniforms)[: round(rate * len(uniforms))]).astype(np.int64)

    _other_draw(patch, drawn)


def truncated(patch: Patch) -> None:
    def drawn(uniforms: Any, rate: float, real: Any) -> Any:
        return real(uniforms, rate)[: math.ceil(rate * len(uniforms))]

    _other_draw(patch, drawn)


def drawn_twice(patch: Patch) -> None:
    def drawn(uniforms: Any, rate: float, real: Any) -> Any:
        units = real(uniforms, rate)
        return np.sort(np.concatenate([units[:1], units]))

    real = xcal.dp.sampling.poisson_draw
    patch.setattr(xcal.methods.client_data, "poisson_draw", lambda u, rate: drawn(u, rate, real))


def views_as_units(patch: Patch) -> None:
    @instead(patch, LocalData, "draw")
    def _(real: Any, self: LocalData, *args: Any) -> Any:
        batch = real(self, *args)
        if batch.plain is None:
            return batch
        return replace(batch, units=torch.arange(len(batch.units)), n_units=len(batch.units))


def null_units_left_out(patch: Patch) -> None:
    """The rate, the steps and the draw follow the real number of units."""

    @instead(patch, LocalData, "__init__")
    def _(real: Any, self: LocalData, *args: Any, **options: Any) -> None:
        real(self, *args, **options | {"declared_units": None})


def too_many_images(patch: Patch) -> None:
    real = xcal.dp.sampling.images_of

    def mutated(drawn: Any, table: Any, images_per_unit: int, chosen: Any = None) -> Any:
        return real(drawn, table, max(images_per_unit, int(table.sizes.max(initial=1))), chosen)

    patch.setattr(xcal.methods.client_data, "images_of", mutated)


def cap_ignored(patch: Patch) -> None:
    real = xcal.dp.sampling.cap_groups
    everywhere(patch, real, lambda groups, cap, rng: np.arange(len(groups)))


def seeded_draws(patch: Patch) -> None:
    @instead(patch, LocalData, "draw")
    def _(real: Any, self: LocalData, rate: float, noise: Any, key: NoiseKey) -> Any:
        return real(self, rate, SeededNoise(0), key)


# --- keys -----------------------------------------------------------------------------------------


def key_without(part: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def text(key: NoiseKey) -> tuple[Any, ...]:
            return astuple(replace(key, **{part: type(getattr(key, part))()}))

        patch.setattr(xcal.dp.noise, "astuple", text)

    return plant


def one_key(patch: Patch) -> None:
    """Signal and gradient take their noise from one stream; the guard of seeded noise is off."""

    @instead(patch, SeededNoise, "_stream")
    def _(real: Any, self: SeededNoise, key: NoiseKey) -> int:
        self._last.clear()
        return real(self, key)

    @instead(patch, ChargedStep, "__init__")
    def _(real: Any, self: ChargedStep, mechanism: Any, noise: Any, key: Any) -> None:
        real(self, mechanism, noise, lambda block: key("draw" if block == "draw" else "gradient"))


def keyed_by_a_seed(patch: Patch) -> None:
    def rekey(self: SecureNoise) -> None:
        self._process = os.getpid()
        twister = np.random.default_rng(int(torch.initial_seed()) % 2**32)
        cipher = Cipher(algorithms.AES(twister.bytes(32)), modes.CTR(os.urandom(16)))
        self._stream = cipher.encryptor()

    patch.setattr(SecureNoise, "_rekey", rekey)


def short_key(patch: Patch) -> None:
    def rekey(self: SecureNoise) -> None:
        self._process = os.getpid()
        key = (os.urandom(4) * 8)[:32]
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    patch.setattr(SecureNoise, "_rekey", rekey)


def not_rekeyed(patch: Patch) -> None:
    @instead(patch, SecureNoise, "_words")
    def _(real: Any, self: SecureNoise, count: int) -> Any:
        self._process = os.getpid()
        return real(self, count)


def shared_source(patch: Patch) -> None:
    """One secure source for all sites of a process, each taking up its stream from the start."""
    key, start = os.urandom(32), os.urandom(16)

    def rekey(self: SecureNoise) -> None:
        self._process = os.getpid()
        self._stream = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()

    patch.setattr(SecureNoise, "_rekey", rekey)


def seeded_site(patch: Patch) -> None:
    def noise(self: SiteDirectory) -> Any:
        return SeededNoise(self.about.seed or 0)

    patch.setattr(SiteDirectory, "noise", noise)


def seeded_engine(patch: Patch) -> None:
    real = xcal.federation.local._noise

    def noise(experiment: Any) -> Any:
        return real(experiment.model_copy(update={"noise": "seeded", "sites": None}))

    patch.setattr(xcal.federation.local, "_noise", noise)


# --- which check must notice which ----------------------------------------------------------------

# --- noise that sites share under masks -----------------------------------------------------------


def share_by_all(patch: Patch) -> None:
    patch.setattr(Roster, "honest_of", lambda self, sites: sites)


def one_mask_key(patch: Patch) -> None:
    @instead(patch, MaskKeys, "_stream")
    def _(real: Any, self: Any, attempt: Any, *rest: Any) -> Any:
        return real(self, replace(attempt, round=0, number=0, terms=""), *rest)


def grid_after_noise(patch: Patch) -> None:
    @instead(patch, ChargedShare, "contribute")
    def _(real: Any, self: ChargedShare, values: Any, **options: Any) -> Any:
        grid = self.mechanism.grid
        assert grid is not None
        real(self, values, **options)
        rng = np.random.default_rng(len(values))
        flat = [torch.as_tensor(values[p.name]).double().reshape(-1) for p in grid.parts]
        exact = torch.cat([v * grid.fineness(p) for v, p in zip(flat, grid.parts, strict=True)])
        return np.rint(exact.numpy() + grid.scale * rng.normal(size=grid.size)).astype(np.int64)


def rounding_not_counted(patch: Patch) -> None:
    patch.setattr(xcal.dp.distributed, "ROUNDING", 0.0)


SHORT = "tests/audit/test_short_audit.py::"
SHARED = "tests/properties/test_distributed.py::"
SENSITIVITY = (
    "tests/properties/test_sensitivity.py::"
    "test_one_unit_moves_every_release_by_at_most_what_was_paid_for"
)
AS_DRAWN = "tests/properties/test_sensitivity.py::test_so_it_is_as_a_client_draws_and_computes"
TAINT = (
    "tests/taint/test_taint.py::"
    "test_nothing_a_run_writes_depends_on_private_data_but_through_releases"
)
ORDER = "tests/conformance/test_order.py::test_a_step_is_paid_for_then_drawn_then_released"
ASKED = "tests/conformance/test_results_of_releases.py::"
FOLLOWS = ASKED + "test_what_a_step_asks_for_follows_from_releases_only"
ENTROPY = "tests/conformance/test_entropy.py::"
ROWS = "tests/properties/test_rows_of_units.py::"
KEYS = "tests/statistical/test_noise.py::test_two_keys_give_independent_streams"
SAMPLING = "tests/properties/test_sampling.py::"
ACCOUNT = "tests/properties/test_account.py::"
METHODS = "tests/conformance/test_methods.py::"

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
        "neighbors-kept",
        "the feature cache is centered over the draw",
        neighbors_in_activations,
        (
            AS_DRAWN + "[fl-dp-Beginning]",
            "tests/equivalence/test_frozen_backbone.py::"
            "test_clipped_sums_are_those_of_the_whole_network[head-1]",
        ),
    ),
    Mutant(
        "signal-free",
        "the signal is released but not charged",
        signal_not_charged,
        (SHORT + "test_every_release_of_a_step_was_charged[xcal-steered]",),
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
        "other-order",
        "costs are those of a smaller order than the budget's",
        other_order,
        (METHODS + "test_spending_stays_within_the_budget[fl-dp]",),
    ),
    Mutant(
        "empty-free",
        "whoever draws nobody is not charged",
        empty_draw_free,
        (TAINT + "[fl-dp-0]", ORDER + "[fl-dp-0]"),
    ),
    Mutant(
        "draw-first",
        "the batch is drawn before it is paid for",
        draw_before_pay,
        (ORDER + "[xcal-steered-0]",),
    ),
    Mutant(
        "charge-late",
        "the ledger hears of a step when the next one is charged",
        charge_after_release,
        (ORDER + "[fl-dp-0]",),
    ),
    Mutant(
        "budget-reset",
        "the budget starts anew every round",
        budget_reset,
        (
            SHORT + "test_charges_stay_within_the_budget_over_all_rounds[xcal-steered]",
            ACCOUNT + "test_a_ledger_continues_over_processes",
        ),
    ),
    Mutant(
        "plan-ignored",
        "a fixed plan's run takes steps of another rate or less noise",
        plan_ignored,
        (
            "tests/unit/test_fixed_plans.py::test_a_step_that_was_not_planned_is_refused_and_not_charged",
        ),
    ),
    Mutant(
        "steps-uncounted",
        "a fixed plan's run takes more steps than were planned",
        steps_uncounted,
        ("tests/unit/test_fixed_plans.py::test_exactly_the_planned_steps_are_admitted",),
    ),
    Mutant(
        "odometer-reset",
        "the odometer counts the last round only",
        odometer_reset,
        (ASKED + "test_what_a_run_says_it_spent_is_what_its_ledger_says[xcal-steered]",),
    ),
    Mutant(
        "rounded-down",
        "sums of costs are rounded downwards",
        rounded_down,
        ("tests/properties/test_filter.py::test_adding_up_errs_upwards_and_by_little",),
    ),
    Mutant(
        "noise-reused",
        "the noise of a redone step is reused with other weights",
        noise_reused,
        (ACCOUNT + "test_replay_with_other_inputs_is_refused",),
    ),
    Mutant(
        "floor-ignored",
        "the owner's lowest noise multiplier is not looked at in a step",
        floor_ignored,
        (
            "tests/federation/test_answer.py::"
            "test_the_lowest_noise_holds_for_a_step_that_its_plan_did_not_tell_of",
        ),
    ),
    Mutant(
        "raw-trace",
        "the trace holds the signal without noise",
        raw_signal_traced,
        (TAINT + "[xcal-steered-0]",),
    ),
    Mutant(
        "raw-count",
        "C is steered by the count without noise",
        raw_count_steers,
        (TAINT + "[adaptive-clip-0]", FOLLOWS + "[adaptive-clip-0]"),
    ),
    Mutant(
        "raw-norms",
        "adap-dpfl's C follows the norms without noise",
        raw_norms_steer,
        (TAINT + "[adap-dpfl-0]",),
    ),
    Mutant(
        "raw-momentum",
        "the momentum buffer is fed with gradients without noise",
        raw_momentum,
        (TAINT + "[fl-dp-3]",),
    ),
    Mutant(
        "raw-average",
        "the averaged weights hold a gradient without noise",
        raw_average,
        (TAINT + "[fl-dp-2]",),
    ),
    Mutant(
        "empty-silent",
        "an empty draw gets no noise",
        empty_draw_silent,
        (ASKED + "test_an_empty_draw_gets_noise_on_every_coordinate[fl-dp-0]", TAINT + "[fl-dp-0]"),
    ),
    Mutant(
        "drawn-divisor",
        "sums are divided by the drawn batch size, at small n",
        drawn_divisor,
        (
            SHORT + "test_the_drawn_size_is_not_given_away",
            "tests/equivalence/test_steps.py::test_no_noise_and_no_clipping_is_plain_sgd",
            TAINT + "[fl-dp-0]",
        ),
    ),
    Mutant(
        "drawn-signal",
        "the signal is divided by the drawn batch size",
        drawn_signal_divisor,
        (TAINT + "[xcal-steered-1]",),
    ),
    Mutant(
        "answered-divisor",
        "a trusted server divides by how many clients answered",
        answered_divisor,
        (
            "tests/properties/test_sensitivity.py::test_a_server_divides_by_how_many_were_asked",
            "tests/unit/test_central.py::test_noise_on_the_mean_is_z_times_s_over_m",
        ),
    ),
    Mutant(
        "own-count",
        "a step clips to what its own norms say",
        own_count_clips,
        (FOLLOWS + "[adaptive-clip-0]",),
    ),
    Mutant(
        "count-uncentered",
        "the count of units within C is not centered",
        count_not_centered,
        (
            "tests/properties/test_sensitivity.py::"
            "test_a_unit_within_c_counts_a_half_and_one_beyond_it_minus_a_half[adaptive-clip]",
            "tests/properties/test_sensitivity.py::test_centered_count_moves_by_half",
        ),
    ),
    Mutant(
        "private-geometry",
        "xcal's spared channels are read from private images",
        private_geometry,
        (TAINT + "[xcal-steered-2]", FOLLOWS + "[xcal-steered-2]"),
    ),
    Mutant(
        "private-channels",
        "agp-dp's spared channels are read from private images",
        private_channels,
        (TAINT + "[agp-dp-0]", FOLLOWS + "[agp-dp-0]"),
    ),
    Mutant(
        "below-charged",
        "xcal-paper's σ falls below the one charged",
        less_than_charged,
        (SENSITIVITY + "[xcal-paper-record]", ORDER + "[xcal-paper-0]"),
    ),
    Mutant(
        "scaled-fraction",
        "a signal of some units is scaled up to all of them",
        scaled_fraction,
        (
            "tests/properties/test_sensitivity.py::"
            "test_some_units_give_the_signal_that_they_give_among_all",
        ),
    ),
    Mutant(
        "other-rate",
        "data are drawn at another rate than they are asked for",
        other_rate,
        (ROWS + "test_every_row_is_of_the_unit_it_comes_from",),
    ),
    Mutant(
        "rate-uncharged",
        "a charged step draws at another rate than was charged",
        other_rate_charged,
        (ORDER + "[fl-dp-0]",),
    ),
    Mutant(
        "fixed-size",
        "every batch has the same size",
        fixed_size,
        (
            SAMPLING + "test_a_unit_is_drawn_by_its_own_uniform_alone",
            ROWS + "test_every_row_is_of_the_unit_it_comes_from",
        ),
    ),
    Mutant(
        "truncated",
        "a draw is cut off at its expected size",
        truncated,
        (
            SAMPLING + "test_a_unit_is_drawn_by_its_own_uniform_alone",
            ROWS + "test_every_row_is_of_the_unit_it_comes_from",
        ),
    ),
    Mutant(
        "unit-twice",
        "a drawn unit counts twice",
        drawn_twice,
        (ROWS + "test_every_row_is_of_the_unit_it_comes_from", AS_DRAWN + "[fl-dp-Beginning]"),
    ),
    Mutant(
        "views-as-units",
        "every view of an image is a unit of its own",
        views_as_units,
        (ROWS + "test_every_row_is_of_the_unit_it_comes_from", AS_DRAWN + "[fl-dp-Beginning]"),
    ),
    Mutant(
        "null-undrawn",
        "rate and draw follow the real number of units, not the declared one",
        null_units_left_out,
        (
            ROWS + "test_every_row_is_of_the_unit_it_comes_from",
            "tests/properties/test_declared_units.py::"
            "test_whoever_else_is_drawn_does_not_depend_on_a_unit_that_is_not_there",
        ),
    ),
    Mutant(
        "too-many-images",
        "all images of a group are used, whatever images_per_unit says",
        too_many_images,
        (ROWS + "test_every_row_is_of_the_unit_it_comes_from",),
    ),
    Mutant(
        "cap-ignored",
        "group_cap is not enforced",
        cap_ignored,
        (SAMPLING + "test_a_cap_is_enforced_and_costs_no_more_than_it_must",),
    ),
    Mutant(
        "seeded-draws",
        "draws come from a seed where noise is secure",
        seeded_draws,
        (ENTROPY + "test_who_is_drawn_and_how_is_decided_by_entropy_alone",),
    ),
    *(
        Mutant(
            f"key-no-{part}",
            f"seeded noise is the same for every {part}",
            key_without(part),
            (f"{KEYS}[other{number}]",),
        )
        for number, part in ((0, "client"), (1, "method"), (2, "round"), (3, "step"), (4, "block"))
    ),
    Mutant(
        "one-key",
        "signal and gradient take their noise from one stream",
        one_key,
        (FOLLOWS + "[xcal-steered-0]", ORDER + "[xcal-steered-0]"),
    ),
    Mutant(
        "seed-keyed",
        "secure noise is keyed by torch's seed",
        keyed_by_a_seed,
        (
            ENTROPY + "test_the_system_s_entropy_decides_and_nothing_else",
            ENTROPY + "test_keys_have_256_bits_and_come_as_the_system_gave_them",
        ),
    ),
    Mutant(
        "short-key",
        "secure noise is keyed by 32 bits",
        short_key,
        (ENTROPY + "test_keys_have_256_bits_and_come_as_the_system_gave_them",),
    ),
    Mutant(
        "fork-repeats",
        "a forked child goes on with its parent's stream",
        not_rekeyed,
        (
            ENTROPY + "test_a_forked_child_repeats_nothing",
            "tests/statistical/test_noise.py::test_a_forked_process_draws_its_own",
        ),
    ),
    Mutant(
        "shared-stream",
        "all secure sources of a process have one stream",
        shared_source,
        (
            ENTROPY + "test_every_source_has_a_stream_of_its_own",
            ENTROPY + "test_the_local_engine_gives_every_site_a_stream_of_its_own",
        ),
    ),
    Mutant(
        "seeded-site",
        "a deployed client's noise comes from a seed",
        seeded_site,
        (ENTROPY + "test_a_deployed_client_draws_from_its_system_whatever_a_request_says",),
    ),
    Mutant(
        "seeded-engine",
        "given sites are charged for noise from the experiment's seed",
        seeded_engine,
        (ENTROPY + "test_the_local_engine_gives_every_site_a_stream_of_its_own[sites]",),
    ),
    Mutant(
        "share-by-all",
        "a share of the noise is that of N sites, and h of them are honest",
        share_by_all,
        (
            "tests/audit/test_masked_view.py::test_the_honest_add_the_noise_that_ledgers_say",
            "tests/federation/test_masks.py::test_too_few_sites_or_too_little_noise_are_refused",
        ),
    ),
    Mutant(
        "one-mask-key",
        "one stream of masks serves all attempts",
        one_mask_key,
        (
            "tests/federation/test_masks.py::test_keys_are_of_one_run_one_round_and_one_attempt",
            "tests/audit/test_masked_view.py::test_two_attempts_give_nothing_away_beside_their_sums",
        ),
    ),
    Mutant(
        "grid-after-noise",
        "shared noise is added in floats, and the grid comes after it",
        grid_after_noise,
        (
            SHARED + "test_what_is_contributed_is_what_was_charged_once",
            SHARED + "test_the_same_noise_parts_two_sums_by_what_their_grids_do",
        ),
    ),
    Mutant(
        "free-rounding",
        "what rounding adds to the sensitivity of a shared sum is not counted",
        rounding_not_counted,
        (SHARED + "test_rounding_can_really_add_what_is_counted",),
    ),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def pytest_configure() -> None:
    """As a plugin of pytest: plant the mutant that the environment names, for good."""
    name = os.environ.get("XCAL_MUTANT")
    if name:
        BY_NAME[name].plant(pytest.MonkeyPatch())
