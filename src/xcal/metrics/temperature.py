"""One temperature that makes confidences fit how often they are right (Guo et al. 2017)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from xcal.errors import UserError

HOTTEST = 100.0
"""Temperatures are looked for between 1/HOTTEST and HOTTEST: where answers are no better than
chance, the likelihood would have them without bounds."""


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """The T that gives the labels the highest likelihood under softmax(logits / T).

    As in Platt's method a label counts 1 - 1/(N + 2), and the other classes share the rest: N right
    answers speak for no more certainty than that. Rows that are not finite are left out. The
    likelihood is concave in 1/T, so the one maximum is found. T changes no answer: the order of the
    classes stays.
    """
    rows = np.asarray(logits, dtype=np.float64)
    truth = np.asarray(labels, dtype=np.int64)
    finite = np.isfinite(rows).all(axis=1)
    rows, truth = rows[finite], truth[finite]
    if not len(rows):
        raise UserError("There is no image with a finite answer to fit a temperature on.")
    others = 1 / (len(rows) + 2)
    targets = np.full(rows.shape, others / (rows.shape[1] - 1))
    targets[np.arange(len(rows)), truth] = 1 - others

    def loss(log_temperature: float) -> float:
        likelihood = log_softmax(rows / math.exp(log_temperature), axis=1)
        return float(-(targets * likelihood).sum(axis=1).mean())

    limit = math.log(HOTTEST)
    found = minimize_scalar(loss, bounds=(-limit, limit), method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))


def as_questions(logits: ArrayLike) -> NDArray[np.float64]:
    """Logits (N, findings) as so many questions of two answers, (N x findings, 2): no, yes.

    softmax over the two is each finding's own probability.
    """
    yes = np.asarray(logits, dtype=np.float64).reshape(-1)
    return np.stack([np.zeros_like(yes), yes], axis=1)


def confidences(logits: ArrayLike, temperature: float = 1.0) -> NDArray[np.float64]:
    """softmax(logits / T), (N, classes); NaN throughout a row that is not finite."""
    rows = np.asarray(logits, dtype=np.float64)
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    result: NDArray[np.float64] = np.exp(log_softmax(np.where(finite, rows, 0) / temperature, 1))
    return np.where(finite, result, np.nan)
