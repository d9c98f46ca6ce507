"""`xcal panel`: the same test images under every method and every ε."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer


def panel_command(
    runs: list[Path] = typer.Argument(..., help="Folders of finished runs on one data set."),
    out: Path = typer.Option(Path("panel.png"), help="The picture to write."),
    images: int = typer.Option(4, min=1, max=64, help="How many test images to show."),
    maps: str = typer.Option(
        "auto",
        help="How maps are made, as in `xcal explain`; auto: by the best map of each run's model on"
        " public validation images.",
    ),
) -> None:
    """Draw what each run's model looks at: rows are methods, columns are ε, one color scale."""
    from rich.console import Console

    from xcal.cli.show import LiveProgress
    from xcal.report.panel import save_panel

    with LiveProgress(Console()) as shown:
        choices = save_panel(out, runs, images, maps, partial(shown.measure, "choosing a map"))
    for folder, choice in zip(runs, choices, strict=True):
        typer.echo(f"{folder.name}: {choice.sentence()}")
    typer.echo(f"The panel of {len(runs)} run{'s' if len(runs) > 1 else ''} is in {out}.")
