"""`xcal audit`: attack the project's own training and say what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from xcal.cli.show import LiveProgress, epsilon_text, make_table, number
from xcal.errors import UserError


def audit_command(
    attacks: list[str] = Argument(
        None, help="one-run, membership, inversion; all if none is named."
    ),
    method: list[str] = Option([], help="A method to attack; all if not given."),
    sets: list[str] = Option([], "--set", help="key=value of the trainings attacked."),
    quick: bool = Option(False, help="A minute's worth: weaker attacks."),
    canaries: int | None = Option(None, help="Gradient canaries of the one-run audit."),
    models: int | None = Option(None, help="Models of membership inference, even."),
    pictures: int | None = Option(None, help="Pictures that inversion tries."),
    level: list[str] = Option(
        [], help="An ε that inversion is tried at, or none; none, 50, 5, 0.5 if not given."
    ),
    confidence: float = Option(0.95, help="Of the lower bounds on ε."),
    out: Path = Option(Path("runs/audit"), help="Where audit.json and pictures go."),
    as_json: bool = Option(False, "--json", help="Print the results as JSON, nothing else."),
) -> None:
    """Attack training with and without privacy: canaries, membership, gradient inversion.

    Interrupted, the same command goes on where it stopped. Exit code 1 where an attack refutes a
    guarantee.
    """
    from dataclasses import replace

    from xcal.audit.suite import QUICK, Effort, Suite
    from xcal.config import parse_set

    if not 0.5 <= confidence < 1:
        raise UserError(f"confidence is {confidence:g}: choose at least 0.5 and less than 1.")
    wanted = {"gradient_canaries": canaries, "models": models, "pictures": pictures}
    chosen: dict[str, Any] = {k: v for k, v in wanted.items() if v is not None}
    for name, least in (("gradient_canaries", 2), ("models", 4), ("pictures", 1)):
        if chosen.get(name, least) < least:
            raise UserError(f"{name.split('_')[-1]} is {chosen[name]}: choose at least {least}.")
    if level:
        chosen["levels"] = tuple(None if text == "none" else _level(text) for text in level)
    effort = replace(QUICK if quick else Effort(), confidence=confidence, **chosen)
    console = Console(stderr=as_json)
    with LiveProgress(console) as shown:
        suite = Suite(dict(map(parse_set, sets)), method, effort, shown.attack)
        result = suite.run(attacks or [], out)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show_audit(console, result)
        console.print(f"Everything is in {out}.")
    if result["broken"]:
        raise typer.Exit(1)


def _level(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UserError(f"level is {text!r}: give an ε greater than 0, or none.")
    return value


def show_audit(console: Console, result: dict[str, Any]) -> None:
    """The tables of one audit."""
    if "one-run" in result:
        console.print(_one_run_table(result["one-run"]))
        console.print(
            "found: lower bound on ε; expected: what an ideal auditor of the noise charged finds on"
            " average; at best: if every guess were right."
        )
    if "membership" in result:
        console.print(_membership_table(result["membership"]))
    if "inversion" in result:
        console.print(_inversion_table(result["inversion"]))
    for name in result["broken"]:
        console.print(f"BROKEN: an attack refutes the guarantee of {name}.", style="bold red")
    if not result["broken"]:
        console.print("No guarantee was refuted.")


def _one_run_table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    title = f"One-run audit, {100 * first['confidence']:g} % confidence, δ = {first['delta']:g}"
    heads = ("method", "canaries", "seen", ">ε claimed", ">found", ">expected", ">at best")
    found = (
        (
            row["method"],
            f"{row['canaries']} {row['canary']}",
            row["view"],
            epsilon_text(row["epsilon_claimed"]),
            number(row["epsilon_found"], 2),
            number(row["expected"], 2),
            number(row["strongest"], 2),
            number(row["accuracy"], 3),
            number(row["p_charged"], 3),
        )
        for row in rows
    )
    return make_table(title, (*heads, ">accuracy", ">p"), found)


def _membership_table(rows: list[dict[str, Any]]) -> Table:
    title = "Membership inference on the final model"
    heads = ("method", "attack", ">ε", ">AUC (95 %)", ">TPR at 1 % FPR (95 %)")
    found = (
        (
            row["method"],
            row["attack"],
            epsilon_text(row["epsilon_claimed"]),
            f"{row['auc']:.3f} ({row['auc_low']:.3f}–{row['auc_high']:.3f})",
            f"{row['tpr']:.3f} ({row['tpr_low']:.3f}–{row['tpr_high']:.3f})",
            number(row["tpr_limit"], 3),
            f"{row['train_accuracy']:.2f}/{row['outside_accuracy']:.2f}",
        )
        for row in rows
    )
    return make_table(title, (*heads, ">allowed by ε", ">fit in/out"), found)


def _inversion_table(rows: list[dict[str, Any]]) -> Table:
    title = "Gradient inversion of one client's update"
    heads = ("update of", "network", "attack", ">ε", ">median PSNR (dB)", ">median SSIM")
    found = (
        (
            row["setting"],
            row["network"].rpartition(":")[2],
            row["attack"],
            epsilon_text(row["epsilon"]),
            number(row["median_psnr"], 1),
            number(row["median_ssim"], 2),
            f"{100 * row['recovered']:.0f} %",
        )
        for row in rows
    )
    return make_table(title, (*heads, ">at 20 dB or more"), found)
