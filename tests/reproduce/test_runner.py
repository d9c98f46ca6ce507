"""The runner with real processes: nothing is repeated, nothing is lost, results merge."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from commands import reproduce_process, xcal_environment
from made_up import made_up_cell
from reproduce.__main__ import app
from reproduce.declared import Choice, declare
from reproduce.store import CellResult, Results, TestSet, merge, table_text
from support import TINY
from xcal.errors import UserError
from xcal.federation.constants import with_constants
from xcal.federation.setup import prepare
from xcal.studies.cell import Talk, explained_subset, run_cell
from xcal.studies.grid import BUSY, Cell, Grid
from xcal.studies.runner import NullWatcher, Options, Outcome, how_many, run_grid

BY_THE_PROCESS = ("threads", "workers", "road_test_images")
TINY_KEYS = {k: v for k, v in TINY.items() if k not in BY_THE_PROCESS}


def tiny_cell(**changes: Any) -> Cell:
    keys = {"method": "fl-dp", **TINY_KEYS, "seed": 0, "road_images": 0, **changes}
    return Cell("smoke", keys, explained=20)


class Quiet(Talk):
    def tell(self, **values: Any) -> None: ...


def test_a_cell_in_this_process(tmp_path: Path) -> None:
    values, test = run_cell(tiny_cell(rounds=2), tmp_path / "w", "xcal study x", Quiet())
    found = CellResult(json.loads(json.dumps(values)))
    assert found.finished and len(found.predicted) == 45 == len(test.labels)
    assert found.values["macro_f1"] == pytest.approx(
        float(
            np.mean(
                [
                    2
                    * ((test.labels == k) & (found.predicted == k)).sum()
                    / max(1, (test.labels == k).sum() + (found.predicted == k).sum())
                    for k in range(3)
                ]
            )
        )
    )
    assert len(found.road_scores) == 20
    assert found.road_scores.mean() == pytest.approx(found.values["road"], abs=1e-4)
    assert found.values["rounds"]["share"][-1] == pytest.approx([1, 1, 1], abs=1e-3)
    assert "secret" not in json.dumps(values)  # names of test files stay where they are


def test_training_that_diverges_is_a_result_and_not_repeated(tmp_path: Path) -> None:
    cell = tiny_cell(method="fl", lr=1e30, rounds=2)
    values, test = run_cell(cell, tmp_path / "w", "", Quiet())
    assert values["status"] == "diverged" and test is None
    results = Results(tmp_path / "r")
    results.write("smoke", values, None)
    assert results.has(cell)
    grid = Grid("s", "smoke", (cell,))
    assert "diverged" in table_text(results.of_grid(grid))
    assert run_grid(grid, Options(tmp_path / "r", tmp_path / "w")).finished == 1


def test_explained_images_show_every_group() -> None:
    groups = np.repeat(np.arange(30), 20)
    chosen = explained_subset(groups, 40)
    assert len(chosen) == 40 == len(set(chosen.tolist()))
    assert set(groups[chosen]) == set(range(30))
    assert len(explained_subset(groups, 10_000)) == 600


RUNNER = """
import json, sys
from pathlib import Path
from xcal.studies.grid import Cell, Grid
from xcal.studies.runner import Options, run_grid
cells = tuple(Cell("smoke", keys, 20) for keys in json.loads(sys.argv[1]))
run_grid(Grid("tiny", "smoke", cells), Options(Path(sys.argv[2]), Path(sys.argv[3]), jobs=2))
"""


@pytest.mark.slow
def test_kill_nine_and_go_on(tmp_path: Path) -> None:
    cells = (tiny_cell(rounds=400),)
    results, work = tmp_path / "results", tmp_path / "work"
    orders = json.dumps([dict(c.keys) for c in cells])
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, orders, str(results), str(work)], env=xcal_environment()
    )
    checkpoint = work / "smoke" / cells[0].id / "checkpoint.safetensors"
    deadline = time.monotonic() + 240
    try:
        while not checkpoint.exists():
            assert time.monotonic() < deadline and runner.poll() is None
            time.sleep(0.1)
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    lock = work / "smoke" / cells[0].id
    long = Results(results)
    # The cell ends with its runner: the folder is free again, and nothing came of it yet.
    from xcal.federation.files import lock_folder

    for _ in range(100):
        try:
            os.close(lock_folder(lock))
            break
        except UserError:
            time.sleep(0.1)
    else:
        pytest.fail("the cell outlived its runner")
    assert not long.has(cells[0])
    before = len((lock / "rounds.jsonl").read_text().splitlines())
    assert 0 < before < 400
    # A cell that goes on must not begin again: what it had is still in its folder.
    grid = Grid("tiny", "smoke", cells)
    out = run_grid(grid, Options(results, work, jobs=1, limit_minutes=0.0))
    assert out.out_of_time and out.finished == 0
    assert len((lock / "rounds.jsonl").read_text().splitlines()) >= before


@pytest.mark.slow
def test_smoke_takes_less_than_a_minute_and_is_not_repeated(tmp_path: Path) -> None:
    results = tmp_path / "results"
    words = ["study", "privacy-utility", "--scale", "smoke", "--results", str(results)]
    words += ["--work", str(tmp_path / "work")]
    began = time.process_time(), os.times().children_user
    done = reproduce_process(*words)
    assert done.returncode == 0, done.stderr + done.stdout
    # Of the processor's time: a busy machine is not the study's fault.
    assert os.times().children_user - began[1] < 60
    with (results / "privacy-utility-smoke.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(r["method"] for r in rows) == ["fl", "fl-dp", "xcal-steered"]
    assert all(
        r["commit"] and r["versions"] and r["command"].startswith("python -m reproduce study")
        for r in rows
    )
    assert not list((tmp_path / "work" / "smoke").glob("*/model.safetensors"))
    again = run_grid(
        declare("privacy-utility", "smoke"), Options(results, tmp_path / "no such folder")
    )
    assert again.finished == 3 and not (tmp_path / "no such folder").exists()
    size = sum(p.stat().st_size for p in results.rglob("*") if p.is_file())
    assert size < 40_000


def fake_result(results: Results, cell: Cell, f1: float) -> None:
    labels = np.arange(8, dtype=np.int64) % 2
    test = TestSet("t-16px", ("a", "b"), "picture", labels, np.arange(8))
    results.write("smoke", made_up_cell(cell, test) | {"macro_f1": f1}, test)


def test_results_of_two_machines_merge(tmp_path: Path) -> None:
    here, there = Results(tmp_path / "here"), Results(tmp_path / "there")
    cells = [tiny_cell(seed=s) for s in range(3)]
    fake_result(here, cells[0], 0.5)
    fake_result(there, cells[0], 0.6)
    fake_result(there, cells[1], 0.7)
    merged = merge(here, [there])
    assert (merged.added, merged.known, merged.different) == (1, 1, (cells[0].id,))
    ours = here.read("smoke", cells[0].id)
    assert ours is not None and ours.values["macro_f1"] == 0.5
    assert here.has(cells[1]) and here.test_set("t-16px").classes == ("a", "b")
    with pytest.raises(UserError, match="holds no results"):
        merge(here, [Results(tmp_path / "nowhere")])


class Told(NullWatcher):
    """A watcher that remembers the messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def ended(self, cell: Cell, message: dict[str, Any]) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("made_meanwhile", [False, True])
