"""How a study's figures are written: the same in the terminal, the documents and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xcal.studies.analysis import Place, Series, interval, signed
from xcal.studies.paper import printed
from xcal.studies.statistics import Difference, Summary, summarise

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{self.title}**", ""]
        lines.append("| " + " | ".join(self.head) + " |")
        lines.append("|" + "---|" * len(self.head))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines)


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


def by_seed(differences: Sequence[float]) -> str:
    """Mean and deviation over seeds, wins and losses; no interval, and so no verdict."""
    if not differences:
        return NOTHING
    found = summarise(differences)
    spread = "" if found.deviation is None else f" ± {found.deviation:.3f}"
    ahead, behind = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return f"{signed(found.mean)}{spread} {ahead}:{behind}"


def verdict(d: Difference | None) -> str:
    return NOTHING if d is None else d.verdict


def epsilon_text(epsilon: float | None) -> str:
    return "∞" if epsilon is None else f"{epsilon:g}"


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
NO_VERDICT = (
    "AUROC (one class against the rest, mean) needs no threshold; its differences are mean ±"
    " deviation over seeds, not resampled, and get no verdict."
)
