"""Every metric once: its name, how it is computed, which way is better, in which range.

Results, cards, tables of the command line, studies and reports all read this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcal.errors import UserError
from xcal.metrics.classification import (
    auroc,
    auroc_per_class,
    balanced_accuracy,
    calibration_error,
    class_numbers,
    confusion_matrix,
    finding_f1,
    macro_f1,
    mean_of_defined,
    sensitivity,
    specificity,
)

Answers = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]], float]


@dataclass(frozen=True)
class Metric:
    """A number that stands in a result."""

    name: str
    """Its key in a result's `classification` or `explanations`; dots go into tables."""
    title: str
    meaning: str
    low: float
    high: float
    better: Literal["higher", "lower"] = "higher"
    function: Answers | None = None
    """Of labels, predicted classes and probabilities; None where it is made of maps."""

    @property
    def of_maps(self) -> bool:
        return self.function is None

    def value(self, result: Mapping[str, Any]) -> float | None:
        """From a run's result or an evaluation; None where it was not measured."""
        found: Any = result["explanations" if self.of_maps else "classification"]
        for part in self.name.split("."):
            found = None if found is None else found.get(part)
        return None if found is None else float(found)


METRICS: tuple[Metric, ...] = (
    Metric(
        "macro_f1", "macro F1", "mean over the classes, 0 to 1", 0, 1,
        function=lambda y, p, s: macro_f1(y, p, s.shape[1]),
    ),
    Metric(
        "accuracy", "accuracy", "share of right answers", 0, 1,
        function=lambda y, p, _: float(np.mean(p == y)) if y.size else float("nan"),
    ),
    Metric(
        "balanced_accuracy", "balanced accuracy", "mean sensitivity of the classes", 0, 1,
        function=lambda y, p, s: balanced_accuracy(y, p, s.shape[1]),
    ),
    Metric(
        "auroc", "AUROC", "one class against the rest, mean; 0.5 is chance", 0, 1,
        function=lambda y, _, s: auroc(y, s),
    ),
    Metric(
        "calibration_error", "expected calibration error", "confidence against truth; 0 is best",
        0, 1, "lower", function=lambda y, _, s: calibration_error(y, s),
    ),
    Metric("road.road", "ROAD", "on confidence, -0.5 to 0.5", -0.5, 0.5),
    Metric(
        "road.road_matched", "ROAD, matched", "at a temperature fitted on public images", -0.5, 0.5
    ),
    Metric(
        "road.road_logit_percent", "ROAD, logits, %", "relative; without bounds",
        -float("inf"), float("inf"),
    ),
    Metric("insertion_auc", "insertion AUC", "higher is better, 0 to 1", 0, 1),
    Metric("deletion_auc", "deletion AUC", "lower is better, 0 to 1", 0, 1, "lower"),
    Metric("localization.pointing", "pointing game", "highest pixel in the true region", 0, 1),
    Metric("localization.inside", "saliency inside", "share in the true region", 0, 1),
)  # fmt: skip


def metric_title(name: str) -> str:
    """What people call the metric of this name; `road` is short for `road.road`."""
    return next(m.title for m in METRICS if name in (m.name, m.name.partition(".")[0]))


def classification_metrics(labels: ArrayLike, probabilities: ArrayLike) -> dict[str, Any]:
    """All metrics of a classifier's answers as plain numbers; None for what is undefined.

    An image whose probabilities are not finite counts as a wrong answer of no confidence at all:
    it is given the class after its own and equal probabilities, and counted in `broken_images`.

    Labels (N, findings), a 0 or 1 each, go with the probability of every finding: then all is
    measured finding by finding, called where it is as likely as not, and means are over findings.
    """
    scores = np.asarray(probabilities, dtype=np.float64)
    if np.ndim(labels) == 2:
        return _finding_metrics(np.asarray(labels, dtype=np.int64), scores)
    truth = np.asarray(labels).reshape(-1)
    if scores.ndim != 2 or len(scores) != truth.size or scores.shape[1] < 2:
        raise UserError(
            f"There are {truth.size} labels and probabilities of the shape {scores.shape}: give "
            "one row of two or more classes per image."
        )
    n_classes = scores.shape[1]
    truth = class_numbers(truth, n_classes, "label")
    broken = np.logical_not(np.isfinite(scores).all(axis=1)).reshape(-1)
    scores = np.where(broken[:, None], 1 / n_classes, scores)
    predicted = np.where(broken, (truth + 1) % n_classes, scores.argmax(axis=1))
    counts = confusion_matrix(truth, predicted, n_classes)
    means = {m.name: _or_none(m.function(truth, predicted, scores)) for m in METRICS if m.function}
    return {
        "images": int(truth.size),
        "broken_images": int(broken.sum()),
        **means,
        "auroc_per_class": [_or_none(value) for value in auroc_per_class(truth, scores)],
        "sensitivity": [_or_none(value) for value in sensitivity(counts)],
        "specificity": [_or_none(value) for value in specificity(counts)],
        "confusion_matrix": counts.tolist(),
    }


def _finding_metrics(truth: NDArray[np.int64], scores: NDArray[np.float64]) -> dict[str, Any]:
    if truth.shape != scores.shape:
        raise UserError(
            f"There are labels of the shape {truth.shape} and probabilities of {scores.shape}: give"
            " one of each per image and finding."
        )
    broken = np.logical_not(np.isfinite(scores).all(axis=1)).reshape(-1)
    scores = np.where(broken[:, None], 0.5, scores)
    predicted = np.where(broken[:, None], 1 - truth, scores >= 0.5).astype(np.int64)
    means: dict[str, list[float]] = {m.name: [] for m in METRICS if m.function}
    sensitivities, specificities = [], []
    for y, p, s in zip(truth.T, predicted.T, scores.T, strict=True):
        both = np.stack([1 - s, s], axis=1)
        for metric in METRICS:
            if metric.function:
                means[metric.name].append(metric.function(y, p, both))
        means["macro_f1"][-1] = finding_f1(y, p)  # of the finding, not of its absence
        counts = confusion_matrix(y, p, 2)
        sensitivities.append(float(sensitivity(counts)[1]))
        specificities.append(float(specificity(counts)[1]))
    return {
        "images": len(truth),
        "broken_images": int(broken.sum()),
        **{name: _or_none(mean_of_defined(values)) for name, values in means.items()},
        "auroc_per_class": [_or_none(value) for value in means["auroc"]],
        "sensitivity": [_or_none(value) for value in sensitivities],
        "specificity": [_or_none(value) for value in specificities],
        "images_per_class": truth.sum(axis=0).tolist(),
        "confusion_matrix": None,
    }


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
