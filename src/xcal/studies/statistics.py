"""Comparing two methods fairly: in pairs, with intervals that know how few pictures there are.

A pair is one seed: the same partition, the same first weights, the same draws, two methods. The
test images are not independent (the blood-cell test set is 67 pictures, not 2,487 files), so whole
groups are resampled, within their class and the same for both methods and all seeds; and seeds are
resampled too. A handful of seeds says less about the next seed than resampling them suggests: that
part of the deviation is widened as Student's t asks for so few. "Better" is said only where the
interval of the difference excludes zero, and never of a single seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from xcal.studies.grid import OwnGrid
from xcal.studies.store import CellResult, Results, TestSet

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
def group_weights(test: TestSet, draws: int) -> Weights:
    """How often each group is drawn (draws, groups): as many of each class as there are."""
    groups = int(test.groups.max()) + 1
    # A group belongs to the class that most of its images have.
    votes = np.zeros((groups, len(test.classes)))
    np.add.at(votes, (test.groups, test.labels), 1)
    class_of = votes.argmax(axis=1)
    generator = np.random.default_rng(0)
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


_DRAWS: dict[Measure, Callable[[CellResult, TestSet, Weights], FloatArray]] = {
    "macro_f1": _f1_draws,
    "road": lambda cell, *drawn: _mean_draws(cell, cell.road_scores, *drawn),
    "road_matched": lambda cell, *drawn: _mean_draws(cell, cell.road_matched_scores, *drawn),
    "auroc": _auroc_draws,
}


@lru_cache(maxsize=4096)
def _drawn(measure: Measure, cell: CellResult, test: TestSet, draws: int) -> FloatArray:
    """A cell's figure in every draw: the same in all comparisons it takes part in."""
    return _DRAWS[measure](cell, test, group_weights(test, draws))


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
) -> Difference:
    """Ours minus theirs; the two lists hold the same seeds in the same order."""
    assert len(ours) == len(theirs) and ours
    drawn = np.stack(
        [
            _drawn(measure, a, test, draws) - _drawn(measure, b, test, draws)
            for a, b in zip(ours, theirs, strict=True)
        ]
    )  # (seeds, draws)
    exact = np.array(
        [a.values[measure] - b.values[measure] for a, b in zip(ours, theirs, strict=True)]
    )
    mean = float(exact.mean())
    by_groups = drawn.mean(axis=0) - mean
    if len(exact) > 1:
        generator = np.random.default_rng([0, 1])
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


# --- a grid of one's own in one table: each value of the compared axis against the first ----------


MEASURES: tuple[Measure, ...] = ("macro_f1", "road", "auroc")


@dataclass(frozen=True)
class Row:
    """One combination of the axes' values, over its finished seeds."""

    at: Mapping[str, Any]  # without the seed
    diverged: int
    means: Mapping[Measure, Summary]
    differences: Mapping[Measure, Difference]  # from the first value; empty in its own row


def rows_of(own: OwnGrid, results: Results) -> list[Row]:
    """A row a combination that has finished or diverged cells, in the order of the axes."""
    found = results.of_grid(own.grid)
    by_setting: dict[tuple[tuple[str, Any], ...], dict[Any, CellResult]] = {}
    for at, cell in own.settings:
        if cell in found:
            setting = tuple((k, v) for k, v in at.items() if k != "seed")
            by_setting.setdefault(setting, {})[cell.seed] = found[cell]
    rows = []
    for setting, cells in by_setting.items():
        ended = {seed: cell for seed, cell in cells.items() if cell.finished}
        first = tuple((k, own.axes[k][0] if k == own.compared else v) for k, v in setting)
        others = {s: c for s, c in by_setting.get(first, {}).items() if c.finished}
        differences = {} if first == setting else _differences(ended, others, results)
        means = {m: summarize(v) for m in MEASURES if (v := _known(ended, m))}
        rows.append(Row(dict(setting), len(cells) - len(ended), means, differences))
    return rows


def _known(cells: Mapping[Any, CellResult], measure: Measure) -> list[float]:
    return [c.values[measure] for c in cells.values() if c.values.get(measure) is not None]


def _differences(
    ours: Mapping[Any, CellResult], theirs: Mapping[Any, CellResult], results: Results
) -> dict[Measure, Difference]:
    """Paired by seed, where both were measured on the same test images."""
    made: dict[Measure, Difference] = {}
    for measure in MEASURES:
        seeds = [
            s
            for s in ours
            if s in theirs
            and ours[s].values["test_set"] == theirs[s].values["test_set"]
            and all(c.values.get(measure) is not None for c in (ours[s], theirs[s]))
            and len({ours[s].values["id"], theirs[s].values["id"]}) == 2
        ]
        if seeds:
            test = results.test_set(ours[seeds[0]].values["test_set"])
            made[measure] = compare(
                [ours[s] for s in seeds], [theirs[s] for s in seeds], test, measure
            )
    return made


def rows_text(own: OwnGrid, rows: list[Row]) -> str:
    """The rows as CSV, in full precision."""
    axes = [k for k in own.axes if k != "seed"]
    each = ("seeds", "mean", "deviation", "difference", "low", "high", "wins", "losses", "verdict")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*axes, "diverged", *(f"{m}_{name}" for m in MEASURES for name in each)])
    for row in rows:
        cells: list[Any] = [*(row.at.get(k, "") for k in axes), row.diverged]
        for measure in MEASURES:
            mean, d = row.means.get(measure), row.differences.get(measure)
            cells += ["", "", ""] if mean is None else [mean.seeds, mean.mean, mean.deviation]
            cells += [""] * 6 if d is None else [d.mean, d.low, d.high, d.wins, d.losses, d.verdict]
        writer.writerow(cells)
    return stream.getvalue()
