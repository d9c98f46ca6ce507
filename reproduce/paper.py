"""The figures that the paper prints, to stand beside ours."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from reproduce.scales import PAPER_NETWORK, PAPER_SET

# Our names for the methods of the printed tables. Both of ours stand beside the printed one.
_COLUMN = {
    "centralized": "centralized",
    "fl": "fl",
    "fl-dp": "fl_dp",
    "agp": "agp",
    "xcal-paper": "xcal",
    "xcal-steered": "xcal",
    "xcal": "xcal",
}
_SHIFT = {"iid": "iid", "label": "label_shift", "covariate": "covariate_shift"}
# 2·F_inf / 3F with F_inf = 0.5 … 0.7 F, and the largest overhead that was measured.
PRINTED_OVERHEAD = (1 / 3, 1.4 / 3, 0.8)


def printed_efficiency(measure: str, data: str, method: str, epsilon: float | None) -> float | None:
    """The printed gain in F1 or ROAD (in the paper's percent) per unit of Σρ/R, at ε = 0.5."""
    if epsilon != 0.5:
        return None
    of_set = tables()["efficiency_eps0.5"][f"delta_{measure}_per_delta_eps"].get(
        PAPER_SET.get(data)
    )
    value = None if of_set is None else of_set.get(_COLUMN.get(method))
    return None if value is None else float(value)


def printed_band() -> dict[float, tuple[float, float]]:
    """By ε the lowest and highest σ of the published rule, as printed."""
    return {float(e): (low, high) for e, (low, high) in tables()["sigma_band_by_epsilon"].items()}


@cache
def tables() -> dict[str, Any]:
    text = files("reproduce").joinpath("paper.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def printed(
    measure: str,
    data: str,
    method: str,
    epsilon: float | None,
    *,
    network: str = "efficientnet_b0",
    clients: int = 3,
    partition: str = "iid",
) -> float | None:
    """The printed macro F1 or ROAD (in the paper's percent); None where nothing is printed.

    The main tables are of EfficientNet-B0 with three clients. For a network the paper has not,
    the figure of its EfficientNet-B0 is the nearest there is.
    """
    paper_set, column = PAPER_SET.get(data), _COLUMN.get(method)
    if paper_set is None or column is None:
        return None
    named = PAPER_NETWORK.get(network, "EfficientNet-B0")
    kind = "macro_f1" if measure == "macro_f1" else "road"
    if method == "centralized":
        bound: float = tables()["centralized_bounds"][kind][paper_set][named]
        return bound
    if (clients, partition, named) == (3, "iid", "EfficientNet-B0"):
        of_set = tables()[f"{kind}_by_epsilon_N3_efficientnet_b0"][paper_set]
        if method == "fl":
            return float(of_set["fl"])
        found = {float(e): v for e, v in of_set.items() if isinstance(v, dict)}
        value = found.get(float(epsilon or 0), {}).get(column)
        return None if value is None else float(value)
    if method != "fl" and epsilon != 0.5:
        return None
    for row in tables()[f"{kind}_by_setting_eps0.5"]:
        place = (row["setting"], row["model"], row["clients"])
        if place == (_SHIFT.get(partition), named, clients):
            value = row[paper_set].get(column)
            return None if value is None else float(value)
    return None
