"""How much F1 and ROAD each share of the budget bought: courses round by round, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reproduce.analysis import Series, signed
from reproduce.paper import printed_band, printed_efficiency
from reproduce.wording import where
from xcal.report.words import Table, epsilon_text


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
class Course:
    """A series read round by round: means over seeds, at rounds where the value was measured."""

    series: Series
    share: NDArray[np.float64]  # Σρ/R, the clients' mean, after each round
    f1: NDArray[np.float64]
    road_share: NDArray[np.float64]
    road: NDArray[np.float64]
    f1_gain: float  # per unit of Σρ/R, from the first to the last round
    road_gain: float
    stop_share: float  # mean over seeds of Σρ/R at the ROAD peak …
    stop_f1: float  # … and what a model stopped there has, on public validation images
    stop_road: float
    f1_peak_share: float  # mean over seeds of Σρ/R at the F1 peak
    fall_left: float  # a rule that knows no future: what it leaves of all that a run spends …
    fall_f1: float  # … and what the model measured before ROAD's first fall has
    early_peaks: int  # seeds whose ROAD is highest before its last measurement
    sigma: NDArray[np.float64]  # noise multiplier, the clients' mean, in each round


def first_fall(values: Sequence[float]) -> tuple[int, int]:
    """(where a rule that ends at the first fall stops, whose model it keeps), as positions."""
    for now in range(1, len(values)):
        if values[now] < values[now - 1]:
            return now, now - 1
    return len(values) - 1, len(values) - 1


def course_of(series: Series) -> Course | None:
    """None where a method has no budget to speak of, or nothing was measured on the way."""
    shares, f1s, roads, stops, sigmas = [], [], [], [], []
    road_rounds: list[int] = []
    early = 0
    for result in series.cells.values():
        rounds = result.values["rounds"]
        if any(s is None for line in rounds["share"] for s in line) or None in rounds["f1"]:
            return None
        road_rounds = [t for t, v in enumerate(rounds["road"]) if v is not None]
        if len(road_rounds) < 2:
            return None
        share = np.array([np.mean(line) for line in rounds["share"]])
        f1 = np.array(rounds["f1"], float)
        road = np.array([rounds["road"][t] for t in road_rounds], float)
        peak = road_rounds[int(road.argmax())]
        fall, before = (road_rounds[t] for t in first_fall(road.tolist()))
        left = 1 - share[fall] / share[-1]
        stops.append((share[peak], f1[peak], road.max(), share[int(f1.argmax())], left, f1[before]))
        early += peak != road_rounds[-1]
        shares.append(share)
        sigmas.append([np.mean([v for v in line if v is not None]) for line in rounds["sigma"]])
        f1s.append(f1)
        roads.append(road)
    if not shares:
        return None
    share, f1, road = (np.mean(v, axis=0) for v in (shares, f1s, roads))
    road_share = share[road_rounds]
    means = map(float, np.mean(stops, axis=0))
    stop_share, stop_f1, stop_road, f1_peak_share, fall_left, fall_f1 = means
    return Course(
        series,
        share,
        f1,
        road_share,
        road,
        f1_gain=float((f1[-1] - f1[0]) / (share[-1] - share[0])),
        road_gain=float((road[-1] - road[0]) / (road_share[-1] - road_share[0])),
        stop_share=stop_share,
        stop_f1=stop_f1,
        stop_road=stop_road,
        f1_peak_share=f1_peak_share,
        fall_left=fall_left,
        fall_f1=fall_f1,
        early_peaks=early,
        sigma=np.mean(sigmas, axis=0),
    )


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
        rows.append(
            (
                f"`{c.series.method}`",
                where(p),
                epsilon_text(p.epsilon),
                signed(c.f1_gain) + _beside(printed_efficiency("f1", p.data, *which), 3),
                signed(c.road_gain) + _beside(printed_efficiency("road", p.data, *which), 1),
                f"{100 * float(c.share[-1]):.0f} %",
                f"{100 * c.f1_peak_share:.0f} %",
                f"{100 * c.stop_share:.0f} %",
                f"{c.early_peaks} of {len(c.series.cells)}",
                f"{c.stop_f1:.3f} / {c.f1[-1]:.3f}",
                f"{c.stop_road:.3f} / {c.road[-1]:.3f}",
                f"{c.fall_f1:.3f}, {100 * c.fall_left:.0f} % left",
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
        " knows no future stops at the first measurement of ROAD that is lower than the one"
        " before, and keeps the model of the one before; left: of what the run spends in the end."
        f" {_printed_band()}"
    )
    return Table("Gains by the share of the budget spent", head, tuple(rows), note)


def efficiency_answer(courses: Sequence[Course]) -> str:
    """Where ROAD peaks, what stopping there costs, and what is left unspent anyway."""
    if not courses:
        return "No finished cells yet."
    early, runs = sum(c.early_peaks for c in courses), sum(len(c.series.cells) for c in courses)
    return (
        f"ROAD is highest before its last measurement in {early} of {runs} runs, on public"
        f" validation images. {_stopped(courses)} {_unspent(courses)}"
    ).rstrip()


def _stopped(courses: Sequence[Course]) -> str:
    """What a rule that stops at ROAD's first fall leaves and costs, over all courses."""
    left = [100 * c.fall_left for c in courses]
    cost = [float(c.fall_f1 - c.f1[-1]) for c in courses]
    return (
        f"A rule that stops at its first fall leaves {np.mean(left):.0f} % of what a run would"
        f" spend and changes F1 there by {signed(float(np.mean(cost)))} ({signed(min(cost))} to"
        f" {signed(max(cost))})."
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
