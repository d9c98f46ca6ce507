"""What the report draws and says of studies: courses, dashes, one N, sets that are not here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from made_up import made_up_results
from reproduce.declared import Choice, declare
from reproduce.report import Material, gather, in_a_word, report_page
from reproduce.store import Results, pack
from reproduce.study_courses import courses_of
from reproduce.study_figures import by_epsilon, not_scaled, scaling
from reproduce.study_panel import StudyPanel, absent_note, study_panels
from reproduce.tables import StudyView, view
from xcal.errors import UserError
from xcal.report.figures import Figure
from xcal.report.template import _cell
from xcal.studies.statistics import Verdict

ONE_EPSILON = Choice(data=("blood-cells",), networks=("small",), epsilons=(5.0,), seeds=2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made_up_results(tmp_path_factory.mktemp("study") / "results", seeds=2)


@pytest.fixture(scope="module")
def main_study(results: Results) -> StudyView:
    return view(declare("privacy-utility", "laptop", ONE_EPSILON), results)


@pytest.fixture(scope="module")
def course(main_study: StudyView) -> dict[str, Figure]:
    private = [s.place for s in main_study.series if s.place.epsilon is not None]
    (found,) = courses_of(main_study, dict.fromkeys(private))
    assert found.title == "blood-cells, small, ε = 5"
    return {figure.id.split("-")[-1]: figure for figure in found.figures}


def test_what_has_no_guarantee_is_dashed(main_study: StudyView) -> None:
    for figure in by_epsilon(main_study):
        assert "dashed lines have no guarantee" in figure.caption
        dashes = {t["meta"]["group"]: t["line"]["dash"] for t in figure.plotly()["data"]}
        assert dashes["agp"] == dashes["fl"] == "dash"
        assert dashes["fl-dp"] == dashes["xcal-steered"] == dashes["xcal-paper"] == "solid"


def test_noise_is_drawn_by_round_with_its_seeds_behind(course: dict[str, Figure]) -> None:
    lines = course["sigma"].lines
    assert [line.group for line in lines if not line.faint] == [
        "fl-dp",
        "agp",
        "xcal-paper",
        "xcal-steered",
    ]
    assert [line.name for line in lines if line.faint] == [
        f"{method}, seed {seed}" for method in ("xcal-paper", "xcal-steered") for seed in (0, 1)
    ]  # static noise is the same in every seed: one line
    mean = next(line for line in lines if line.name == "xcal-steered")
    assert mean.x[0] == 1 and mean.x[-1] == len(mean.y)
    assert mean.y[-1] == pytest.approx(1.005)  # of 1.00 and 1.01
    assert next(line for line in lines if line.group == "agp").style == 1
    assert "fl-dp 1.000 throughout" in course["sigma"].alt
    drawn = course["sigma"].plotly()["data"]
    assert {t.get("opacity", 1) for t in drawn} == {1, 0.35}


def test_only_what_was_released_is_drawn_as_signal(course: dict[str, Figure]) -> None:
    assert {line.group for line in course["signal"].lines} == {"xcal-paper", "xcal-steered"}


def test_the_budget_has_a_line_a_client_or_one_for_all(course: dict[str, Figure]) -> None:
    assert [line.name for line in course["budget"].lines] == [
        "fl-dp, every client",
        *(f"xcal-paper, client {k}" for k in range(3)),
        "xcal-steered, every client",
    ]
    assert "xcal-paper, client 2: 100.0 %" in course["budget"].alt


def test_a_place_is_told_once_though_studies_share_it(results: Results) -> None:
    studies = gather([results.path]).studies
    titles = [c.title for s in studies for c in s.courses]
    assert len(titles) == len(set(titles))
    assert {"blood-cells, small, ε = 0.5", "blood-cells, small, ε = 5"} <= set(titles)
    ids = [f.id for s in studies for f in s.every_figure]
    assert len(ids) == len(set(ids))


def test_one_number_of_clients_is_said_and_not_drawn(results: Results) -> None:
    few = Choice(("blood-cells",), ("efficientnet_b0",), ("fl-dp", "xcal-steered"), (0.5,), 2)
    whole = view(declare("clients", "laptop", few), results)
    assert scaling(whole) and not_scaled(whole) == ""
    three = tuple(s for s in whole.series if s.place.clients == 3)
    narrowed = StudyView(**{**whole.__dict__, "series": three})
    assert scaling(narrowed) == []
    assert not_scaled(narrowed).startswith("Only N = 3 was run")
    other = tuple(s for s in whole.series if s.place.clients != 3)
    assert not_scaled(StudyView(**{**whole.__dict__, "series": other})) == ""


def test_sets_that_are_not_here_are_one_sentence(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path))
    for cell, found in results.of_grid(declare("panel", "laptop", ONE_EPSILON)).items():
        entry = {"image": 0, "label": 0, "predicted": 0, "confidence": 1.0, "shape": [1, 1]}
        test = results.test_set(found.values["test_set"])
        kept = {**found.values, "maps": [{**entry, "map": pack(test.labels[:1])}]}
        results.write("laptop", kept, test)
        assert cell.id == found.id
    panels = study_panels(results, "laptop")
    assert [p.absent for p in panels] == ["blood-cells"]
    more = [*panels, *panels, StudyPanel("x", (), absent="ham10000")]
    page = report_page(Material((), (), 0, tuple(more)))
    assert page.count("not on this machine") == 1
    assert "The images of blood-cells and ham10000 are not on this machine" in page
    assert "<code>xcal data import FOLDER --name NAME --pixels PIXELS</code>" in page
    assert "Grad-CAM of the class" not in page
    assert absent_note([StudyPanel("x", ())]) == ""


def test_a_cell_breaks_only_between_its_values() -> None:
    assert (
        _cell("+0.012 [−0.010, +0.030] 4:1, better")
        == '+0.012 <span class="keep">[−0.010, +0.030]</span> 4:1, better'
    )
    assert _cell("0.452 ± 0.013 (5)") == '<span class="keep">0.452 ± 0.013</span> (5)'
    assert _cell("`fl-dp`, w = 0.8") == '<code>fl-dp</code>, <span class="keep">w = 0.8</span>'
    assert _cell("<b> (") == "&lt;b&gt; ("


def test_the_page_is_whole_and_asks_for_nothing(results: Results) -> None:
    page = report_page(gather([results.path]))
    assert page.count("* plotly.js v") == 1  # embedded once
    own = re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", page, flags=re.DOTALL)
    assert len(own) < 1_500_000
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]+", own)
    assert "https://" not in own and "http://" not in own
    for words in (
        "Does noise steered by explanations",
        "Studies are simulations",
        "Versions and commands",
        "goes on with",
        "do not pin it",  # cells of agp are older than what agp says it uses
        'class="is-better"',
    ):
        assert words in own, words
    assert own.count('role="img"') == own.count('class="plot"') > 10


def test_the_word_is_that_of_the_comparisons(results: Results) -> None:
    studies = gather([results.path], panels=False).studies
    main = next(s for s in studies if s.view.study == "privacy-utility")
    ours = [c.f1.verdict for c in main.view.comparisons if c.series.method == "xcal-steered"]
    assert ours and set(ours) <= set(Verdict)
    (word,) = in_a_word(studies)
    shown = {v for v in ours if v.shows}
    assert word.startswith("Yes" if shown == set(ours) == {Verdict.BETTER} else ("In some", "Not"))


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no results"):
        gather([tmp_path])
