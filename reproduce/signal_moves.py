"""Where the effect of the signal is lost: what it costs, when it begins to act, how far it moves σ.

    python -m reproduce.signal_moves

Reads the committed cells of `xcal-steered` (`results/cells/laptop`), trains nothing, and writes
`benchmarks/results/signal-moves.md`, a row for each set, network, ε and reference:

- price: the static σ of the same plan, and how much more noise a step with a signal gets for it;
- waits: steps that pass before the signal may move anything, of all steps of a client;
- noise: deviation of s − s̄ that comes from the release, beside Δ, what counts in full;
- moves: how far the mean σ of a round gets from the static one, over all rounds, clients and seeds;
- what there was to gain: F1 of static noise at this ε and without noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from reproduce.analysis import Series, find, series_of
from reproduce.declared import declare
from reproduce.store import Results
from xcal.experiments import make_experiment
from xcal.methods.xcal_steered import SCHEDULES, XCAL_STEERED, SteeredParameters, smoothing_noise

ROOT = Path(__file__).parent.parent
OUT = Path(__file__).parent.parent / "benchmarks" / "results" / "signal-moves.md"
SHOWN = ("", "reference = absolute", "eager", "eager, w = 0.8", "signal: decay", "signal: rise")
HEAD = (
    "| data | network | ε | variant | seeds | static σ | price | waits | noise of s − s̄ | Δ"
    " | σ over static | F1 static | F1 without noise |\n"
    "|---|---|---:|---|---:|---:|---:|---|---:|---:|---|---:|---:|"
)


def row(one: Series, others: Sequence[Series]) -> str:
    """One line of the table, from the cells of one series."""
    cells = list(one.cells.values())
    experiment = make_experiment({**cells[0].keys, "weights": None}, "the cell")
    assert isinstance(experiment, SteeredParameters)
    plan = XCAL_STEERED.plan(experiment, cells[0].values["clients"][0]["units"], experiment.rounds)
    rule = XCAL_STEERED.rule(experiment, plan)
    static = plan.sigma_static
    waits = min(plan.steps, round(rule.signal_every / rule.tau))
    moved = [
        sigma / static - 1
        for cell in cells
        for of_round in cell.values["rounds"]["sigma"]
        for sigma in of_round
        if sigma is not None
    ]
    scheduled = rule.source in SCHEDULES
    noise = smoothing_noise(rule)
    contrast = max(rule.contrast, 3 * noise)
    told = "–" if scheduled else f"{noise:.3f}"
    if scheduled:
        scale = "–"
    elif rule.reference == "absolute":
        scale = "0.5"
    else:
        scale = f"{contrast:.3f}"
    place = one.place
    base, plain = find(others, place, "fl-dp"), find(others, place.at(None), "fl")

    def mean(series: Series | None) -> str:
        found = None if series is None else series.summary("macro_f1")
        return "–" if found is None else f"{found.mean:.3f}"

    return (
        f"| {place.data} | {place.network} | {place.epsilon:g} | {one.variant or 'default'}"
        f" | {len(cells)} | {static:.3f} | {plan.sigma_ref / static - 1:.1%}"
        f" | {'–' if scheduled else f'{waits} of {plan.steps}'} | {told} | {scale}"
        f" | {min(moved):+.1%} to {max(moved):+.1%}, median {statistics.median(moved):+.1%}"
        f" | {mean(base)} | {mean(plain)} |"
    )


def page(results: Results) -> str:
    found = {
        **results.of_grid(declare("privacy-utility", "laptop")),
        **results.of_grid(declare("ablation", "laptop")),
    }
    series = series_of(found)
    rows = [
        row(one, series)
        for one in series
        if one.method == "xcal-steered" and one.variant in SHOWN and one.place.unit == "record"
    ]
    about = (
        "# Where the effect of the signal is lost\n\nMade by `python -m reproduce.signal_moves`"
        " from the cells in `results/`; what the columns are is told there. σ over static: the mean"
        " σ of each round and client; a step with a signal pays its price, so a constant lies at"
        " the price.\n\n"
    )
    return about + HEAD + "\n" + "\n".join(rows) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    OUT.write_text(page(Results(ROOT / "results")), encoding="utf-8")


if __name__ == "__main__":
    main()
