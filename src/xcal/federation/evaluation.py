"""Measuring a model on public images. Nothing here may see a client's training data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from xcal.data.augment import View
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.dp.clipping.precision import double
from xcal.explain.choosing import DEFAULT, make_maps
from xcal.explain.faithfulness import insertion_deletion
from xcal.explain.gradcam import gradcam_maps
from xcal.explain.interval import mean_interval
from xcal.explain.localization import localization
from xcal.explain.road import RoadSettings, road
from xcal.methods.client_data import Inputs
from xcal.methods.feature_store import FeatureStore
from xcal.metrics.classification import finding_f1, macro_f1, mean_of_defined
from xcal.metrics.metric_registry import classification_metrics
from xcal.metrics.temperature import fit_temperature
from xcal.models.backbone import split_backbone


@dataclass(frozen=True)
class Predictions:
    """What a model says of each image, in the images' order.

    Of several findings labels and predictions are (N, findings), a 0 or 1 each.
    """

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float64]  # of the predicted class, or of the likeliest finding
    probabilities: NDArray[np.float64]  # (N, classes): softmax; of findings, each by itself

    def macro_f1(self) -> float:
        if self.labels.ndim == 2:
            found = map(finding_f1, self.labels.T, self.predicted.T)
            return mean_of_defined(list(found))
        return float(macro_f1(self.labels, self.predicted, self.probabilities.shape[1]))

    def loss(self) -> float:
        """Mean cross-entropy; what the network gave no finite answer to counts as impossible."""
        if self.labels.ndim == 2:
            right = np.where(self.labels == 1, self.probabilities, 1 - self.probabilities)
            return float(-np.log(np.maximum(np.nan_to_num(right, nan=0.0), 1e-12)).mean())
        true = np.nan_to_num(self.probabilities, nan=0.0)[np.arange(len(self.labels)), self.labels]
        return float(-np.log(np.maximum(true, 1e-12)).mean())

    def temperature(self) -> float | None:
        """The temperature that makes these confidences fit; None where nothing can tell."""
        if self.labels.ndim > 1 or not np.isfinite(self.probabilities).all(axis=1).any():
            return None
        with np.errstate(divide="ignore"):  # logits, but for a number that softmax does not see
            return fit_temperature(np.log(self.probabilities).clip(min=-700), self.labels)

    def metrics(self) -> dict[str, Any]:
        """What clinicians ask of a classifier, as plain numbers."""
        return classification_metrics(self.labels, self.probabilities)


_BATCH = 64  # more is slower: see `explain/signal.py`


OnImages = Callable[[int, int], None]  # how many are done, of how many


def predict(
    model: nn.Module,
    images: Images,
    *,
    device: str = "cpu",
    on_images: OnImages = lambda *_: None,
) -> Predictions:
    """Predictions in evaluation mode; the model comes back in the mode it had."""
    return PublicImages(images, device).predict(model, on_images)


class PublicImages:
    """Public images that are measured again and again.

    What a network's frozen backbone makes of them is computed once and kept, where there is room in
    `feature_cache_mb`, in fixed blocks, so that a resumed run measures the same to the bit.
    """

    def __init__(self, images: Images, device: str = "cpu", feature_cache_mb: int = 0) -> None:
        self._images = images
        store = FeatureStore.of_environment()
        self._inputs = Inputs(images.pixels, (View(),), 1.0, device, store)
        self._keep_mb = feature_cache_mb

    def predict(self, model: nn.Module, on_images: OnImages = lambda *_: None) -> Predictions:
        """Predictions in evaluation mode; the model comes back in the mode it had."""
        mode = model.training
        model.eval()
        pieces = []
        try:
            with torch.no_grad():
                for piece in self._probabilities(model):
                    pieces.append(piece)
                    on_images(min(len(pieces) * _BATCH, len(self._images)), len(self._images))
        finally:
            model.train(mode)
        return _predictions(self._images, pieces)

    def _probabilities(self, model: nn.Module) -> Iterator[NDArray[np.float64]]:
        split = split_backbone(model) if self._keep_mb else None
        kept = self._inputs.keep(split, 1, self._keep_mb)
        for start in range(0, len(self._images), _BATCH):
            chosen = np.arange(start, min(start + _BATCH, len(self._images)))
            plain = np.zeros_like(chosen)
            if kept and split is not None:
                logits = split.forward_head(self._inputs.activations(chosen, plain))
            else:
                logits = model(self._inputs.pictures(chosen, plain))
            if self._images.multi_label:
                yield torch.sigmoid(double(logits)).cpu().numpy()
            else:
                yield torch.softmax(double(logits), dim=1).cpu().numpy()


def _predictions(images: Images, pieces: list[NDArray[np.float64]]) -> Predictions:
    probabilities = np.concatenate(pieces) if pieces else np.zeros((0, 1))
    # A network of non-finite weights predicts nothing: call it class 0 with no confidence.
    shown = np.nan_to_num(probabilities, nan=0.0)
    if images.multi_label:
        called = (shown >= 0.5).astype(np.int64)
        return Predictions(images.labels, called, shown.max(axis=1, initial=0.0), probabilities)
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
    model: nn.Module,
    images: Images,
    *,
    device: str = "cpu",
    maps_by: str = DEFAULT,
    temperature: float | None = None,
    on_images: OnImages = lambda *_: None,
) -> dict[str, Any]:
    """All measures of the model's maps: ROAD, insertion and deletion, localization.

    Each mean comes with the interval that a sample of so many images leaves. With a `temperature`
    that public images gave, ROAD is measured at it too.
    """
    began, count = time.monotonic(), len(images)
    inputs = to_tensor(np.asarray(images.pixels)).to(device)
    maps = make_maps(model, inputs, method=maps_by)

    def between(values: NDArray[np.float64]) -> list[float] | None:
        return mean_interval(values, images.groups)

    # ROAD takes twice as long as insertion and deletion: two of three parts of an image.
    found = road(
        model, inputs, maps, RoadSettings(), on_images=lambda n: on_images(2 * n // 3, count)
    )
    result: dict[str, Any] = {"maps": maps_by}
    result["road"] = {**found.summary(), "interval": between(found.scores)}
    if temperature is not None and len(images):
        matched = found.matched(temperature)
        result["road"] |= {
            "road_matched": float(matched.mean()),
            "matched_interval": between(matched),
            "temperature": temperature,
        }
    curves = insertion_deletion(
        model, inputs, maps, on_images=lambda n: on_images((2 * count + n) // 3, count)
    )
    result["insertion_auc"] = float(curves.insertion_auc.mean()) if len(images) else None
    result["insertion_interval"] = between(curves.insertion_auc)
    result["deletion_auc"] = float(curves.deletion_auc.mean()) if len(images) else None
    result["deletion_interval"] = between(curves.deletion_auc)
    if images.masks is not None:
        place = localization(maps, torch.from_numpy(images.masks))
        result["localization"] = {
            **place.summary(),
            "pointing_interval": between(place.pointing),
            "inside_interval": between(place.inside),
        }
    result["seconds"] = round(time.monotonic() - began, 3)
    return result
