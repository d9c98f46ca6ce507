"""Ranks with ties averaged, and the correlation of them: shared by the metrics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

FloatArray = NDArray[np.float64]


def rank_correlation(first: FloatArray, second: FloatArray) -> FloatArray:
    """Spearman's correlation (N,) of the rows of two (N, M) arrays, in [-1, 1].

    A row that is constant, in either array, orders nothing and gets 0.
    """
    a, b = (_centered_ranks(rows) for rows in (first, second))
    scale = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    products = (a * b).sum(axis=1)
    correlation: FloatArray = np.divide(products, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.clip(correlation, -1, 1)


def _centered_ranks(rows: FloatArray) -> FloatArray:
    if rows.size == 0:
        return np.zeros(rows.shape)
    # Mid-ranks sum to the same in every row, so that their mean is exact.
    ranks: FloatArray = rankdata(rows, axis=1) - (rows.shape[1] + 1) / 2
    return ranks
