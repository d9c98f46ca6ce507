"""Draws docs/finding.png from the committed results: each method minus static noise at equal ε.

python docs/make_finding.py        (from the root of a checkout)
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from reproduce.analysis import printed_gain  # noqa: E402
from reproduce.store import Results  # noqa: E402
from reproduce.tables import view  # noqa: E402
from reproduce.whole import whole_grids  # noqa: E402

METHODS = {
    "xcal-steered": ("#1f5fa8", "xcal-steered (ours)"),
    "xcal-paper": ("#c2571a", "xcal-paper (as published)"),
}
SHIFT = 0.17


def main() -> None:
    results = Results(ROOT / "results")
    found = view(whole_grids("laptop", results)["privacy-utility"], results).comparisons
    # Where both models give every image the same class there is nothing to compare.
    found = [c for c in found if c.series.method in METHODS and not c.f1.same]
    places = list(dict.fromkeys(c.series.place for c in found))
    height = {place: len(places) - i for i, place in enumerate(places)}
    figure, axes = plt.subplots(figsize=(7.6, 0.29 * len(places) + 1.2), dpi=110)
    axes.axvline(0, color="#888888", linewidth=0.8)
    for i, (method, (color, label)) in enumerate(METHODS.items()):
        own = [c for c in found if c.series.method == method]
        y = [height[c.series.place] + (SHIFT if i == 0 else -SHIFT) for c in own]
        axes.hlines(
            y, [c.f1.low for c in own], [c.f1.high for c in own], color=color, linewidth=1.5
        )
        axes.plot([c.f1.mean for c in own], y, "o", color=color, markersize=4, label=label)
    gains = [(printed_gain(place), height[place]) for place in places]
    axes.plot(
        [g for g, _ in gains if g is not None],
        [y for g, y in gains if g is not None],
        "D",
        markerfacecolor="none",
        markeredgecolor="black",
        markersize=5,
        linestyle="none",
        label="gain printed in the paper",
    )
    axes.set_yticks(
        list(height.values()), [f"{p.data}, {p.network}, ε = {p.epsilon:g}" for p in places]
    )
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("macro F1 minus static noise at the same ε (95 % interval)", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.3, 1.09))
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "finding.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
