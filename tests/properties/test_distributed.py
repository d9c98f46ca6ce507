"""Shared noise in whole numbers: sensitivity, share, modulus, and who may release what."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xcal.dp.account import Account
from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.distributed import DiscreteMechanism, DistributedGrid, DistributedMechanism, Part
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import RunTerms, Terms, charges_of, read_rows, verify
from xcal.dp.mechanism import UnchargedRelease
from xcal.dp.noise import NoiseKey, SecureNoise, SeededNoise
from xcal.errors import UserError

CLIP = 1.5


def grid_of(
    size: int = 50, *, sites: int = 4, honest: int = 3, units: int = 200, sigma: float = 2.0
) -> DistributedGrid:
    parts = (Part("gradient", size, CLIP, sigma), Part("count", 1, 0.5, 5 * sigma))
    return DistributedGrid(parts, sites, honest, units)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 400),
    honest=st.integers(1, 9),
    sigma=st.floats(0.3, 50),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["spread", "one", "ties"]),
)
def test_one_unit_moves_the_whole_numbers_by_no_more_than_charged(
    size: int, honest: int, sigma: float, seed: int, kind: str
) -> None:
    grid = DistributedGrid((Part("gradient", size, CLIP, sigma),), 10, honest, 100)
    part = grid.parts[0]
    rng = np.random.default_rng(seed)
    a = grid.fineness(part)
    others = rng.normal(size=size)
    unit = rng.normal(size=size) if kind == "spread" else np.eye(size)[seed % size]
    unit = unit / np.linalg.norm(unit) * CLIP
    if kind == "ties":  # every coordinate a hair from where rounding turns, on the worse side
        others = (np.round(others * a) + 0.5 - 1e-6) / a
        unit = np.sign(rng.normal(size=size)) * CLIP / math.sqrt(size)
    with_it = grid.round({"gradient": torch.from_numpy(others + unit)})
    without = grid.round({"gradient": torch.from_numpy(others)})
    moved = float(np.linalg.norm((with_it - without).astype(float)))
    assert moved <= grid.moved(part)
    # What the ledger is told: multiplier, and noise of the honest over what one unit moves.
    release = grid.releases[0]
    assert release.noise / release.sensitivity == pytest.approx(sigma, rel=1e-12)
    assert CLIP < release.sensitivity <= CLIP * (1 + 1.01 / 990)
    assert release.noise * a == pytest.approx(math.sqrt(honest) * grid.scale, rel=1e-12)


def test_rounding_can_really_add_what_is_counted() -> None:
    """A tiny unit turns every coordinate: without √d in the sensitivity this would break it."""
    size = 10_000
    grid = DistributedGrid((Part("gradient", size, CLIP, 1.0),), 3, 2, 100)
    a = grid.fineness(grid.parts[0])
    others = torch.full((size,), (7.5 - 1e-4) / a, dtype=torch.float64)
    unit = torch.full((size,), 2e-4 / a, dtype=torch.float64)
    assert float(unit.norm()) < 1e-3 * CLIP
    moved = grid.round({"gradient": others + unit}) - grid.round({"gradient": others})
    assert np.linalg.norm(moved) == math.sqrt(size)
    assert grid.moved(grid.parts[0]) >= a * CLIP + math.sqrt(size)


def test_sums_of_all_sites_decode_to_the_sum_on_the_grid_without_overflow() -> None:
    grid = grid_of()
    rng = np.random.default_rng(0)
    extreme = grid.units * CLIP / math.sqrt(50)  # as far as all units of a site can go together
    total = np.zeros(grid.size, dtype=np.uint64)
    plain = np.zeros(grid.size, dtype=np.int64)
    for sign in (1, 1, 1, 1):
        values = torch.full((50,), sign * extreme, dtype=torch.float64)
        whole = grid.round({"gradient": values, "count": 0.5 * grid.units})
        noisy = whole + rng.integers(-64 * grid.scale, 64 * grid.scale, grid.size)
        plain += noisy
        sent = grid.pack(grid.wrap(noisy))
        assert len(sent) == grid.size * grid.width
        total = (total + grid.unpack(sent)) & grid.mask
    found = grid.decode(total)
    assert np.array_equal(found["gradient"], plain[:50] / grid.fineness(grid.parts[0]))
    assert found["count"][0] == plain[50] / grid.fineness(grid.parts[1])
    negative = grid.wrap(-plain)
    assert np.array_equal(grid.decode(negative)["gradient"], -found["gradient"])
    for wrong in (b"", sent[:-1], sent + b"\0"):
        with pytest.raises(ValueError, match="numbers"):
            grid.unpack(wrong)


def test_a_share_has_the_noise_of_one_of_the_honest() -> None:
    grid = DistributedGrid((Part("gradient", 200_000, CLIP, 3.0),), 10, 9, 100)
    noise = SecureNoise().discrete_normals(NoiseKey("", "", 0, 0, "share"), grid.size, grid.scale)
    deviation = noise.std() / grid.fineness(grid.parts[0])
    assert deviation == pytest.approx(3.0 * CLIP / 3, rel=0.01)  # σC/√h


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="fewer parameters"):
        DistributedGrid((Part("gradient", 10**9, 1.0, 1000.0),), 3, 2, 100)
    with pytest.raises(UserError, match="fewer parameters"):
        DistributedGrid((Part("gradient", 5_000_000, 1.0, 1.0),), 3, 2, 10**8)
    with pytest.raises(UserError, match="fewer parameters"):  # whatever a server asks for
        DistributedGrid((Part("gradient", 10, 1.0, 1e307),), 3, 2, 100)
    for sites, honest in ((3, 0), (3, 4)):
        with pytest.raises(ValueError, match="honest"):
            grid_of(sites=sites, honest=honest)
    grid = grid_of()
    for bad in (torch.zeros(49), torch.full((50,), math.nan)):
        with pytest.raises(ValueError, match="finite"):
            grid.round({"gradient": bad, "count": 0.0})
    small = DistributedGrid((Part("gradient", 3000, 1.0, 4.0),), 3, 2, 1000)
    large = DistributedGrid((Part("gradient", 5_000_000, 1.0, 4.0),), 50, 49, 100_000)
    assert (small.width, large.width) == (4, 6)  # bytes of one number


def account_of(folder: Path, order: float, budget: float) -> tuple[Ledger, Account]:
    path = folder / "ledger.sqlite"
    folder.mkdir(exist_ok=True)
    create(path, Terms("p", "record", 1.0, 1e-5, simulated=True))
    ledger = Ledger(path)
    terms = RunTerms("r", "fl-dp", "record", 1.0, 1e-5, order, budget, 10)
    return ledger, Account(ledger, terms, replayable=False)


class Nobody:
    def draw(self, rate: float, noise: object, key: NoiseKey) -> float:
        return rate


def test_what_is_contributed_is_what_was_charged_once(tmp_path: Path) -> None:
    plan = plan_static(PlanShape(1.0, 1e-5, 200, 20, 10), whole_orders=True)
    assert plan.order == int(plan.order)
    grid = grid_of(sigma=plan.sigma_static * math.sqrt(1 + 1 / 25))
    mechanism = DistributedMechanism.of(plan.sample_rate, grid)
    ledger, account = account_of(tmp_path, plan.order, plan.budget)
    with ledger:
        charged = mechanism.charge(
            account,
            0,
            0,
            inputs=None,
            noise=SeededNoise(0),
            key=lambda block: NoiseKey("0", "fl-dp", 0, 0, block),
        )
        assert charged.draw(Nobody()) == plan.sample_rate
        values = {"gradient": torch.ones(50), "count": 1.0}
        honest = {"gradient": CLIP, "count": 0.5}
        for call in (
            lambda: charged.release_tensors("gradient", values, sensitivity=CLIP),
            lambda: charged.release_scalar("count", 1.0),
        ):
            with pytest.raises(UnchargedRelease, match="share"):
                call()
        sent = charged.contribute(values, sensitivities=honest)
        expected = grid.round(values) + SeededNoise(0).discrete_normals(
            NoiseKey("0", "fl-dp", 0, 0, "share"), grid.size, grid.scale
        )
        assert np.array_equal(sent, expected)
        with pytest.raises(UnchargedRelease, match="beyond"):
            charged.contribute(values, sensitivities=honest)
        with pytest.raises(UnchargedRelease, match="second batch"):
            charged.draw(Nobody())
        assert len(ledger.charges("r")) == 1
    assert verify(tmp_path / "ledger.sqlite").ok  # by dp-accounting alone


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_noise_parts_two_sums_by_what_their_grids_do(tmp_path: Path, seed: int) -> None:
    """Whole numbers before the noise: taken apart again, nothing of the noise is left."""
    grid = grid_of()
    given = []
    rng = torch.Generator().manual_seed(seed)
    values = {"gradient": torch.randn(50, generator=rng), "count": 1.5}
    for number, scale in enumerate((0.0, 1.0)):
        ledger, account = account_of(tmp_path / str(number), 8, 100.0)
        with ledger:
            charged = DistributedMechanism.of(0.1, grid).charge(
                account,
                0,
                0,
                inputs=None,
                noise=SeededNoise(seed),
                key=lambda block: NoiseKey("0", "fl-dp", 0, 0, block),
            )
            some = {name: value * scale for name, value in values.items()}
            most = {"gradient": CLIP, "count": 0.5}
            given.append(charged.contribute(some, sensitivities=most))
    assert np.array_equal(given[1] - given[0], grid.round(values))


def test_a_sum_that_one_unit_moves_further_is_refused(tmp_path: Path) -> None:
    grid = grid_of()
    ledger, account = account_of(tmp_path, 8, 100.0)
    with ledger:
        charged = DistributedMechanism.of(0.1, grid).charge(
            account,
            0,
            0,
            inputs=None,
            noise=SecureNoise(),
            key=lambda block: NoiseKey("0", "fl-dp", 0, 0, block),
        )
        with pytest.raises(UnchargedRelease, match="sensitivity"):
            charged.contribute(
                {"gradient": torch.zeros(50), "count": 0.0},
                sensitivities={"gradient": CLIP * 1.001, "count": 0.5},
            )


def test_a_site_by_itself_releases_whole_numbers_with_all_of_the_noise(tmp_path: Path) -> None:
    plan = plan_static(PlanShape(1.0, 1e-5, 200, 20, 10), whole_orders=True)
    sigma = plan.sigma_static * math.sqrt(1 + 1 / 25)
    parts = (Part("gradient", 60, CLIP, sigma), Part("count", 1, 0.5, 5 * sigma))
    mechanism = DiscreteMechanism.of(plan.sample_rate, plan.sigma_static, parts, 200)
    grid = mechanism.grid
    assert grid is not None and (grid.sites, grid.honest) == (1, 1)
    ledger, account = account_of(tmp_path, plan.order, plan.budget)
    sums = {"b": torch.full((10,), 0.3), "a": torch.ones(5, 10)}

    def key(block: str, step: int = 0) -> NoiseKey:
        return NoiseKey("0", "fl-dp", 0, step, block)

    with ledger:
        charged = [
            mechanism.charge(
                account,
                0,
                step,
                inputs=None,
                noise=SeededNoise(0),
                key=lambda block, step=step: key(block, step),
            )
            for step in range(2)
        ]
        assert charged[0].draw(Nobody()) == plan.sample_rate
        found = charged[0].release_tensors("gradient", sums, sensitivity=CLIP).tensors
        count = charged[0].release_scalar("count", 1.0)
        for call, why in (
            (lambda: charged[0].release_scalar("count", 1.0), "beyond"),
            (lambda: charged[0].release_tensors("gradient", sums, sensitivity=CLIP), "beyond"),
            # The room for rounding is in the charge, and not the step's to use.
            (
                lambda: charged[1].release_tensors("gradient", sums, sensitivity=CLIP * 1.0005),
                "sensitivity",
            ),
            (
                lambda: charged[1].release_tensors("gradient", sums, sensitivity=1.0, noise=1e9),
                "discrete",
            ),
        ):
            with pytest.raises(UnchargedRelease, match=f"(?i){why}"):
                call()
    flat = torch.cat([sums["b"], sums["a"].reshape(-1)])
    noise = SeededNoise(0)
    for part, value, released in (
        (parts[0], flat, torch.cat([found["b"], found["a"].reshape(-1)])),
        (parts[1], 1.0, torch.tensor(count)),
    ):
        whole = grid.whole(part, value) + noise.discrete_normals(
            key(part.name), part.size, grid.scale
        )
        expected = torch.from_numpy(whole / grid.fineness(part)).float()
        assert torch.equal(expected.reshape(released.shape), released.float())
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in sums.items()}
    assert verify(tmp_path / "ledger.sqlite").ok  # by dp-accounting alone
    (first, _) = charges_of(read_rows(tmp_path / "ledger.sqlite"), "r")
    assert (first.sigma, first.rate) == (plan.sigma_static, plan.sample_rate)
    for release, part in zip(first.releases, parts, strict=True):
        assert release.noise == grid.scale / grid.fineness(part)
        assert release.noise / release.sensitivity == pytest.approx(part.multiplier, rel=1e-12)
        assert part.sensitivity < release.sensitivity < part.sensitivity * (1 + 1.01 / 990)
    with pytest.raises(ValueError, match="whole orders"):
        mechanism.cost(8.5)
    with pytest.raises(UserError, match="noise_kind = 'gaussian'"):
        DiscreteMechanism.of(0.1, 1000.0, (Part("gradient", 10**9, 1.0, 1000.0),), 100)


def test_costs_are_proved_at_whole_orders_only(tmp_path: Path) -> None:
    mechanism = DistributedMechanism.of(0.1, grid_of())
    assert mechanism.cost(8.0) > 0
    with pytest.raises(ValueError, match="whole orders"):
        mechanism.cost(8.5)
    with pytest.raises(ValueError, match="grid"):
        DistributedMechanism(0.1, mechanism.sigma, mechanism.releases)


@pytest.mark.parametrize(("epsilon", "most"), [(0.5, 1.001), (5.0, 1.03)])
def test_whole_orders_cost_little_more_noise(epsilon: float, most: float) -> None:
    shape = PlanShape(epsilon, 1e-5, 3332, 32, 3150, steps_per_round=1)
    any_order, whole = plan_static(shape), plan_static(shape, whole_orders=True)
    assert 1 - 1e-5 <= whole.sigma_static / any_order.sigma_static <= most
