"""docs/methods.md names every method, and its tuning table is the one the results give."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from support import ROOT
from xcal.methods.registry import METHODS

PAGE = (ROOT / "docs" / "methods.md").read_text()


@pytest.fixture(scope="module")
def tuning() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tune_methods", ROOT / "benchmarks" / "tune_methods.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tune_methods", module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_described(method: str) -> None:
    assert f"`{method}`" in PAGE


def test_the_tuning_table_is_made_of_the_committed_results(tuning: ModuleType) -> None:
    _, _, rest = PAGE.partition(tuning.BEGIN)
    shown, _, _ = rest.partition(tuning.END)
    assert shown.strip() == tuning.table().strip(), (
        "run `python benchmarks/tune_methods.py --write`"
    )


def test_a_finished_cell_is_not_run_again(
    tuning: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(tuning, "RESULTS", tmp_path / "cells.csv")  # type: ignore[operator]
    monkeypatch.setattr(tuning, "prepare", lambda experiment: None)
    ran = []

    def fake(cell: object, base: object) -> dict[str, object]:
        ran.append(cell)
        return {"validation_f1": "0.5000", "test_f1": "0.4000", "halted": 0, "seconds": "1.0"}

    monkeypatch.setattr(tuning, "run", fake)
    tuning.search(["fl"], [0])
    tuning.search(["fl"], [0, 1])
    assert [(c.lr, c.seed) for c in ran] == [
        (lr, seed) for seed in (0, 1) for lr in tuning.LEARNING_RATES
    ]
    assert "| fl | 0.500 |" in tuning.table()
