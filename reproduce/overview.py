"""Many comparisons in one table: what a reader sees before the tables of each place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from reproduce.analysis import (
    BASELINE,
    Comparison,
    Series,
    against,
    find,
    printed_gain,
    signed,
)
from reproduce.paper import printed
from reproduce.store import Results
from reproduce.wording import figure, judged, where
from xcal.report.words import NOTHING, Table, epsilon_text
from xcal.studies.statistics import Difference, Verdict

RIVALS = ("xcal-steered", "xcal-paper", "agp")


def _with_verdict(d: Difference | None) -> str:
    """The difference, and what can be said of it where that is anything."""
    return "the same answers" if d is not None and d.same else judged(d)


def printed_gains(comparisons: Sequence[Comparison]) -> str:
    """A sentence: in how many places the printed gain is more than the interval allows."""
    told = [(printed_gain(c.series.place), c.f1) for c in comparisons]
    found = [(gain, d) for gain, d in told if gain is not None and d.seeds >= 2 and not d.same]
    if not found:
        return ""
    above = sum(gain > d.high for gain, d in found)
    return (
        f" The gain that the paper prints lies above the interval of `xcal-steered` in {above} of"
        f" {len(found)} of them, those left out in which both give the same answers."
    )


def over_all_pairs(comparisons: Sequence[Comparison]) -> Table | None:
    """A row a method: how far from static noise over all pairs of runs, and how one-sided."""
    rows = []
    for method in _rivals(comparisons):
        own = [c for c in comparisons if c.series.method == method]
        measures = (
            [d for c in own for d in c.f1.each],
            [d for c in own for d in c.auroc_by_seed],
            [d for c in own if c.road is not None for d in c.road.each],
        )
        told = (text for each in measures for text in _record(each))
        rows.append((f"`{method}`", *told, _noise(own), _spent(own)))
    if not rows:
        return None
    head = ["method"]
    for name in ("macro F1", "AUROC", "ROAD"):
        head += [f"{name} − static", "ahead:behind", "sign test"]
    head += ["σ over static", "budget spent"]
    note = (
        "Pairs of one seed, all settings together: median difference, pairs ahead:behind; sign"
        " test: p, two-sided and uncorrected, a hint only, since pairs share their test images."
        " AUROC (one class against the rest, mean) needs no threshold: it tells models apart that"
        " give every image the same class. σ over static, budget spent: means of the lowest and the"
        " highest setting."
    )
    return Table("Over all pairs of runs", tuple(head), tuple(rows), note)


def _noise(comparisons: Sequence[Comparison]) -> str:
    """By how many per cent the mean σ lies above static noise's."""
    places = []
    for c in comparisons:
        common = [seed for seed in c.series.cells if seed in c.reference.cells]
        own, base = (
            [float(s.cells[seed].values.get("mean_sigma") or 0.0) for seed in common]
            for s in (c.series, c.reference)
        )
        if own and min(own) > 0 and min(base) > 0:
            places.append(100 * (float(np.mean(own)) / float(np.mean(base)) - 1))
    return _range(places)


def _spent(comparisons: Sequence[Comparison]) -> str:
    """What share of its budget the client that spent most has spent in the end."""
    places = []
    for c in comparisons:
        shares = [
            max((s for s in shares if s is not None), default=None)
            for shares in (
                [client["share_spent"] for client in result.values["clients"]]
                for result in c.series.cells.values()
            )
        ]
        known = [100 * s for s in shares if s is not None]
        if known:
            places.append(float(np.mean(known)))
    return _range(places)


def _range(percents: Sequence[float]) -> str:
    if not percents:
        return NOTHING
    low, high = f"{min(percents):.0f}", f"{max(percents):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _record(differences: Sequence[float]) -> tuple[str, str, str]:
    """Their median, wins and losses, and the p of a two-sided sign test."""
    if not differences:
        return NOTHING, NOTHING, NOTHING
    middle = signed(float(np.median(differences)))
    ahead, behind = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    if ahead + behind == 0:
        return middle, "0:0", NOTHING
    chance = float(stats.binomtest(ahead, ahead + behind).pvalue)
    return middle, f"{ahead}:{behind}", "< 0.001" if chance < 0.001 else f"{chance:.3f}"


