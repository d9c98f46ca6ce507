"""How a study's figures are written: the same in the terminal, the documents and the report."""

from __future__ import annotations

from reproduce.analysis import Comparison, Place, Series, interval, signed
from reproduce.paper import printed
from xcal.report.words import NOTHING
from xcal.studies.statistics import Difference, Summary, summarize


def figure(found: Summary | None, digits: int = 3) -> str:
    """Mean ± standard deviation over seeds (n)."""
    if found is None:
        return NOTHING
    spread = "" if found.deviation is None else f" ± {found.deviation:.{digits}f}"
    return f"{found.mean:.{digits}f}{spread} ({found.seeds})".replace("-", "−")


def difference(d: Difference | None) -> str:
    """The difference with its interval and its record of wins and losses."""
    if d is None:
        return NOTHING
    return f"{interval(d)} {d.wins}:{d.losses}"


def judged(d: Difference | None) -> str:
    """The difference, with its verdict where that says something."""
    return difference(d) + (f", {d.verdict}" if d is not None and d.verdict.shows else "")


def auroc_difference(found: Comparison | None) -> str:
    """With interval and verdict where images' ranks were kept, else by seed and without."""
    if found is None or not found.auroc_by_seed:
        return NOTHING
    if found.auroc is not None:
        return judged(found.auroc)
    each = found.auroc_by_seed
    over = summarize(each)
    spread = "" if over.deviation is None else f" ± {over.deviation:.3f}"
    return f"{signed(over.mean)}{spread} {sum(d > 0 for d in each)}:{sum(d < 0 for d in each)}"


def verdict(d: Difference | None) -> str:
    return NOTHING if d is None else d.verdict


def printed_text(series: Series, measure: str, digits: int) -> str:
    p = series.place
    value = printed(
        measure,
        p.data,
        series.method,
        p.epsilon,
        network=p.network,
        clients=p.clients,
        partition=p.partition,
    )
    return NOTHING if value is None else f"{value:.{digits}f}"


def where(place: Place) -> str:
    parts = [place.data, place.network]
    if (place.clients, place.partition) != (3, "iid"):
        parts.append(f"{place.clients} clients, {place.partition}")
    return ", ".join(parts)


COMPARED = (
    "Mean ± standard deviation over (n) seeds. Differences are paired by seed and partition, with"
    " a 95 % interval that resamples seeds and whole groups, and wins:losses by seed."
)
RANKED = (
    "AUROC (one class against the rest, mean) needs no threshold. Its differences have an interval"
    " where the cells kept how they rank the test images; else they are mean ± deviation over seeds"
    " and get no verdict. ROAD, matched: after temperature scaling on public validation images,"
    " since confidence alone moves it."
)
