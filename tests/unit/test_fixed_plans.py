"""Runs whose noise is fixed beforehand: counted, verified by PLD, and never taken for others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import xcal
from reproduce.scales import SCALES, make_cell
from support import TINY
from xcal.cli.app import app as whole_app
from xcal.cli.ledger_command import app
from xcal.dp.account import Account, NotAsPlanned
from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.calibration import Plan, PlanShape, calibrate, calibrate_fixed, plan_fixed
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import (
    GENESIS,
    Release,
    RunTerms,
    Terms,
    canonical,
    charges_of,
    head_path,
    read_rows,
    row_hash,
    runs_of,
    verify,
)
from xcal.errors import UserError
from xcal.experiments import make_experiment, read_pinned
from xcal.federation.folder import RunFolder
from xcal.first_edition import BEFORE_THE_KEY, RENAMED
from xcal.methods.fl_dp import FL_DP

FIXED = ("fl-dp", "adaptive-clip", "agp-dp")
QUICK: dict[str, Any] = {**TINY, "road_images": 0, "road_test_images": 0}
PLAN = plan_fixed(PlanShape(2.0, 1e-5, units=100, batch=10, rounds=1))  # ten steps
TERMS = RunTerms(
    "r", "fl-dp", "record", 2.0, 1e-5, PLAN.order, PLAN.budget, PLAN.steps, "secure", **PLAN.fixed
)


def pay(account: Account, step: int, plan: Plan = PLAN, **other: float) -> None:
    values = {"rate": plan.sample_rate, "sigma": plan.sigma_static, **other}
    cost = step_cost(values["rate"], values["sigma"], plan.order)
    releases = (Release("gradient", values["sigma"], 1.0),)
    account.pay(0, step, cost=cost, releases=releases, inputs=None, **values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "ledger.sqlite"
    create(place, Terms("people", "record", 2.0, 1e-5))
    return place


def test_exactly_the_planned_steps_are_admitted(path: Path) -> None:
    assert (PLAN.accountant, PLAN.steps) == ("pld", 10)
    assert PLAN.sigma_static < calibrate(2.0, 1e-5, 0.1, 10).sigma
    with Ledger(path) as book:
        account = Account(book, TERMS, replayable=False)
        for step in range(10):
            assert account.filter.share_spent == pytest.approx(step / 10)
            assert account.filter.admits(0.0)
            pay(account, step)
        assert account.filter.share_spent == 1.0
        assert account.filter.left == pytest.approx(0.0, abs=1e-6)
        assert not account.filter.admits(0.0)
        with pytest.raises(BudgetExhausted):
            pay(account, 10)
        with pytest.raises(BudgetExhausted):
            pay(account, 10, sigma=100.0)  # whatever it would cost: ten were planned
    assert verify(path).ok
    assert len(charges_of(read_rows(path), "r")) == 10


def test_a_step_done_again_under_secure_noise_counts_again(path: Path) -> None:
    with Ledger(path) as book:
        account = Account(book, TERMS, replayable=False)
        for step in (0, 1, 2, 2, 3, 3, 4, 5, 6, 7):  # two were cut off after they were paid for
            pay(account, step)
        with pytest.raises(BudgetExhausted):
            pay(account, 8)
    with Ledger(path) as book:  # and after a restart
        account = Account(book, TERMS, replayable=False)
        assert account.filter.share_spent == 1.0
        with pytest.raises(BudgetExhausted):
            pay(account, 8)


@pytest.mark.parametrize(
    "other",
    [{"rate": 0.1 + 1e-9}, {"rate": 0.05}, {"sigma": PLAN.sigma_static * 0.999}, {"sigma": 0.5}],
)
def test_a_step_that_was_not_planned_is_refused_and_not_charged(path: Path, other: Any) -> None:
    with Ledger(path) as book:
        account = Account(book, TERMS, replayable=False)
        pay(account, 0)
        rows = book.head.count
        with pytest.raises(NotAsPlanned):
            pay(account, 1, **other)
        assert book.head.count == rows
        pay(account, 1, sigma=PLAN.sigma_static * 1.5)  # more noise is within the plan
    assert verify(path).ok


@pytest.mark.parametrize("method", FIXED)
def test_a_run_by_pld_verifies_and_is_analysed(method: str, tmp_path: Path) -> None:
    result = xcal.run(tmp_path / "run", method=method, **QUICK)
    assert all(c["share_spent"] == 1.0 for c in result["clients"])
    assert all(c["epsilon_spent"] == 8.0 for c in result["clients"])
    assert result["unused"] == []
    for client in ("0", "1", "2"):
        rows = read_rows(tmp_path / "run" / "clients" / client / "ledger.sqlite")
        (run,) = runs_of(rows).values()
        assert run.accountant == "pld"
        assert len(charges_of(rows, run.run)) == run.steps
    runner = CliRunner()
    assert runner.invoke(app, ["verify", str(tmp_path / "run")]).exit_code == 0
    assert runner.invoke(app, ["show", str(tmp_path / "run")]).exit_code == 0
    said = runner.invoke(app, ["analyse", str(tmp_path / "run"), "--json"])
    assert said.exit_code == 0
    (found,) = json.loads(said.stdout)["ledgers"][2]["runs"]
    assert (found["accountant"], found["more_at_last"]) == ("pld", 0)
    assert found["static"]["sigma"] == run.sigma
    assert found["static"]["epsilon_pld"] <= 8.0 < found["static"]["epsilon_rdp"]


@pytest.mark.parametrize("method", ["xcal-steered", "xcal-paper", "adap-dpfl"])
def test_methods_that_move_their_noise_keep_the_filter(method: str) -> None:
    plan = xcal.plan(method=method, epsilon=2.0, units=400, batch=16, rounds=2)
    assert (plan.accountant, plan.fixed) == ("renyi", {})
    assert plan.budget == budget_at(plan.order, 2.0, 1e-5)


@pytest.mark.parametrize("method", [*FIXED, "dp-fedavg"])
def test_one_accountant_for_all_on_request(method: str) -> None:
    keys = {"method": method, "epsilon": 2.0, "units": 400, "batch": 16, "rounds": 2}
    plan = xcal.plan(accountant="renyi", **keys)
    assert plan.accountant == "renyi"
    fixed = xcal.plan(**keys)
    assert fixed.accountant == "pld"
    assert 0.85 < fixed.sigma_static / plan.sigma_static < 0.99


@contextlib.contextmanager
def forged(path: Path) -> Any:
    """The rows for editing; hashes and head are made anew afterwards, as a careful forger would."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for trigger in ("no_update", "no_delete"):
            connection.execute(f"DROP TRIGGER IF EXISTS {trigger}")
        found = connection.execute("SELECT kind, body FROM rows ORDER BY seq").fetchall()
        rows = [(kind, json.loads(body)) for kind, body in found]
        yield rows
        connection.execute("DELETE FROM rows")
        previous = GENESIS
        for seq, (kind, body) in enumerate(rows, start=1):
            text = canonical(body)
            digest = row_hash(seq, kind, text, previous)
            connection.execute(
                "INSERT INTO rows VALUES (?, ?, ?, ?, ?)", (seq, kind, text, previous, digest)
            )
            previous = digest
    head_path(path).write_text(f"{len(rows)} {previous}\n")


