"""Small slips that everybody makes, and what is said of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scans import RAMP, dicom
from support import ROOT, TINY, sets
from xcal.data.catalog import load
from xcal.data.image_store import read_info
from xcal.errors import how_to_install
from xcal.experiments import make_experiment
from xcal.federation.card import notices
from xcal.federation.evaluation import Predictions

Invoke = Callable[..., tuple[int, str, str]]


# --- a decimal comma ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--set", "epsilon=0,5", "--out", "run"),
        ("plan", "--epsilon", "0,5", "--units", "100"),
        ("plan", "--epsilon=0,5", "--units", "100"),
    ],
)
def test_a_decimal_comma_is_understood_but_not_taken(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(*words)
    assert code == 2 and "Did you mean 0.5?" in err
    assert list(tmp_path.iterdir()) == []


def test_a_decimal_comma_in_a_file(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("rounds = 2\nepsilon = 0,5  # strict\n")
    code, _, err = invoke("run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run"))
    assert code == 2 and "Did you mean 0.5?" in err


# --- DICOM files without an ending ----------------------------------------------------------------


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of scans whose names end in nothing, or in the last number of a UID."""
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "store"))
    folder = tmp_path / "scans"
    for i in range(24):
        path = folder / ("sick", "well")[i % 2] / (f"IM{i:04d}" if i % 4 else f"1.2.840.{i}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dicom(np.roll(RAMP, i, axis=1), patient=f"p{i // 2 % 6}"))
    (folder / "notes").write_text("not an image\n")
    return folder


@pytest.mark.parametrize("kind", ["auto", "dicom"])
@pytest.mark.parametrize("zipped", [False, True])
def test_scans_without_an_ending_are_found(
    invoke: Invoke, scans: Path, tmp_path: Path, kind: str, zipped: bool
) -> None:
    source = scans
    if zipped:
        source = tmp_path / "scans.zip"
        with zipfile.ZipFile(source, "w") as packed:
            for path in scans.rglob("*"):
                if path.is_file():
                    packed.write(path, path.relative_to(scans))
    code, _, err = invoke("data", "import", str(source), "--pixels", "16", "--kind", kind)
    assert code == 0, err
    found = load("scans", pixels=16)
    assert sum(len(images) for _, images in found.splits()) == 24
    assert found.group_name == "patient" and found.classes == ("sick", "well")


def test_kind_dicom_takes_nothing_else(invoke: Invoke, scans: Path) -> None:
    Image.new("RGB", (8, 8)).save(scans / "sick" / "logo.png")
    code, _, err = invoke("data", "import", str(scans), "--pixels", "16", "--kind", "dicom")
    assert code == 0, err
    assert sum(len(images) for _, images in load("scans", pixels=16).splits()) == 24
    for path in list(scans.rglob("*")):
        if path.is_file() and path.suffix != ".png":
            path.unlink()
    code, _, err = invoke("data", "import", str(scans), "--kind", "dicom", "--name", "none")
    assert code == 2 and "no DICOM file" in err


# --- a table that was passed over -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (b"scan,finding\nsick/0.png,sick\n", "--path-column and --label-column"),
        (b"path,finding\nsick/0.png,sick\n", "--label-column"),
        (b"path,label\n\xff\xfe\n", "UTF-8"),
        (b"", "is empty"),
    ],
)
def test_a_table_that_is_passed_over_says_why(
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: bytes,
    why: str,
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "store"))
    folder = tmp_path / "set"
    for i in range(24):
        path = folder / ("sick", "well")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (i, 0, 0)).save(path)
    (folder / "table.csv").write_bytes(table)
    code, out, err = invoke("data", "import", str(folder), "--pixels", "16")
    assert code == 0, err
    noted = [note for note in read_info("set", 16).notes if "passed over" in note]
    assert len(noted) == 1 and why in noted[0] and "table.csv" in noted[0]
    assert "passed over" in out
    # Where folders do not say the classes either, the refusal says it too.
    for path in list(folder.rglob("*.png")):
        path.rename(folder / path.name)
    code, _, err = invoke("data", "import", str(folder), "--pixels", "16", "--name", "other")
    assert code == 2 and "passed over" in err and why in err


# --- modules of one's own, and extras -------------------------------------------------------------


