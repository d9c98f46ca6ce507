"""The private mean of a trusted server, and the run that carries it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xcal
from step_tools import FreeAccount
from support import TINY
from xcal.dp.account import Account
from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.ledger import ledger as ledgers
from xcal.dp.ledger.rows import RunTerms, Terms, charges_of, read_rows, runs_of, verify
from xcal.dp.noise import NoiseKey, SeededNoise
from xcal.dp.pld import epsilon_pld
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.local import server_noise
from xcal.federation.outcome import noise_of
from xcal.federation.setup import prepare, prepare_remote
from xcal.methods.adaptive_clip import ADAPTIVE_CLIP_AT_SERVER
from xcal.methods.dp_fedavg import ServerContext, private_mean

QUICK = {**TINY, "road_images": 0, "road_test_images": 0, "validation_images": 0}
PLAN = plan_static(PlanShape(4.0, 1e-5, units=5, batch=5, rounds=10, unit="client"), "dp-fedavg")


class NoNoise(SeededNoise):
    def normals(self, key: NoiseKey, count: int) -> torch.Tensor:
        return torch.zeros(count)

    def scalar(self, key: NoiseKey) -> float:
        return 0.0


def context(folder: Path, noise: SeededNoise, round_number: int = 0) -> Any:
    path = folder / "ledger.sqlite"
    if not path.exists():
        ledgers.create(path, Terms("five clients", "client", 4.0, 1e-5, simulated=True))
    book = ledgers.Ledger(path)
    terms = RunTerms(
        "r", "dp-fedavg", "client", 4.0, 1e-5, PLAN.order, PLAN.budget, PLAN.steps, "seeded"
    )
    account = Account(book, terms, replayable=True)
    return ServerContext("dp-fedavg", round_number, noise, account, 5), book


def test_noise_on_the_mean_is_z_times_s_over_m(tmp_path: Path) -> None:
    tools, book = context(tmp_path, SeededNoise(1))
    zero = [{"w": torch.zeros(100_000, dtype=torch.float64)} for _ in range(3)]
    found = private_mean(tools, zero, clip=0.7, sigma=PLAN.sigma_static)
    book.close()
    wanted = PLAN.sigma_static * 0.7 / 5  # the divisor is fixed: two clients did not answer
    assert float(found.mean["w"].std()) == pytest.approx(wanted, rel=0.01)
    (charge,) = charges_of(read_rows(tmp_path / "ledger.sqlite"), "r")
    assert charge.rate == 1.0
    assert charge.releases[0].noise == pytest.approx(PLAN.sigma_static * 0.7)
    assert charge.releases[0].sensitivity == 0.7


@settings(max_examples=40, deadline=None)
@given(
    scale=st.floats(1e-3, 1e6),
    clip=st.floats(1e-3, 1e3),
    broken=st.sampled_from([None, math.nan, math.inf]),
    seed=st.integers(0, 1000),
)
def test_zeroing_one_client_moves_the_sums_by_no_more_than_stated(
    scale: float, clip: float, broken: float | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    updates = [{"w": torch.from_numpy(rng.normal(size=20) * scale)} for _ in range(4)]
    if broken is not None:
        updates[0]["w"][3] = broken
    totals = []
    for last in (updates[3], {"w": torch.zeros(20, dtype=torch.float64)}):
        paying = FreeAccount()
        tools = ServerContext("dp-fedavg", 0, NoNoise(0), paying, 1)  # type: ignore[arg-type]
        # a deviation far below the clip, so that rounding to the grid does not count
        found = private_mean(tools, [*updates[:3], last], clip=clip, sigma=1e-9, sigma_count=1e-9)
        totals.append(found)
    moved = float((totals[0].mean["w"] - totals[1].mean["w"]).norm())
    assert moved <= clip * (1 + 1e-6)
    assert bool(torch.isfinite(totals[0].mean["w"]).all())


def test_a_null_client_moves_the_count_by_a_half() -> None:
    small = {"w": torch.full((4,), 0.1, dtype=torch.float64)}
    broken = {"w": torch.full((4,), math.nan, dtype=torch.float64)}  # as good as null
    tools = ServerContext("m", 0, NoNoise(0), FreeAccount(), 1)  # type: ignore[arg-type]
    fractions = [
        private_mean(tools, [small, other], clip=1.0, sigma=1.0, sigma_count=1e-6).fraction
        for other in (small, broken)
    ]
    assert fractions[0] == pytest.approx(0.5 + 1.0)
    assert fractions[1] == pytest.approx(0.5 + 0.5)


def test_a_client_that_sends_nothing_is_a_null_client() -> None:
    """Its neighbor sends zeros, or what is not finite: neither counts as within S."""
    small = {"w": torch.full((4,), 0.1, dtype=torch.float64)}
    large = {"w": torch.full((4,), 9.0, dtype=torch.float64)}
    zero = {"w": torch.zeros(4, dtype=torch.float64)}
    tools = ServerContext("m", 0, NoNoise(0), FreeAccount(), 1)  # type: ignore[arg-type]

    def fraction(other: dict[str, torch.Tensor]) -> float:
        found = private_mean(tools, [small, other], clip=1.0, sigma=1.0, sigma_count=1e-6)
        assert found.fraction is not None
        return found.fraction

    assert abs(fraction(large) - fraction(zero)) == pytest.approx(0.5)
    assert abs(fraction(small) - fraction(zero)) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "central"
    return folder, xcal.run(folder, method="dp-fedavg", **QUICK)


def test_server_pays_per_client_and_clients_stand_at_infinity(finished: Any) -> None:
    folder, result = finished
    path = folder / "server" / "ledger.sqlite"
    assert verify(path).ok
    rows = read_rows(path)
    assert rows[0].body["terms"]["unit"] == "client"
    (run,) = runs_of(rows).values()
    charges = charges_of(rows, run.run)
    assert [(c.round, c.rate) for c in charges] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    # three plain Gaussians at this multiplier are (8, 0.001)
    assert 7.98 <= epsilon_pld(1.0, charges[0].sigma, 3, 1e-3) <= 8.0
    for client in ("0", "1", "2"):
        kinds = [r.kind for r in read_rows(folder / "clients" / client / "ledger.sqlite")]
        assert kinds == ["create", "run", "unbounded", "unbounded", "unbounded"]
    assert result["epsilon_target"] is None
    assert result["epsilon_client"] == 8.0
    assert result["unit"] == "client"
    assert result["server"]["share_spent"] > 0.999
    assert all(c["epsilon_spent"] is None for c in result["clients"])


def test_statement_and_card_say_what_three_clients_are_worth(finished: Any) -> None:
    folder, _ = finished
    text = " ".join((folder / "statement.txt").read_text().split())
    assert "The server is trusted" in text
    assert "The mean is over 3 clients a round" in text
    assert "this guarantee was made for thousands of clients" in text
    assert "who takes part is known, so nothing is amplified" in text
    card = (folder / "card.md").read_text()
    assert "At record level, against the server: ε = ∞" in card
    plans = json.loads((folder / "plans.json").read_text())
    assert list(plans) == ["server"]


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_robust_aggregation_would_void_it(rule: str) -> None:
    with pytest.raises(UserError, match="guarantee would be void"):
        prepare(make_experiment({**QUICK, "method": "dp-fedavg", "aggregation": rule}))


def test_a_site_with_a_limit_refuses_it(tmp_path: Path) -> None:
    sites = []
    for client in range(3):
        site_dir = tmp_path / str(client)
        ledgers.create(site_dir / "ledger.sqlite", Terms(f"p{client}", "record", 10.0, 1e-2))
        sites.append(str(site_dir))
    with pytest.raises(UserError, match="has no guarantee"):
        prepare(make_experiment({**QUICK, "method": "dp-fedavg", "sites": tuple(sites)}))


def test_noise_for_clients_elsewhere_is_not_made_of_the_seed_they_are_sent() -> None:
    here = prepare(make_experiment({**QUICK, "method": "dp-fedavg"}))
    assert (server_noise(here).name, noise_of(here, {})) == ("seeded", "seeded")
    there = prepare_remote(make_experiment({**QUICK, "method": "dp-fedavg"}), ("a", "b", "c"))
    assert (server_noise(there).name, noise_of(there, {})) == ("secure", "secure")


# --- adaptive-clip at client level ----------------------------------------------------------------

AT_SERVER = {**QUICK, "method": "adaptive-clip", "level": "client", "epsilon": 50.0}


@pytest.mark.parametrize("start", [0.01, 100.0])
def test_clipping_norm_converges_to_the_quantile_of_the_updates(start: float) -> None:
    """From far below and far above: many clients, so that the count says something."""
    experiment = make_experiment({**AT_SERVER, "clip": start, "clip_rate": 0.3, "quantile": 0.7})
    plan = ADAPTIVE_CLIP_AT_SERVER.server_plan(experiment, 200)
    state = ADAPTIVE_CLIP_AT_SERVER.load_server_state(None, experiment)
    rng = np.random.default_rng(5)
    norms = rng.lognormal(0.0, 0.5, 200)
    updates = [{"w": torch.full((4,), norm / 2, dtype=torch.float64)} for norm in norms]
    noise, late = SeededNoise(4), []
    for t in range(150):
        tools = ServerContext("m", t, noise, FreeAccount(), 200)  # type: ignore[arg-type]
        _, state = ADAPTIVE_CLIP_AT_SERVER.server_step(tools, experiment, plan, updates, state)
        assert state.clip is not None
        late.append(state.clip)
    assert np.median(late[-50:]) == pytest.approx(np.quantile(norms, 0.7), rel=0.1)


def test_a_run_at_client_level_pays_for_update_and_count_together(tmp_path: Path) -> None:
    result = xcal.run(tmp_path / "run", **AT_SERVER)
    assert result["unit"] == "client"
    assert result["epsilon_target"] is None
    assert result["epsilon_client"] == 50.0
    path = tmp_path / "run" / "server" / "ledger.sqlite"
    assert verify(path).ok
    rows = read_rows(path)
    (run,) = runs_of(rows).values()
    charges = charges_of(rows, run.run)
    assert len(charges) == 3
    for charge in charges:
        assert [r.name for r in charge.releases] == ["update", "count"]
    norms = [c.releases[0].sensitivity for c in charges]
    assert norms[0] == 1.0
    assert len(set(norms)) == 3  # it moves with every released count
    assert result["server"]["method"]["clip"] not in norms
    assert result["unused"] == []


def test_a_count_without_noise_enough_is_refused() -> None:
    plan = prepare(make_experiment(AT_SERVER)).server_plan
    assert plan is not None
    low = 0.49 * plan.sigma_static
    with pytest.raises(UserError, match="count_noise"):
        prepare(make_experiment({**AT_SERVER, "count_noise": low}))
    prepare(make_experiment({**AT_SERVER, "count_noise": 2 * plan.sigma_static}))


def test_a_plan_can_be_had_before(capsys: Any) -> None:
    plan = xcal.plan(method="dp-fedavg", units=100, epsilon=4.0, rounds=20)
    assert plan.unit == "client"
    assert plan.steps == 20
    assert plan.sample_rate == 1.0