@pytest.fixture
def paid(path: Path) -> Path:
    with Ledger(path) as book:
        account = Account(book, TERMS, replayable=False)
        for step in range(10):
            pay(account, step)
    return path


LESS = PLAN.sigma_static * 0.9


@pytest.mark.parametrize(
    ("run", "charge", "again", "what"),
    [
        ({}, {}, 0, None),  # the forger alone is not noticed: what he changes is
        ({"sigma": LESS}, {}, 0, "plan exceeds its promise"),
        ({"rate": 0.2}, {}, 0, "another step than its run's plan fixed"),
        ({"rate": 0.2}, {"rate": 0.2, "cost": 9.0}, 0, "plan exceeds its promise"),
        ({"steps": 20}, {}, 0, "plan exceeds its promise"),
        ({"epsilon": 1.9}, {}, 0, "plan exceeds its promise"),
        ({"delta": 1e-6}, {}, 0, "plan exceeds its promise"),
        ({}, {}, 1, "more steps than its run planned"),
        ({}, {"sigma": LESS}, 0, "other noise than it releases with"),
        (
            {},
            {"sigma": LESS, "releases": [["gradient", LESS, 1.0]], "cost": 9.0},
            0,
            "another step than its run's plan fixed",
        ),
        ({}, {"rate": 0.05}, 0, "another step than its run's plan fixed"),
        ({}, {"cost": 1e-9}, 0, "records less than its step costs"),
        ({"accountant": "renyi"}, {}, 0, "understood"),
        ({"accountant": "renyi", "rate": None, "sigma": None}, {}, 0, "budget exceeds its promise"),
        (
            {
                "accountant": "renyi",
                "rate": None,
                "sigma": None,
                "budget": budget_at(PLAN.order, 2.0, 1e-5),
            },
            {},
            0,
            "past its budget",
        ),
        ({"accountant": "pld", "sigma": None}, {}, 0, "understood"),
        ({"accountant": "some"}, {}, 0, "understood"),
        ({"sigma": -1.0}, {}, 0, "understood"),
        ({"rate": 1.5}, {}, 0, "understood"),
    ],
)
def test_tampered_rows_are_noticed(
    paid: Path, run: dict[str, Any], charge: dict[str, Any], again: int, what: str | None
) -> None:
    with forged(paid) as rows:
        rows[1] = ("run", {**rows[1][1], **run})
        rows[2:] = [(kind, {**body, **charge}) for kind, body in rows[2:]]
        rows += rows[-1:] * again
    done = CliRunner().invoke(whole_app, ["ledger", "verify", str(paid)])
    if what is None:
        assert done.exit_code == 0, done.output
    else:
        assert done.exit_code != 0
        assert what in " ".join((done.output + str(done.exception or "")).split())


