"""`xcal report`: runs on one page."""

from __future__ import annotations

from pathlib import Path

import typer


def report_command(
    folders: list[Path] = typer.Argument(..., help="Runs, or folders of runs."),
    out: Path = typer.Option(Path("report.html"), help="The page to write."),
    images: int = typer.Option(4, min=0, max=16, help="Test images to show under every run."),
    maps: str = typer.Option("auto", help="How maps are made, as in `xcal panel`."),
    figures: Path | None = typer.Option(
        None, help="Also draw the figures as SVG and PDF into this folder (extra `figures`)."
    ),
) -> None:
    """Write one self-contained HTML file: the question, the answer, tables, interactive figures."""
    from xcal.report.report import save_report

    page = save_report(out, folders, panel_images=images, maps=maps)
    typer.echo(f"The report on {len(page.runs)} run{'s'[: len(page.runs) > 1]} is in {out}.")
    if figures is not None:
        from xcal.report.vector import save_figures

        save_figures(figures, page.run_figures)
        typer.echo(f"{len(page.run_figures)} figures as SVG and PDF are in {figures}.")
