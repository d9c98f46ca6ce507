"""`maps = "auto"` as a user meets it: in a run, in explain, panel, report and evaluate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import xcal
from support import TINY, sets
from xcal.cli.app import main
from xcal.config import Experiment
from xcal.experiments import make_experiment
from xcal.explain.choosing import MAPS

QUICK = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 4, "validation_images": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("maps") / "fl"
    xcal.run(out, method="fl", **QUICK, maps="auto")
    return out


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The command in this process: its exit code, what it printed, what it complained of."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["xcal", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return command


def test_a_run_records_what_it_chose(run: Path) -> None:
    found = json.loads((run / "result.json").read_text())["explanations"]
    choice = found["choice"]
    assert found["maps"] == choice["method"] and choice["images"] > 0
    assert {"gradcam", "occlusion", "rise", "occlusion+gradcam"} <= choice["road"].keys()
    assert 'maps = "auto"' in (run / "experiment.toml").read_text()


@pytest.mark.slow
def test_one_choice_for_all_commands_made_once(
    call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = json.loads((run / "result.json").read_text())["explanations"]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("chosen a second time")

    monkeypatch.setattr("xcal.federation.outcome.choose_map", never)
    code, out, _ = call("explain", run, "test:0", "--out", "made")
    assert code == 0 and f"Maps by {recorded['maps']}" in out
    assert "public validation images" in out and "cost no ε" in out
    assert "cost no ε" in (tmp_path / "made" / "explanations.html").read_text()
    code, out, _ = call("panel", run, "--images", "1")
    assert code == 0 and "fl: Maps by" in out and "cost no ε" in out
    assert call("report", run, "--images", "1")[0] == 0
    assert "cost no ε" in (tmp_path / "report.html").read_text()
    code, out, _ = call("evaluate", run, "--json")
    assert code == 0
    assert json.loads(out)["explanations"]["road"] == recorded["road"]
    assert not (run / "maps.json").exists()


def test_a_map_asked_for_is_taken(call, run: Path) -> None:
    before = {p.name for p in run.iterdir()}
    code, out, _ = call("explain", run, "test:0", "--maps", "occlusion+gradcam")
    assert code == 0 and "occlusion + Grad-CAM, as asked for" in out
    code, out, _ = call("evaluate", run, "--images", "2", "--map", "cell-occlusion", "--json")
    assert code == 0 and json.loads(out)["explanations"]["maps"] == "cell-occlusion"
    assert {p.name for p in run.iterdir()} == before


def test_images_nobody_called_public_choose_nothing(
    call, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "maps.json").unlink(missing_ok=True)
    monkeypatch.setattr("xcal.data.catalog.is_public", lambda name: False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured on images that are not public")

    monkeypatch.setattr("xcal.federation.outcome.choose_map", never)
    code, out, _ = call("explain", run, "test:0")
    assert code == 0
    assert "Maps by Grad-CAM, the fixed default; none was chosen: nobody agreed" in out
    assert not (run / "maps.json").exists()


@pytest.mark.parametrize("words", [["explain", "RUN", "test:0"], ["panel", "RUN"]])
def test_a_name_that_is_no_maps_is_refused(call, run: Path, words: list[str]) -> None:
    words = [str(run) if word == "RUN" else word for word in words]
    code, _, complaint = call(*words, "--maps", "lime")
    assert code == 2 and complaint.startswith("xcal: ") and "no explanation map" in complaint
    code, _, complaint = call("run", *sets(maps="lime"), "--out", "new")
    assert code == 2 and "no explanation map" in complaint and not Path("new").exists()


def test_the_default_leaves_what_a_run_is_known_by_alone() -> None:
    keys = {**TINY, "method": "fl-dp"}
    plain, chosen = make_experiment(keys), make_experiment({**keys, "maps": "auto"})
    assert "maps" not in plain.identity() and chosen.identity()["maps"] == "auto"
    told = Experiment.model_fields["maps"].description or ""
    assert all(name in told for name in MAPS if name not in ("gradient-input", "random"))
