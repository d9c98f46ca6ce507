"""`xcal report`: runs and studies on one page."""

from __future__ import annotations

from pathlib import Path

import typer


def report_command(
    folders: list[Path] = typer.Argument(..., help="Runs, folders of runs, or results of studies."),
    out: Path = typer.Option(Path("report.html"), help="The page to write."),
    images: int = typer.Option(4, min=0, max=16, help="Test images to show under every run."),
    figures: Path | None = typer.Option(
        None, help="Also draw the figures as SVG and PDF into this folder (extra `figures`)."
    ),
) -> None:
    """Write one self-contained HTML file: the question, the answer, tables, interactive figures."""
    from xcal.report.report import save_report

    material = save_report(out, folders, panel_images=images)
    parts = []
    if material.runs:
        parts.append(f"{len(material.runs)} run{'s' if len(material.runs) > 1 else ''}")
    if material.studies:
        parts.append(f"{len(material.studies)} stud{'ies' if len(material.studies) > 1 else 'y'}")
    typer.echo(f"The report on {' and '.join(parts)} is in {out}.")
    if figures is not None:
        from xcal.report.vector import save_figures

        drawn = save_figures(figures, material)
        typer.echo(f"{drawn} figures as SVG and PDF are in {figures}.")
