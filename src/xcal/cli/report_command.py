"""`xcal report`: runs or a study on one page, also of a run that still trains; `xcal panel`."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from typer import Argument, Option

from xcal.cli.interrupts import noting, stop_if_interrupted
from xcal.cli.show import LiveProgress
from xcal.errors import UserError


def report_command(
    folders: list[Path] = Argument(..., help="Runs, folders of runs, or one study."),
    out: Path = Option(Path("report.html"), help="The page to write."),
    images: int = Option(4, min=0, max=16, help="Test images to show under every run."),
    maps: str = Option("auto", help="How maps are made, as in `xcal panel`."),
    figures: Path | None = Option(
        None, help="Also draw the figures as SVG and PDF into this folder (extra `figures`)."
    ),
    live: bool = Option(
        False, "--live", help="Show one run in the browser while it trains, on this machine only."
    ),
    port: int = Option(0, min=0, max=65535, help="With --live: its port; 0 takes any."),
) -> None:
    """Write one self-contained HTML file: a sentence, a figure, then one section per question."""
    from xcal.report.figures import save_figures
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
        save_figures(figures, page.run_figures)
        typer.echo(f"{len(page.run_figures)} figures as SVG and PDF are in {figures}.")


def _serve(folder: Path, port: int, images: int) -> None:
    """Until Ctrl-C: the page goes on growing, and is whole once the run is."""
    from xcal.report.report import LiveReport

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


def panel_command(
    runs: list[Path] = Argument(..., help="Folders of finished runs on one data set."),
    out: Path = Option(Path("panel.png"), help="The picture to write."),
    images: int = Option(4, min=1, max=64, help="How many test images to show."),
    maps: str = Option(
        "auto",
        help="How maps are made, as in `xcal explain`; auto: by the best map of each run's model on"
        " public validation images.",
    ),
) -> None:
    """Draw what each run's model looks at: rows are methods, columns are ε, one color scale."""
    from xcal.report.panel import save_panel

    with LiveProgress(Console()) as shown:
        choices = save_panel(out, runs, images, maps, partial(shown.measure, "choosing a map"))
    for folder, choice in zip(runs, choices, strict=True):
        typer.echo(f"{folder.name}: {choice.sentence()}")
    typer.echo(f"The panel of {len(runs)} run{'s' if len(runs) > 1 else ''} is in {out}.")
