"""A finished run in a user's hands: `xcal.load`, `xcal predict`, the lines on its card."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import xcal
from scans import dicom
from support import ROOT, TESTS, TINY, tiny
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.inference import predict_logits
from xcal.metrics.classification import calibration_error
from xcal.metrics.temperature import confidences, fit_temperature

QUICK = {**TINY, "rounds": 2, "road_images": 0, "road_test_images": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "fl"
    xcal.run(out, method="fl", **QUICK)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test images of the run as files: PNG and, below, JPEG, BMP."""
    out = tmp_path_factory.mktemp("images")
    (out / "below").mkdir()
    for i, name in enumerate(["a.png", "b.PNG", "below/c.bmp", "below/d, e.png"]):
        Image.fromarray(tiny().test.pixels[i]).save(out / name)
    (out / "notes.txt").write_text("no image")
    return out


def table(path: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def test_a_loaded_run_predicts_what_the_run_measured(run: Path) -> None:
    trained, test = xcal.load(run), tiny().test
    assert trained.classes == ("left", "middle", "right") and not trained.model.training
    found = trained.predict(list(test.pixels))
    right = np.mean(
        [n == trained.classes[k] for n, k in zip(found.names, test.labels, strict=True)]
    )
    result = json.loads((run / "result.json").read_text())
    assert right == pytest.approx(result["classification"]["accuracy"])
    direct = predict_logits(trained.model, to_tensor(test.pixels)).double().softmax(1).numpy()
    np.testing.assert_allclose(found.confidences, direct, rtol=1e-5)
    assert np.allclose(found.confidences.sum(1), 1) and not found.calibrated


def test_every_way_to_give_an_image_is_the_same_image(run: Path, folder: Path) -> None:
    trained = xcal.load(str(run))
    array = tiny().test.pixels[0]
    expected = to_tensor(array[None])[0]
    with Image.open(folder / "a.png") as picture:
        ways = [folder / "a.png", str(folder / "a.png"), array, picture]
        for way in ways:
            assert torch.equal(trained.preprocess(way), expected)
        one = trained.predict(folder / "a.png").confidences
        for given in (expected, expected[None], [expected], [array], array, array[None], picture):
            assert np.array_equal(trained.predict(given).confidences, one)
    assert trained.predict([]).names == ()
    gray = trained.preprocess(np.arange(400, dtype=np.uint16).reshape(20, 20) * 100)
    assert gray.shape == (3, 16, 16)
    for wrong in (3.0, np.zeros((4, 4, 3)), np.zeros((2, 2, 2, 2)), np.full((3, 3), np.nan)):
        with pytest.raises(UserError):
            trained.preprocess(wrong)
    with pytest.raises(UserError, match="make it with preprocess"):
        trained.predict(torch.zeros(2, 3, 8, 8))


def test_the_lines_on_the_card_run(run: Path, folder: Path, tmp_path: Path) -> None:
    card = (run / "card.md").read_text()
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) == 5
    code = code.replace("image.png", str(folder / "a.png"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=run,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{TESTS}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "'middle'" in done.stdout


def test_predict_writes_one_row_for_each_file(
    call, run: Path, folder: Path, tmp_path: Path
) -> None:
    code, said, _ = call("predict", run, folder, folder / "a.png", "--out", "found.csv")
    assert code == 0
    rows = table(tmp_path / "found.csv")
    names = ["a.png", "b.PNG", "below/c.bmp", "below/d, e.png", "a.png"]
    assert [row["file"] for row in rows] == [str(folder / name) for name in names]
    trained = xcal.load(run).calibrated()
    expected = trained.predict([row["file"] for row in rows])
    assert [row["class"] for row in rows] == list(expected.names)
    for row, values in zip(rows, expected.confidences, strict=True):
        found = [float(row[f"confidence: {name}"]) for name in trained.classes]
        assert found == pytest.approx(list(values), abs=1e-6)
        assert float(row["confidence"]) == max(found) and row["calibrated"] == "yes"
    count = len(tiny().validation)
    assert f"fitted on {count} public validation images of support:tiny" in said
    assert [p.name for p in tmp_path.iterdir()] == ["found.csv"]


def test_uncalibrated_confidences_are_called_so(call, run: Path, folder: Path) -> None:
    code, said, _ = call("predict", run, folder / "a.png", "--no-calibrate")
    assert code == 0 and "not calibrated" in said
    (row,) = table("predictions.csv")
    assert row["calibrated"] == "no"
    plain = xcal.load(run).predict(folder / "a.png")
    assert float(row["confidence"]) == pytest.approx(plain.confidence[0], abs=1e-6)


def test_images_nobody_called_public_calibrate_nothing(
    call, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcal.data.catalog.is_public", lambda name: False)
    code, said, _ = call("predict", run, folder / "a.png")
    assert code == 0 and "not calibrated: nobody agreed" in said
    assert [row["calibrated"] for row in table("predictions.csv")] == ["no"]


def test_bad_files_are_all_named_and_nothing_is_written(
    call, run: Path, folder: Path, tmp_path: Path
) -> None:
    whole = (folder / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "scan.dcm").write_bytes(b"no DICOM at all")
    (tmp_path / "notes.txt").write_text("no image")
    code, _, complaint = call(
        "predict", run, folder, "cut.png", "scan.dcm", "notes.txt", "nowhere.png"
    )
    assert code == 2 and complaint.count("\n") == 1 and "Traceback" not in complaint
    for name in ("cut.png", "scan.dcm", "notes.txt", "nowhere.png"):
        assert name in complaint
    assert not (tmp_path / "predictions.csv").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere", "a.png"],
        ["RUN", "a.png", "--out", "nowhere/predictions.csv"],
        ["RUN", "a.png", "--out", "a.png"],
        ["RUN", "a.png", "--out", "."],
        ["RUN", "empty"],
    ],
)
def test_bad_input_of_predict_is_one_sentence(
    call, run: Path, folder: Path, tmp_path: Path, words: list[str]
) -> None:
    image = (folder / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "empty").mkdir()
    code, _, complaint = call("predict", *[str(run) if word == "RUN" else word for word in words])
    assert code == 2 and complaint.startswith("xcal: ") and complaint.count("\n") == 1
    assert (tmp_path / "a.png").read_bytes() == image


def test_dicom_files_are_predicted_as_the_run_reads_them(call, run: Path, tmp_path: Path) -> None:
    scan = dicom(np.arange(400, dtype=np.uint16).reshape(20, 20))
    (tmp_path / "scan.dcm").write_bytes(scan)
    (tmp_path / "IM0001").write_bytes(scan)
    code, _, complaint = call("predict", run, "scan.dcm", "IM0001")
    assert code == 0, complaint
    first, second = table(tmp_path / "predictions.csv")
    assert first["confidence"] == second["confidence"]


@pytest.mark.parametrize("true", [0.4, 1.0, 3.0])
def test_the_temperature_is_found_and_calibrates(true: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(40_000, 4)) * 3
    truth = confidences(logits, true)
    labels = (truth.cumsum(1) < rng.random((len(logits), 1))).sum(1)
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(true, rel=0.03)
    assert calibration_error(labels, confidences(logits, found)) < 0.01
    broken = np.vstack([logits, np.full((5, 4), np.nan)])
    assert fit_temperature(broken, np.append(labels, [0] * 5)) == pytest.approx(found, rel=1e-6)
    assert np.isnan(confidences(broken)[-1]).all()


def test_few_images_that_are_all_right_do_not_make_certain() -> None:
    # Three right answers: 1 - 1/5 is what they speak for, so e^(5/T) = 8.
    assert fit_temperature(np.eye(3) * 5, [0, 1, 2]) == pytest.approx(5 / np.log(8), rel=1e-4)
    with pytest.raises(UserError):
        fit_temperature(np.full((2, 3), np.nan), [0, 1])
