"""`xcal panel`: the same test images under every method and every ε."""

from __future__ import annotations

from pathlib import Path

import typer


def panel_command(
    runs: list[Path] = typer.Argument(..., help="Folders of finished runs on one data set."),
    out: Path = typer.Option(Path("panel.png"), help="The picture to write."),
    images: int = typer.Option(4, min=1, max=64, help="How many test images to show."),
) -> None:
    """Draw what each run's model looks at: rows are methods, columns are ε, one color scale."""
    from xcal.report.panel import save_panel

    save_panel(out, runs, images)
    typer.echo(f"The panel of {len(runs)} run{'s' if len(runs) > 1 else ''} is in {out}.")
