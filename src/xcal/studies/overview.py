"""Many comparisons in one table: what a reader sees before the tables of each place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from xcal.studies.analysis import (
    BASELINE,
    Comparison,
    Series,
    find,
    interval,
    printed_gain,
    signed,
)
from xcal.studies.statistics import Difference
from xcal.studies.wording import NOTHING, Table, difference, epsilon_text, figure, where

RIVALS = ("xcal", "xcal-paper", "agp")
_SHOWN = ("better", "worse")


def _with_verdict(d: Difference | None) -> str:
    """The difference, and what can be said of it where that is anything."""
    if d is not None and _same(d):
        return "the same answers"
    said = f", {d.verdict}" if d is not None and d.verdict in _SHOWN else ""
    return difference(d) + said


def _same(d: Difference) -> bool:
    """Whether no answer differs in any draw: models that learnt nothing compare nothing."""
    return d.wins == d.losses == 0 and d.low == d.high == 0


def printed_gains(comparisons: Sequence[Comparison]) -> str:
    """A sentence: in how many places the printed gain is more than the interval allows."""
    told = [(printed_gain(c.series.place), c.f1) for c in comparisons]
    found = [(gain, d) for gain, d in told if gain is not None and d.seeds >= 2 and not _same(d)]
    if not found:
        return ""
    above = sum(gain > d.high for gain, d in found)
    return (
        f" The gain that the paper prints lies above the interval of `xcal` in {above} of"
        f" {len(found)} of them, those left out in which both give the same answers."
    )


def record_over_places(comparisons: Sequence[Comparison]) -> str:
    """In how many pairs of runs ahead and behind, and how often a coin is as one-sided."""
    ahead = sum(c.f1.wins for c in comparisons)
    behind = sum(c.f1.losses for c in comparisons)
    if ahead + behind == 0:
        return "no pair that differs"
    chance = float(stats.binomtest(ahead, ahead + behind).pvalue)
    said = "less than 0.001" if chance < 0.001 else f"{chance:.3f}"
    return f"{ahead} ahead, {behind} behind (a coin is as one-sided with probability {said})"


def methods_overview(series: Sequence[Series], comparisons: Sequence[Comparison]) -> Table | None:
    """A row a place: static noise, what each method adds to it, what the paper prints."""
    rivals = [m for m in RIVALS if any(c.series.method == m for c in comparisons)]
    if not rivals:
        return None
    rows = []
    for place in dict.fromkeys(c.series.place for c in comparisons):
        base = find(series, place, BASELINE)
        assert base is not None  # each comparison has it
        found = {c.series.method: c.f1 for c in comparisons if c.series.place == place}
        gain = printed_gain(place)
        rows.append(
            (
                where(place),
                epsilon_text(place.epsilon),
                figure(base.summary("macro_f1")),
                *(_with_verdict(found.get(m)) for m in rivals),
                NOTHING if gain is None else signed(gain),
            )
        )
    head = (
        "where",
        "ε",
        "static noise",
        *(f"`{m}` − static" for m in rivals),
        "the paper's gain",
    )
    records = [
        f"`{m}`: {record_over_places([c for c in comparisons if c.series.method == m])}"
        for m in rivals
    ]
    note = (
        "Macro F1 of `fl-dp`, mean ± standard deviation over (n) seeds; differences from it, paired"
        " by seed, with 95 % intervals and wins:losses; the gain over static noise that the paper"
        " prints for XCal-FL. `agp` has no guarantee at any ε. Over all pairs of runs: "
        + "; ".join(records)
        + "."
    )
    return Table("Macro F1 against static noise", head, tuple(rows), note)


def variants_overview(
    to_static: Sequence[Comparison], to_default: Sequence[Comparison]
) -> Table | None:
    """A row a variant: over how many places, how far from static noise and from the default."""
    rows = []
    variants = dict.fromkeys((c.series.method, c.series.variant) for c in to_static)
    for method, variant in variants:
        if not variant and method == BASELINE:
            continue

        def of(
            found: Sequence[Comparison], one: tuple[str, str] = (method, variant)
        ) -> list[Comparison]:
            return [c for c in found if (c.series.method, c.series.variant) == one]

        static, default = of(to_static), of(to_default)
        verdicts = [c.f1.verdict for c in static]
        shown = ", ".join(f"{w} in {verdicts.count(w)}" for w in _SHOWN if w in verdicts)
        rows.append(
            (
                f"`{method}`" + (f", {variant}" if variant else ""),
                str(len(static)),
                _spread(static),
                _score(static),
                shown or NOTHING,
                _spread(default),
                _score(default),
            )
        )
    if not rows:
        return None
    head = (
        "variant",
        "places",
        "F1 − static",
        "ahead:behind",
        "shown",
        "F1 − default",
        "ahead:behind",
    )
    note = (
        "A place is a set, a network and an ε. Mean over all pairs of runs, with the lowest and the"
        " highest place in brackets; ahead and behind count pairs of runs; shown: in how many"
        " places with two seeds or more the interval excludes zero."
    )
    return Table("All that was tried, over all places", head, tuple(rows), note)


def _spread(found: Sequence[Comparison]) -> str:
    if not found:
        return NOTHING
    means = [c.f1.mean for c in found]
    if len(means) == 1:
        return interval(found[0].f1).split(" ")[0]
    mean = float(np.average(means, weights=[c.f1.seeds for c in found]))
    return f"{signed(mean)} ({signed(min(means))} to {signed(max(means))})"


def _score(found: Sequence[Comparison]) -> str:
    if not found:
        return NOTHING
    return f"{sum(c.f1.wins for c in found)}:{sum(c.f1.losses for c in found)}"
