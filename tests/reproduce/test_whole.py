"""What was added to a study stays in its table and report, and in nobody else's."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from made_up import made_up_cell
from reproduce.declared import Choice, declare
from reproduce.report import gather
from reproduce.store import Results, TestSet
from reproduce.whole import whole_grid, whole_grids
from xcal.studies.grid import Cell

GROUP = np.repeat(np.arange(60), 5)
TEST = TestSet("smear-32px", ("a", "b", "c"), "picture", GROUP % 3, GROUP)


def finish(results: Results, study: str, choice: Choice | None = None, **changes: object) -> None:
    """As if the study had been run so."""
    for cell in declare(study, "smoke", choice).cells:
        values = made_up_cell(cell, TEST) | {"command": f"xcal study {study} --scale smoke"}
        results.write("smoke", values | changes, TEST)


def added(study: str, results: Results) -> set[tuple[str, str, int]]:
    own = {cell.id for cell in declare(study, "smoke").cells}
    found: tuple[Cell, ...] = whole_grid(study, "smoke", results).cells
    return {(c.method, c.variant, c.seed) for c in found if c.id not in own}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


@pytest.mark.parametrize("command", ["xcal study privacy-utility", "made by hand"])
def test_more_seeds_and_methods_stay_in_the_table(results: Results, command: str) -> None:
    asked = Choice(methods=("fl-dp", "xcal-steered", "agp-dp"), seeds=2)
    finish(results, "privacy-utility", asked, command=command)
    finish(results, "privacy-utility", command=command)
    results.write_table(whole_grid("privacy-utility", "smoke", results))
    with results.table_path("privacy-utility", "smoke").open() as file:
        rows = [(row["method"], row["seed"]) for row in csv.DictReader(file)]
    assert sorted(rows) == [
        ("agp-dp", "0"), ("agp-dp", "1"), ("fl", "0"), ("fl-dp", "0"), ("fl-dp", "1"),
        ("xcal-steered", "0"), ("xcal-steered", "1"),
    ]  # fmt: skip


def test_the_report_shows_what_was_added(results: Results) -> None:
    asked = Choice(("other",), ("small",), ("fl-dp", "xcal-steered", "agp-dp"), (2.0,), 2)
    finish(results, "privacy-utility", asked)
    found = gather([results.path], panels=False)
    assert found.orphans == 0
    section = next(s.view for s in found.studies if s.view.study == "privacy-utility")
    rows = {(row[0], row[1], row[2][-3:]) for table in section.tables for row in table.rows}
    assert rows == {
        ("`fl-dp`", "2", "(2)"),
        ("`xcal-steered`", "2", "(2)"),
        ("`agp-dp`", "2", "(2)"),
    }


def test_other_settings_belong_to_no_study(results: Results) -> None:
    cell = declare("privacy-utility", "smoke").cells[0]
    strange = Cell("smoke", {**cell.keys, "lr": 99.0}, cell.explained)
    results.write("smoke", made_up_cell(strange, TEST), TEST)
    assert all(strange not in grid.cells for grid in whole_grids("smoke", results).values())
    assert gather([results.path], panels=False).orphans == 1


def test_a_study_does_not_take_the_cells_of_another(results: Results) -> None:
    """All of these an ablation could be asked for as well; nobody did."""
    finish(results, "privacy-utility", Choice(methods=("fl-dp", "xcal-steered", "agp-dp"), seeds=2))
    assert added("ablation", results) == set() == added("units", results)
    assert added("panel", results) == {("agp-dp", "", 0)}  # which is of one seed


def test_added_variants_come_with_what_they_are_compared_with(results: Results) -> None:
    finish(results, "privacy-utility", Choice(methods=("fl-dp", "xcal-steered", "agp-dp"), seeds=2))
    finish(results, "ablation", Choice(seeds=2))
    found = added("ablation", results)
    assert {
        ("fl-dp", "", 1),
        ("xcal-steered", "", 1),
        ("xcal-steered", "signal: decay", 1),
    } <= found
    assert "agp-dp" not in {method for method, _, _ in found}


def test_what_a_table_has_stays_in_it(results: Results) -> None:
    """Also cells that another study declares by itself: they were asked for here too."""
    finish(results, "privacy-utility", Choice(methods=("fl",)))
    assert added("efficiency", results) == set()
    results.write_table(declare("efficiency", "smoke", Choice(methods=("fl",))))
    assert added("efficiency", results) == {("fl", "", 0)}


def test_a_method_of_somebody_elses_own_is_shown_and_not_loaded(results: Results) -> None:
    finish(results, "privacy-utility")
    keys = dict(
        declare("privacy-utility", "smoke", Choice(methods=("xcal-steered",))).cells[0].keys
    )
    from reproduce.scales import SMOKE, make_cell

    values = SMOKE.values("nobody.has:this", "smear", "small", 5.0, 0)
    assert set(keys) <= set(values) | {"concentration"}
    cell = make_cell("smoke", values, SMOKE.explained)
    results.write("smoke", made_up_cell(cell, TEST), TEST)
    assert ("nobody.has:this", "", 0) in added("privacy-utility", results)
