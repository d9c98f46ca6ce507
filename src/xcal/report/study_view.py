"""A study of one's own (`xcal study`) for the report: one figure and one table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from xcal.errors import UserError
from xcal.metrics.metric_registry import metric_title
from xcal.report.figures import Figure, Line
from xcal.report.template import Page
from xcal.report.words import NOTHING, Table
from xcal.studies.statistics import MEASURES, Verdict

COMPARISON = "comparison.csv"
Row = Mapping[str, str]


def is_study(folder: Path) -> bool:
    """Whether `xcal study` wrote its comparison here."""
    return (folder / COMPARISON).is_file()


def study_page(folder: Path) -> Page:
    """What the study's own table says, nothing computed anew."""
    source = folder / COMPARISON
    try:
        with open(source, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        raise UserError(f"{source} cannot be read: run the study again.") from None
    if not rows or "macro_f1_mean" not in rows[0]:
        raise UserError(f"{source} has no finished cells: go on with the study.")
    axes = list(rows[0])[: list(rows[0]).index("diverged")]
    moving = [a for a in axes if len({row[a] for row in rows}) > 1] or axes[:1]
    named = [(", ".join(f"{a} = {row[a]}" for a in moving), row) for row in rows]
    compared = [(name, row) for name, row in named if row["macro_f1_low"]]
    measured = [(name, row) for name, row in named if row["macro_f1_mean"]]
    return Page(
        f"{folder.name}: what makes a difference?",
        [_differing(compared) if compared else _highest(measured)],
        runs_table=_table(moving, rows),
        lead=_differences(compared) if compared else _means(measured),
        runs_question="What was measured?",
        commands=[{"name": folder.name, "command": str(source), "commit": None, "versions": {}}],
    )


def _differing(compared: Sequence[tuple[str, Row]]) -> str:
    shows = [(name, row) for name, row in compared if Verdict(row["macro_f1_verdict"]).shows]
    told = "; ".join(
        f"{name} is {row['macro_f1_verdict']} ({float(row['macro_f1_difference']):+.3f})"
        for name, row in shows
    )
    count = f"{len(shows)} of {len(compared)} comparisons show a difference in macro F1"
    return f"{count}{': ' + told if told else ''}."


def _highest(measured: Sequence[tuple[str, Row]]) -> str:
    if not measured:
        return "None of its cells was measured."
    name, row = max(measured, key=lambda one: float(one[1]["macro_f1_mean"]))
    return f"Highest mean macro F1: {name}, {float(row['macro_f1_mean']):.3f}."


def _differences(compared: Sequence[tuple[str, Row]]) -> Figure:
    values = [float(row["macro_f1_difference"]) for _, row in compared]
    pairs = list(zip(values, compared, strict=True))
    low = tuple(v - float(row["macro_f1_low"]) for v, (_, row) in pairs)
    high = tuple(float(row["macro_f1_high"]) - v for v, (_, row) in pairs)
    words = "; ".join(f"{name}: {v:+.3f}" for v, (name, _) in pairs)
    names = tuple(name for name, _ in compared)
    return Figure(
        "differences",
        "Macro F1 less that of the first value, paired by seed",
        f"Differences of macro F1 with 95 % intervals: {words}.",
        "difference of macro F1",
        "",
        (Line("difference", names, tuple(values), 0, low, high, mode="markers"),),
        across=True,
        zero=True,
    )


def _means(measured: Sequence[tuple[str, Row]]) -> Figure | None:
    if not measured:
        return None
    names = tuple(name for name, _ in measured)
    spread = tuple(float(row["macro_f1_deviation"] or 0) for _, row in measured)
    values = tuple(float(row["macro_f1_mean"]) for _, row in measured)
    words = "; ".join(f"{name}: {v:.3f}" for name, v in zip(names, values, strict=True))
    return Figure(
        "means",
        "Mean macro F1 and its standard deviation over seeds",
        f"Mean macro F1: {words}.",
        "macro F1",
        "",
        (Line("mean", names, values, 0, spread, spread, mode="markers"),),
        across=True,
    )


def _table(moving: Sequence[str], rows: Sequence[Row]) -> Table:
    shown = [m for m in MEASURES if any(row[f"{m}_mean"] for row in rows)]
    paired = any(row["macro_f1_low"] for row in rows)
    head = [", ".join(moving), "seeds"]
    for measure in shown:
        head += [metric_title(measure), *(["difference"] if paired else [])]
    lines = []
    for row in rows:
        diverged = f", {row['diverged']} diverged" if row["diverged"] != "0" else ""
        seeds = (row["macro_f1_seeds"] or NOTHING) + diverged
        cells = [", ".join(row[a] for a in moving), seeds]
        for measure in shown:
            cells.append(_mean(row, measure))
            cells += [_difference(row, measure)] if paired else []
        lines.append(tuple(cells))
    note = "Mean ± standard deviation over seeds."
    if paired:
        note += (
            " Differences from the first value, paired by seed, with 95 % intervals that resample"
            " seeds and whole groups of test images."
        )
    return Table("All of it", tuple(head), tuple(lines), note)


def _mean(row: Row, measure: str) -> str:
    mean, spread = row[f"{measure}_mean"], row[f"{measure}_deviation"]
    beside = f" ± {float(spread):.3f}" if spread else ""
    return f"{float(mean):.3f}{beside}" if mean else NOTHING


def _difference(row: Row, measure: str) -> str:
    if not row[f"{measure}_low"]:
        return NOTHING
    mean, low, high = (float(row[f"{measure}_{what}"]) for what in ("difference", "low", "high"))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], {row[f'{measure}_verdict']}"
