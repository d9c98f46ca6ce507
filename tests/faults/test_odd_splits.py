"""Whatever `xcal run` accepts of small and odd data ends; what it refuses costs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import micro
from xcal.dp.ledger.rows import read_rows, verify
from xcal.federation.ledgers_of import find_ledgers

Invoke = Callable[..., tuple[int, str, str]]

SHORT = {
    "method": "fl-dp",
    "unit": "record",
    "network": "support:micro",
    "pixels": 16,
    "clients": 2,
    "rounds": 2,
    "batch": 10,
    "epsilon": 3.0,
    "delta": 1e-3,
    "threads": 1,
    "train_images": 60,
    "road_images": 3,
    "road_test_images": 3,
}


def words(**keys: Any) -> list[str]:
    found = []
    for key, value in {**SHORT, **keys}.items():
        found += ["--set", f"{key}={json.dumps(value)}"]
    return found


def charged(folder: Path) -> int:
    if not folder.exists():
        return 0
    return sum(len(read_rows(p)) - 1 for p in folder.rglob("ledger.sqlite"))


FINISHES: dict[str, tuple[dict[str, Any], int]] = {  # keys, and how many things are not measured
    "no test images": ({"data": "odd_data:no_test", "method": "xcal-steered"}, 1),
    "no validation images": ({"data": "odd_data:no_validation"}, 1),
    "training images only": ({"data": "odd_data:training_only"}, 2),
    "training images only, without a guarantee": (
        {"data": "odd_data:training_only", "method": "fl"},
        2,
    ),
    "training images only, a trusted server": (
        {"data": "odd_data:training_only", "method": "dp-fedavg"},
        2,
    ),
    "a class without test images": ({"data": "odd_data:absent_in_test"}, 1),
    "one class in test": ({"data": "odd_data:one_class_in_test"}, 1),
    "one image of a class": ({"data": "odd_data:one_image_of_a_class"}, 0),
    "one image of a class, by label": (
        {"data": "odd_data:one_image_of_a_class", "partition": "label-extreme"},
        0,
    ),
    "one group, torn": ({"data": "odd_data:one_group", "keep_groups": False}, 0),
    "one group at one client": (
        {"data": "odd_data:one_group", "unit": "group", "clients": 1, "batch": 1},
        0,
    ),
    "a batch of all units": ({"data": "support:tiny", "batch": 30, "keep_groups": False}, 0),
    "one unit a client": (
        {"data": "odd_data:few", "clients": 4, "batch": 1, "keep_groups": False},
        0,
    ),
    "one unit a client, all pooled": (
        {"data": "odd_data:few", "method": "centralized", "batch": 4},
        0,
    ),
    "nothing measured on purpose": (
        {"data": "support:tiny", "validation_images": 0, "road_images": 0, "road_test_images": 0},
        0,
    ),
    "no maps, and none needed": (
        {"data": "support:tiny", "network": "odd_data:blind"},
        1,
    ),
}


@pytest.mark.parametrize("what", FINISHES)
def test_what_is_accepted_ends_and_can_be_looked_at(
    invoke: Invoke, tmp_path: Path, what: str
) -> None:
    keys, unmeasured = FINISHES[what]
    run = tmp_path / "run"
    code, out, err = invoke("run", *words(**keys), "--out", str(run))
    assert code == 0, err
    result = json.loads((run / "result.json").read_text())
    assert len(result["unmeasured"]) == unmeasured
    assert json.loads((run / "run.json").read_text()).get("unmeasured", []) == result["unmeasured"]
    shown = " ".join(out.split())
    assert all(" ".join(text.split()) in shown for text in result["unmeasured"])
    assert shown.find("measured") < shown.find("macro F1") or not unmeasured
    assert (result["macro_f1"] is None) == (result["classification"]["images"] == 0)
    assert all(verify(path).ok for path in find_ledgers(run))
    assert (run / "card.md").exists()
    # what looks at a run afterwards ends too, and so does a run that was cut off right before it
    (run / "result.json").unlink()
    code, _, err = invoke("run", "--resume", str(run))
    assert code == 0, err
    again = json.loads((run / "result.json").read_text())
    assert {k: again[k] for k in ("macro_f1", "clients", "classification")} == {
        k: result[k] for k in ("macro_f1", "clients", "classification")
    }
    code, out, err = invoke("evaluate", str(run), "--json")
    assert code == 0, err
    assert json.loads(out)["classification"]["macro_f1"] == result["classification"]["macro_f1"]
    assert invoke("evaluate", str(run))[0] == 0
    code, _, err = invoke("report", str(run), "--out", str(tmp_path / "report.html"))
    assert code == 0, err
    code, _, err = invoke("explain", str(run), "test:0", "--out", str(tmp_path / "explained"))
    possible = len(result["classification"]["confusion_matrix"]) and result["macro_f1"] is not None
    assert code == (0 if possible and "blind" not in str(keys) else 2), err
    assert "Traceback" not in err


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # keys, and a word of the sentence
    "no training images": ({"data": "odd_data:nothing_at_all"}, "0 groups"),
    "one group for two clients": (
        {"data": "odd_data:one_group", "unit": "group", "batch": 1},
        "clients",
    ),
    "a batch above the units": ({"data": "support:tiny", "batch": 31}, "batch"),
    "more clients than units": ({"data": "odd_data:few", "clients": 5, "batch": 1}, "clients"),
    "a method that follows validation": (
        {"data": "odd_data:no_validation", "method": "adap-dpfl"},
        "validation",
    ),
    "too few pixels": (
        {"data": "support:tiny", "network": "odd_data:narrow", "method": "fl"},
        "16×16 pixels",
    ),
    "too few pixels for clipping": (
        {"data": "support:tiny", "network": "odd_data:narrow"},
        "16×16 pixels",
    ),
    "other logits": ({"data": "support:tiny", "network": "odd_data:two_logits"}, "3 classes"),
    "a signal without maps": (
        {"data": "support:tiny", "network": "odd_data:blind", "method": "xcal-steered"},
        "cam_layer",
    ),
    "stages that are none": (
        {"data": "support:tiny", "network": "efficientnet_b0", "head_reads": "stages:7-12"},
        "stages",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_end_is_refused_and_costs_nothing(
    invoke: Invoke, tmp_path: Path, what: str
) -> None:
    run = tmp_path / "run"
    keys, word = REFUSED[what]
    code, _, err = invoke("run", *words(**keys), "--out", str(run))
    assert code == 2, err
    assert word in err
    assert len(err.strip().splitlines()) == 1, err
    assert charged(run) == 0
    assert not run.exists()


def test_weights_of_other_shapes_are_refused_first(invoke: Invoke, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {k: torch.zeros(*v.shape, 2) for k, v in micro(3).state_dict().items()}
    save_file(weights, tmp_path / "other.safetensors")
    keys = {"data": "support:tiny", "weights": str(tmp_path / "other.safetensors")}
    code, _, err = invoke("run", *words(**keys), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "shape" in err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_refused_first(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    keys = words(data="support:tiny")
    code, _, err = invoke("run", *keys, "--out", str(tmp_path / "file" / "run"))
    assert code == 2
    assert len(err.strip().splitlines()) == 1
