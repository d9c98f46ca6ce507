"""How noise, signal and budget moved in a study's cells, round by round, place by place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from reproduce.analysis import Place, Series
from reproduce.tables import StudyView
from reproduce.wording import where
from xcal.report.figures import DASHES, Figure, Line, figure_id, tone
from xcal.report.run_figures import CLIENTS_SHOWN
from xcal.report.words import epsilon_text

Values = tuple[float | None, ...]  # one a round


@dataclass(frozen=True)
class PlaceCourse:
    """The figures of one set, network, federation and ε."""

    title: str
    figures: tuple[Figure, ...]


def courses_of(view: StudyView, places: Iterable[Place]) -> list[PlaceCourse]:
    """The courses of the methods as they are, variants left out, at those of `places` they have."""
    made = []
    for place in places:
        series = [s for s in view.series if s.place == place and not s.variant]
        title = f"{where(place)}, ε = {epsilon_text(place.epsilon)}"
        if place.unit != "record":
            title += f", unit: {place.unit}"
        found = [
            _of_method(view.scale, title, series, "sigma", "mean σ", "Mean σ"),
            _of_method(view.scale, title, series, "signal", "released signal", "Released signal"),
            _budget(view.scale, title, series),
        ]
        if figures := tuple(f for f in found if f is not None):
            made.append(PlaceCourse(title, figures))
    return made


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 4) if known else None


def _by_round(courses: Sequence[Sequence[float | None]]) -> Values:
    """Round by round, the mean of those that have a value there."""
    return tuple(_mean(values) for values in zip_longest(*courses))


def _rounds(values: Values) -> tuple[int, ...]:
    return tuple(range(1, len(values) + 1))


def _from_to(values: Values) -> str:
    known = [v for v in values if v is not None]
    same = max(known) - min(known) < 0.0005
    return f"{known[0]:.3f} throughout" if same else f"from {known[0]:.3f} to {known[-1]:.3f}"


def _of_method(
    scale: str, title: str, series: Sequence[Series], key: str, label: str, long: str
) -> Figure | None:
    """Each method's mean over clients and seeds, and its seeds behind it."""
    lines, words = [], []
    for one in series:
        by_seed = {
            seed: tuple(_mean(clients) for clients in cell.values["rounds"].get(key, ()))
            for seed, cell in one.cells.items()
        }
        mean = _by_round(list(by_seed.values()))
        if not any(mean):  # without noise there is none to show
            continue
        # Another dash, as in the other figures, where the method promises nothing.
        style = 0 if one.promises else 1
        lines.append(
            Line(one.method, _rounds(mean), mean, tone(one.method), style=style, mode="lines")
        )
        words.append(f"{one.method} {_from_to(mean)}")
        lines += [
            Line(
                one.method,
                _rounds(values),
                values,
                tone(one.method),
                style=style,
                mode="lines",
                label=f"{one.method}, seed {seed}",
                faint=True,
            )
            for seed, values in by_seed.items()
            if values != mean  # a seed that is like all others would only hide the mean
        ]
    if not lines:
        return None
    caption = "Means over clients and seeds; faint: single seeds."
    if key == "signal":
        caption += " Noise can carry it outside 0 to 1."
    elif any(line.style for line in lines):
        caption += " Dashed: no guarantee."
    return Figure(
        figure_id("course", scale, title, key),
        f"{long} by round: {title}",
        f"{long} in each round, mean over clients and seeds: {'; '.join(words)}.",
        "round",
        label,
        tuple(lines),
        caption=caption,
    )


def _budget(scale: str, title: str, series: Sequence[Series]) -> Figure | None:
    """Each client's share of its budget after each round, the mean over seeds."""
    lines, words, left_out = [], [], 0
    for one in series:
        by_seed = [cell.values["rounds"].get("share", ()) for cell in one.cells.values()]
        count = max((len(shares) for rounds in by_seed for shares in rounds), default=0)
        clients = [
            _by_round([[shares[k] for shares in rounds] for rounds in by_seed])
            for k in range(count)
        ]
        if not any(any(values) for values in clients):  # nothing promised, nothing spent
            continue
        alike = all(values == clients[0] for values in clients)
        left_out = max(left_out, 0 if alike else count - CLIENTS_SHOWN)
        for k, values in enumerate(clients[: 1 if alike else CLIENTS_SHOWN]):
            who = "every client" if alike and count > 1 else f"client {k}"
            lines.append(
                Line(
                    one.method,
                    _rounds(values),
                    values,
                    tone(one.method),
                    style=k % len(DASHES),
                    mode="lines",
                    label=f"{one.method}, {who}",
                )
            )
            spent = next(v for v in reversed(values) if v is not None)
            words.append(f"{one.method}, {who}: {100 * spent:.1f} %")
    if not lines:
        return None
    caption = "Means over seeds; a line a client, or one where all are alike."
    if left_out > 0:
        caption += f" The first {CLIENTS_SHOWN} clients are shown, {left_out} are not."
    return Figure(
        figure_id("course", scale, title, "budget"),
        f"Budget spent by round: {title}",
        f"Share of each client's privacy budget spent in the end: {'; '.join(words)}.",
        "round",
        "share spent, Σρ/R",
        tuple(lines),
        caption=caption,
    )