def _rivals(comparisons: Sequence[Comparison]) -> list[str]:
    return [m for m in RIVALS if any(c.series.method == m for c in comparisons)]


def methods_overview(series: Sequence[Series], comparisons: Sequence[Comparison]) -> Table | None:
    """A row a place: static noise, what each method adds to it, what the paper prints."""
    rivals = _rivals(comparisons)
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
    note = (
        "Macro F1 of `fl-dp`, mean ± standard deviation over (n) seeds; differences from it, paired"
        " by seed, with 95 % intervals and wins:losses; the gain over static noise that the paper"
        " prints for XCal-FL. `agp` has no guarantee at any ε."
    )
    return Table("Macro F1 against static noise", head, tuple(rows), note)


def clients_overview(series: Sequence[Series], results: Results) -> Table | None:
    """A row a number of clients and a shift: what noise costs there, and the published rule."""
    rows = []
    for base in (s for s in series if s.method == BASELINE):
        place = base.place
        free, rule = find(series, place.at(None), "fl"), find(series, place, "xcal-paper")
        made = None if rule is None else against(rule, base, results)
        printed_here = [
            printed(
                "macro_f1",
                place.data,
                method,
                place.epsilon,
                network=place.network,
                clients=place.clients,
                partition=place.partition,
            )
            for method in ("fl", BASELINE, "xcal-paper")
        ]
        rows.append(
            (
                place.data,
                place.network,
                epsilon_text(place.epsilon),
                str(place.clients),
                place.partition,
                figure(None if free is None else free.summary("macro_f1")),
                figure(base.summary("macro_f1")),
                _with_verdict(None if made is None else made.f1),
                ", ".join(NOTHING if v is None else f"{v:.3f}" for v in printed_here),
            )
        )
    if not rows:
        return None
    head = ("set", "network", "ε", "N", "clients", "`fl`", "`fl-dp`", "`xcal-paper` − `fl-dp`")
    note = (
        "Macro F1, mean ± standard deviation over (n) seeds; differences paired by seed, with 95 %"
        " intervals and wins:losses. N clients share the images, each with its own noise. label:"
        " classes are spread unevenly; covariate: each client's images have a brightness of their"
        " own. The last column is what the paper prints for `fl`, static noise and XCal-FL."
    )
    return Table(
        "More clients, and clients that are unlike", (*head, "the paper"), tuple(rows), note
    )


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
        shown = ", ".join(
            f"{w} in {verdicts.count(w)}" for w in Verdict if w.shows and w in verdicts
        )
        rows.append(
            (
                f"`{method}`" + (f", {variant}" if variant else ""),
                str(len(static)),
                _in_f1(static),
                shown or NOTHING,
                _in_f1(default),
                _in_auroc(static),
                _in_auroc(default),
            )
        )
    if not rows:
        return None
    head = (
        "variant",
        "settings",
        "F1 − static",
        "shown",
        "F1 − default",
        "AUROC − static",
        "AUROC − default",
    )
    note = (
        "A setting is a set, a network and an ε. Median over all pairs of runs, the mean of the"
        " lowest and of the highest setting in brackets, pairs of runs ahead:behind; shown: in how"
        " many settings with two seeds or more the interval of F1 excludes zero."
    )
    return Table("All that was tried, over all settings", head, tuple(rows), note)


def _in_f1(found: Sequence[Comparison]) -> str:
    return _spread([c.f1.each for c in found])


def _in_auroc(found: Sequence[Comparison]) -> str:
    return _spread([c.auroc_by_seed for c in found if c.auroc_by_seed])


def _spread(places: Sequence[Sequence[float]]) -> str:
    """Median over all pairs, the range of the places' means, wins and losses."""
    if not places:
        return NOTHING
    middle, record, _ = _record([d for each in places for d in each])
    means = [float(np.mean(each)) for each in places]
    between = f" ({signed(min(means))} to {signed(max(means))})" if len(places) > 1 else ""
    return f"{middle}{between} {record}"
