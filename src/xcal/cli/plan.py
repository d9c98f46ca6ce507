"""`xcal plan`: what a target costs in noise, before anything is trained."""

from __future__ import annotations

import csv
import json
import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

import xcal

if TYPE_CHECKING:
    from xcal.dp.calibration import Plan

EXPLAINED = {
    "accountant": "pld: fixed beforehand, by privacy-loss distributions; renyi: the filter",
    "units": "declared number of units n at one client",
    "batch": "expected batch size B",
    "rounds": "rounds the client takes part in",
    "steps": "planned steps K over all rounds",
    "sample_rate": "Poisson rate B/n",
    "order": "the fixed Rényi order of filter and odometer",
    "budget": "R: what may be spent, or all steps cost, at that order",
    "sigma_static": "constant multiplier that exactly spends the target",
    "sigma_pld": "the same by PLD: what noise fixed beforehand needs",
    "sigma_renyi": "the same by the Rényi filter: what noise chosen on the way needs",
    "adaptive_price": "σ_renyi/σ_pld − 1: what choosing on the way costs by accounting alone",
    "sigma_ref": "multiplier of a usual step",
    "sigma_min": "lowest (a step that is explained best)",
    "sigma_max": "highest (a step that is explained worst)",
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
    method: str = typer.Option("xcal", help="A method with a guarantee: fl-dp, xcal, …"),
    epsilon: float = typer.Option(..., help="Target ε over all rounds."),
    delta: float = typer.Option(1e-5, help="Target δ."),
    units: int = typer.Option(..., help="Units of privacy at the client, n."),
    unit: str | None = typer.Option(
        None, help="What a unit is: record (assumed if not given), or group."
    ),
    batch: int = typer.Option(
        32, "--expected-batch-size", "--batch", help="Expected batch size B."
    ),
    rounds: int = typer.Option(30, help="Rounds T."),
    local_epochs: int = typer.Option(1, help="Local epochs E."),
    kappa: float | None = typer.Option(None, help="xcal-steered: price of the signal."),
    w: float | None = typer.Option(
        None, help="xcal-steered: how far the signal moves a step's share."
    ),
    clipping: str | None = typer.Option(None, help="xcal-steered: 'fixed', or 'quantile'."),
    kappa_b: float | None = typer.Option(None, help="Quantile clipping: price of the count."),
    count_noise: float | None = typer.Option(None, help="adaptive-clip: σ_b of the count."),
    rho: float | None = typer.Option(None, help="xcal-paper: the signal's share of ε."),
    band: float | None = typer.Option(None, help="xcal-paper: half-width b of the band."),
    accountant: str | None = typer.Option(None, help="'auto', or 'renyi' for every method."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object and nothing else."),
) -> None:
    """Show the noise that a target (ε, δ) needs."""
    optional = {
        "unit": unit,
        "kappa": kappa,
        "w": w,
        "clipping": clipping,
        "kappa_b": kappa_b,
        "count_noise": count_noise,
        "rho": rho,
        "band": band,
        "accountant": accountant,
    }
    made = xcal.plan(
        units=units,
        method=method,
        epsilon=epsilon,
        delta=delta,
        batch=batch,
        rounds=rounds,
        local_epochs=local_epochs,
        **{k: v for k, v in optional.items() if v is not None},
    )
    values = shown_values(made)
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    table = Table(title=f"{method}: ε = {epsilon:g}, δ = {delta:g}", title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("what it is")
    for key, text in EXPLAINED.items():
        value = values[key]
        shown = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(key, shown, text)
    console = Console(markup=False, emoji=False)
    console.print(table)
    if unit is None and made.unit == "record":
        console.print(
            f"Assumed, as a plan sees no data: a unit is one image (record). To protect patients,"
            f" let n be the number of patients (--unit group); the noise is that of {units} units."
        )
    for warning in made.warnings:
        console.print(f"Beware: {warning}")
    show_reached(console, made.sigma_ref / batch)


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
    table = Table(
        title=f"Macro F1 (AUROC) that static noise like this, σ/B = {noise:.2g}, reached here",
        title_justify="left",
    )
    for name in ("what trained", "ε, unit", "σ/B", "n", *sets):
        table.add_column(name, justify="left" if name == "what trained" else "right")
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in near:
        noisy = f"{float(row['noise']):.2g}"
        key = (row["network"], f"{float(row['epsilon']):g}, {row['unit']}", noisy, row["units"])
        cell = f"{float(row['macro_f1']):.2f} ({float(row['auroc']):.2f})"
        lines.setdefault(key, {})[row["data"]] = cell
    for setting, cells in lines.items():
        table.add_row(*setting, *(cells.get(name, "–") for name in sets))
    console.print(table)
    console.print(
        "Three clients of about n units, 64 pixels, 10 rounds, 1 to 5 seeds: docs/results.md."
    )
    lost = [row for row in near if float(row["auroc"]) < LEARNT]
    if lost:
        which = "; ".join(f"{row['network']} on {row['data']}" for row in lost)
        console.print(
            f"Beware: nothing was learnt there by training {which} (AUROC below {LEARNT:g})."
            " Published weights whose head trains, larger batches, more units or a larger ε help."
        )
    if noise > 2 * there[-1]:
        console.print(
            f"Beware: the plan's noise is {noise / there[-1]:.0f} times the largest that was"
            " tried here: nothing says that it leaves anything to learn."
        )
    elif noise < there[0] / 2:
        console.print("The plan's noise is below all that was tried here.")
