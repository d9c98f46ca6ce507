"""Measuring a model on public images. Nothing here may see a client's training data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from xcal.data.images import Images
from xcal.data.sampling import to_tensor
from xcal.explain.classification import macro_f1


@dataclass(frozen=True)
class Predictions:
    """What a model says of each image, in the images' order."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float64]  # softmax of the predicted class
    probabilities: NDArray[np.float64]  # (N, classes)

    def macro_f1(self) -> float:
        return float(macro_f1(self.labels, self.predicted, self.probabilities.shape[1]))


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
    probabilities = np.nan_to_num(probabilities, nan=0.0)
    predicted = probabilities.argmax(axis=1).astype(np.int64)
    return Predictions(
        images.labels,
        predicted,
        probabilities[np.arange(len(predicted)), predicted],
        probabilities,
    )
