"""Draws docs/finding.png from the committed results at the scale `probe`: macro F1 at equal ε.

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

from reproduce.analysis import BASELINE, against, find, printed_gain  # noqa: E402
from reproduce.probe import PLAIN  # noqa: E402
from reproduce.store import Results  # noqa: E402
from reproduce.tables import view  # noqa: E402
from reproduce.whole import whole_grids  # noqa: E402

# Whose macro F1 is shown, less whose.
LINES = {
    ("xcal", PLAIN): ("#2b7a3d", "xcal less static noise without its recipe"),
    ("xcal-steered", ""): ("#1f5fa8", "xcal-steered less static noise, both with the recipe"),
    ("xcal-paper", ""): ("#c2571a", "xcal-paper (as published) likewise"),
}
SHIFT = 0.2


def main() -> None:
    results = Results(ROOT / "results")
    series = view(whole_grids("probe", results)["privacy-utility"], results).series
    places = [p for p in dict.fromkeys(s.place for s in series) if p.epsilon is not None]
    places.sort(key=lambda place: (place.data, place.epsilon))
    height = {place: len(places) - i for i, place in enumerate(places)}
    figure, axes = plt.subplots(figsize=(7.6, 0.42 * len(places) + 1.4), dpi=110)
    axes.axvline(0, color="#888888", linewidth=0.8)
    for i, ((method, variant), (color, label)) in enumerate(LINES.items()):
        shown = []
        for place in places:
            ours, other = find(series, place, method), find(series, place, BASELINE, variant)
            found = against(ours, other, results) if ours and other else None
            if found is not None and found.f1.seeds > 1:
                shown.append((height[place] + SHIFT * (1 - i), found.f1))
        y = [at for at, _ in shown]
        axes.hlines(
            y, [f.low for _, f in shown], [f.high for _, f in shown], color=color, linewidth=1.5
        )
        axes.plot([f.mean for _, f in shown], y, "o", color=color, markersize=4, label=label)
    gains = [(printed_gain(place), height[place]) for place in places]
    axes.plot(
        [g for g, _ in gains if g is not None],
        [y for g, y in gains if g is not None],
        "D",
        markerfacecolor="none",
        markeredgecolor="black",
        markersize=5,
        linestyle="none",
        label="gain of XCal-FL printed in the paper",
    )
    axes.set_yticks(list(height.values()), [f"{p.data}, ε = {p.epsilon:g}" for p in places])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("difference in macro F1 at equal ε (95 % interval, five seeds)", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.4, 1.12))
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "finding.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
