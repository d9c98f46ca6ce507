"""`xcal plan`: what a target costs in noise, before anything is trained."""

from __future__ import annotations

import csv
import json
import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from typer import Option

import xcal
from xcal.cli.show import make_table, plain_console

if TYPE_CHECKING:
    from xcal.dp.calibration import Plan

EXPLAINED = {
    "accountant": "pld: privacy-loss distributions, noise fixed in advance; renyi: the filter",
    "units": "declared number of units n at one client",
    "batch": "expected batch size B",
    "rounds": "rounds the client takes part in",
    "steps": "planned steps K over all rounds",
    "sample_rate": "Poisson rate B/n",
    "order": "the fixed Rényi order of filter and odometer",
    "budget": "R: what may be spent, or all steps cost, at that order",
    "sigma_static": "constant multiplier that exactly spends the target",
    "sigma_pld": "the same by PLD, for noise fixed in advance",
    "sigma_renyi": "the same by the Rényi filter, for noise chosen during training",
    "adaptive_price": "σ_renyi/σ_pld − 1: what accounting for such a choice costs",
    "sigma_ref": "multiplier of a typical step",
    "sigma_min": "lowest (the step with the best explanations)",
    "sigma_max": "highest (the step with the worst)",
    "sigma_signal": "deviation of the noise on the signal",
    "sigma_count": "deviation of the noise on the count of units within C",
    "signal_price": "σ_ref/σ_static − 1: what signal and count cost",
}


def shown_values(plan: Plan) -> dict[str, Any]:
    """The plan's own values, and its target's static multiplier by both accountants."""
    from xcal.dp.calibration import calibrate, calibrate_fixed
    from xcal.errors import UserError

    target = (plan.epsilon, plan.delta, plan.sample_rate, plan.steps)
    pld = calibrate_fixed(*target).sigma
    try:
        renyi: float | None = calibrate(*target).sigma
    except UserError:  # a target so small that no order reaches it; the plan itself has noise
        renyi = None
    price = None if renyi is None else renyi / pld - 1
    return {**plan.as_dict(), "sigma_pld": pld, "sigma_renyi": renyi, "adaptive_price": price}


def plan_command(
    method: str = Option("xcal", help="A method with a guarantee: fl-dp, xcal, …"),
    epsilon: float = Option(..., help="Target ε over all rounds."),
    delta: float = Option(1e-5, help="Target δ."),
    units: int = Option(..., help="Units of privacy at the client, n."),
    unit: str | None = Option(
        None, help="What a unit is: record (assumed if not given), or group."
    ),
    batch: int = Option(32, "--expected-batch-size", "--batch", help="Expected batch size B."),
    rounds: int = Option(30, help="Rounds T."),
    sets: list[str] = Option(
        [], "--set", help="key=value, as kappa=1 or accountant=renyi; may be repeated."
    ),
    as_json: bool = Option(False, "--json", help="One JSON object and nothing else."),
) -> None:
    """Show the noise that a target (ε, δ) needs."""
    from xcal.config import parse_set

    keys = {
        "method": method,
        "epsilon": epsilon,
        "delta": delta,
        "unit": unit,
        "expected_batch_size": batch,
        "rounds": rounds,
        **dict(map(parse_set, sets)),
    }
    made = xcal.plan(units=units, **keys)
    values = shown_values(made)
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    rows = ((key, _shown(values[key]), text) for key, text in EXPLAINED.items())
    title = f"{method}: ε = {epsilon:g}, δ = {delta:g}"
    console = plain_console()
    console.print(make_table(title, ("quantity", ">value", "what it is"), rows))
    if unit is None and made.unit == "record":
        console.print(
            f"Assumed, as a plan sees no data: a unit is one image (record). To protect patients,"
            f" let n be the number of patients (--unit group); the noise is that of {units} units."
        )
    for warning in made.warnings:
        console.print(f"Beware: {warning}")
    show_reached(console, made.sigma_ref / batch)


def _shown(value: object) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def reached() -> list[dict[str, str]]:
    """What static noise reached on public sets, one row a setting (`docs/make_reached.py`)."""
    text = files("xcal.cli").joinpath("reached.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


LEARNT = 0.55  # mean AUROC; 0.5 is chance


def show_reached(console: Console, noise: float) -> None:
    """The settings whose noise was nearest to the plan's, and a warning where they learnt nothing.

    Noise is compared as σ/B: what is added to the mean of clipped gradients, in units of C.
    """
    rows = reached()
    there = sorted({float(row["noise"]) for row in rows})
    nearest = min(there, key=lambda one: abs(math.log(one / noise)))
    near = [row for row in rows if 0.5 <= float(row["noise"]) / nearest <= 2]
    sets = sorted({row["data"] for row in near})
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in near:
        noisy = f"{float(row['noise']):.2g}"
        key = (row["network"], f"{float(row['epsilon']):g}, {row['unit']}", noisy, row["units"])
        cell = f"{float(row['macro_f1']):.2f} ({float(row['auroc']):.2f})"
        lines.setdefault(key, {})[row["data"]] = cell
    title = (
        f"Macro F1 (AUROC) of static noise on public sets; σ/B nearest to the plan's {noise:.2g}"
    )
    heads = ("what trained", ">ε, unit", ">σ/B", ">n", *(f">{name}" for name in sets))
    found = ((*at, *(cells.get(name, "–") for name in sets)) for at, cells in lines.items())
    console.print(make_table(title, heads, found))
    console.print(
        "Three clients with about n units each, 64 pixels, 10 rounds, 1 to 5 seeds; all settings:"
        " docs/results.md."
    )
    lost = [row for row in near if float(row["auroc"]) < LEARNT]
    if lost:
        which = "; ".join(f"{row['network']} on {row['data']}" for row in lost)
        console.print(
            f"Beware: nothing was learnt (AUROC below {LEARNT:g}) in these cases: {which}."
            " What helps: a head on pretrained weights (preset good), larger batches, more units, a"
            " larger ε."
        )
    if noise > 2 * there[-1]:
        console.print(
            f"Beware: the plan's noise is {noise / there[-1]:.0f} times the largest that was tried"
            " on these sets: nothing shows that it leaves anything to learn."
        )
    elif noise < there[0] / 2:
        console.print("The plan's noise is below all that was tried on these sets.")
