"""Which rate each method learns best with, by its last rounds on public validation images."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduce.declared import declare
from reproduce.probe import PLAIN, RATES_FILE
from reproduce.store import Results
from xcal.errors import UserError

LAST = 5
"""Rounds at the end whose mean macro F1 on validation images decides."""
TABLE = Path(__file__).parent.parent / "results" / "rates-probe.csv"


def choose_rates(path: Path, scale: str) -> int:
    """Write `rates.json`, and a table of all that was tried; how many rates were chosen."""
    found = Results(path).of_grid(grid := declare("rates", scale))
    if not found:
        raise UserError(f"{path} has no finished cell of the study `rates`: run that first.")
    tried: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    rows = []
    for cell in grid.cells:
        result = found.get(cell)
        if result is None or not result.finished:
            continue
        name = f"{cell.method}, {PLAIN}" if cell.variant.startswith(PLAIN) else cell.method
        epsilon = "none" if cell.epsilon is None else f"{cell.epsilon:g}"
        value = fmean(f for f in result.values["rounds"]["f1"][-LAST:] if f is not None)
        lr = float(cell.keys["lr"])
        tried[name, str(cell.keys["data"]), epsilon].append((value, lr))
        rows.append(
            [name, cell.keys["data"], epsilon, lr, round(value, 4), result.values["commit"]]
        )
    chosen: dict[str, Any] = {}
    for (name, data, epsilon), values in sorted(tried.items()):
        chosen.setdefault(name, {}).setdefault(data, {})[epsilon] = max(values)[1]
    RATES_FILE.write_text(json.dumps(chosen, indent=1) + "\n")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["method", "data", "epsilon", "lr", "validation_macro_f1", "commit"])
        out.writerows(rows)
    return len(tried)
