"""How far a mean over a sample of images may lie from the mean over all such images."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

_NORMAL_95 = 1.959964


def mean_interval(values: ArrayLike, groups: ArrayLike) -> list[float] | None:
    """A 95 % interval of the mean, by the normal approximation; None for fewer than two groups.

    Images of one group (a patient) are alike, so groups count and not images: the variance is that
    of the groups' sums. Values that are NaN are left out.

    >>> mean_interval([1.0, 0.0, 1.0, 0.0], [1, 2, 3, 4])
    [-0.0658, 1.0658]
    >>> mean_interval([1.0, 1.0, 0.0, 0.0], [1, 1, 2, 2])
    [-0.48, 1.48]
    """
    numbers, of = np.asarray(values, dtype=np.float64), np.asarray(groups)
    there = ~np.isnan(numbers)
    numbers, (known, place) = numbers[there], np.unique(of[there], return_inverse=True)
    if len(known) < 2:
        return None
    mean = float(numbers.mean())
    sums = np.bincount(place, weights=numbers - mean)
    error = math.sqrt(len(known) / (len(known) - 1) * float((sums**2).sum())) / len(numbers)
    return [round(mean - _NORMAL_95 * error, 4), round(mean + _NORMAL_95 * error, 4)]
