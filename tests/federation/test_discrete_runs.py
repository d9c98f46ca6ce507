"""`noise_kind = "discrete"`: noise of a site's own in whole numbers, by every way a run goes."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import xcal
from commands import xcal_process
from federation.test_masked_engines import by_bytes
from federation.test_masked_runs import charges, ledgers, same
from support import ROOT, TINY, sets
from xcal.cli.app import app
from xcal.dp.accounting import reference_cost
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import (
    LedgerRefusal,
    RunTerms,
    Terms,
    charges_of,
    check_rows,
    check_spending,
    read_rows,
    runs_of,
    verify,
)
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.setup import prepare
from xcal.methods.registry import METHODS

KEYS: dict[str, Any] = {
    **TINY,
    "method": "fl-dp",
    "noise_kind": "discrete",
    "rounds": 2,
    "road_images": 0,
    "road_test_images": 0,
}
OPTIONS: dict[str, dict[str, Any]] = {"agp-dp": {"protected": 0.25, "protection": 4.0}}
USERS = [name for name, method in METHODS.items() if "noise_kind" in method.uses]


def test_methods_whose_multiplier_is_fixed_beforehand_have_it() -> None:
    assert sorted(USERS) == ["adaptive-clip", "agp-dp", "fl-dp", "xcal"]


@pytest.mark.slow
@pytest.mark.parametrize("method", USERS)
def test_its_ledger_is_recomputed_and_its_statement_says_so(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "method": method, **OPTIONS.get(method, {})}
    result = xcal.run(tmp_path / "run", **keys)
    # The guarantee of a site by itself: the column is that of any other run.
    assert result["epsilon_target"] == 8.0 and "epsilon_masked" not in result
    assert all(0 < c["epsilon_spent"] <= 8.0 for c in result["clients"])
    for path in ledgers(tmp_path / "run"):
        assert verify(path).ok
        rows = read_rows(path)
        (run,) = runs_of(rows).values()
        assert (run.noise_kind, run.honest, run.accountant) == ("discrete", None, "renyi")
        assert run.order == int(run.order) and run.budget is not None
        paid = charges_of(rows, run.run)
        assert len(paid) == run.steps
        for charge in paid:
            names = [r.name for r in charge.releases]
            assert names == ["gradient", "count"][: 2 if method == "adaptive-clip" else 1]
            joint = sum((r.sensitivity / r.noise) ** 2 for r in charge.releases) ** -0.5
            assert joint == pytest.approx(charge.sigma, rel=1e-9)
            expected = reference_cost(charge.rate, joint, run.order)
            assert expected * (1 - 1e-9) <= charge.cost <= expected * (1 + 1e-6)
            if method != "adaptive-clip":  # C, and what rounding may add
                assert 1.0 < charge.releases[0].sensitivity < 1.002
        assert 0.999 * run.budget < sum(c.cost for c in paid) <= run.budget
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement["noise"] == "seeded, discrete Gaussian in whole numbers"
    assert "at a whole order" in statement["accounting"]
    assert not any("rounded to a public grid" in a for a in statement["assumptions"])
    assert any("what rounding adds is charged" in a for a in statement["assumptions"])
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["ledger", "show", str(tmp_path / "run")])
    assert "renyi, discrete" in shown.stdout


@pytest.mark.slow
def test_sites_reached_by_bytes_make_the_local_engine_s_model(tmp_path: Path) -> None:
    keys = {k: v for k, v in KEYS.items() if k != "method"}
    xcal.run(tmp_path / "local", **KEYS)
    by_bytes(tmp_path / "bytes", trust="site", method="fl-dp", **keys)
    assert same(tmp_path / "local", tmp_path / "bytes")
    assert charges(tmp_path / "bytes") == charges(tmp_path / "local")
    assert all(verify(path).ok for path in ledgers(tmp_path / "bytes"))
    xcal.run(tmp_path / "gaussian", **{**KEYS, "noise_kind": "gaussian"})
    assert not same(tmp_path / "local", tmp_path / "gaussian")


@pytest.mark.skipif(
    find_spec("flwr") is None or find_spec("ray") is None, reason="the extra flower is not there"
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flower_makes_the_local_engine_s_model(tmp_path: Path) -> None:
    xcal.run(tmp_path / "local", **KEYS)
    words = sets(**{k: v for k, v in KEYS.items() if TINY.get(k) != v})
    out = ["--engine", "flower", "--client-cpus", "1", "--out", str(tmp_path / "flower")]
    done = xcal_process("run", *words, *out, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(tmp_path / "local", tmp_path / "flower")


@pytest.mark.parametrize(
    "keys",
    [
        *({"method": name} for name in METHODS if name not in USERS),
        {"method": "adaptive-clip", "level": "client"},
        {"method": "xcal", "steering": "signal"},
        {"trust": "masked"},
    ],
    ids=lambda keys: "-".join(keys.values()),
)
def test_who_cannot_use_it_is_refused_before_anything(keys: dict[str, Any], tmp_path: Path) -> None:
    asked = {**KEYS, **keys}
    why = "leave noise_kind out" if "trust" in keys else "noise_kind = 'gaussian'"
    with pytest.raises(UserError, match=why):
        prepare(make_experiment(asked))
    with pytest.raises(UserError, match=why):
        xcal.run(tmp_path / "run", **asked)
    assert not (tmp_path / "run").exists()


def test_a_digest_of_before_the_key_stays_what_it_was() -> None:
    plain = make_experiment({**KEYS, "noise_kind": "gaussian"})
    assert "noise_kind" not in {*plain.resolved(), *plain.identity()}
    assert make_experiment(KEYS).identity()["noise_kind"] == "discrete"


def test_a_ledger_takes_it_at_whole_orders_only(tmp_path: Path) -> None:
    run = RunTerms("r", "fl-dp", "record", 1.0, 1e-5, 8.0, 0.5, 10, noise_kind="discrete")
    odd = tmp_path / "odd.sqlite"
    create(odd, Terms("p", "record", 2.0, 1e-5, rule="renyi", order=8.5, simulated=True))
    with Ledger(odd) as ledger, pytest.raises(LedgerRefusal, match="noise_kind = 'gaussian'"):
        ledger.reserve(run)
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("p", "record", 2.0, 1e-4, simulated=True))
    with Ledger(path) as ledger:
        ledger.reserve(run)
        ledger.reserve(run)
        with pytest.raises(LedgerRefusal, match="other terms"):
            ledger.reserve(replace(run, noise_kind="gaussian"))
        ledger.reserve(replace(run, run="s", noise_kind="gaussian"))
    told = {row.body["run"]: row.body for row in read_rows(path) if row.kind == "run"}
    assert told["r"]["noise_kind"] == "discrete"
    assert "noise_kind" not in told["s"]  # as rows were before
    rows = read_rows(path)
    other = replace(rows[1], body={**rows[1].body, "noise_kind": "other"})
    assert check_rows([rows[0], other]).row == 2


def test_a_charge_between_two_whole_orders_is_noticed(tmp_path: Path) -> None:
    xcal.run(tmp_path / "run", **{**KEYS, "rounds": 1})
    rows = read_rows(ledgers(tmp_path / "run")[0])
    assert check_spending(rows).ok
    edited = [
        replace(row, body={**row.body, "order": row.body["order"] + 0.5})
        if row.kind == "run"
        else row
        for row in rows
    ]
    found = check_spending(edited)
    assert not found.ok
    assert found.problem in (
        "charges discrete noise otherwise than at a whole order",
        "charges a run whose budget exceeds its promise",
    )
