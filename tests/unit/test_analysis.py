"""`xcal ledger analyse`: the parts sum to the whole, and what is left is what the filter has."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import xcal
from commands import xcal_environment
from support import TINY
from xcal.cli.ledger_command import app
from xcal.dp.account import Account
from xcal.dp.accounting import joint_sigma, step_cost
from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger import ledger as ledgers
from xcal.dp.ledger.analysis import analyse, by_mechanism, lifetime
from xcal.dp.ledger.rows import Charge, Release, RunTerms, Terms, read_rows
from xcal.dp.pld import epsilon_pld
from xcal.errors import UserError

PLAN = plan_static(PlanShape(2.0, 1e-5, units=400, batch=16, rounds=2))
TERMS = RunTerms("r", "xcal", "record", 2.0, 1e-5, PLAN.order, PLAN.budget, PLAN.steps, "seeded")


def charge(step: int, **noise: float) -> Charge:
    sensitivity = {"gradient": 1.0, "signal": 0.5, "count": 0.5}
    releases = tuple(Release(n, v, sensitivity[n]) for n, v in noise.items())
    sigma = joint_sigma(*(r.noise / r.sensitivity for r in releases))
    cost = step_cost(PLAN.sample_rate, sigma, PLAN.order)
    return Charge("r", 0, step, PLAN.sample_rate, sigma, cost, releases)


def test_parts_follow_precision_and_sum_to_the_whole() -> None:
    # multipliers 2 and 2: half each; the count at 4 beside a gradient at 2: one to four
    charges = [charge(0, gradient=2.0, signal=1.0), charge(1, gradient=2.0, count=2.0)]
    found = {m.name: m for m in by_mechanism(charges, PLAN.order)}
    assert found["signal"].cost == pytest.approx(charges[0].cost / 2)
    assert found["count"].cost == pytest.approx(charges[1].cost / 5)
    total = math.fsum(c.cost for c in charges)
    assert math.fsum(m.cost for m in found.values()) == pytest.approx(total)
    assert math.fsum(m.share for m in found.values()) == pytest.approx(1.0)
    assert found["gradient"].releases == 2
    alone = 2 * step_cost(PLAN.sample_rate, 2.0, PLAN.order)
    assert found["gradient"].alone == pytest.approx(alone)
    assert found["gradient"].alone < total


@pytest.fixture
def half_spent(tmp_path: Path) -> Path:
    """A ledger of a run that made half of its planned steps at the static multiplier."""
    path = tmp_path / "ledger.sqlite"
    ledgers.create(path, Terms("p", "record", 2.0, 1e-5, simulated=True))
    with ledgers.Ledger(path) as book:
        account = Account(book, TERMS, replayable=True)
        for step in range(PLAN.steps // 2):
            _pay(account, step)
    return path


def _pay(account: Account, step: int) -> None:
    one = charge(step, gradient=PLAN.sigma_static)
    account.pay(
        0,
        step,
        rate=one.rate,
        sigma=one.sigma,
        cost=one.cost,
        releases=one.releases,
        inputs=None,
    )


def test_what_is_left_pays_for_exactly_as_many_steps_as_the_filter_admits(
    half_spent: Path,
) -> None:
    (found,) = analyse(read_rows(half_spent), pld=False)
    assert found.spent is not None and found.left is not None and found.budget is not None
    assert found.spent + found.left == pytest.approx(found.budget)
    assert found.more_at_last == found.more_at_static
    with ledgers.Ledger(half_spent) as book:
        account = Account(book, TERMS, replayable=True)
        more = 0
        with contextlib.suppress(BudgetExhausted):
            while True:
                _pay(account, PLAN.steps // 2 + more)
                more += 1
    assert found.more_at_static == more
    assert more == PLAN.steps - PLAN.steps // 2


def test_a_static_plan_by_rdp_and_by_pld(half_spent: Path) -> None:
    (found,) = analyse(read_rows(half_spent))
    assert found.static is not None
    assert found.static.sigma == pytest.approx(PLAN.sigma_static, rel=1e-6)
    assert found.static.steps == PLAN.steps // 2
    expected = epsilon_pld(PLAN.sample_rate, PLAN.sigma_static, PLAN.steps // 2, 1e-5)
    assert found.static.epsilon_pld == pytest.approx(expected)
    assert expected < found.static.epsilon_rdp < 2.0


def test_lifetime_rules(half_spent: Path, tmp_path: Path) -> None:
    assert lifetime(read_rows(half_spent))["epsilon_left"] == 0.0
    path = tmp_path / "other" / "ledger.sqlite"
    ledgers.create(path, Terms("p", "record", 5.0, 1e-5, "renyi", PLAN.order, simulated=True))
    with ledgers.Ledger(path) as book:
        account = Account(book, TERMS, replayable=True)
        _pay(account, 0)
    found = lifetime(read_rows(path))
    assert found["spent"] == pytest.approx(charge(0, gradient=PLAN.sigma_static).cost)
    assert found["left"] == pytest.approx(found["budget"] - found["spent"])


def test_an_unknown_run_is_named(half_spent: Path) -> None:
    with pytest.raises(UserError, match="has no run 'x': it has r"):
        analyse(read_rows(half_spent), "x")


def command(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["analyse", str(folder), *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_command_on_runs_with_and_without_a_guarantee(tmp_path: Path) -> None:
    quick: dict[str, Any] = {**TINY, "road_images": 0, "road_test_images": 0}
    xcal.run(tmp_path / "xcal", method="xcal-steered", signal_every=1, **quick)
    xcal.run(tmp_path / "central", method="dp-fedavg", **quick)
    said = json.loads(command(tmp_path / "xcal", "--json", "--no-pld"))
    assert len(said["ledgers"]) == 3
    (run,) = said["ledgers"][0]["runs"]
    assert {m["name"] for m in run["mechanisms"]} == {"gradient", "signal"}
    signal = next(m for m in run["mechanisms"] if m["name"] == "signal")
    assert signal["share"] == pytest.approx(1 / 26, rel=1e-6)  # κ = 5: 1/κ² beside 1
    assert run["left"] == pytest.approx(run["budget"] - run["spent"])
    text = command(tmp_path / "central", "--no-pld")
    assert "per client" in text
    assert text.count("Σρ = ∞") == 3
    assert "update" in text


def test_an_auditor_needs_no_torch(half_spent: Path) -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ImportError('torch is not here')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from xcal.cli.app import main\n"
        f"sys.argv = ['xcal', 'ledger', 'analyse', {str(half_spent)!r}, '--no-pld']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=xcal_environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "left pays for" in done.stdout
