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
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from xcal.studies.store import CellResult, TestSet

Measure = Literal["macro_f1", "road", "auroc"]
FloatArray = NDArray[np.float64]

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


def summarise(values: Sequence[float]) -> Summary:
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


def group_weights(test: TestSet, draws: int, seed: int) -> FloatArray:
    """How often each group is drawn (draws, groups): as many of each class as there are."""
    groups = int(test.groups.max()) + 1
    # A group belongs to the class that most of its images have.
    votes = np.zeros((groups, len(test.classes)))
    np.add.at(votes, (test.groups, test.labels), 1)
    home = votes.argmax(axis=1)
    generator = np.random.default_rng(seed)
    weights = np.zeros((draws, groups))
    for k in range(len(test.classes)):
        members = np.flatnonzero(home == k)
        if len(members):
            even = np.full(len(members), 1 / len(members))
            weights[:, members] = generator.multinomial(len(members), even, size=draws)
    return weights


def _f1_draws(result: CellResult, test: TestSet, weights: FloatArray) -> FloatArray:
    classes, groups = len(test.classes), weights.shape[1]
    counts = np.zeros((groups, classes, classes))
    np.add.at(counts, (test.groups, test.labels, result.predicted), 1)
    drawn = weights @ counts.reshape(groups, -1)
    return macro_f1_of_counts(drawn.reshape(-1, classes, classes))


def _road_draws(result: CellResult, test: TestSet, weights: FloatArray) -> FloatArray:
    groups = test.groups[result.road_images]
    total, count = np.zeros(weights.shape[1]), np.zeros(weights.shape[1])
    np.add.at(total, groups, result.road_scores)
    np.add.at(count, groups, 1)
    drawn: FloatArray = (weights @ total) / np.maximum(weights @ count, 1)
    return drawn


def weighted_auroc(
    ranks: NDArray[np.int64], positive: NDArray[np.bool_], weights: FloatArray
) -> FloatArray:
    """How likely one of the class outranks one of the others, ties half; `weights` (draws, N)."""
    order = np.argsort(ranks, kind="stable")
    ranks, positive, weights = ranks[order], positive[order], weights[:, order]
    others = np.cumsum(np.where(positive, 0.0, weights), axis=1)
    others = np.concatenate([np.zeros((len(others), 1)), others], axis=1)
    first, last = (np.searchsorted(ranks, ranks, side=side) for side in ("left", "right"))
    below = (others[:, first] + others[:, last]) / 2  # weight of the others below, ties half
    hits = np.where(positive, weights, 0.0)
    total = hits.sum(axis=1) * others[:, -1]
    found: FloatArray = (hits * below).sum(axis=1) / np.where(total > 0, total, np.nan)
    return found


def _auroc_draws(result: CellResult, test: TestSet, weights: FloatArray) -> FloatArray:
    ranks = result.ranks
    assert ranks is not None
    classes = [1] if len(ranks) == 1 else range(len(ranks))
    parts = []
    for some in np.array_split(weights, max(1, weights.size // 1_000_000)):
        each = some[:, test.groups]
        by_class = [
            weighted_auroc(row, test.labels == k, each)
            for row, k in zip(ranks, classes, strict=True)
        ]
        parts.append(np.nanmean(by_class, axis=0))
    return np.concatenate(parts)


_DRAWS = {"macro_f1": _f1_draws, "road": _road_draws, "auroc": _auroc_draws}


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
    weights = group_weights(test, draws, seed)
    each = _DRAWS[measure]
    drawn = np.stack(
        [each(a, test, weights) - each(b, test, weights) for a, b in zip(ours, theirs, strict=True)]
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
