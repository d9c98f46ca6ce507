"""Classification metrics on examples small enough to compute by hand."""

from __future__ import annotations

import math

import pytest
import torch

from xcal.errors import UserError
from xcal.explain.classification import confusion_matrix, macro_f1


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


def test_impossible_classes_are_refused() -> None:
    with pytest.raises(UserError, match="outside 0 to 1"):
        macro_f1([0, 2], [0, 1], 2)
    with pytest.raises(UserError, match="2 labels and 1 predictions"):
        macro_f1([0, 1], [0], 2)
