"""`xcal study`: an experiment along axes of one's own, from the command line to its tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from commands import xcal_forked, xcal_process
from support import TINY
from xcal.errors import UserError
from xcal.methods.registry import get_method
from xcal.studies.grid import own_grid, read_axis
from xcal.studies.store import CellResult, Results, table_row


def experiment_file(folder: Path, text: str = "", **changes: object) -> Path:
    values = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 10, **changes}
    path = folder / "mine.toml"
    lines = [f"{k} = {_toml(v)}" for k, v in values.items()]
    path.write_text("\n".join(lines) + "\n" + text)
    return path


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


@pytest.mark.slow
def test_a_grid_is_run_compared_and_gone_on_with(tmp_path: Path) -> None:
    path = experiment_file(tmp_path)
    words = ["study", str(path), "method=fl-dp,fl", "epsilon=2,8"]
    words += ["--out", str(tmp_path / "out"), "--jobs", "2"]
    done = xcal_process(*words, "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 cells are finished" in done.stdout  # without noise one run serves every ε
    files = sorted((tmp_path / "out" / "cells").glob("*.json"))
    before = {file: file.stat().st_mtime_ns for file in files}
    done = xcal_process(*words, "--seeds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 6 cells are finished already" in done.stdout
    assert {file: file.stat().st_mtime_ns for file in files} == before
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = {(r["method"], r["epsilon"]): r for r in csv.DictReader(file)}
    assert set(rows) == {("fl-dp", "2"), ("fl-dp", "8"), ("fl", "2"), ("fl", "8")}
    for epsilon in ("2", "8"):
        base, other = rows["fl-dp", epsilon], rows["fl", epsilon]
        assert base["macro_f1_verdict"] == "" and other["macro_f1_seeds"] == "2"
        gap = float(other["macro_f1_mean"]) - float(base["macro_f1_mean"])
        assert float(other["macro_f1_difference"]) == pytest.approx(gap)
        low, high = float(other["macro_f1_low"]), float(other["macro_f1_high"])
        assert low <= gap <= high
    with (tmp_path / "out" / "cells.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6


def test_a_cell_pins_what_its_method_says_it_uses(tmp_path: Path) -> None:
    own = own_grid(experiment_file(tmp_path), ["method=xcal,fl,agp"])
    for _, cell in own.settings:
        by_the_process = {"threads", "road_test_images"}
        made = cell.experiment()
        unset = {k for k in get_method(cell.method).uses if getattr(made, k, None) is None}
        assert set(cell.keys) - {"paired"} <= get_method(cell.method).uses - by_the_process
        left_out = get_method(cell.method).uses - by_the_process - set(cell.keys)
        assert left_out <= unset | {"preset", "sites", "log", "trust", "noise_kind"}
        assert cell.keys["paired"] is True
    assert [cell.explained for _, cell in own.settings] == [10] * 3


def test_the_table_has_batch_and_clipping_norm(tmp_path: Path) -> None:
    """Under the heads that tables always had, whatever the keys are called."""
    (_, cell), *_ = own_grid(experiment_file(tmp_path), ["method=fl-dp"]).settings
    found = {"id": cell.id, "keys": cell.keys, "clients": [], "versions": {}}
    row = table_row(cell, CellResult(found))
    assert row["batch"] == cell.keys["expected_batch_size"]
    assert row["clip"] == cell.keys["max_grad_norm"]


def test_axes_of_the_file_and_of_the_command(tmp_path: Path) -> None:
    path = experiment_file(
        tmp_path, '\n[axes]\nmethod = ["fl-dp", "xcal-steered"]\nclip = [0.5, 1.0]\n'
    )
    own = own_grid(path, ["clip=2"], seeds=3)
    assert own.axes == {
        "method": ("fl-dp", "xcal-steered"),
        "max_grad_norm": (2,),
        "seed": (0, 1, 2),
    }
    assert own.compared == "method"
    assert [at["seed"] for at, _ in own.settings] == [0, 0, 1, 1, 2, 2]  # pairs end together
    assert read_axis("train=last:2,head") == ("train", ("last:2", "head"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["methd=fl"], "Did you mean 'method'"),
        (["method="], "key=a,b,c"),
        (["rounds=-1,2"], "rounds = -1"),
        (["method=fl-dpp"], "fl-dp"),
        (["sites=somewhere"], "sites"),
    ],
)
def test_bad_axes_are_refused_before_anything_runs(
    tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        own_grid(experiment_file(tmp_path), words)


def test_a_declared_study_is_named_with_its_command(tmp_path: Path) -> None:
    done = xcal_forked("study", "privacy-utility", cwd=tmp_path)
    assert done.returncode == 2 and "python -m reproduce study" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    own = own_grid(experiment_file(tmp_path), seeds=1)
    (cell,) = own.grid.cells
    path = tmp_path / "out" / "cells" / f"{cell.id}.json"
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", "{}", f'{{"id": "{cell.id}", "keys": {{}}, "explained": 1}}'):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a cell's result"):
            Results(tmp_path / "out").of_grid(own.grid)