@pytest.mark.slow
def test_a_module_in_the_working_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from support import micro as network\n")
    words = sets(rounds=1, network="mine:network", road_images=0, road_test_images=0)
    done = subprocess.run(
        [sys.executable, "-m", "xcal", "run", *words, "--out", "run"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
            "PYTHONSAFEPATH": "1",  # as the installed command, which does not add the folder
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_names_the_wheel_and_the_clone(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ".whl[dicom]" in how_to_install("dicom") and "'.[dicom]'" in how_to_install("dicom")
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setattr("xcal.cli.run.find_spec", lambda name: None)
    code, _, err = invoke("run", "--engine", "flower", "--out", str(tmp_path / "run"))
    assert code == 2 and how_to_install("flower") in err


# --- results that need a word ---------------------------------------------------------------------


def _said(predicted: list[int], confidence: float) -> Predictions:
    labels = np.arange(len(predicted)) % 3
    probabilities = np.full((len(predicted), 3), (1 - confidence) / 2)
    probabilities[np.arange(len(predicted)), predicted] = confidence
    return Predictions(
        labels, np.array(predicted), np.full(len(predicted), confidence), probabilities
    )


def _rounds(*values: float | None) -> list[dict[str, Any]]:
    return [{"round": i, "validation_macro_f1": value} for i, value in enumerate(values)]


def test_notices() -> None:
    names = ("a", "b", "c")
    assert notices(_said([0, 1, 2, 1], 0.9), names, _rounds(0.2, 0.85, 0.82)) == []
    (same,) = notices(_said([1, 1, 1], 0.6), names, [])
    assert "'b'" in same
    (certain,) = notices(_said([0, 1, 2], 0.999), names, _rounds(None, None))
    assert "100 %" in certain
    (fell,) = notices(_said([0, 1, 2], 0.9), names, _rounds(0.2, 0.85, 0.54))
    assert "0.85" in fell and "0.54" in fell and "round 2" in fell
    empty = Predictions(np.zeros(0, int), np.zeros(0, int), np.zeros(0), np.zeros((0, 3)))
    assert notices(empty, names, []) == []


def test_a_run_that_learnt_nothing_says_so(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = sets(rounds=1, lr=1e-6, road_images=0, road_test_images=0)
    code, shown, err = invoke("run", *words, "--out", str(out))
    assert code == 0, err
    told = json.loads((out / "result.json").read_text())["notices"]
    assert len(told) == 1 and "every test image" in told[0]
    assert told[0] in " ".join(shown.split())
    assert told[0] in (out / "card.md").read_text()
    code, _, err = invoke("report", str(out), "--out", str(tmp_path / "page.html"), "--images", "0")
    assert code == 0, err
    assert "calls every test image" in (tmp_path / "page.html").read_text()


# --- the preset, and the plan ---------------------------------------------------------------------


def test_the_preset_good_fits_itself_to_few_units(invoke: Invoke, tmp_path: Path) -> None:
    keys = {k: v for k, v in TINY.items() if k not in ("batch", "lr")}
    words = [w for k, v in keys.items() for w in ("--set", f"{k}={v}")]
    words += "--set preset=good --set rounds=1 --set road_images=0 --set road_test_images=0".split()
    code, out, err = invoke("run", *words, "--out", str(tmp_path / "run"))
    assert code == 0, err
    pinned = (tmp_path / "run" / "experiment.toml").read_text()
    units = min(
        c["units"] for c in json.loads((tmp_path / "run/result.json").read_text())["clients"]
    )
    assert f"expected_batch_size = {units}\n" in pinned
    assert "than the smallest client holds" in " ".join(out.split())
    code, _, err = invoke(
        "run", *words, "--set", "expected_batch_size=256", "--out", str(tmp_path / "own")
    )
    assert code == 2 and "256" in err  # what was given is not changed


def test_what_a_preset_fills_in_was_not_given() -> None:
    made = make_experiment({"preset": "good", "lr": 2.0})
    assert made.model_fields_set == {"preset", "lr"}


def test_a_plan_says_what_such_noise_reached(invoke: Invoke) -> None:
    words = "plan --method fl-dp --units 1000 --rounds 10 --epsilon".split()
    code, hard, err = invoke(*words, "0.5", "--expected-batch-size", "64")
    assert code == 0, err
    assert "nothing was learnt" in " ".join(hard.split()) and "all, from scratch" in hard
    code, easy, err = invoke(*words, "5", "--expected-batch-size", "256")
    assert code == 0, err
    assert "nothing was learnt" not in " ".join(easy.split()) and "linear head" in easy


def test_the_reached_table_is_of_the_committed_results() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from make_reached import TARGET, table
    finally:
        sys.path.pop(0)
    assert TARGET.read_text() == table()