def test_a_run_of_before_opens_verifies_and_goes_on(tmp_path: Path) -> None:
    """Its row in the ledger has no accountant, and the steps that follow are the filter's."""
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 2.0, 1e-5))
    plan = plan_fixed(PlanShape(2.0, 1e-5, units=100, batch=10, rounds=1), accountant="renyi")
    terms = RunTerms("r", "fl-dp", "record", 2.0, 1e-5, plan.order, plan.budget, plan.steps)
    with Ledger(path) as book:
        account = Account(book, terms, replayable=False)
        for step in range(4):
            pay(account, step, plan)
    with forged(path) as rows:
        for key in ("accountant", "rate", "sigma"):
            del rows[1][1][key]
    assert verify(path).ok
    with Ledger(path) as book:
        account = Account(book, terms, replayable=False)
        for step in range(4, 10):
            pay(account, step, plan)
        with pytest.raises(BudgetExhausted):
            pay(account, 10, plan)
        with pytest.raises(UserError, match="other terms"):
            Account(book, TERMS, replayable=False)
    assert verify(path).ok


def test_a_folder_of_before_resumes_by_the_filter(tmp_path: Path) -> None:
    """An experiment.toml without the key is one from before: the run goes on as it was planned."""
    experiment = make_experiment({**QUICK, "method": "fl-dp", "accountant": "renyi"})
    folder = RunFolder.create(tmp_path / "run", experiment, [])
    path = folder.path / "experiment.toml"
    text = "".join(
        line for line in path.read_text().splitlines(True) if not line.startswith("accountant")
    )
    path.write_text(text)
    about = {**folder.about, "experiment": hashlib.sha256(text.encode()).hexdigest()}
    (folder.path / "run.json").write_text(json.dumps(about))
    assert read_pinned(path).accountant == "renyi"
    xcal.run(tmp_path / "run", resume=True)
    rows = read_rows(tmp_path / "run" / "clients" / "0" / "ledger.sqlite")
    (run,) = runs_of(rows).values()
    assert (run.accountant, run.rate, run.sigma) == ("renyi", None, None)
    charges = charges_of(rows, run.run)
    plan = FL_DP.plan(experiment, round(10 / charges[0].rate), 3)
    assert {c.sigma for c in charges} == {plan.sigma_static}
    assert verify(tmp_path / "run" / "clients" / "0" / "ledger.sqlite").ok


