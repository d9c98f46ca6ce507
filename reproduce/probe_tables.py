"""The main tables of the scale `probe`: what helps, and what the methods add once all have it."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.analysis import BASELINE, Place, Series, against, explained, find
from reproduce.paper import printed
from reproduce.probe import PLAIN
from reproduce.store import Results
from reproduce.wording import auroc_difference, figure, judged
from xcal.report.words import NOTHING, Table, epsilon_text

ADDED = ("xcal-steered", "xcal-paper", "adaptive-clip", "adap-dpfl", "agp-dp", "agp")


def _places(series: Sequence[Series]) -> list[Place]:
    return [p for p in dict.fromkeys(s.place for s in series) if p.epsilon is not None]


def _printed(place: Place, method: str) -> str:
    value = printed("macro_f1", place.data, method, place.epsilon)
    return NOTHING if value is None else f"{value:.3f}"


def what_helps(series: Sequence[Series], results: Results) -> Table | None:
    """A row a set and ε: static noise as it was, `xcal`, and what the paper prints."""
    rows = []
    for place in _places(series):
        plain, ours = find(series, place, BASELINE, PLAIN), find(series, place, "xcal")
        if plain is None or ours is None or (made := against(ours, plain, results)) is None:
            continue
        rows.append(
            (
                place.data,
                epsilon_text(place.epsilon),
                f"{_printed(place, BASELINE)}, {_printed(place, 'xcal')}",
                figure(plain.summary("macro_f1")),
                figure(ours.summary("macro_f1")),
                judged(made.f1),
                auroc_difference(made),
                figure(plain.summary("road_matched")),
                figure(ours.summary("road_matched")),
                judged(explained(ours, plain, results, "road_matched")),
            )
        )
    if not rows:
        return None
    head = (
        *("set", "ε", "the paper: static, XCal-FL", "F1, static, plain", "F1, `xcal`"),
        *("F1 − plain", "AUROC − plain", "ROAD, plain", "ROAD, `xcal`", "ROAD − plain"),
    )
    note = (
        "`fl-dp` as it was (one view of an image, standardized channels, Grad-CAM) and `xcal`"
        " (views pooled, channels whitened where that helps, maps by occlusion), at equal proved"
        " (ε, δ). ROAD of 32 test images, after temperature scaling on public validation images,"
        " of the first seeds: an occlusion map costs as much as many trainings."
        " Mean ± standard deviation over (n) seeds; differences paired by seed, with 95 %"
        " intervals over seeds and groups, and wins:losses."
    )
    return Table("What helps, at equal ε", head, tuple(rows), note)


def what_methods_add(series: Sequence[Series], results: Results) -> Table | None:
    """A row a set and ε: static noise with the recipe, and every other method less that."""
    there = [m for m in ADDED if any(s.method == m for s in series)]
    rows = []
    for place in _places(series):
        base = find(series, place, BASELINE)
        if base is None:
            continue
        found = [against(s, base, results) if s else None for s in _of(series, place, there)]
        told = [judged(one.f1) if one is not None else NOTHING for one in found]
        rows.append(
            (place.data, epsilon_text(place.epsilon), figure(base.summary("macro_f1")), *told)
        )
    if not rows or not there:
        return None
    head = ("set", "ε", "`fl-dp`", *(f"`{m}` − `fl-dp`" for m in there))
    note = (
        "Macro F1; every method has the same recipe, draws, noise and rate: the one at a set and ε"
        " that validation images chose for all. `agp` has no guarantee at any ε."
    )
    return Table("What a method adds to static noise", head, tuple(rows), note)


def _of(series: Sequence[Series], place: Place, methods: Sequence[str]) -> list[Series | None]:
    return [find(series, place, method) for method in methods]


def without_noise(series: Sequence[Series]) -> Table | None:
    """The bounds: no noise, and no federation."""
    rows = [
        (s.place.data, f"`{s.name}`", figure(s.summary("macro_f1")), figure(s.summary("auroc")))
        for s in series
        if s.place.epsilon is None
    ]
    head = ("set", "method", "macro F1", "AUROC")
    return Table("Without noise", head, tuple(rows)) if rows else None
