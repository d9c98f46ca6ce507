"""Images that show several findings at once: imported, trained, measured, predicted, explained."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import xcal
from support import micro, tiny
from xcal.data.catalog import load
from xcal.data.importing import import_dataset
from xcal.data.partition import partition
from xcal.dp.clipping import ClippingEngine
from xcal.errors import UserError
from xcal.metrics.classification import auroc_per_class
from xcal.metrics.metric_registry import classification_metrics

Invoke = Callable[..., tuple[int, str, str]]
FINDINGS = ("Effusion", "Mass", "Nodule")
KEYS = {
    "method": "fl-dp",
    "network": "small",
    "epsilon": 8.0,
    "delta": 1e-3,
    "clients": 2,
    "rounds": 1,
    "expected_batch_size": 8,
    "pixels": 32,
    "validation_images": 10,
    "workers": 1,
}


@pytest.fixture(autouse=True)
def site_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def shown(number: int) -> list[str]:
    """Which findings image `number` shows: every combination in turn."""
    return [name for k, name in enumerate(FINDINGS) if number >> k & 1]


def scans(folder: Path, count: int = 96) -> Path:
    """Pictures with a bright corner for each finding, two of one patient, and their table."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        pixels = rng.integers(60, 90, (32, 32, 3), dtype=np.uint8)
        for k, corner in enumerate(((0, 0), (0, 20), (20, 0))):
            if FINDINGS[k] in shown(i):
                pixels[corner[0] : corner[0] + 12, corner[1] : corner[1] + 12] = 230
        Image.fromarray(pixels).save(folder / f"{i}.png")
        found = shown(i)
        rows.append(
            {
                "image": f"{i}.png",
                "label": "|".join(found) or "No Finding",
                "patient": f"p{i // 2}",
                **{name: int(name in found) for name in FINDINGS},
            }
        )
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder / "table.csv"


