"""What anyone should be told of a result before trusting it: one line each, from public numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xcal.federation.evaluation import Predictions

CERTAIN = 0.995  # shown as 100 %
FALL = 0.05  # of macro F1 from its best round to the last


def notices(
    test: Predictions, classes: Sequence[str], rounds: Sequence[Mapping[str, Any]]
) -> list[str]:
    """One class for all, confidences that say nothing, last rounds that fall."""
    found = []
    answers = np.unique(test.predicted)
    if len(answers) == 1 and len(np.unique(test.labels)) > 1:
        found.append(
            f"The model calls every test image {classes[int(answers[0])]!r}: it learnt nothing that"
            " tells the classes apart."
        )
    if len(test.confidence) and np.nanmin(test.confidence) >= CERTAIN:
        found.append(
            "Every confidence on the test images rounds to 100 %, so they say nothing: lower lr or"
            " max_grad_norm, or use `xcal.load(…).calibrated()`."
        )
    course = [
        (r["round"] + 1, float(r["validation_macro_f1"]))
        for r in rounds  # a line that was damaged says nothing
        if type(r.get("round")) is int and type(r.get("validation_macro_f1")) in (int, float)
    ]
    if course:
        best, last = max(course, key=lambda point: point[1]), course[-1]
        if best[1] - last[1] >= FALL:
            found.append(
                f"Validation macro F1 fell from {best[1]:.2f} (round {best[0]}) to {last[1]:.2f}"
                " after the last: a lower lr, a lower average or larger batches end steadier."
            )
    return found
