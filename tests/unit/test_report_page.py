"""The report as text: what stands in it, what does not, and its vector figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import xcal
from made_up import made_up_results
from support import TINY
from xcal.cli.report import report_command
from xcal.errors import UserError
from xcal.report.figures import Figure, Line, thinned
from xcal.report.report import Material, gather, report_page
from xcal.report.vector import save_figures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    keys = {**TINY, "road_test_images": 10, "signal_every": 1}
    xcal.run(base / "runs" / "xcal", method="xcal", **keys)
    made_up_results(base / "results", seeds=2)
    return base


@pytest.fixture(scope="module")
def material(folder: Path) -> Material:
    return gather([folder / "runs", folder / "results"])


def without_plotly(page: str) -> str:
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_is_whole_and_asks_for_nothing(material: Material) -> None:
    page = report_page(material, panel_images=1)
    assert page.count("* plotly.js v") == 1  # embedded once
    own = without_plotly(page)
    assert len(own) < 1_500_000
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]+", own)
    assert "https://" not in own and "http://" not in own
    for words in (
        "Does noise steered by explanations",
        "What is promised",
        "Each client&#39;s budget as it was spent",
        "Where the models look",
        "Versions and commands",
        "goes on with",
    ):
        assert words in own, words
    assert own.count('role="img"') == own.count('class="plot"') > 10
    assert "secret-" not in own  # names of files stay out


def test_names_from_outside_cannot_run(tmp_path: Path, folder: Path) -> None:
    evil = tmp_path / "<img src=x onerror=alert(1)>"
    evil.parent.mkdir(exist_ok=True)
    evil.symlink_to(folder / "runs" / "xcal")
    page = without_plotly(report_page(gather([evil]), panel_images=0))
    assert "<img src=x" not in page
    assert "\\u003cimg src=x" in page or "&lt;img src=x" in page


def test_what_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        gather([tmp_path])


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path, folder: Path) -> None:
    import shutil

    shutil.copytree(folder / "runs" / "xcal", tmp_path / "half")
    (tmp_path / "half" / "result.json").unlink()
    with pytest.raises(UserError, match="--resume"):
        gather([tmp_path / "half"])


def test_vector_figures(material: Material, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = Material((), material.studies[1:2], (), 0)
    count = save_figures(tmp_path / "figures", few)
    drawn = sorted((tmp_path / "figures").glob("*.svg"))
    assert len(drawn) == count == len(list((tmp_path / "figures").glob("*.pdf")))
    assert "macro F1" in drawn[0].read_text()


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
    report_command([folder / "runs" / "xcal"], out=out, images=1, figures=None)
    assert "The report on 1 run is in" in capsys.readouterr().out
    assert out.stat().st_size > 1_000_000
    with pytest.raises(UserError, match="holds no finished run"):
        report_command([tmp_path / "nothing"], out=out, images=1, figures=None)