def test_a_cell_that_another_process_makes_is_left_to_it(
    tmp_path: Path, made_meanwhile: bool
) -> None:
    cell, results = tiny_cell(), Results(tmp_path / "r")
    lock = tmp_path / "w" / "smoke" / f"{cell.id}.lock"
    lock.parent.mkdir(parents=True)
    told = Told()
    if made_meanwhile:
        told.started = lambda cell: fake_result(results, cell, 0.5)  # type: ignore[method-assign]
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        grid = Grid("x", "smoke", (cell,))
        out = run_grid(grid, Options(results.path, tmp_path / "w", jobs=1), told)
    assert [m["code"] for m in told.messages] == [BUSY] and not out.failed
    assert (out.finished, out.elsewhere) == ((1, []) if made_meanwhile else (0, [cell]))
    assert not (tmp_path / "w" / "smoke" / cell.id).exists()


def test_the_command_says_what_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = declare("privacy-utility", "smoke").cells[0]

    def busy(grid: Grid, options: Options, watcher: Any, **_: Any) -> Outcome:
        watcher.begin(3, 0)
        watcher.ended(cell, {"code": BUSY})
        return Outcome(3, 2, elsewhere=[cell])

    monkeypatch.setattr("xcal.studies.runner.run_grid", busy)
    done = CliRunner().invoke(app, ["study", "privacy-utility", "--results", str(tmp_path / "r")])
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "failed" not in said
    assert f"{cell.title} is being made by another process: left to it." in said
    assert "1 cell is being made by other processes" in said


def test_a_group_of_the_smoke_scale_is_large_enough_for_its_batch() -> None:
    for cell in declare("units", "smoke", Choice(seeds=2)).cells:
        assert all(prepare(with_constants(cell.experiment())).plans), cell.title


def test_time_is_measured_one_at_a_time() -> None:
    cell = tiny_cell()
    assert how_many(Grid("overhead", "smoke", (cell,), one_at_a_time=True), 8) == 1
    assert how_many(Grid("x", "smoke", (cell,)), 3) == 3
    assert 1 <= how_many(Grid("x", "smoke", (cell,)), None) <= (os.cpu_count() or 1)


def test_a_grid_without_its_weights_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XCAL_DATA", raising=False)
    words = ["study", "panel", "--scale", "laptop", "--network", "columns"]
    words += ["--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError) and "--weights" in str(done.exception)
    assert not (tmp_path / "w").exists()


def test_a_grid_without_its_data_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "empty"))
    cell = Cell("laptop", {**tiny_cell().keys, "data": "blood-cells"}, 20)
    with pytest.raises(UserError, match=r"no data set called 'blood-cells'.*other data sets"):
        run_grid(Grid("x", "laptop", (cell,)), Options(tmp_path / "r", tmp_path / "w"))
    assert not (tmp_path / "w").exists()
