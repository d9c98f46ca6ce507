"""A study of one's own (`xcal study`) for the report: one figure and one table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.report.figures import Figure, Line
from xcal.report.words import NOTHING, Table
from xcal.studies.comparison import MEASURES

COMPARISON = "comparison.csv"


@dataclass(frozen=True)
class StudyView:
    question: str
    answer: str
    table: Table
    figure: Figure | None
    commands: Sequence[Mapping[str, Any]]


def is_study(folder: Path) -> bool:
    """Whether `xcal study` wrote its comparison here."""
    return (folder / COMPARISON).is_file()


def study_view(folder: Path) -> StudyView:
    """What the study's own table says, nothing computed anew."""
    try:
        with open(folder / COMPARISON, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        raise UserError(f"{folder / COMPARISON} cannot be read: run the study again.") from None
    if not rows or "macro_f1_mean" not in rows[0]:
        raise UserError(f"{folder / COMPARISON} has no finished cells: go on with the study.")
    axes = list(rows[0])[: list(rows[0]).index("diverged")]
    moving = [a for a in axes if len({row[a] for row in rows}) > 1] or axes[:1]
    names = [", ".join(f"{a} = {row[a]}" for a in moving) for row in rows]
    compared = [(name, row) for name, row in zip(names, rows, strict=True) if row["macro_f1_low"]]
    shows = [(name, row) for name, row in compared if _verdict(row) in ("better", "worse")]
    if compared:
        told = "; ".join(
            f"{name} is {_verdict(row)} ({float(row['macro_f1_difference']):+.3f})"
            for name, row in shows
        )
        count = f"{len(shows)} of {len(compared)} comparisons show a difference in macro F1"
        answer = f"{count}{': ' + told if told else ''}."
    else:
        best = max(zip(names, rows, strict=True), key=lambda one: _number(one[1]["macro_f1_mean"]))
        answer = f"Highest mean macro F1: {best[0]}, {_number(best[1]['macro_f1_mean']):.3f}."
    return StudyView(
        f"{folder.name}: what makes a difference?",
        answer,
        _table(moving, rows),
        _differences(compared) if compared else _means(names, rows),
        [
            {
                "name": folder.name,
                "command": str(folder / COMPARISON),
                "commit": None,
                "versions": {},
            }
        ],
    )


def _verdict(row: Mapping[str, str]) -> str:
    return row["macro_f1_verdict"]


def _number(text: str) -> float:
    return float(text) if text else float("-inf")


def _differences(compared: Sequence[tuple[str, Mapping[str, str]]]) -> Figure:
    values = [float(row["macro_f1_difference"]) for _, row in compared]
    low = [v - float(row["macro_f1_low"]) for v, (_, row) in zip(values, compared, strict=True)]
    high = [float(row["macro_f1_high"]) - v for v, (_, row) in zip(values, compared, strict=True)]
    names = tuple(name for name, _ in compared)
    words = "; ".join(f"{n}: {v:+.3f}" for n, v in zip(names, values, strict=True))
    line = Line("difference", names, tuple(values), 0, tuple(low), tuple(high), mode="markers")
    return Figure(
        "differences",
        "Macro F1 less that of the first value, paired by seed",
        f"Differences of macro F1 with 95 % intervals: {words}.",
        "difference of macro F1",
        "",
        (line,),
        across=True,
        zero=True,
    )


def _means(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Figure | None:
    known = [(n, row) for n, row in zip(names, rows, strict=True) if row["macro_f1_mean"]]
    if not known:
        return None
    spread = tuple(float(row["macro_f1_deviation"] or 0) for _, row in known)
    values = tuple(float(row["macro_f1_mean"]) for _, row in known)
    line = Line("mean", tuple(n for n, _ in known), values, 0, spread, spread, mode="markers")
    words = "; ".join(f"{n}: {v:.3f}" for (n, _), v in zip(known, values, strict=True))
    return Figure(
        "means",
        "Mean macro F1 and its standard deviation over seeds",
        f"Mean macro F1: {words}.",
        "macro F1",
        "",
        (line,),
        across=True,
    )


def _table(moving: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    titles = {"macro_f1": "macro F1", "road": "ROAD", "auroc": "AUROC"}
    shown = [m for m in MEASURES if any(row[f"{m}_mean"] for row in rows)]
    paired = any(row["macro_f1_low"] for row in rows)
    head = [", ".join(moving), "seeds"]
    for measure in shown:
        head += [titles[measure], *(["difference"] if paired else [])]
    lines = []
    for row in rows:
        cells = [", ".join(row[a] for a in moving), row["macro_f1_seeds"] or NOTHING]
        for measure in shown:
            mean, spread = row[f"{measure}_mean"], row[f"{measure}_deviation"]
            cells.append(
                f"{float(mean):.3f}{f' ± {float(spread):.3f}' if spread else ''}"
                if mean
                else NOTHING
            )
            if paired:
                low = row[f"{measure}_low"]
                cells.append(
                    f"{float(row[f'{measure}_difference']):+.3f}"
                    f" [{float(low):+.3f}, {float(row[f'{measure}_high']):+.3f}]"
                    if low
                    else NOTHING
                )
        lines.append(tuple(cells))
    note = "Mean ± standard deviation over seeds; differences are paired, with 95 % intervals."
    return Table("All of it", tuple(head), tuple(lines), note)