def words(keys: dict[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.slow
def test_from_a_table_to_predictions(invoke: Invoke, tmp_path: Path) -> None:
    table = scans(tmp_path / "scans")
    code, out, err = invoke("data", "import", str(table), "--name", "chest", "--pixels", "32")
    assert code == 0, err
    assert "several of the 3 findings" in out
    data = load("chest")
    assert data.classes == FINDINGS and data.multi_label
    for _, images in data.splits():
        for name, labels in zip(images.ids, images.labels, strict=True):
            assert [FINDINGS[k] for k in np.flatnonzero(labels)] == shown(int(Path(name).stem))
    code, out, err = invoke("run", *words({**KEYS, "data": "chest"}), "--out", "run")
    assert code == 0, err
    result = json.loads(Path("run/result.json").read_text())
    found = result["classification"]
    assert set(found["auroc_per_finding"]) == set(FINDINGS)
    told = [v for v in found["auroc_per_finding"].values() if v is not None]
    assert found["auroc"] == pytest.approx(np.mean(told))
    assert result["unit"] == "group" and result["clients"][0]["epsilon_spent"] <= 8.0
    assert result["road"] is None and any("findings" in text for text in result["unmeasured"])
    with np.load("run/predictions.npz") as saved:  # each by itself: no softmax
        assert saved["label"].shape == saved["probabilities"].shape == (len(data.test), 3)
        again = classification_metrics(saved["label"], saved["probabilities"])
    assert again["auroc_per_class"] == found["auroc_per_class"]
    card = Path("run/card.md").read_text()
    assert "3 findings, each told by itself" in card and "| Mass |" in card

    code, out, err = invoke("predict", "run", "scans", "--out", "p.csv", "--no-calibrate")
    assert code == 0, err
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert len(rows) == 96
    for row in rows:
        likely = [n for n in FINDINGS if float(row[f"confidence: {n}"]) >= 0.5]
        assert row["findings"] == "|".join(likely)
    trained = xcal.load("run")
    got = trained.predict([tmp_path / "scans" / "5.png"])
    assert got.confidences.shape == (1, 3)
    assert trained.temperature == 1.0
    logits = torch.from_numpy(trained.logits([tmp_path / "scans" / "5.png"]))
    np.testing.assert_allclose(got.confidences, torch.sigmoid(logits).numpy(), rtol=1e-9)

    code, out, err = invoke("explain", "run", "scans/3.png", "--finding", "mass", "--out", "maps")
    assert code == 0, err
    assert "Mass" in out and Path("maps/3-explained.png").exists()
    assert invoke("explain", "run", "scans/3.png", "--out", "maps")[0] == 0
    code, _, err = invoke("explain", "run", "scans/3.png", "--finding", "Hernia")
    assert code == 2 and "Effusion, Mass, Nodule" in err
    code, out, _ = invoke("evaluate", "run", "--json")
    assert json.loads(out)["classification"]["auroc_per_finding"] == found["auroc_per_finding"]
    assert invoke("evaluate", "run")[0] == 0
    assert invoke("report", "run", "--out", "report.html")[0] == 0
    assert "AUROC by finding" in Path("report.html").read_text()
    code, _, err = invoke("panel", "run", "--out", "panel.png")
    assert code == 2 and "findings" in err


def test_a_column_for_every_finding(invoke: Invoke, tmp_path: Path) -> None:
    table = scans(tmp_path / "scans", 24)
    code, _, err = invoke(
        "data", "import", str(table), "--name", "columns", "--pixels", "16",
        "--label-column", "Mass,Nodule",
    )  # fmt: skip
    assert code == 0, err
    data = load("columns")
    assert data.classes == ("Mass", "Nodule") and data.group_name == "patient"
    for name, labels in zip(data.train.ids, data.train.labels, strict=True):
        found = shown(int(Path(name).stem))
        assert labels.tolist() == [int("Mass" in found), int("Nodule" in found)]


def test_a_cell_that_is_neither_0_nor_1_is_named(invoke: Invoke, tmp_path: Path) -> None:
    table = scans(tmp_path / "scans", 24)
    table.write_text(table.read_text().replace("3.png,Effusion|Mass,p1,1", "3.png,x|y,p1,perhaps"))
    code, _, err = invoke("data", "import", str(table), "--label-column", "Effusion,Mass")
    assert code == 2 and "'perhaps'" in err and "3.png" in err
    code, _, err = invoke("data", "import", str(table), "--label-column", "Mass,Hernia")
    assert code == 2 and "'Hernia'" in err


@pytest.mark.parametrize("method", ["xcal-steered", "xcal-paper"])
def test_methods_whose_signal_compares_classes_refuse(
    invoke: Invoke, tmp_path: Path, method: str
) -> None:
    import_dataset(scans(tmp_path / "scans", 48), name="chest", pixels=32)
    keys = words({**KEYS, "data": "chest", "method": method})
    code, _, err = invoke("run", *keys, "--out", "run")
    assert code == 2 and "several findings" in err and not Path("run").exists()


@pytest.mark.parametrize("kind", ["label", "label-extreme"])
def test_a_label_shift_is_refused(invoke: Invoke, tmp_path: Path, kind: str) -> None:
    import_dataset(scans(tmp_path / "scans", 48), name="chest", pixels=32)
    code, _, err = invoke(
        "run", *words({**KEYS, "data": "chest", "partition": kind}), "--out", "run"
    )
    assert code == 2 and "iid" in err and not Path("run").exists()
    parts = partition(load("chest").train, 2, unit="group")
    assert sum(len(shard.indices) for shard in parts.shards) == len(load("chest").train)


def findings_of(images: object, number: int) -> torch.Tensor:
    """Two findings that each image of `tiny` shows or not."""
    return torch.stack([torch.arange(number) % 2, torch.arange(number) // 2 % 2], dim=1)


def test_objects_of_a_script(tmp_path: Path) -> None:
    """A Dataset whose labels are vectors, a loss of torch with weights for rare findings."""
    data = tiny()
    sets = [
        TensorDataset(
            torch.from_numpy(images.pixels).permute(0, 3, 1, 2), findings_of(images, len(images))
        )
        for _, images in data.splits()
    ]
    keys = {k: v for k, v in KEYS.items() if k not in ("pixels", "network")}
    result = xcal.run(
        tmp_path / "run",
        data=tuple(sets),
        classes=("even", "low"),
        model=lambda classes: micro(classes, seed=0),
        loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0])),
        **keys,
    )
    assert set(result["classification"]["auroc_per_finding"]) == {"even", "low"}
    wrong = TensorDataset(sets[0].tensors[0], 2 * sets[0].tensors[1])
    with pytest.raises(UserError, match="0 or 1 for each of the 2 findings"):
        xcal.run(tmp_path / "no", data=(wrong, None, None), classes=("even", "low"), **keys)
    assert not (tmp_path / "no").exists()


def test_the_sum_is_that_of_one_image_at_a_time_under_binary_cross_entropy() -> None:
    model = micro(4, seed=1).double()
    torch.manual_seed(0)
    images = torch.randn(9, 3, 16, 16).double()
    labels = torch.randint(0, 2, (9, 4))
    got = ClippingEngine(model).clipped_sum(images, labels, clip=0.05).gradients
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in zip(images, labels, strict=True):
        loss = F.binary_cross_entropy_with_logits(model(x[None])[0], y.double())
        found = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.cat([g.flatten() for g in found]).norm())
        for name, g in zip(want, found, strict=True):
            want[name] += g * min(1.0, 0.05 / norm)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def test_metrics_are_those_of_each_finding() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (40, 3))
    labels[:, 2] = 0  # nobody has the last: it has no AUROC and no part in means
    scores = rng.random((40, 3))
    found = classification_metrics(labels, scores)
    each = [
        auroc_per_class(labels[:, k], np.stack([1 - scores[:, k], scores[:, k]], axis=1))[1]
        for k in range(2)
    ]
    assert found["auroc_per_class"] == [pytest.approx(each[0]), pytest.approx(each[1]), None]
    assert found["auroc"] == pytest.approx(np.mean(each))
    assert found["images_per_class"] == labels.sum(0).tolist()
    hits = ((scores >= 0.5) & (labels == 1)).sum(0)
    called = (scores >= 0.5).sum(0)
    f1 = [2 * hits[k] / (called[k] + labels[:, k].sum()) for k in range(3)]
    assert found["macro_f1"] == pytest.approx(np.mean(f1))
    broken = scores.copy()
    broken[0] = np.nan
    assert classification_metrics(labels, broken)["broken_images"] == 1


