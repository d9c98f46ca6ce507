"""Which rate methods learn best with, by their last rounds on public validation images.

One for all methods at a set and ε, and one for `plain` cells: the mean over methods decides. What
the study `rates` has not tried yet is as the levers chose it (benchmarks/results/levers).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduce.declared import declare
from reproduce.probe import PLAIN, RATES_FILE, RECIPE
from reproduce.store import Results
from xcal.errors import UserError

LAST = 5
"""Rounds at the end whose mean macro F1 on validation images decides."""
TABLE = RATES_FILE.with_name("rates.csv")
HEAD = ("recipe", "method", "data", "epsilon", "lr", "seed", "validation_macro_f1", "commit")


def choose_rates(path: Path, scale: str) -> int:
    """Write `rates.json`, and a table of all that was tried; how many rates were chosen.

    What the table has of other sets and ε, tried in folders that are gone, stays.
    """
    found = Results(path).of_grid(grid := declare("rates", scale))
    if not found:
        raise UserError(f"{path} has no finished cell of the study `rates`: run that first.")
    tried: dict[tuple[str, str, str], dict[float, dict[str, list[float]]]] = {}
    rows = _known_rows()
    for cell in grid.cells:
        result = found.get(cell)
        if result is None or not result.finished:
            continue
        recipe = PLAIN if cell.variant.startswith(PLAIN) else RECIPE
        epsilon = "none" if cell.epsilon is None else f"{cell.epsilon:g}"
        value = fmean(f for f in result.values["rounds"]["f1"][-LAST:] if f is not None)
        data, lr = str(cell.keys["data"]), float(cell.keys["lr"])
        by_rate = tried.setdefault((recipe, data, epsilon), {})
        by_rate.setdefault(lr, {}).setdefault(cell.method, []).append(value)
        about = (recipe, cell.method, data, epsilon, str(lr), str(cell.seed))
        rows[about] = (str(round(value, 4)), result.values["commit"])
    chosen: dict[str, Any] = json.loads(RATES_FILE.read_text()) if RATES_FILE.exists() else {}
    for (recipe, data, epsilon), by_rate in sorted(tried.items()):
        # A rate that a method diverged at is none; seeds count within their method.
        whole = {lr: m for lr, m in by_rate.items() if len(m) == max(map(len, by_rate.values()))}
        best = max(whole, key=lambda lr: fmean(fmean(values) for values in whole[lr].values()))
        chosen.setdefault(recipe, {}).setdefault(data, {})[epsilon] = best
    RATES_FILE.write_text(json.dumps(chosen, indent=1) + "\n")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(HEAD)
        out.writerows((*about, *told) for about, told in rows.items())
    return len(tried)


def _known_rows() -> dict[tuple[str, ...], tuple[str, ...]]:
    """What the table has: by what was tried, its figure and commit."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == HEAD
    return {tuple(row[:6]): tuple(row[6:]) for row in rows}
