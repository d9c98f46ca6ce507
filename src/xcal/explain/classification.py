"""What is asked of a classifier's answers: pure functions on arrays of labels and probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcal.errors import UserError


def confusion_matrix(labels: ArrayLike, predicted: ArrayLike, n_classes: int) -> NDArray[np.int64]:
    """Counts (n_classes, n_classes): row = the true class, column = the predicted one."""
    truth = _classes(labels, n_classes, "label")
    answer = _classes(predicted, n_classes, "prediction")
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


def _classes(values: ArrayLike, n_classes: int, what: str) -> NDArray[np.int64]:
    array = np.asarray(values).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= n_classes):
        raise UserError(
            f"A {what} lies outside 0 to {n_classes - 1}: give the number of classes the data "
            "really has."
        )
    return array.astype(np.int64)