def test_digests_of_before_stay_what_they_were() -> None:
    before = make_experiment({**QUICK, **BEFORE_THE_KEY})
    assert not set(BEFORE_THE_KEY) & set(before.identity())
    later = (*BEFORE_THE_KEY, "workers", "log")
    today = {k: v for k, v in before.resolved().items() if k not in later}
    assert {RENAMED.get(k, k): v for k, v in before.identity().items()} == today
    assert make_experiment(QUICK).identity()["accountant"] == "auto"


def test_a_study_s_cell_is_by_the_filter_unless_it_says_otherwise() -> None:
    """Committed cells pin no accountant: their names stay, and they mean what they meant."""
    values = SCALES["laptop"].values("fl-dp", "blood-cells", "small", 0.5, 0)
    cell = make_cell("laptop", values, 10)
    assert "accountant" not in cell.keys
    assert cell.experiment().accountant == "renyi"
    other = make_cell("laptop", {**values, "accountant": "auto"}, 10)
    assert other.id != cell.id
    assert other.experiment().accountant == "auto"


def test_lifetime_by_one_order_is_charged_as_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 5.0, 1e-5, "renyi", 8.0))
    with Ledger(path) as book:
        account = Account(book, TERMS, replayable=False)
        for step in range(10):
            pay(account, step)
    rows = read_rows(path)
    expected = step_cost(PLAN.sample_rate, PLAN.sigma_static, 8.0)
    assert [r.body["lifetime_cost"] for r in rows if r.kind == "charge"] == [expected] * 10
    assert verify(path).ok


def test_the_command_shows_both_accountants() -> None:
    words = "plan --epsilon 0.5 --units 3332 --batch 32 --rounds 30 --json".split()
    runner = CliRunner()
    fixed, adaptive, forced = (
        json.loads(runner.invoke(whole_app, [*words, *more]).stdout)
        for more in (
            ["--method", "fl-dp"],
            ["--method", "xcal-steered"],
            ["--set", "accountant=renyi"],
        )
    )
    assert (fixed["accountant"], adaptive["accountant"]) == ("pld", "renyi")
    assert fixed["sigma_static"] == fixed["sigma_pld"] == adaptive["sigma_pld"]
    assert adaptive["sigma_static"] == adaptive["sigma_renyi"] == fixed["sigma_renyi"]
    assert adaptive["adaptive_price"] == pytest.approx(0.087, abs=0.002)
    assert forced["sigma_static"] == adaptive["sigma_static"]
    refused = runner.invoke(whole_app, [*words, "--set", "accountant=pld"])
    assert refused.exit_code != 0


@pytest.mark.parametrize(
    "target",
    [(3.0, 0.02, 0.01, 1), (1.0, 0.2, 0.1, 1), (8.0, 0.4, 0.01, 10), (5000.0, 1e-5, 0.1, 3),
     (1e7, 1e-5, 0.1, 3)],
)  # fmt: skip
def test_targets_that_no_grid_holds_fall_back_to_renyi(
    target: tuple[float, float, float, int],
) -> None:
    try:
        found = calibrate_fixed(*target)
    except UserError:
        return  # in one sentence
    assert found.sigma > 0
