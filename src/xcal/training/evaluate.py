"""Measuring a model on public images. Nothing here may see a client's training data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from xcal.data.images import Images
from xcal.data.sampling import to_tensor
from xcal.explain.classification import classification_metrics, macro_f1
from xcal.explain.faithfulness import insertion_deletion
from xcal.explain.gradcam import MapMethod, gradcam_maps
from xcal.explain.localisation import localisation
from xcal.explain.road import RoadSettings, road


@dataclass(frozen=True)
class Predictions:
    """What a model says of each image, in the images' order."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float64]  # softmax of the predicted class
    probabilities: NDArray[np.float64]  # (N, classes)

    def macro_f1(self) -> float:
        return float(macro_f1(self.labels, self.predicted, self.probabilities.shape[1]))

    def loss(self) -> float:
        """Mean cross-entropy; what the network gave no finite answer to counts as impossible."""
        true = np.nan_to_num(self.probabilities, nan=0.0)[np.arange(len(self.labels)), self.labels]
        return float(-np.log(np.maximum(true, 1e-12)).mean())

    def metrics(self) -> dict[str, Any]:
        """What clinicians ask of a classifier, as plain numbers."""
        return classification_metrics(self.labels, self.probabilities)


def predict(
    model: nn.Module, images: Images, *, device: str = "cpu", batch: int = 256
) -> Predictions:
    """Predictions in evaluation mode; the model comes back in the mode it had."""
    mode = model.training
    model.eval()
    pieces = []
    try:
        with torch.no_grad():
            for start in range(0, len(images), batch):
                pixels = np.asarray(images.pixels[start : start + batch])
                logits = model(to_tensor(pixels).to(device))
                pieces.append(torch.softmax(logits.double(), dim=1).cpu().numpy())
    finally:
        model.train(mode)
    probabilities = np.concatenate(pieces) if pieces else np.zeros((0, 1))
    # A network of non-finite weights predicts nothing: call it class 0 with no confidence.
    shown = np.nan_to_num(probabilities, nan=0.0)
    predicted = shown.argmax(axis=1).astype(np.int64)
    return Predictions(
        images.labels,
        predicted,
        shown[np.arange(len(predicted)), predicted],
        probabilities,
    )


def explain_road(model: nn.Module, images: Images, *, device: str = "cpu") -> dict[str, Any]:
    """ROAD of the model's Grad-CAM on these images, and what it cost in seconds."""
    began = time.monotonic()
    inputs = to_tensor(np.asarray(images.pixels)).to(device)
    found = road(model, inputs, gradcam_maps(model, inputs), RoadSettings()).summary()
    return {**found, "seconds": round(time.monotonic() - began, 3)}


def explanation_metrics(
    model: nn.Module, images: Images, *, device: str = "cpu", maps_by: MapMethod = "gradcam"
) -> dict[str, Any]:
    """All measures of the model's maps: ROAD, insertion and deletion, localisation."""
    began = time.monotonic()
    inputs = to_tensor(np.asarray(images.pixels)).to(device)
    maps = gradcam_maps(model, inputs, method=maps_by)
    result: dict[str, Any] = {"maps": maps_by}
    result["road"] = road(model, inputs, maps, RoadSettings()).summary()
    curves = insertion_deletion(model, inputs, maps)
    result["insertion_auc"] = float(curves.insertion_auc.mean()) if len(images) else None
    result["deletion_auc"] = float(curves.deletion_auc.mean()) if len(images) else None
    if images.masks is not None:
        result["localisation"] = localisation(maps, torch.from_numpy(images.masks)).summary()
    result["seconds"] = round(time.monotonic() - began, 3)
    return result
