"""How much F1 and ROAD each share of the budget bought: courses round by round, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reproduce.analysis import Series, signed
from reproduce.paper import printed_band, printed_efficiency
from reproduce.wording import where
from xcal.report.words import NOTHING, Table, epsilon_text


def lowess(
    x: NDArray[np.float64], y: NDArray[np.float64], share: float = 0.6
) -> NDArray[np.float64]:
    """Cleveland's locally weighted line with tricube weights, at each x; for the eye only."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    nearest = max(3, int(np.ceil(share * len(x))))
    if len(x) < 3:
        return y.copy()
    result = np.empty(len(x))
    for i, here in enumerate(x):
        distance = np.abs(x - here)
        reach = np.sort(distance)[min(nearest, len(x)) - 1]
        weight = (1 - np.clip(distance / max(reach * 1.0001, 1e-12), 0, 1) ** 3) ** 3
        center = (weight * x).sum() / weight.sum()
        spread = (weight * (x - center) ** 2).sum()
        level = (weight * y).sum() / weight.sum()
        slope = (weight * (x - center) * y).sum() / spread if spread > 1e-12 else 0.0
        result[i] = level + slope * (here - center)
    return result


@dataclass(frozen=True)
class RoadCourse:
    """ROAD of a series at the rounds where it was measured, and what stopping by it would do."""

    share: NDArray[np.float64]
    values: NDArray[np.float64]
    gain: float  # per unit of Σρ/R, from the first to the last measurement
    stop_share: float  # mean over seeds of Σρ/R at the peak …
    stop_f1: float  # … and what a model stopped there has, on public validation images
    stop_road: float
    fall_left: float  # a rule that does not look ahead: what it leaves of all that a run spends …
    fall_f1: float  # … and what the model measured before the first fall has
    early_peaks: int  # seeds that are highest before their last measurement


@dataclass(frozen=True)
class Course:
    """A series read round by round: means over seeds."""

    series: Series
    share: NDArray[np.float64]  # Σρ/R, the clients' mean, after each round
    f1: NDArray[np.float64]
    f1_gain: float  # per unit of Σρ/R, from the first to the last round
    f1_peak_share: float  # mean over seeds of Σρ/R at the F1 peak
    sigma: NDArray[np.float64]  # noise multiplier, the clients' mean, in each round
    road: RoadCourse | None  # None where ROAD was not measured on the way


def first_fall(values: Sequence[float]) -> tuple[int, int]:
    """(where a rule that ends at the first fall stops, whose model it keeps), as positions."""
    for now in range(1, len(values)):
        if values[now] < values[now - 1]:
            return now, now - 1
    return len(values) - 1, len(values) - 1


def course_of(series: Series) -> Course | None:
    """None where a method has no budget to speak of, or nothing was measured on the way."""
    shares, f1s, peaks, sigmas = [], [], [], []
    for result in series.cells.values():
        rounds = result.values["rounds"]
        spent = any(s is None for line in rounds["share"] for s in line)
        if spent or None in rounds["f1"] or len(rounds["f1"]) < 2:
            return None
        share, f1 = _shares(rounds), np.array(rounds["f1"], float)
        shares.append(share)
        f1s.append(f1)
        peaks.append(share[int(f1.argmax())])
        sigmas.append([np.mean([v for v in line if v is not None]) for line in rounds["sigma"]])
    if not shares:
        return None
    share, f1 = (np.mean(v, axis=0) for v in (shares, f1s))
    return Course(
        series,
        share,
        f1,
        f1_gain=float((f1[-1] - f1[0]) / (share[-1] - share[0])),
        f1_peak_share=float(np.mean(peaks)),
        sigma=np.mean(sigmas, axis=0),
        road=_road_course(series),
    )


def _shares(rounds: Mapping[str, Any]) -> NDArray[np.float64]:
    return np.array([np.mean(line) for line in rounds["share"]])


def _road_course(series: Series) -> RoadCourse | None:
    shares, roads, stops, early = [], [], [], 0
    for result in series.cells.values():
        rounds = result.values["rounds"]
        measured = [t for t, v in enumerate(rounds["road"]) if v is not None]
        if len(measured) < 2:
            return None
        share, f1 = _shares(rounds), np.array(rounds["f1"], float)
        road = np.array([rounds["road"][t] for t in measured], float)
        peak = measured[int(road.argmax())]
        fall, before = (measured[t] for t in first_fall(road.tolist()))
        stops.append((share[peak], f1[peak], road.max(), 1 - share[fall] / share[-1], f1[before]))
        early += peak != measured[-1]
        shares.append(share[measured])
        roads.append(road)
    share, road = (np.mean(v, axis=0) for v in (shares, roads))
    stop_share, stop_f1, stop_road, fall_left, fall_f1 = map(float, np.mean(stops, axis=0))
    gain = float((road[-1] - road[0]) / (share[-1] - share[0]))
    return RoadCourse(share, road, gain, stop_share, stop_f1, stop_road, fall_left, fall_f1, early)


