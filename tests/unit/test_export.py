"""`xcal export`: the file runs without xcal, and answers what the run's model answers."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xcal
from support import TINY, tiny
from xcal.data.normalize import to_tensor

QUICK = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "fl"
    xcal.run(out, method="fl-dp", **{**QUICK, "network": "small", "pixels": 32})
    return out


def check_about(about: dict, trained) -> None:
    assert about["classes"] == list(trained.classes) == ["left", "middle", "right"]
    assert about["input"]["shape"] == ["images", 3, 32, 32]
    assert (about["epsilon"], about["delta"], about["unit"]) == (8, 1e-3, "record")
    assert about["output"]["temperature"] == pytest.approx(trained.calibrated().temperature)


def by_hand(pixels: np.ndarray, about: dict) -> np.ndarray:
    """Preprocessing as the file itself tells it, for images of its size."""
    told = about["input"]
    values = pixels.astype(np.float32) * told["scale"]
    values = (values - np.array(told["mean"])) / np.array(told["std"])
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2), dtype=np.float32)


def test_torchscript_answers_as_the_run(call, run: Path, tmp_path: Path) -> None:
    code, _, complaint = call("export", run, "--to", "torchscript", "--out", "model.pt")
    assert code == 0, complaint
    found = {"xcal.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.load(tmp_path / "model.pt", _extra_files=found)
    about, trained = json.loads(found["xcal.json"]), xcal.load(run)
    check_about(about, trained)
    pixels = tiny(pixels=32).test.pixels[:7]
    inputs = by_hand(pixels, about)
    np.testing.assert_allclose(inputs, to_tensor(pixels).numpy(), atol=1e-6)
    expected = trained.logits(list(pixels))
    np.testing.assert_allclose(model(torch.from_numpy(inputs)).detach(), expected, atol=1e-4)


def test_onnx_answers_as_the_run(call, run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    code, _, complaint = call("export", run, "--to", "onnx")
    assert code == 0, complaint
    session = onnxruntime.InferenceSession(str(tmp_path / "fl.onnx"))
    about = json.loads(session.get_modelmeta().custom_metadata_map["xcal"])
    trained = xcal.load(run)
    check_about(about, trained)
    pixels = tiny(pixels=32).test.pixels[:7]
    (logits,) = session.run(None, {"images": by_hand(pixels, about)})
    np.testing.assert_allclose(logits, trained.logits(list(pixels)), atol=1e-4)
    assert [p.name for p in tmp_path.iterdir()] == ["fl.onnx"]


class Fickle(nn.Module):
    """Takes another way for one image than for several: a recording knows one of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images)
        return logits if len(images) == 1 else logits + 1


@pytest.mark.parametrize("to", ["torchscript", "onnx"])
def test_a_model_that_cannot_be_recorded_is_not_written(
    call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    import xcal.report.trained as module

    real = module.load_run

    def fickle(folder: Path):
        loaded = real(folder)
        return loaded._replace(model=Fickle(loaded.model).eval())

    monkeypatch.setattr(module, "load_run", fickle)
    code, _, complaint = call("export", run, "--to", to)
    assert code == 2 and "answers otherwise" in complaint and complaint.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere", "--to", "onnx"],
        ["RUN", "--to", "onnx", "--out", "nowhere/model.onnx"],
        ["RUN", "--to", "onnx", "--out", "."],
    ],
)
def test_bad_input_of_export_is_one_sentence(call, run: Path, words: list[str]) -> None:
    code, _, complaint = call("export", *[str(run) if word == "RUN" else word for word in words])
    assert code == 2 and complaint.startswith("xcal: ") and complaint.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(
    call, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, _, complaint = call("export", run, "--to", "onnx")
    assert code == 2 and ".whl[export]" in complaint and "'.[export]'" in complaint
