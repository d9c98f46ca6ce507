"""What is asked of a classifier's answers: pure functions on arrays of labels and probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from xcal.errors import UserError

FloatArray = NDArray[np.float64]


def confusion_matrix(labels: ArrayLike, predicted: ArrayLike, n_classes: int) -> NDArray[np.int64]:
    """Counts (n_classes, n_classes): row = the true class, column = the predicted one."""
    truth = class_numbers(labels, n_classes, "label")
    answer = class_numbers(predicted, n_classes, "prediction")
    if truth.shape != answer.shape:
        raise UserError(
            f"There are {truth.size} labels and {answer.size} predictions: give one of each per "
            "image."
        )
    counts = np.bincount(truth * n_classes + answer, minlength=n_classes**2)
    return counts.reshape(n_classes, n_classes).astype(np.int64)


def macro_f1(labels: ArrayLike, predicted: ArrayLike, n_classes: int) -> float:
    """The unweighted mean of the classes' F1, in [0, 1]; NaN without any image.

    A class that neither occurs nor is predicted has no F1 and is left out of the mean; one that
    occurs and is never rightly predicted counts 0.

    >>> macro_f1([0, 0, 1, 1], [0, 1, 1, 1], 2)  # F1 of 2/3 and 4/5
    0.7333333333333334
    """
    counts = confusion_matrix(labels, predicted, n_classes)
    hits = np.diag(counts)
    mentions = counts.sum(axis=0) + counts.sum(axis=1)
    present = mentions > 0
    if not present.any():
        return float("nan")
    return float(np.mean(2 * hits[present] / mentions[present]))


def finding_f1(labels: ArrayLike, predicted: ArrayLike) -> float:
    """F1 of one finding, in [0, 1]; NaN where it neither occurs nor is predicted."""
    counts = confusion_matrix(labels, predicted, 2)
    mentions = int(counts[1].sum() + counts[:, 1].sum())
    return 2 * int(counts[1, 1]) / mentions if mentions else float("nan")


def sensitivity(counts: NDArray[np.int64]) -> FloatArray:
    """Per class of a confusion matrix: the share of its images that are recognized, in [0, 1].

    NaN for a class without images.
    """
    return _ratio(np.diag(counts), counts.sum(axis=1))


def specificity(counts: NDArray[np.int64]) -> FloatArray:
    """Per class of a confusion matrix: the share of all other images not called it, in [0, 1].

    NaN for a class without any other images.
    """
    others = counts.sum() - counts.sum(axis=1)
    false_alarms = counts.sum(axis=0) - np.diag(counts)
    return _ratio(others - false_alarms, others)


def balanced_accuracy(labels: ArrayLike, predicted: ArrayLike, n_classes: int) -> float:
    """The mean sensitivity of the classes that occur, in [0, 1]; NaN without any image."""
    return mean_of_defined(sensitivity(confusion_matrix(labels, predicted, n_classes)))


def auroc_per_class(labels: ArrayLike, probabilities: ArrayLike) -> FloatArray:
    """One class against the rest: how likely an image of the class outranks one that is not.

    In [0, 1], ties count half, 1/2 is chance; NaN for a class without images or without others.
    `probabilities` is (N, classes) and finite.
    """
    scores, truth = _probabilities(labels, probabilities)
    return np.array([area(scores[:, k], truth == k) for k in range(scores.shape[1])])


def area(scores: FloatArray, positive: NDArray[np.bool_]) -> float:
    """How likely one of the positives outranks one of the others, ties half; NaN without either.

    Mann and Whitney's statistic from mid-ranks.
    """
    hits, others = int(positive.sum()), int((~positive).sum())
    if not hits or not others:
        return float("nan")
    above = rankdata(scores.reshape(-1))[positive.reshape(-1)].sum() - hits * (hits + 1) / 2
    return float(above / (hits * others))


def auroc(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """The mean of `auroc_per_class` over the classes that have one, in [0, 1]; else NaN."""
    return mean_of_defined(auroc_per_class(labels, probabilities))


def calibration_error(labels: ArrayLike, probabilities: ArrayLike, *, bins: int = 15) -> float:
    """Expected calibration error of the predicted class, in [0, 1]: 0 is perfect.

    Images are sorted into equal bins of confidence; the differences between mean confidence and
    share of right answers are averaged, weighted by the bins' sizes. NaN without any image.
    """
    scores, truth = _probabilities(labels, probabilities)
    if len(truth) == 0:
        return float("nan")
    confidence = scores.max(axis=1)
    surplus = confidence - (scores.argmax(axis=1) == truth)
    # Bins are open below and closed above, as usual; confidence 0 cannot occur.
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(place, surplus, bins)).sum() / len(truth))


def _probabilities(
    labels: ArrayLike, probabilities: ArrayLike
) -> tuple[FloatArray, NDArray[np.int64]]:
    scores = np.asarray(probabilities, dtype=np.float64)
    if scores.ndim != 2:
        raise UserError(f"Probabilities of the shape {scores.shape} were given: one row per image.")
    truth = class_numbers(labels, scores.shape[1], "label")
    if len(truth) != len(scores):
        raise UserError(
            f"There are {len(truth)} labels and {len(scores)} rows of probabilities: give one of "
            "each per image."
        )
    return scores, truth


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> FloatArray:
    result: FloatArray = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return result


def mean_of_defined(values: ArrayLike) -> float:
    """The mean of those that are numbers; NaN of none."""
    known = np.asarray(values, dtype=np.float64)
    defined = known[~np.isnan(known)]
    return float(defined.mean()) if defined.size else float("nan")


def class_numbers(values: ArrayLike, n_classes: int, what: str) -> NDArray[np.int64]:
    array = np.asarray(values).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= n_classes):
        raise UserError(
            f"A {what} lies outside 0 to {n_classes - 1}: give the number of classes the data "
            "really has."
        )
    return array.astype(np.int64)
