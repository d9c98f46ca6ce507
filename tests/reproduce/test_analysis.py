"""From cells to sentences: the paper's figures, courses, answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from made_up import made_up_cell, made_up_results
from reproduce.analysis import (
    beside_the_paper,
    round_seconds,
)
from reproduce.declared import Choice, declare
from reproduce.efficiency import course_of, efficiency_table, first_fall, lowess
from reproduce.paper import printed
from reproduce.store import CellResult, Results, pack
from reproduce.tables import StudyView, comparisons_of, view
from xcal.studies.grid import Cell
from xcal.studies.statistics import Difference

SMALL = Choice(data=("blood-cells",), networks=("small",), epsilons=(0.5, 5.0), seeds=3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made_up_results(tmp_path_factory.mktemp("r"), seeds=3)


def test_the_paper_prints_what_it_prints() -> None:
    assert printed("macro_f1", "blood-cells", "xcal", 0.5) == 0.716
    assert printed("macro_f1", "blood-cells", "fl-dp", 0.5) == 0.654
    assert printed("macro_f1", "blood-cells", "fl", None) == 0.844
    assert printed("macro_f1", "ham10000", "xcal-paper", 50.0) == 0.886
    assert printed("road", "chest-xray14", "agp", 5.0) == 12.093
    assert printed("macro_f1", "blood-cells", "centralized", None, network="resnet18") == 0.855
    shifted = printed(
        "macro_f1", "ham10000", "fl-dp", 0.5, network="resnet18", clients=50, partition="covariate"
    )
    assert shifted == 0.667
    for nothing in (
        printed("macro_f1", "smear", "xcal", 0.5),
        printed("macro_f1", "blood-cells", "xcal", 3.0),
        printed("macro_f1", "blood-cells", "agp-dp", 0.5),
        printed("macro_f1", "blood-cells", "agp", 0.5, clients=10),
    ):
        assert nothing is None


def test_lowess_leaves_a_line_alone_and_calms_noise() -> None:
    x = np.linspace(0, 1, 20)
    np.testing.assert_allclose(lowess(x, 3 * x - 1), 3 * x - 1, atol=1e-9)
    noise = np.random.default_rng(0).normal(0, 1, 20)
    assert lowess(x, noise).std() < noise.std()
    assert lowess(x[:2], noise[:2]).tolist() == noise[:2].tolist()


def test_a_view_counts_what_is_there_and_what_is_missing(results: Results) -> None:
    found = view(declare("privacy-utility", "laptop", SMALL), results)
    assert found.finished == found.total
    assert "All" in found.missing
    whole = view(declare("privacy-utility", "laptop"), results)
    assert f"{whole.finished} of the grid's {whole.total} cells" in whole.missing
    assert "python -m reproduce study privacy-utility --scale laptop" in whole.missing


def test_disagreement_with_the_paper_is_said_in_a_sentence(results: Results) -> None:
    series = view(declare("privacy-utility", "laptop", SMALL), results).series
    (found,) = (
        c for c in comparisons_of(series, results, ["xcal-steered"]) if c.series.place.epsilon < 1
    )
    for (low, mean, high), said in {
        (-0.01, 0.0, 0.01): "no difference shown, and one as large as printed is outside",
        (-0.01, 0.0, 0.09): "here over 3 seeds: no difference shown.",
        (-0.03, -0.02, -0.01): "the opposite direction.",
        (0.01, 0.02, 0.03): "the same direction.",
    }.items():
        ours = replace(found, f1=Difference(3, mean, low, high, 2, 1))
        sentence = beside_the_paper(ours) or ""
        assert "the paper prints an F1 difference of +0.062" in sentence
        assert said in sentence.split(" Of ROAD")[0]


def test_the_tables_say_better_only_where_the_interval_does(results: Results) -> None:
    found = view(declare("privacy-utility", "laptop", SMALL), results)
    for table in found.tables:
        for row in table.rows:
            if row[4] == "better":
                assert "[+" in row[3]
            if row[4] == "worse":
                assert row[3].split(", ")[1].startswith("−")
        assert table.markdown().count("\n|") == len(table.rows) + 2


def test_the_overview_has_a_row_a_place_and_says_no_more_than_the_tables(results: Results) -> None:
    found = view(declare("privacy-utility", "laptop", SMALL), results)
    overview, pairs = found.overviews
    assert [row[:2] for row in overview.rows] == [
        ("blood-cells, small", "0.5"),
        ("blood-cells, small", "5"),
    ]
    tables = {(row[0], row[1]): row for table in found.tables for row in table.rows}
    for row in overview.rows:
        for column, method in ((3, "xcal-steered"), (4, "xcal-paper"), (5, "agp")):
            of_place = tables[f"`{method}`", row[1]]
            shown = f", {of_place[4]}" if of_place[4] in ("better", "worse") else ""
            assert row[column] == of_place[3] + shown or row[column] == "the same answers"
    assert [row[6] for row in overview.rows] == ["+0.062", "+0.023"]
    assert [row[0] for row in pairs.rows] == ["`xcal-steered`", "`xcal-paper`", "`agp`"]
    for row in pairs.rows:
        assert all(0 <= sum(map(int, row[k].split(":"))) <= 6 for k in (2, 5, 8))
    assert "of 2 of them, those left out" in found.answer


def test_all_that_was_tried_stands_in_one_table(results: Results) -> None:
    found = view(declare("ablation", "laptop", SMALL), results)
    (overview,) = found.overviews
    rows = {row[0]: row for row in overview.rows}
    assert "`fl-dp`" not in rows
    assert (
        rows["`xcal-steered`"][1] == "2"
        and rows["`xcal-steered`"][4] == rows["`xcal-steered`"][6] == "–"
    )
    for column in (2, 4):
        ahead, behind = map(
            int, rows["`xcal-steered`, signal: decay"][column].split(" ")[-1].split(":")
        )
        assert 0 < ahead + behind <= 6  # two places of three seeds
    assert rows["`xcal-steered`, signal: decay"][6].endswith(" 0:0")  # the made-up AUROC are equal


def test_a_replaced_signal_is_compared_with_the_signal(results: Results) -> None:
    found = view(declare("ablation", "laptop", SMALL), results)
    rows = {row[0]: row for table in found.tables for row in table.rows}
    assert rows["`xcal-steered`, signal: decay"][2] != "–"
    assert rows["`xcal-steered`"][2] == "–"
    assert "comparisons the signal was replaced" in found.answer


def test_courses_know_where_they_peak(results: Results) -> None:
    series = view(declare("efficiency", "laptop", SMALL), results).series
    course = course_of(next(s for s in series if s.method == "xcal-steered"))
    assert course is not None and course.road is not None
    # The made-up ROAD rises to half of the budget and stays; the first of equals is the peak.
    assert course.road.stop_share == pytest.approx(0.6)
    assert course.f1_gain > 0
    table = view(declare("efficiency", "laptop", SMALL), results).tables[0]
    peaks = table.head.index("ROAD peaks at")
    assert any("60 %" in row[peaks] for row in table.rows)
    early = table.head.index("before the last")
    assert all(row[early] == f"{len(course.series.cells)} of 3" for row in table.rows)


def test_a_course_without_road_on_the_way_still_has_its_f1(results: Results) -> None:
    series = view(declare("efficiency", "laptop", SMALL), results).series
    one = next(s for s in series if s.method == "xcal-steered")

    def unmeasured(cell: CellResult) -> CellResult:
        rounds = cell.values["rounds"]
        return replace(
            cell, values={**cell.values, "rounds": {**rounds, "road": [None] * len(rounds["road"])}}
        )

    bare = course_of(replace(one, cells={s: unmeasured(c) for s, c in one.cells.items()}))
    whole = course_of(one)
    assert bare is not None and whole is not None and bare.road is None
    assert bare.f1_gain == whole.f1_gain and bare.f1_peak_share == whole.f1_peak_share
    row = efficiency_table([bare]).rows[0]
    assert row.count("–") >= 5 and "nan" not in "".join(row)


def test_a_rule_that_knows_no_future_stops_at_the_first_fall() -> None:
    assert first_fall([0.1, 0.2, 0.15, 0.4]) == (2, 1)
    assert first_fall([0.1, 0.2, 0.2, 0.4]) == (3, 3)  # it never fell: nothing is left over
    assert first_fall([0.3]) == (0, 0)


def test_stopping_is_said_with_what_it_leaves_and_costs(results: Results) -> None:
    found = view(declare("efficiency", "laptop", SMALL), results)
    # The made-up ROAD never falls.
    assert "leaves 0 % of what a run would spend and changes F1 there by +0.000" in found.answer


def test_auroc_stands_beside_f1_without_a_verdict(results: Results) -> None:
    found = view(declare("privacy-utility", "laptop", SMALL), results)
    column = found.tables[0].head.index("AUROC − static")
    rows = {(row[0], row[1]): row for row in found.tables[0].rows}
    assert rows["`fl-dp`", "5"][column] == "–"
    assert re.fullmatch(r"[+−]0\.\d{3} ± 0\.\d{3} \d:\d", rows["`xcal-steered`", "5"][column])


def test_overhead_is_a_clients_round_over_static_noise(results: Results) -> None:
    grid = declare("overhead", "laptop", Choice(("blood-cells",), ("small",)))
    found = view(grid, results)
    assert round_seconds(next(s for s in found.series if s.method == "fl-dp"))[0] == 1.0
    assert any("33" in row[3] for row in found.tables[0].rows if row[0] == "`xcal-steered`")
    assert "33 to 47 %" in found.tables[0].note


def test_where_both_give_the_same_answers_nothing_is_said_about_the_paper(tmp_path: Path) -> None:
    results, place = made_up_results(tmp_path, seeds=2), ("ham10000", "small")
    known = Results(tmp_path).test_set("blood-cells-64px")
    choice = Choice(("ham10000",), ("small",), ("fl-dp", "xcal-steered"), (0.5,), 2)
    for cell in declare("privacy-utility", "laptop", choice).cells:
        values = made_up_cell(cell, known)
        one_class = pack(np.zeros(len(known.labels), np.uint8))
        results.write("laptop", values | {"predicted": one_class, "macro_f1": 0.2}, known)
    found = view(declare("privacy-utility", "laptop", choice), results)
    (sentence,) = found.sentences
    assert sentence.startswith(f"{place[0]}, {place[1]}, ε = 0.5: the paper prints")
    assert (
        "`xcal-steered` and `fl-dp` give the same answers here over 2 seeds, which says nothing"
        in (sentence)
    )
    assert "outside the interval" not in sentence


def test_the_gain_of_road_is_held_against_the_paper_by_its_direction(results: Results) -> None:
    found = view(declare("privacy-utility", "laptop", SMALL), results)
    (ours,) = (s for s in found.sentences if "`xcal-steered` minus" in s and "ε = 0.5" in s)
    rows = {(row[0], row[1]): row for table in found.tables for row in table.rows}
    row = rows["`xcal-steered`", "0.5"]
    said = {"better": "the same direction", "worse": "the opposite direction"}.get(row[7], row[7])
    assert ours.endswith(
        " Of ROAD it prints a difference of +65.0 on its own scale; on ours it is"
        f" {row[6].rsplit(' ', 1)[0]}: {said}."
    )


def clients_view(tmp_path: Path, keep: Callable[[Cell], bool]) -> StudyView:
    base, results = made_up_results(tmp_path / "a", seeds=1), Results(tmp_path / "b")
    test = base.test_set("blood-cells-64px")
    choice = Choice(("blood-cells",), ("efficientnet_b0",), ("fl-dp", "xcal-steered"), (0.5,), 2)
    grid = declare("clients", "laptop", choice)
    for cell in filter(keep, grid.cells):
        results.write("laptop", made_up_cell(cell, test), test)
    return view(grid, results)


def test_sentences_on_clients_name_how_many_and_how_unlike(tmp_path: Path) -> None:
    found = clients_view(tmp_path, lambda cell: True)
    begins = [s.split(", ε")[0] for s in found.sentences]
    assert "blood-cells, efficientnet_b0, N = 3, iid" in begins
    assert "blood-cells, efficientnet_b0, N = 50, label" in begins
    assert len(set(begins)) == len(begins)
    assert "yet" not in found.answer


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (
            ("N = 3, iid",),
            "with N = 3: no other number of clients has been run yet, nor clients with",
        ),
        (("N = 3, ",), "with N = 3: no other number of clients has been run yet."),
        (("N = 3, iid", "N = 10, iid"), "unlike ones have not been run yet."),
    ],
)
def test_what_more_clients_do_is_not_answered_by_one_number(
    tmp_path: Path, keep: tuple[str, ...], said: str
) -> None:
    found = clients_view(tmp_path, lambda cell: cell.variant.startswith((*keep, "bound")))
    assert said in found.answer


def test_the_ablation_says_worse_where_the_interval_does(results: Results) -> None:
    for table in view(declare("ablation", "laptop", SMALL), results).tables:
        for row in table.rows:
            for text in (row[2], row[3], row[5]):
                shown = re.search(r"\[(.)0\.\d+, (.)0\.\d+\] \d:\d(, better|, worse)?$", text)
                if shown is not None and "0.000" not in text.split("[")[1]:
                    verdict = {"++": ", better", "−−": ", worse"}.get(shown[1] + shown[2])
                    assert shown[3] == verdict, text
    everything = str(view(declare("ablation", "laptop", SMALL), results).tables)
    assert ", worse" in everything or ", better" in everything


def test_a_method_without_a_budget_is_told_and_not_dropped(tmp_path: Path) -> None:
    results = made_up_results(tmp_path, seeds=1)
    test = results.test_set("blood-cells-64px")
    grid = declare("efficiency", "laptop", SMALL)
    for cell in grid.cells:
        values = made_up_cell(cell, test)
        if cell.method == "agp":  # as real ones are: nothing is promised, nothing is spent
            rounds = values["rounds"]
            rounds["share"] = [[None for _ in line] for line in rounds["share"]]
        results.write("laptop", values, test)
    found = view(grid, results)
    assert "`agp`" not in {row[0] for row in found.tables[0].rows}
    assert [s for s in found.sentences if "its ε is nominal" in s] == list(found.sentences)
    assert len(found.sentences) == 1 and found.sentences[0].startswith("`agp` has no row")


def test_nothing_finished_is_nothing_said(tmp_path: Path) -> None:
    for study in ("privacy-utility", "ablation", "efficiency", "clients", "overhead", "units"):
        found = view(declare(study, "laptop"), Results(tmp_path))
        assert found.finished == 0 and not found.sentences and found.answer
