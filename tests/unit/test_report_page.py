"""The report as text: what stands in it, what does not, and its vector figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import xcal
from support import TINY
from xcal.cli.report_command import report_command
from xcal.errors import UserError
from xcal.report.figures import Figure, Line, save_figures, thinned
from xcal.report.report import Page, gather, page_html, runs_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    keys = {**TINY, "road_test_images": 10, "signal_every": 1}
    xcal.run(base / "runs" / "xcal", method="xcal-steered", **keys)
    return base


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return runs_page(gather([folder / "runs"]), panel_images=1)


def without_plotly(page: str) -> str:
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_is_whole_and_asks_for_nothing(page: Page) -> None:
    html = page_html(page)
    assert html.count("* plotly.js v") == 1  # embedded once
    own = without_plotly(html)
    assert len(own) < 1_500_000
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]+", own)
    assert "https://" not in own and "http://" not in own
    for words in (
        "What came out, and what was promised?",
        "What is promised",
        "Each client&#39;s budget as it was spent",
        "Where the models look",
        "Versions and commands",
    ):
        assert words in own, words
    assert own.count('role="img"') == own.count('class="plot"') == 5
    assert "secret-" not in own  # names of files stay out


def test_names_from_outside_cannot_run(tmp_path: Path, folder: Path) -> None:
    evil = tmp_path / "<img src=x onerror=alert(1)>"
    evil.parent.mkdir(exist_ok=True)
    evil.symlink_to(folder / "runs" / "xcal")
    page = without_plotly(page_html(runs_page(gather([evil]), panel_images=0)))
    assert "<img src=x" not in page
    assert "\\u003cimg src=x" in page or "&lt;img src=x" in page


def test_runs_of_one_promise_are_told_it_once(page: Page) -> None:
    first = page.runs[0]
    runs = (first, replace(first, name="again"), replace(first, name="other", opening=("Nobody.",)))
    html = page_html(replace(page, runs=runs))
    assert len(first.opening) == 3
    assert f"<b>{first.name}, again:</b> " in html and "<b>other:</b> Nobody." in html
    assert html.count(": the whole statement") == 3


def test_what_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        gather([tmp_path])


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path, folder: Path) -> None:
    import shutil

    shutil.copytree(folder / "runs" / "xcal", tmp_path / "half")
    (tmp_path / "half" / "result.json").unlink()
    with pytest.raises(UserError, match="--resume"):
        gather([tmp_path / "half"])


def test_vector_figures(page: Page, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_figures(tmp_path / "figures", page.run_figures)
    drawn = sorted((tmp_path / "figures").glob("*.svg"))
    assert len(drawn) == 5 == len(list((tmp_path / "figures").glob("*.pdf")))
    assert "macro F1" in (tmp_path / "figures" / "rounds-validation-macro-f1.svg").read_text()


def test_a_figure_says_what_it_shows() -> None:
    line = Line("a", (1, 2), (0.1, 0.2), 0, (0.01, 0.01), (0.02, 0.02))
    made = Figure("f", "T", "words", "x", "y", (line,)).plotly()
    assert made["data"][0]["error_y"]["array"] == [0.02, 0.02]
    assert made["legend"] == [{"name": "a", "tone": 0}]


def test_long_series_are_thinned_to_their_ends() -> None:
    assert thinned(list(range(1000)), 10)[-1] == 999
    assert len(thinned(list(range(1000)), 10)) == 10
    assert thinned([1, 2], 10) == [1, 2]


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "page.html"
    report_command(
        [folder / "runs" / "xcal"], out=out, images=1, maps="gradcam", figures=None, live=False
    )
    assert "The report on 1 run is in" in capsys.readouterr().out
    assert out.stat().st_size > 1_000_000
    with pytest.raises(UserError, match="holds no finished run"):
        report_command(
            [tmp_path / "nothing"], out=out, images=1, maps="gradcam", figures=None, live=False
        )


def test_a_studys_results_are_said_to_be_reported_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    with pytest.raises(UserError, match="python -m reproduce report"):
        gather([tmp_path])
