"""Reading finished runs back, and measuring their models again."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from support import TINY, tiny
from xcal.data.images import ImageData
from xcal.errors import UserError
from xcal.federation.files import read_tensors, write_tensors
from xcal.report.runs import evaluate_run, load_data, load_run

QUICK = {**TINY, "rounds": 2, "road_images": 0, "road_test_images": 6, "validation_images": 0}


def reordered(**options: Any) -> ImageData:
    """`tiny` with its classes in another order, labels to match."""
    data = tiny(**_known(options))
    order = ("right", "left", "middle")
    number = np.array([order.index(name) for name in data.classes])
    splits = {
        split: dataclasses.replace(images, labels=number[images.labels])
        for split, images in data.splits()
    }
    return dataclasses.replace(data, classes=order, **splits)


def other_classes(**options: Any) -> ImageData:
    return dataclasses.replace(tiny(**_known(options)), classes=("left", "middle", "round"))


def no_test(**options: Any) -> ImageData:
    data = tiny(**_known(options))
    return dataclasses.replace(data, test=data.test.take(np.arange(0)))


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in ("pixels", "seed")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "fl"
    xcal.run(out, method="fl", **QUICK)
    return out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """This module under a name that a data set can be given by."""
    name = "report_test_data"
    monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    return name


def test_a_loaded_run_gives_the_predictions_it_was_saved_with(folder: Path) -> None:
    run = load_run(folder)
    assert run.classes == ("left", "middle", "right")
    assert not any(module.training for module in run.model.modules())
    found = evaluate_run(run, load_data(run))
    result = json.loads((folder / "result.json").read_text())
    assert found["classification"] == result["classification"]
    for key in ("road", "insertion_auc", "deletion_auc"):
        assert found["explanations"][key] == result["explanations"][key]


def test_every_metric_is_there_and_is_json(folder: Path) -> None:
    run = load_run(folder)
    before = torch.random.get_rng_state()
    found = evaluate_run(run, load_data(run), explained=4, against=run)
    assert torch.equal(before, torch.random.get_rng_state())
    assert found["explanations"]["road"]["images"] == 4
    assert found["agreement"]["rank_correlation"] == pytest.approx(1)
    assert found["agreement"]["overlap"] == 1
    assert [stage["scrambled"] for stage in found["sanity_check"]][-1] == 1
    json.loads(json.dumps(found, allow_nan=False))


def test_without_images_to_explain_there_are_no_explanations(folder: Path) -> None:
    run = load_run(folder)
    found = evaluate_run(run, load_data(run), explained=0, against=run)
    assert found["explanations"] is None and found["agreement"] is None


def test_another_set_with_its_classes_in_another_order_judges_alike(
    folder: Path, here: str
) -> None:
    run = load_run(folder)
    own = evaluate_run(run, load_data(run), explained=0)
    other = evaluate_run(run, load_data(run, f"{here}:reordered"), explained=0)
    assert other["classification"] == own["classification"]


def test_a_set_with_other_classes_or_without_test_images_is_refused(
    folder: Path, here: str
) -> None:
    run = load_run(folder)
    with pytest.raises(UserError, match="has no class 'right'"):
        load_data(run, f"{here}:other_classes")
    with pytest.raises(UserError, match="no test images"):
        evaluate_run(run, load_data(run, f"{here}:no_test"))
    with pytest.raises(UserError, match="no data set called 'nowhere'"):
        load_data(run, "nowhere")


def test_folders_that_hold_no_finished_run_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        load_run(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(UserError, match="not finished"):
        load_run(copy)
    weights.write_bytes(content[:100])
    with pytest.raises(UserError, match="damaged"):
        load_run(copy)
    weights.write_bytes(content)
    tensors, about = read_tensors(weights) or ({}, {})
    tensors.popitem()
    write_tensors(weights, tensors, about)
    with pytest.raises(UserError, match="do not fit the network"):
        load_run(copy)
    write_tensors(weights, tensors, {"network": "support:micro"})
    with pytest.raises(UserError, match="does not name its classes"):
        load_run(copy)


def test_a_run_of_a_version_that_knew_fewer_keys_can_be_read(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "experiment": "of another version"}))
    lines = (copy / "experiment.toml").read_text().splitlines(keepends=True)
    (copy / "experiment.toml").write_text("".join(k for k in lines if not k.startswith("kappa")))
    run = load_run(copy)
    assert evaluate_run(run, load_data(run), explained=0)["classification"]["images"] == 45


def test_runs_of_different_sizes_are_not_compared(folder: Path) -> None:
    run = load_run(folder)
    larger = run._replace(experiment=run.experiment.model_copy(update={"pixels": 32}))
    with pytest.raises(UserError, match="compare runs of one size"):
        evaluate_run(run, load_data(run), against=larger)