def without_course(series: Iterable[Series]) -> list[str]:
    """Why methods that were run have no course, a sentence each."""
    said = {}
    for one in series:
        if course_of(one) is not None:
            continue
        spent = [r.values["rounds"]["share"] for r in one.cells.values()]
        counted = all(s is not None for rounds in spent for line in rounds for s in line)
        said[one.method, counted] = f"`{one.method}` has no row" + (
            f" for {one.place.data}, {one.place.network}: on the way it was measured too rarely."
            if counted
            else ": it promises nothing, its ε is nominal, and so there is no budget of which a"
            " share could be spent."
        )
    return list(said.values())


def efficiency_table(courses: Sequence[Course]) -> Table:
    """A row a course: what was gained, where it peaked, what stopping would have left."""
    rows = []
    for c in courses:
        p = c.series.place
        which = c.series.method, p.epsilon
        paper = _beside(printed_efficiency("road", p.data, *which), 1)
        rows.append(
            (
                f"`{c.series.method}`",
                where(p),
                epsilon_text(p.epsilon),
                signed(c.f1_gain) + _beside(printed_efficiency("f1", p.data, *which), 3),
                (NOTHING if c.road is None else signed(c.road.gain)) + paper,
                f"{100 * float(c.share[-1]):.0f} %",
                f"{100 * c.f1_peak_share:.0f} %",
                *_road_cells(c),
                f"{c.sigma[0]:.2f} / {c.sigma.min():.2f} / {c.sigma[-1]:.2f}",
            )
        )
    head = (
        "method",
        "where",
        "ε",
        "ΔF1 / Δ(Σρ/R)",
        "ΔROAD / Δ(Σρ/R)",
        "spent in the end",
        "F1 peaks at",
        "ROAD peaks at",
        "before the last",
        "F1 there / at the end",
        "ROAD there / at the end",
        "F1 if stopped at ROAD's first fall",
        "σ, first / lowest / last round",
    )
    note = (
        "On public validation images, means over seeds; in brackets what the paper prints, its"
        " ROAD in its own percent. Peaks are those of each seed's own course, in shares of the"
        " budget; a peak chosen after the fact is biased upwards, most where the course is noise."
        " Before the last: seeds whose ROAD is highest before its last measurement. A rule that"
        " does not look ahead stops at the first measurement of ROAD that is lower than the one"
        " before, and keeps the model of the one before; left: of what the run spends in the end."
        f" {_printed_band()}"
    )
    return Table("Gains by the share of the budget spent", head, tuple(rows), note)


def _road_cells(c: Course) -> tuple[str, ...]:
    if (r := c.road) is None:
        return (NOTHING,) * 5
    return (
        f"{100 * r.stop_share:.0f} %",
        f"{r.early_peaks} of {len(c.series.cells)}",
        f"{r.stop_f1:.3f} / {c.f1[-1]:.3f}",
        f"{r.stop_road:.3f} / {r.values[-1]:.3f}",
        f"{r.fall_f1:.3f}, {100 * r.fall_left:.0f} % left",
    )


def efficiency_answer(courses: Sequence[Course]) -> str:
    """Where F1 and ROAD peak, what stopping there costs, and what is left unspent anyway."""
    if not courses:
        return "No finished cells yet."
    peaks = [100 * c.f1_peak_share for c in courses]
    said = (
        f"Macro F1 peaks at {min(peaks):.0f} to {max(peaks):.0f} % of the budget, by course, on"
        " public validation images."
    )
    return " ".join(filter(None, (said, _stopped(courses), _unspent(courses))))


def _stopped(courses: Sequence[Course]) -> str:
    """Where ROAD peaks, and what a rule that stops at its first fall leaves and costs."""
    told = [(c, c.road) for c in courses if c.road is not None]
    if not told:
        return ""
    early, runs = sum(r.early_peaks for _, r in told), sum(len(c.series.cells) for c, _ in told)
    left = [100 * r.fall_left for _, r in told]
    cost = [float(r.fall_f1 - c.f1[-1]) for c, r in told]
    return (
        f"ROAD is highest before its last measurement in {early} of {runs} runs. A rule that stops"
        f" at its first fall leaves {np.mean(left):.0f} % of what a run would spend and changes F1"
        f" there by {signed(float(np.mean(cost)))} ({signed(min(cost))} to {signed(max(cost))})."
    )


def _unspent(courses: Sequence[Course]) -> str:
    """Which methods end with a part of their budget unspent, whoever stops them."""
    ends: dict[str, list[float]] = {}
    for c in courses:
        ends.setdefault(c.series.method, []).append(100 * (1 - float(c.share[-1])))
    told = [
        f"`{method}` leaves {np.mean(left):.0f} % of its budget unspent ({min(left):.0f} to"
        f" {max(left):.0f} %)"
        for method, left in ends.items()
        if np.mean(left) >= 1
    ]
    return f"By itself {', '.join(told)}." if told else ""


def _beside(value: float | None, digits: int) -> str:
    return "" if value is None else f" ({value:+.{digits}f})"


def _printed_band() -> str:
    """The paper's own range of σ, for comparison with the last column."""
    bands = [f"{low:g} to {high:g} at ε = {e:g}" for e, (low, high) in printed_band().items()]
    return f"The paper prints a σ of {', '.join(bands)}."