@pytest.mark.slow
@pytest.mark.skipif("XCAL_DATA" not in os.environ, reason="XCAL_DATA names no folder of real data")
def test_the_findings_of_the_nih(invoke: Invoke) -> None:
    source = Path(os.environ["XCAL_DATA"]) / "nih-chest-xray-part1-128px.zip"
    code, _, err = invoke(
        "data", "import", str(source), "--name", "nih", "--task", "findings", "--pixels", "32"
    )
    assert code == 0, err
    data = load("nih")
    assert len(data.classes) == 14 and "Pneumonia" in data.classes
    assert data.train.labels.shape == (3544, 14)
    pneumonia = data.classes.index("Pneumonia")
    counts = [int(images.labels[:, pneumonia].sum()) for _, images in data.splits()]
    assert counts == [49, 3, 11]  # as the set's own description counts them
    assert [int(images.labels.any(1).sum()) for _, images in data.splits()] == [1557, 180, 506]
    keys = {**KEYS, "data": "nih", "expected_batch_size": 64, "network": "small"}
    assert invoke("run", *words(keys), "--out", "run")[0] == 0
    measured = json.loads(Path("run/result.json").read_text())["classification"]
    assert len(measured["auroc_per_finding"]) == 14 and 0 < measured["auroc"] < 1
