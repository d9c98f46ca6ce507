"""What the signal costs and what it is worth, for choices of `signal_every` and `signal_fraction`.

`python benchmarks/signal_cost.py [FOLDER]` measures both networks at 64 px with one thread, prints
a table and, given a folder, writes it there.

Time is measured: the signal of p·B images beside our step without one. The error is that of the
smoothed signal against the mean score of the whole population, and follows from public numbers:
the noise of one release, `σ_s/(pB)` with `σ_s = κ·½·σ_t`, and the sampling of at most pB scores in
[0, 1]. It is given for a smoothing that looks back over the same number of steps whatever k is
(`τ_k = 1 − (1 − τ)^k`), which compares choices fairly, and for τ applied to each release.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peers.results import origin_lines
from peers.variants import NETWORKS, Setting, full_signal, make_step
from xcal.dp.clipping import ClippingEngine

CHOICES = ((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (8, 1.0), (1, 0.5), (1, 0.25), (2, 0.5))
TAU, KAPPA = 0.05, 5.0
# Blood cells, three clients, ε = 0.5: the static multiplier times √(1 + 1/κ²).
SIGMA = 4.23 * math.sqrt(1 + 1 / KAPPA**2)


def smoothed_error(every: int, fraction: float, batch: int, *, same_window: bool) -> float:
    """Deviation of the smoothed signal from the population's mean score."""
    count = fraction * batch
    noise = KAPPA * 0.5 * SIGMA / count
    sampling = 0.5 / math.sqrt(count)  # scores in [0, 1] deviate by at most ½
    tau = 1 - (1 - TAU) ** every if same_window else TAU
    return math.sqrt((noise**2 + sampling**2) * tau / (2 - tau))


def signal_choices(
    setting: Setting,
    *,
    choices: Sequence[tuple[int, float]] = CHOICES,
    rounds: int = 15,
) -> list[dict[str, Any]]:
    """One row per choice: signal_every, signal_fraction, overhead (share of our step), errors."""
    step = make_step("ours", setting)
    model, (images, labels) = setting.model(), setting.data()
    shown = ClippingEngine(model).clipped_sum(
        images, labels, clip=1.0, capture=str(model.cam_layer)
    )
    assert shown.features is not None
    logits, features = shown.logits, shown.features
    counts = sorted({max(1, round(fraction * setting.batch)) for _, fraction in choices})
    shares: dict[int, list[float]] = {count: [] for count in counts}
    for index in range(rounds + 1):
        start = time.perf_counter()
        step.run(index)
        plain = time.perf_counter() - start
        for count in counts:
            start = time.perf_counter()
            full_signal(model, images[:count], logits[:count], features[:count])
            if index:  # the first round warms up
                shares[count].append((time.perf_counter() - start) / plain)
    return [
        {
            "network": setting.network,
            "signal_every": every,
            "signal_fraction": fraction,
            "overhead": statistics.median(shares[max(1, round(fraction * setting.batch))]) / every,
            "error_same_window": smoothed_error(every, fraction, setting.batch, same_window=True),
            "error": smoothed_error(every, fraction, setting.batch, same_window=False),
        }
        for every, fraction in choices
    ]


def choices_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| network | signal_every | signal_fraction | overhead of our step | error, same window |"
        " error, τ per release |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['network']} | {row['signal_every']} | {row['signal_fraction']:g} | "
        f"{100 * row['overhead']:.1f} % | {row['error_same_window']:.3f} | {row['error']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    rows = [row for network in NETWORKS for row in signal_choices(Setting(network, 64))]
    text = choices_table(rows)
    print(text)
    if arguments:
        command = "python benchmarks/signal_cost.py " + arguments[0]
        head = ["# What the signal costs and what it is worth", "", *origin_lines(command), ""]
        note = (
            f"Batch 32, 64 px, one thread; τ = {TAU}, κ = {KAPPA:g}, σ_t = {SIGMA:.2f}. Computed "
            "from public numbers, not simulated: see the module's description."
        )
        path = Path(arguments[0]) / "signal-choices.md"
        path.write_text("\n".join([*head, note, "", text]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
