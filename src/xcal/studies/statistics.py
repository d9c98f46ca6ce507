"""Comparing two methods fairly: in pairs, with intervals that know how few pictures there are.

A pair is one seed: the same partition, the same first weights, the same draws, two methods. The
test images are not independent (the blood-cell test set is 67 pictures, not 2,487 files), so whole
groups are resampled, within their class and the same for both methods and all seeds; and seeds are
resampled too. A handful of seeds says less about the next seed than resampling them suggests: that
part of the deviation is widened as Student's t asks for so few. "Better" is said only where the
interval of the difference excludes zero, and never of a single seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from xcal.studies.store import CellResult, TestSet

Measure = Literal["macro_f1", "road", "road_matched", "auroc"]
FloatArray = NDArray[np.float64]
Weights = NDArray[np.float32]

DRAWS = 2000
CONFIDENCE = 0.95


class Verdict(StrEnum):
    """What a paired difference says."""

    BETTER = "better"
    WORSE = "worse"
    NOT_SHOWN = "no difference shown"
    ONE_SEED = "one seed"

    @property
    def shows(self) -> bool:
        """Whether a difference was shown."""
        return self in (Verdict.BETTER, Verdict.WORSE)


@dataclass(frozen=True)
class Summary:
    """A method's figure over seeds."""

    seeds: int
    mean: float
    deviation: float | None  # between seeds; None of one


@dataclass(frozen=True)
class Difference:
    """A method minus another over their common seeds."""

    seeds: int
    mean: float
    low: float
    high: float
    wins: int
    losses: int
    each: tuple[float, ...] = ()  # seed by seed

    @property
    def verdict(self) -> Verdict:
        if self.seeds < 2:
            return Verdict.ONE_SEED
        if self.low > 0:
            return Verdict.BETTER
        return Verdict.WORSE if self.high < 0 else Verdict.NOT_SHOWN

    @property
    def same(self) -> bool:
        """Whether nothing differs in any draw: models that learnt nothing compare nothing."""
        return self.wins == self.losses == 0 and self.low == self.high == 0


def summarize(values: Sequence[float]) -> Summary:
    array = np.asarray(values, dtype=float)
    deviation = float(array.std(ddof=1)) if len(array) > 1 else None
    return Summary(len(array), float(array.mean()), deviation)


def macro_f1_of_counts(counts: FloatArray) -> FloatArray:
    """Macro F1 of confusion counts (…, classes, classes), over the classes that occur."""
    hits = np.diagonal(counts, axis1=-2, axis2=-1)
    truth, answers = counts.sum(axis=-1), counts.sum(axis=-2)
    occurs = (truth + answers) > 0
    f1 = np.where(occurs, 2 * hits / np.where(occurs, truth + answers, 1), 0.0)
    result: FloatArray = f1.sum(axis=-1) / np.maximum(occurs.sum(axis=-1), 1)
    return result


@lru_cache(maxsize=16)
def group_weights(test: TestSet, draws: int, seed: int) -> Weights:
    """How often each group is drawn (draws, groups): as many of each class as there are."""
    groups = int(test.groups.max()) + 1
    # A group belongs to the class that most of its images have.
    votes = np.zeros((groups, len(test.classes)))
    np.add.at(votes, (test.groups, test.labels), 1)
    class_of = votes.argmax(axis=1)
    generator = np.random.default_rng(seed)
    # Counts of images and of pairs of them stay exact in single precision, at twice the speed.
    weights = np.zeros((draws, groups), dtype=np.float32)
    for k in range(len(test.classes)):
        members = np.flatnonzero(class_of == k)
        if len(members):
            even = np.full(len(members), 1 / len(members))
            weights[:, members] = generator.multinomial(len(members), even, size=draws)
    weights.flags.writeable = False  # shared by every comparison on this test set
    return weights


def _f1_draws(result: CellResult, test: TestSet, weights: Weights) -> FloatArray:
    classes, groups = len(test.classes), weights.shape[1]
    counts = np.zeros((groups, classes, classes), dtype=np.float32)
    np.add.at(counts, (test.groups, test.labels, result.predicted), 1)
    drawn = (weights @ counts.reshape(groups, -1)).astype(float)
    return macro_f1_of_counts(drawn.reshape(-1, classes, classes))


def _road_draws(result: CellResult, test: TestSet, weights: Weights) -> FloatArray:
    return _mean_draws(result, result.road_scores, test, weights)


def _matched_draws(result: CellResult, test: TestSet, weights: Weights) -> FloatArray:
    return _mean_draws(result, result.road_matched_scores, test, weights)


