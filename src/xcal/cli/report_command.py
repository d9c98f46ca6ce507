"""`xcal report`: runs or a study on one page; `--live`: a run that still trains."""

from __future__ import annotations

import threading
from pathlib import Path

import typer
from rich.console import Console

from xcal.cli.interrupts import noting, stop_if_interrupted
from xcal.errors import UserError


def report_command(
    folders: list[Path] = typer.Argument(..., help="Runs, folders of runs, or one study."),
    out: Path = typer.Option(Path("report.html"), help="The page to write."),
    images: int = typer.Option(4, min=0, max=16, help="Test images to show under every run."),
    maps: str = typer.Option("auto", help="How maps are made, as in `xcal panel`."),
    figures: Path | None = typer.Option(
        None, help="Also draw the figures as SVG and PDF into this folder (extra `figures`)."
    ),
    live: bool = typer.Option(
        False, "--live", help="Show one run in the browser while it trains, on this machine only."
    ),
    port: int = typer.Option(0, min=0, max=65535, help="With --live: its port; 0 takes any."),
) -> None:
    """Write one self-contained HTML file: a sentence, a figure, then one section per question."""
    from xcal.report.report import save_report

    if live:
        if len(folders) != 1:
            raise UserError("--live shows one run: name one folder.")
        _serve(folders[0], port, images)
        return
    with Console(stderr=True).status("reading") as status:
        page = save_report(out, folders, panel_images=images, maps=maps, progress=status.update)
    what = f"{len(page.runs)} run{'s'[: len(page.runs) > 1]}" if page.runs else "the study"
    typer.echo(f"The report on {what} is in {out}.")
    if figures is not None:
        from xcal.report.vector import save_figures

        save_figures(figures, page.run_figures)
        typer.echo(f"{len(page.run_figures)} figures as SVG and PDF are in {figures}.")


def _serve(folder: Path, port: int, images: int) -> None:
    """Until Ctrl-C: the page goes on growing, and is whole once the run is."""
    from xcal.report.live import LiveReport

    live = LiveReport(folder, port, images)
    thread = threading.Thread(target=live.serve, daemon=True)
    thread.start()
    typer.echo(f"{folder} in the browser, on this machine only: {live.url} (Ctrl-C ends it)")
    try:
        with noting():
            while thread.is_alive():
                thread.join(0.2)
                stop_if_interrupted()
    except KeyboardInterrupt:
        typer.echo("Ended; the run goes on by itself.")
    finally:
        live.close()
