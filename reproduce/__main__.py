"""`python -m reproduce`: the declared studies, what they say, and the pages made from them."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from xcal.cli.app import main
from xcal.cli.interrupts import interruptible
from xcal.cli.study import AGAIN, GridProgress, print_outcome, print_plan
from xcal.errors import UserError
from xcal.studies.grid import PROBE

RESULTS = Path(__file__).parent.parent / "results"

app = typer.Typer(
    help="The paper's tables and figures, from a checkout of the repository.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _split(option: str, text: str | None) -> tuple[str, ...] | None:
    """The names that an option lists; None where it was not given."""
    if text is None:
        return None
    words = tuple(part.strip() for part in text.split(",") if part.strip())
    if not words:
        raise UserError(f"{option} names nothing: give names with commas between, or leave it out.")
    return words


def _networks(text: str | None) -> tuple[str, ...] | None:
    """Networks by name; `probe` was called `columns`."""
    names = _split("--network", text)
    return names and tuple(PROBE if name == "columns" else name for name in names)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    words = _split("--epsilons", text)
    try:
        found = None if words is None else tuple(float(word) for word in words)
    except ValueError:
        raise UserError(f"--epsilons takes numbers with commas between, not {text!r}.") from None
    for word, epsilon in zip(words or (), found or (), strict=True):
        if not 0 < epsilon < math.inf:
            raise UserError(
                f"--epsilons has {word}, but ε is a number above 0: leave it out, and for training"
                " without noise choose --methods fl."
            )
    return found


def _published(given: Path | None) -> Path | None:
    """Published weights: those named, or those beside the data sets that XCAL_DATA names."""
    if given is not None:
        if not given.is_file():
            raise UserError(f"There is no file of weights {given}: check the path.")
        return given
    if folder := os.environ.get("XCAL_DATA"):
        found = Path(folder) / "weights" / "efficientnet_b0-imagenet.pth"
        return found if found.is_file() else None
    return None


def _on_this_machine(grid: Any, results: Any, weights: Path | None, device: str) -> dict[str, str]:
    """Where published weights are and on what to run, for the cells that are still to be run."""
    changes, found = {"device": device}, _published(weights)
    if found is not None:
        return {**changes, "weights": str(found)}
    for cell in grid.cells:
        if "weights" in cell.keys and not results.has(cell):
            raise UserError(
                f"The cell ({cell.title}) starts from published weights: say where they are with"
                " --weights FILE."
            )
    return changes


@app.command("study")
def study_command(
    name: str = typer.Argument(..., help="The study."),
    scale: str = typer.Option("smoke", help="smoke, laptop, probe or paper."),
    data: str | None = typer.Option(None, help="Data sets, with commas between."),
    network: str | None = typer.Option(None, help="Networks, with commas between."),
    methods: str | None = typer.Option(None, help="Methods, with commas between."),
    epsilons: str | None = typer.Option(None, help="Values of ε, with commas between."),
    variants: str | None = typer.Option(
        None, help="Beside plain cells only variants that begin so, with commas between."
    ),
    seeds: int | None = typer.Option(None, min=1, help="How many seeds, counted from 0."),
    limit_minutes: float | None = typer.Option(None, help="Stop after so long; go on later."),
    jobs: int | None = typer.Option(None, min=1, help="Cells at once; else what the machine has."),
    weights: Path | None = typer.Option(None, help="Published EfficientNet-B0 weights."),
    results: Path = typer.Option(RESULTS, help="Where finished cells are kept."),
    work: Path = typer.Option(Path("runs/studies"), help="Where unfinished cells are."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    keep: bool = typer.Option(False, "--keep", help="Keep finished cells' run folders."),
    plan: bool = typer.Option(False, "--plan", help="Only say what there is and what is missing."),
) -> None:
    """Run a study: privacy-utility, clients, ablation, efficiency, overhead, panel, units, rates
    or shipped.

    The same command again goes on where it stopped; more seeds add to what is there.
    """
    from reproduce.declared import Choice, declare, only_variants
    from reproduce.scales import older_note
    from reproduce.store import Results
    from reproduce.whole import whole_grid
    from xcal.studies import runner

    console, there = Console(), Results(results)
    choice = Choice(
        _split("--data", data),
        _networks(network),
        _split("--methods", methods),
        _numbers(epsilons),
        seeds,
    )
    grid = declare(name, scale, choice)
    if variants is not None:
        grid = only_variants(grid, _split("--variants", variants) or ())
    if plan:
        print_plan(console, grid, there)
        if note := older_note(there.of_grid(grid).values()):
            console.print(note)
        return
    whole_grid(name, scale, there)  # results that cannot be read are refused before anything else
    options = runner.Options(
        results=results,
        work=work,
        jobs=jobs,
        limit_minutes=limit_minutes,
        command=shlex.join(["python", "-m", "reproduce", *sys.argv[1:]]),
        keep=keep,
        changes=_on_this_machine(grid, there, weights, device),
        worker="reproduce.cell",
    )
    said = f"[bold]{name}[/bold], {scale} scale, {len(grid.cells)} cells. {grid.question}"
    with interruptible(console, AGAIN), GridProgress(console, name, said) as progress:
        outcome = runner.run_grid(
            grid, options, progress, full_grid=lambda: whole_grid(name, scale, there)
        )
    console.print(
        f"{outcome.finished} of {outcome.total} cells are finished; the table is"
        f" {there.table_path(name, scale)}."
    )
    print_outcome(console, outcome, limit_minutes)


@app.command("rates")
def rates_command(
    results: Path = typer.Argument(..., help="Where `study rates` was run into."),
    scale: str = typer.Option("probe", help="The scale of the study."),
) -> None:
    """Write the rate that validation images choose for each method into reproduce/rates.json."""
    from reproduce.chosen_rates import choose_rates

    count = choose_rates(results, scale)
    Console().print(f"{count} rates are in reproduce/rates.json; commit it with what it was by.")


@app.command("merge")
def merge_command(
    folders: list[Path] = typer.Argument(..., help="Others' result folders."),
    results: Path = typer.Option(RESULTS, help="Where finished cells are kept."),
) -> None:
    """Take over the cells that other machines have finished."""
    from reproduce.scales import SCALES
    from reproduce.store import Results, merge
    from reproduce.whole import whole_grids

    ours = Results(results)
    merged = merge(ours, [Results(folder) for folder in folders])
    for known in ours.scales():
        for grid in whole_grids(known, ours).values() if known in SCALES else ():
            if ours.of_grid(grid):
                ours.write_table(grid)
    kept = len(merged.different)
    Console().print(
        f"{merged.added} cells added to {results}, {merged.known} known already"
        + (f", {kept} of them with other results: kept ours." if kept else ".")
    )


@app.command("report")
def report_command(
    folders: list[Path] = typer.Argument(None, help="Folders of results; else the committed ones."),
    out: Path = typer.Option(Path("report.html"), help="The page to write."),
    panels: bool = typer.Option(True, help="Draw where the models look."),
    figures: Path | None = typer.Option(
        None, help="Also draw the figures as SVG and PDF into this folder (extra `figures`)."
    ),
) -> None:
    """Write one self-contained HTML file: the question, the answer, tables, interactive figures."""
    from rich.progress import track

    from reproduce.report import gather, save_report

    console = Console(stderr=True)

    def shown(steps: Mapping[str, Any]) -> Any:
        return track(steps.items(), "Studies", console=console, transient=True)

    material = gather(folders or [RESULTS], panels=panels, watch=shown)
    save_report(out, material)
    count = len(material.studies)
    typer.echo(f"The report on {count} stud{'ies' if count > 1 else 'y'} is in {out}.")
    if figures is not None:
        from xcal.report.figures import save_figures

        drawn = [f for s in material.studies for f in s.every_figure]
        save_figures(figures, track(drawn, "Figures", console=console, transient=True))
        typer.echo(f"{len(drawn)} figures as SVG and PDF are in {figures}.")


@app.command("findings")
def findings_command() -> None:
    """Write the committed results' tables and answers into the documents again."""
    from reproduce.findings import write_pages

    write_pages()


if __name__ == "__main__":
    main(app, "reproduce")