def _mean_draws(
    result: CellResult, scores: FloatArray, test: TestSet, weights: Weights
) -> FloatArray:
    """The mean of the explained images' scores in every draw."""
    groups, of_image = np.unique(test.groups[result.road_images], return_inverse=True)
    total, count = np.bincount(of_image, weights=scores), np.bincount(of_image)
    often = weights[:, groups].astype(float)
    drawn: FloatArray = (often @ total) / np.maximum(often @ count, 1)
    return drawn


def weighted_auroc(
    ranks: NDArray[np.int64],
    positive: NDArray[np.bool_],
    groups: NDArray[np.int64],
    weights: Weights,
) -> FloatArray:
    """How likely one of the class outranks one of the others, ties half; `weights` (draws, groups).

    An image counts as often as its group is drawn, so it is all in the matrix of how many pairs of
    a group of the class and a group of the others are in order: counted once for all draws.
    """
    rows, of_row = np.unique(groups[positive], return_inverse=True)
    columns, of_column = np.unique(groups[~positive], return_inverse=True)
    order = np.argsort(ranks[~positive], kind="stable")
    below = np.zeros((len(order) + 1, len(columns)), dtype=np.float32)
    below[np.arange(1, len(order) + 1), of_column[order]] = 1
    np.cumsum(below, axis=0, out=below)  # others of each group among the k lowest
    others = ranks[~positive][order]
    ends = [np.searchsorted(others, ranks[positive], side=side) for side in ("left", "right")]
    by_group = np.argsort(of_row, kind="stable")
    starts = np.searchsorted(of_row[by_group], np.arange(len(rows)))
    pairs = np.zeros((len(rows), len(columns)), dtype=np.float32)
    for end in ends:
        if len(rows):
            pairs += np.add.reduceat(below[end[by_group]], starts, axis=0) / 2
    of_class, of_others = weights[:, rows], weights[:, columns]
    hits = of_class @ np.bincount(of_row, minlength=len(rows)).astype(of_class.dtype)
    rest = of_others @ np.bincount(of_column, minlength=len(columns)).astype(of_class.dtype)
    total = hits.astype(float) * rest
    ordered = np.einsum("dr,dr->d", of_class, of_others @ pairs.T, dtype=float)
    found: FloatArray = ordered / np.where(total > 0, total, np.nan)
    return found


def _auroc_draws(result: CellResult, test: TestSet, weights: Weights) -> FloatArray:
    ranks = result.ranks
    assert ranks is not None
    classes = [1] if len(ranks) == 1 else range(len(ranks))
    by_class = [
        weighted_auroc(row, test.labels == k, test.groups, weights)
        for row, k in zip(ranks, classes, strict=True)
    ]
    found: FloatArray = np.nanmean(by_class, axis=0)
    return found


_DRAWS = {
    "macro_f1": _f1_draws,
    "road": _road_draws,
    "road_matched": _matched_draws,
    "auroc": _auroc_draws,
}


@lru_cache(maxsize=4096)
def _drawn(measure: Measure, cell: CellResult, test: TestSet, draws: int, seed: int) -> FloatArray:
    """A cell's figure in every draw: the same in all comparisons it takes part in."""
    return _DRAWS[measure](cell, test, group_weights(test, draws, seed))


@lru_cache(maxsize=64)
def seed_widening(seeds: int) -> float:
    """By what the bootstrap over so few seeds is too narrow."""
    t = float(stats.t.ppf(0.5 + CONFIDENCE / 2, seeds - 1))
    z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
    return math.sqrt(seeds / (seeds - 1)) * t / z


def compare(
    ours: Sequence[CellResult],
    theirs: Sequence[CellResult],
    test: TestSet,
    measure: Measure = "macro_f1",
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """Ours minus theirs; the two lists hold the same seeds in the same order."""
    assert len(ours) == len(theirs) and ours
    drawn = np.stack(
        [
            _drawn(measure, a, test, draws, seed) - _drawn(measure, b, test, draws, seed)
            for a, b in zip(ours, theirs, strict=True)
        ]
    )  # (seeds, draws)
    exact = np.array(
        [a.values[measure] - b.values[measure] for a, b in zip(ours, theirs, strict=True)]
    )
    mean = float(exact.mean())
    by_groups = drawn.mean(axis=0) - mean
    if len(exact) > 1:
        generator = np.random.default_rng([seed, 1])
        chosen = generator.integers(len(exact), size=(draws, len(exact)))
        redrawn = np.take_along_axis(drawn.T, chosen, axis=1).mean(axis=1)
        by_seeds = (redrawn - drawn.mean(axis=0)) * seed_widening(len(exact))
    else:
        by_seeds = np.zeros(draws)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(mean + by_groups + by_seeds, [tail, 100 - tail])
    return Difference(
        len(exact),
        mean,
        float(low),
        float(high),
        int((exact > 0).sum()),
        int((exact < 0).sum()),
        tuple(exact.tolist()),
    )
