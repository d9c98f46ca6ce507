"""What every method must keep, whatever it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from support import TINY
from xcal.dp.accounting import reference_cost
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import KEYS
from xcal.federation.files import read_tensors
from xcal.methods.base import CentralMethod
from xcal.methods.registry import METHODS

ALL = sorted(METHODS)
PRIVATE = [name for name in ALL if METHODS[name].private]
CENTRAL = [name for name in ALL if isinstance(METHODS[name], CentralMethod)]

RESULT_KEYS = set(
    "method macro_f1 epsilon_target epsilon_nominal epsilon_paper delta unit noise seed network"
    " commit versions command clients".split()
)
FILES = set(
    "experiment.toml result.json rounds.jsonl trace.jsonl predictions.npz statement.txt"
    " statement.json model.safetensors clients schedule.json plans.json".split()
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """One finished run of every method."""
    base = tmp_path_factory.mktemp("runs")
    return {m: (base / m, xcal.run(base / m, method=m, **TINY)) for m in ALL}


@pytest.mark.parametrize("method", ALL)
def test_result_names_what_was_promised(finished: Any, method: str) -> None:
    folder, result = finished[method]
    private = method in PRIVATE
    assert result["method"] == method
    assert (result["epsilon_target"] is not None) == private
    central = method in CENTRAL
    assert (result["epsilon_client"] is not None) == central
    assert result["unit"] == ("client" if central else "record" if private else None)
    assert 0 <= result["macro_f1"] <= 1
    statement = json.loads((folder / "statement.json").read_text())
    if private:
        assert "(8, 0.001)-differentially private" in statement["promise"]
        assert {c["epsilon"] for c in statement["clients"]} == {8.0}
    elif central:  # never in one column with record level
        assert "(8, 0.001)-differentially private for all that one client" in statement["promise"]
        assert "infinite epsilon" in statement["promise"]
        assert statement["unit"] == "client"
        assert statement["clients"] == []
    else:
        assert "infinite" in statement["promise"]
        assert statement["clients"] == []
    assert set(result) >= RESULT_KEYS
    for client in result["clients"]:
        assert {"id", "units", "epsilon_spent", "order", "steps", "halted"} <= set(client)


@pytest.mark.parametrize("method", ALL)
def test_folder_holds_everything(finished: Any, method: str) -> None:
    folder, _ = finished[method]
    assert {path.name for path in folder.iterdir()} >= FILES
    rounds = lines(folder / "rounds.jsonl")
    assert [r["round"] for r in rounds] == list(range(TINY["rounds"]))
    predictions = np.load(folder / "predictions.npz")
    assert set(predictions.files) >= {"id", "group", "label", "predicted", "confidence"}
    assert len(predictions["id"]) == 45


@pytest.mark.parametrize("method", PRIVATE)
def test_an_event_for_every_release(finished: Any, method: str) -> None:
    folder, result = finished[method]
    trace = lines(folder / "trace.jsonl")
    for client in result["clients"]:
        rows = read_rows(folder / "clients" / client["id"] / "ledger.sqlite")
        (run,) = runs_of(rows).values()
        charges = charges_of(rows, run.run)
        own = [t for t in trace if t["client"] == client["id"]]
        # Each step of the trace was paid for once; a halted paper run may have paid one more.
        assert [(c.round, c.step) for c in charges][: len(own)] == [
            (t["round"], t["step"]) for t in own
        ]
        assert len(charges) - len(own) in ((0, 1) if client["halted"] else (0,))
        for charge, step in zip(charges, own, strict=False):
            names = {r.name for r in charge.releases}
            assert "gradient" in names
            assert ("signal" in names) == (step["signal"] is not None)
            gradient = next(r for r in charge.releases if r.name == "gradient")
            # what was used is never below what was charged
            assert step["sigma"] >= gradient.noise / gradient.sensitivity - 1e-12


@pytest.mark.parametrize("method", PRIVATE)
def test_spending_stays_within_the_budget(finished: Any, method: str) -> None:
    folder, result = finished[method]
    for client in result["clients"]:
        path = folder / "clients" / client["id"] / "ledger.sqlite"
        assert verify(path).ok
        rows = read_rows(path)
        (run,) = runs_of(rows).values()
        assert run.order is not None
        assert run.budget is not None
        again = math.fsum(
            reference_cost(c.rate, c.sigma, run.order) for c in charges_of(rows, run.run)
        )
        assert again <= run.budget
        assert client["share_spent"] == pytest.approx(again / run.budget, rel=1e-6)
        assert client["epsilon_spent"] <= 8.0


def test_fl_dp_and_xcal_take_all_steps_and_spend_nearly_all(finished: Any) -> None:
    for method in ("fl-dp", "xcal-steered"):
        for client in finished[method][1]["clients"]:
            assert client["steps"] == TINY["rounds"] * math.ceil(client["units"] / TINY["batch"])
            assert not client["halted"]
            assert client["share_spent"] > 0.99


@pytest.mark.parametrize("method", ALL)
def test_same_seed_same_model(finished: Any, method: str, tmp_path: Path) -> None:
    folder, result = finished[method]
    again = xcal.run(tmp_path / "again", method=method, **TINY)
    first, _ = read_tensors(folder / "model.safetensors")  # type: ignore[misc]
    second, _ = read_tensors(tmp_path / "again" / "model.safetensors")  # type: ignore[misc]
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert again["macro_f1"] == result["macro_f1"]


def test_another_seed_another_model(finished: Any, tmp_path: Path) -> None:
    xcal.run(tmp_path / "other", method="xcal-steered", **{**TINY, "seed": 5})
    first, _ = read_tensors(finished["xcal-steered"][0] / "model.safetensors")  # type: ignore[misc]
    second, _ = read_tensors(tmp_path / "other" / "model.safetensors")  # type: ignore[misc]
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_every_key_is_of_use_to_some_method() -> None:
    """A key that no method names would be reported as not used, whatever it does."""
    used = frozenset[str]().union(*(method.uses for method in METHODS.values()))
    assert set(KEYS) == used


def test_xcal_with_no_reach_and_no_price_is_static_noise(tmp_path: Path) -> None:
    # w = 0 and an (almost) free signal: σ within one step of the grid, 0.2 %, of fl-dp's under the
    # same accountant.
    xcal.run(tmp_path / "x", method="xcal-steered", **{**TINY, "w": 0.0, "kappa": 1e6})
    shape = {"units": 51, "batch": 10, "rounds": 3, "epsilon": 8.0, "delta": 1e-3}
    static = xcal.plan(method="fl-dp", accountant="renyi", **shape).sigma_static
    sigmas = [t["sigma"] for t in lines(tmp_path / "x" / "trace.jsonl") if t["client"] == "0"]
    assert json.loads((tmp_path / "x" / "plans.json").read_text())["0"]["units"] == 51
    assert all(abs(s / static - 1) < 0.003 for s in sigmas)


@pytest.mark.parametrize("method", PRIVATE)
def test_a_refused_run_leaves_nothing(method: str, tmp_path: Path) -> None:
    for bad in ({"epsilon": -1.0}, {"batch": 1000}, {"delta": 2.0}, {"network": "support:nope"}):
        with pytest.raises(UserError):
            xcal.run(tmp_path / "bad", method=method, **{**TINY, **bad})
        assert not (tmp_path / "bad").exists()


def test_groups_are_drawn_and_counted_as_units(tmp_path: Path) -> None:
    result = xcal.run(
        tmp_path / "g", method="xcal-steered", **{**TINY, "unit": "group", "batch": 5}
    )
    assert result["unit"] == "group"
    assert sum(c["units"] for c in result["clients"]) == 50  # 150 images in groups of three
    statement = (tmp_path / "g" / "statement.txt").read_text()
    assert "all images of one patient" in statement


def test_partial_participation_plans_only_own_rounds(tmp_path: Path) -> None:
    result = xcal.run(
        tmp_path / "p", method="xcal-steered", **{**TINY, "participants": 2, "rounds": 4}
    )
    schedule = json.loads((tmp_path / "p" / "schedule.json").read_text())
    assert all(len(r) == 2 for r in schedule)
    for client in result["clients"]:
        own = sum(int(client["id"]) in r for r in schedule)
        assert client["steps"] == own * math.ceil(client["units"] / TINY["batch"])
        assert client["share_spent"] > 0.98


def test_exhausted_clients_say_so_and_are_left_out(tmp_path: Path) -> None:
    # At ε = 50 the published split overspends a shared batch, so the proved filter must halt it.
    result = xcal.run(
        tmp_path / "e",
        method="xcal-paper",
        **{**TINY, "epsilon": 60.0, "delta": 1e-5, "rounds": 6, "tau": 1.0, "band": 0.6},
    )
    rounds = lines(tmp_path / "e" / "rounds.jsonl")
    assert any(c["halted"] for c in result["clients"])
    assert any(r["exhausted"] for r in rounds)
    assert all(c["epsilon_spent"] <= 60.0 for c in result["clients"])
    assert result["epsilon_paper"] <= 60.0 * (1 + 1e-9)


def test_a_method_of_ones_own_runs_like_any_other(tmp_path: Path) -> None:
    result = xcal.run(tmp_path / "own", **{**TINY, "method": "support:own_method"})
    assert result["epsilon_target"] == 8.0
    rows = read_rows(tmp_path / "own" / "clients" / "0" / "ledger.sqlite")
    assert [r.method for r in runs_of(rows).values()] == ["own"]


def test_units_at_several_clients_are_named_in_the_statement(tmp_path: Path) -> None:
    xcal.run(tmp_path / "s", method="fl-dp", **{**TINY, "units_per_client": 90})
    statement = (tmp_path / "s" / "statement.txt").read_text()
    assert "Some units stand at several clients" in statement


@pytest.mark.parametrize("partition", ["label", "label-extreme", "covariate"])
def test_every_partition_trains(partition: str, tmp_path: Path) -> None:
    result = xcal.run(tmp_path / "p", method="fl-dp", **{**TINY, "partition": partition})
    assert len(result["clients"]) == 3
