"""Classification metrics on examples small enough to compute by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from xcal.errors import UserError
from xcal.metrics.classification import (
    auroc,
    auroc_per_class,
    balanced_accuracy,
    calibration_error,
    confusion_matrix,
    macro_f1,
    sensitivity,
    specificity,
)
from xcal.metrics.metric_registry import classification_metrics


def test_confusion_matrix_has_truth_in_rows() -> None:
    counts = confusion_matrix([0, 0, 1, 2], [0, 1, 1, 1], 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]


def test_macro_f1_by_hand() -> None:
    # class 0: 2*1/(1+2); class 1: 2*1/(3+1); class 2: 0
    assert macro_f1([0, 0, 1, 2], [0, 1, 1, 1], 3) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert macro_f1([0, 1, 2], [0, 1, 2], 3) == 1.0


def test_macro_f1_leaves_out_classes_that_nobody_mentions() -> None:
    assert macro_f1([0, 1], [0, 1], 7) == 1.0
    assert macro_f1([0, 1], [0, 2], 7) == pytest.approx(1 / 3)


def test_metrics_take_tensors_and_empty_sets() -> None:
    assert macro_f1(torch.tensor([0, 1]), torch.tensor([0, 1]), 2) == 1.0
    assert math.isnan(macro_f1([], [], 4))
    assert confusion_matrix([], [], 2).tolist() == [[0, 0], [0, 0]]


def test_sensitivity_and_specificity_by_hand() -> None:
    counts = np.array([[8, 2, 0], [1, 4, 0], [0, 0, 0]])
    assert sensitivity(counts)[:2] == pytest.approx([0.8, 0.8])
    assert math.isnan(sensitivity(counts)[2])
    assert specificity(counts) == pytest.approx([4 / 5, 8 / 10, 1.0])
    assert math.isnan(specificity(np.array([[3, 0], [0, 0]]))[0])


def test_balanced_accuracy_is_the_mean_sensitivity_of_what_occurs() -> None:
    labels, predicted = [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]
    assert balanced_accuracy(labels, predicted, 2) == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert balanced_accuracy(labels, predicted, 5) == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert math.isnan(balanced_accuracy([], [], 2))


def two_columns(scores: list[float]) -> np.ndarray:
    return np.stack([1 - np.array(scores), np.array(scores)], axis=1)


def test_auroc_by_hand() -> None:
    # pairs (positive, negative): 0.4>0.1, 0.4>0.3, 0.8>0.1, 0.8>0.3 and one tie at 0.4
    probabilities = two_columns([0.1, 0.3, 0.4, 0.4, 0.8])
    assert auroc_per_class([0, 0, 0, 1, 1], probabilities)[1] == pytest.approx(5.5 / 6)
    assert auroc([0, 0, 0, 1, 1], probabilities) == pytest.approx(5.5 / 6)
    assert auroc([0, 0, 1, 1], two_columns([0.1, 0.2, 0.3, 0.4])) == 1.0
    assert auroc([1, 1, 0, 0], two_columns([0.1, 0.2, 0.3, 0.4])) == 0.0
    assert auroc([0, 1, 0, 1], two_columns([0.5] * 4)) == 0.5


def test_auroc_equals_the_count_of_pairs() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 80)
    probabilities = rng.random((80, 3)).round(1)  # many ties
    for k, value in enumerate(auroc_per_class(labels, probabilities)):
        ours, others = probabilities[labels == k, k], probabilities[labels != k, k]
        gap = ours[:, None] - others
        assert value == pytest.approx(((gap > 0) + 0.5 * (gap == 0)).mean())


def test_auroc_is_undefined_without_both_sides() -> None:
    assert np.isnan(auroc_per_class([0, 0], two_columns([0.1, 0.2]))).all()
    assert math.isnan(auroc([0, 0], two_columns([0.1, 0.2])))


def test_calibration_error_by_hand() -> None:
    # confidence 0.8 four times, right three times; confidence 1.0 twice, right once
    probabilities = two_columns([0.8, 0.8, 0.8, 0.8, 1.0, 1.0])
    labels = [1, 1, 1, 0, 1, 0]
    assert calibration_error(labels, probabilities) == pytest.approx((4 * 0.05 + 2 * 0.5) / 6)
    assert calibration_error([1, 1], two_columns([1.0, 1.0])) == 0.0
    # in one bin errors of opposite sign cancel
    assert calibration_error([1, 0], two_columns([0.5, 0.5]), bins=1) == pytest.approx(0.0)
    assert math.isnan(calibration_error([], np.zeros((0, 2))))


def test_the_report_is_plain_json() -> None:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.4, 0.3]])
    report = classification_metrics([0, 1, 0], probabilities)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["macro_f1"] == macro_f1([0, 1, 0], [0, 1, 1], 3)
    assert report["sensitivity"] == [0.5, 1.0, None]
    assert report["confusion_matrix"] == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    empty = classification_metrics([], np.zeros((0, 2)))
    assert empty["macro_f1"] is None
    assert empty["images"] == 0


def test_broken_probabilities_are_wrong_answers_and_counted() -> None:
    probabilities = np.array([[0.9, 0.1], [math.nan, math.nan], [0.2, 0.8]])
    report = classification_metrics([0, 0, 1], probabilities)
    assert report["broken_images"] == 1
    assert report["accuracy"] == pytest.approx(2 / 3)
    json.dumps(report, allow_nan=False)


def test_impossible_input_is_refused() -> None:
    with pytest.raises(UserError, match="outside 0 to 1"):
        macro_f1([0, 2], [0, 1], 2)
    with pytest.raises(UserError, match="2 labels and 1 predictions"):
        macro_f1([0, 1], [0], 2)
    with pytest.raises(UserError, match="2 labels and 1 rows"):
        auroc([0, 1], np.array([[0.5, 0.5]]))
    with pytest.raises(UserError, match="shape"):
        auroc([0, 1], np.array([0.5, 0.5]))
    with pytest.raises(UserError, match="one row"):
        classification_metrics([0, 1], np.array([[1.0], [1.0]]))
