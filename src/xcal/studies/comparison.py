"""A grid of one's own in one table: each value of the compared axis against the first."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xcal.studies.grid import OwnGrid
from xcal.studies.statistics import Difference, Measure, Summary, compare, summarize
from xcal.studies.store import CellResult, Results

MEASURES: tuple[Measure, ...] = ("macro_f1", "road", "auroc")


@dataclass(frozen=True)
class Row:
    """One combination of the axes' values, over its finished seeds."""

    at: Mapping[str, Any]  # without the seed
    diverged: int
    means: Mapping[Measure, Summary]
    differences: Mapping[Measure, Difference]  # from the first value; empty in its own row


def rows_of(own: OwnGrid, results: Results) -> list[Row]:
    """A row a combination that has finished or diverged cells, in the order of the axes."""
    found = results.of_grid(own.grid)
    by_setting: dict[tuple[tuple[str, Any], ...], dict[Any, CellResult]] = {}
    for at, cell in own.settings:
        if cell in found:
            setting = tuple((k, v) for k, v in at.items() if k != "seed")
            by_setting.setdefault(setting, {})[cell.seed] = found[cell]
    rows = []
    for setting, cells in by_setting.items():
        ended = {seed: cell for seed, cell in cells.items() if cell.finished}
        first = tuple((k, own.axes[k][0] if k == own.compared else v) for k, v in setting)
        others = {s: c for s, c in by_setting.get(first, {}).items() if c.finished}
        differences = {} if first == setting else _differences(ended, others, results)
        means = {m: summarize(v) for m in MEASURES if (v := _known(ended, m))}
        rows.append(Row(dict(setting), len(cells) - len(ended), means, differences))
    return rows


def _known(cells: Mapping[Any, CellResult], measure: Measure) -> list[float]:
    return [c.values[measure] for c in cells.values() if c.values.get(measure) is not None]


def _differences(
    ours: Mapping[Any, CellResult], theirs: Mapping[Any, CellResult], results: Results
) -> dict[Measure, Difference]:
    """Paired by seed, where both were measured on the same test images."""
    made: dict[Measure, Difference] = {}
    for measure in MEASURES:
        seeds = [
            s
            for s in ours
            if s in theirs
            and ours[s].values["test_set"] == theirs[s].values["test_set"]
            and all(c.values.get(measure) is not None for c in (ours[s], theirs[s]))
            and len({ours[s].values["id"], theirs[s].values["id"]}) == 2
        ]
        if seeds:
            test = results.test_set(ours[seeds[0]].values["test_set"])
            made[measure] = compare(
                [ours[s] for s in seeds], [theirs[s] for s in seeds], test, measure
            )
    return made


def rows_text(own: OwnGrid, rows: list[Row]) -> str:
    """The rows as CSV, in full precision."""
    axes = [k for k in own.axes if k != "seed"]
    each = ("seeds", "mean", "deviation", "difference", "low", "high", "wins", "losses", "verdict")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*axes, "diverged", *(f"{m}_{name}" for m in MEASURES for name in each)])
    for row in rows:
        cells: list[Any] = [*(row.at.get(k, "") for k in axes), row.diverged]
        for measure in MEASURES:
            mean, d = row.means.get(measure), row.differences.get(measure)
            cells += ["", "", ""] if mean is None else [mean.seeds, mean.mean, mean.deviation]
            cells += [""] * 6 if d is None else [d.mean, d.low, d.high, d.wins, d.losses, d.verdict]
        writer.writerow(cells)
    return stream.getvalue()
