"""`xcal evaluate`, `xcal explain` and `xcal panel` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import xcal
from support import TINY

QUICK = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 6, "validation_images": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "fl"
    xcal.run(out, method="fl", **QUICK)
    return out


def test_evaluate_prints_one_json_object(call, run: Path) -> None:
    code, out, _ = call("evaluate", run, "--json")
    found = json.loads(out)
    result = json.loads((run / "result.json").read_text())
    assert code == 0
    assert found["classification"] == result["classification"]
    assert found["explanations"]["road"] == result["explanations"]["road"]


def test_evaluate_prints_a_table_with_every_metric(call, run: Path) -> None:
    code, out, _ = call("evaluate", run, "support:tiny", "--images", "4", "--against", run)
    assert code == 0
    for word in ("macro F1", "AUROC", "calibration", "ROAD", "insertion", "sanity", "agreement"):
        assert word in out
    assert "middle" in out and "sensitivity" in out


def test_explain_writes_a_picture_each_and_one_page(call, run: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20), (200, 60, 90)).save(tmp_path / "cell [bold].png")
    code, out, _ = call("explain", run, "test:0", tmp_path / "cell [bold].png", "--out", "made")
    assert code == 0
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == [
        "cell-bold-explained.png",
        "explanations.html",
        "secret-test-0-explained.png",
    ]
    assert "cell [bold].png" in out and "explanations.html" in out
    page = (tmp_path / "made" / "explanations.html").read_text()
    assert "secret-test-0" in page and "cell [bold].png" in page
    assert "no privacy guarantee (ε = ∞)" in page


def test_explain_without_matplotlib_writes_the_page_and_says_so(
    call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcal.plotting.find_spec", lambda _: None)
    code, out, _ = call("explain", run, "test:0", "--out", "made")
    assert code == 0 and ".whl[figures]" in out.replace("\n", "")
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["explanations.html"]


def test_panel_writes_its_picture(call, run: Path, tmp_path: Path) -> None:
    code, out, _ = call("panel", run, "--images", "2")
    assert code == 0 and "panel.png" in out
    with Image.open(tmp_path / "panel.png") as drawn:
        assert drawn.height > drawn.width > 200  # two images, a row each


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["evaluate", "nowhere"], "holds no run"),
        (["evaluate", "RUN", "nowhere"], "no data set called"),
        (["explain", "RUN", "nowhere.png"], "There is no image nowhere.png"),
        (["explain", "RUN", "test:99999"], "names no image"),
        (["explain", "RUN", "test:0", "--out", "taken"], "cannot be made"),
        (["panel", "RUN", "RUN"], "give one of them"),
        (["panel", "RUN", "--out", "nowhere/panel.png"], "was not saved"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    call, run: Path, tmp_path: Path, words: list[str], problem: str
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    code, _, complaint = call(*[str(run) if word == "RUN" else word for word in words])
    assert code == 2
    assert complaint.startswith("xcal: ") and complaint.count("\n") == 1
    assert problem in complaint and "Traceback" not in complaint
