"""A trained model as one file that runs without xcal: TorchScript, or ONNX (extra `export`)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch import Tensor

from xcal.data.normalize import IMAGENET_MEAN, IMAGENET_STD, to_tensor
from xcal.errors import UserError, how_to_install
from xcal.explain.inference import predict_logits, undisturbed
from xcal.report.trained import Trained

ABOUT = "xcal.json"
"""What a TorchScript file's description is called; in an ONNX file it is the metadata `xcal`."""
TOLERANCE = 1e-4
"""How far the exported model's logits may be from the original's, in shares of the largest."""

Run = Callable[[Tensor], Tensor]


def description(trained: Trained, about: dict[str, Any]) -> dict[str, Any]:
    """What whoever runs the file has to know: classes, preprocessing, how to read the output."""
    pixels = trained.experiment.pixels
    return {
        "classes": list(trained.classes),
        "input": {
            "name": "images",
            "shape": ["images", 3, pixels, pixels],
            "type": "float32",
            "colors": "RGB; gray as three equal channels",
            "resize": "whole image to the square, bicubic, antialiased",
            "scale": 1 / 255,
            "mean": list(IMAGENET_MEAN),
            "std": list(IMAGENET_STD),
            "order": "value * scale, minus mean, over std",
        },
        "output": {
            "name": "logits",
            "shape": ["images", len(trained.classes)],
            "confidences": "sigmoid(logits / temperature), each finding by itself"
            if trained.run.multi_label
            else "softmax(logits / temperature)",
            "temperature": trained.temperature,
            "temperature_fitted_on": trained.fitted_on,
        },
        **about,
    }


def exported(trained: Trained, to: str, about: dict[str, Any]) -> tuple[bytes, float]:
    """The file, and the largest difference of its logits from the original's on made-up images.

    Refused where they differ by more than rounding: what was recorded is then not the network.
    """
    content, run = (_torchscript if to == "torchscript" else _onnx)(
        trained, json.dumps(description(trained, about), ensure_ascii=False)
    )
    worst = 0.0
    for count in (1, 2, 5):  # another number of images than it was recorded with
        images = _made_up(trained, count)
        expected = predict_logits(trained.model, images)
        difference = float((run(images) - expected).abs().max())
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:
            raise UserError(
                f"The network as {to} answers otherwise than the original (logits differ by"
                f" {difference:.2g}): its forward pass depends on its input in a way that"
                " cannot be recorded. Nothing was written."
            )
        worst = max(worst, difference)
    return content, worst


def _torchscript(trained: Trained, about: str) -> tuple[bytes, Run]:
    with _recording(trained, "torchscript"):
        traced = torch.jit.trace(trained.model, _made_up(trained, 2), check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file, _extra_files={ABOUT: about})
        file.seek(0)
        again = torch.jit.load(file)

    def run(images: Tensor) -> Tensor:
        with torch.no_grad(), catch_warnings():
            simplefilter("ignore")
            return again(images)

    return file.getvalue(), run


def _onnx(trained: Trained, about: str) -> tuple[bytes, Run]:
    try:
        import onnx
        import onnxruntime
    except ImportError:
        raise UserError(f"Exporting to ONNX needs onnx: {how_to_install('export')}.") from None
    with _recording(trained, "onnx"), TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.onnx"
        # The exporter that records, not the one that compiles: measured ten times as fast here,
        # and it needs no further package.
        torch.onnx.export(
            trained.model,
            (_made_up(trained, 2),),
            file,
            dynamo=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": {0: "images"}, "logits": {0: "images"}},
        )
        made = onnx.load(file)
    onnx.helper.set_model_props(made, {"xcal": about})
    onnx.checker.check_model(made)
    content = made.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        return torch.from_numpy(logits)

    return content, run


@contextmanager
def _recording(trained: Trained, to: str) -> Iterator[None]:
    """Within, a network is recorded; what its own code cannot be recorded for is a sentence.

    Both ways are called deprecated by torch and have no successor that others can read; what of a
    recording goes wrong is found by running it, so the recorder's own warnings are not shown.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # a fused layer that no other runtime knows
        with undisturbed(trained.model), torch.no_grad(), catch_warnings():
            simplefilter("ignore")
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # torch's exporters raise almost anything
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UserError(
            f"The network {trained.experiment.network!r} cannot be written as {to}"
            f" ({type(error).__name__}: {said})."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _made_up(trained: Trained, count: int) -> Tensor:
    """Images of noise: no picture of anybody is needed to compare two networks."""
    pixels = trained.experiment.pixels
    noise = np.random.default_rng(count).integers(0, 256, (count, pixels, pixels, 3), np.uint8)
    return to_tensor(noise)
