"""`xcal run`: one training, resumable."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from xcal.config import load_experiment
from xcal.errors import UserError


def run_command(
    experiment: Path | None = typer.Argument(None, help="An experiment file (TOML)."),
    sets: list[str] = typer.Option([], "--set", help="key=value on top of it; may be repeated."),
    out: Path | None = typer.Option(None, "--out", help="The run's folder; must not exist yet."),
    resume: Path | None = typer.Option(None, "--resume", help="Continue the run in this folder."),
) -> None:
    """Train one experiment, or continue one that was cut off."""
    from xcal.cli.show import LiveProgress, show_result
    from xcal.federation.folder import RunFolder
    from xcal.federation.local import run_experiment
    from xcal.federation.setup import prepare

    console = Console()
    federation = None
    if resume is not None:
        if experiment is not None or sets or out is not None:
            raise UserError(
                "--resume takes the run's own configuration: give nothing else with it."
            )
        folder = RunFolder.find(resume)
    else:
        if out is None:
            raise UserError(
                "Say where the run goes with --out DIR, or continue one with --resume DIR."
            )
        made, given = load_experiment(experiment, sets)
        console.print(f"Preparing {made.data} for {made.method}, {made.clients} clients …")
        federation = prepare(made)
        folder = RunFolder.create(out, made, sorted(given))
    try:
        with LiveProgress(console) as progress:
            result = run_experiment(folder, progress, federation)
    except KeyboardInterrupt:
        console.print(
            f"\nInterrupted. Nothing is lost: continue with `xcal run --resume {folder.path}`."
        )
        raise typer.Exit(130) from None
    show_result(console, result, folder.path)
