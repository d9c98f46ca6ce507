"""`xcal study`: an experiment along axes of one's own, resumable, compared in pairs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Argument, Option

from xcal.cli.interrupts import interruptible
from xcal.cli.show import Bar, make_table, number
from xcal.errors import UserError

if TYPE_CHECKING:
    from xcal.studies.grid import Cell, Grid
    from xcal.studies.runner import Outcome
    from xcal.studies.store import Results


AGAIN = "The same command goes on from here."


class GridProgress(Bar):
    """One bar over the whole grid with what is left of its time, and one line per finished cell."""

    def __init__(self, console: Console, title: str, announced: str) -> None:
        self._console = console
        self._title = title
        self._announced = announced  # said once it is known that the grid can be run
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.1f}/{task.total} cells"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._task: Any = None
        self._left = "time left not known yet"
        self._ended = 0
        self._total = 0

    def begin(self, total: int, known: int) -> None:
        self._ended, self._total = known, total
        self._console.print(self._announced)
        if known:
            self._console.print(f"{known} of {total} cells are finished already.")
        self._task = self._bar.add_task(self._title, total=total, completed=known, left="")

    def started(self, cell: Cell) -> None: ...

    def moved(self, done: float, seconds_left: float | None) -> None:
        if seconds_left is not None:
            self._left = f"about {time_text(seconds_left)} left"
        self._bar.update(self._task, completed=done, left=self._left)

    def ended(self, cell: Cell, message: dict[str, Any]) -> None:
        from xcal.studies.grid import BUSY

        if message["code"] == BUSY:
            self._console.print(
                f"{cell.title} is being made by another process: left to it.", highlight=False
            )
            return
        if message["code"] == 0:
            self._ended += 1
            said = (
                f"F1 {number(message['macro_f1'])}, ROAD {number(message['road'])},"
                f" {message['seconds']:.0f} s"
                if message["finished"] == "finished"
                else "training diverged"
            )
        else:
            said = f"failed: {message['error']}"
        self._console.print(
            f"{self._ended}/{self._total}  {cell.title}: {said}; {self._left}", highlight=False
        )


def time_text(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def print_plan(console: Console, grid: Grid, results: Results) -> None:
    """What there is of a grid, and what is missing."""
    there = results.of_grid(grid)
    for cell in grid.cells:
        console.print(f"{'done   ' if cell in there else 'missing'}  {cell.title}", highlight=False)
    console.print(f"{len(there)} of {len(grid.cells)} cells are finished.")


def print_outcome(console: Console, outcome: Outcome, minutes: float | None) -> None:
    """What is left to do; raises what the first failed cell said."""
    if outcome.elsewhere:
        others = len(outcome.elsewhere)
        console.print(
            f"{others} cell{' is' if others == 1 else 's are'} being made by other processes, which"
            " write the results; the same command later sees them."
        )
    if outcome.out_of_time:
        console.print(f"The {minutes:g} minutes are over. {AGAIN}")
    if outcome.failed:
        cell, why = outcome.failed[0]
        raise UserError(
            f"{len(outcome.failed)} cell{'s' if len(outcome.failed) > 1 else ''} failed; the first"
            f" ({cell.title}): {why}"
        )


def study_command(
    experiment: Path = Argument(..., help="An experiment file; it may have a table [axes]."),
    axes: list[str] = Argument(None, help="Axes, as method=fl-dp,xcal epsilon=1,8."),
    seeds: int | None = Option(None, min=1, help="How many seeds, counted from 0."),
    out: Path | None = Option(None, help="Where results go; else studies/NAME of the file."),
    limit_minutes: float | None = Option(None, help="Stop after so long; go on later."),
    jobs: int | None = Option(None, min=1, help="Cells at once; else what the machine has."),
    keep: bool = Option(False, "--keep", help="Keep finished cells' run folders."),
    plan: bool = Option(False, "--plan", help="Only say what there is and what is missing."),
) -> None:
    """Run an experiment at every combination of some keys' values, and compare them in pairs.

    Values of the first axis are compared with its first value, seed by seed. The same command
    again goes on where it stopped; more seeds or values add to what is there.
    """
    from xcal.report.report import COMPARISON, study_page
    from xcal.studies.grid import own_grid
    from xcal.studies.runner import Options, run_grid
    from xcal.studies.statistics import rows_of, rows_text
    from xcal.studies.store import Results, write_text

    console = Console()
    if not experiment.exists():
        raise UserError(
            f"There is no experiment file {experiment}: check the path. The paper's own studies are"
            " run from a checkout by `python -m reproduce study NAME`."
        )
    own = own_grid(experiment, axes or (), seeds)
    grid, folder = own.grid, out or Path("studies") / experiment.stem
    results = Results(folder)
    if plan:
        print_plan(console, grid, results)
        return
    command = shlex.join(["xcal", *sys.argv[1:]])
    options = Options(folder, folder / "work", jobs, limit_minutes, command, keep)
    said = f"[bold]{experiment.stem}[/bold], {len(grid.cells)} cells."
    with interruptible(console, AGAIN), GridProgress(console, experiment.stem, said) as progress:
        outcome = run_grid(grid, options, progress)
    rows = rows_of(own, results)
    write_text(folder / COMPARISON, rows_text(own, rows))
    if rows:
        shown = study_page(folder).runs_table
        assert shown is not None
        console.print(make_table(None, shown.head, shown.rows, caption=shown.note))
    console.print(
        f"{outcome.finished} of {outcome.total} cells are finished: {folder}/cells.csv, compared in"
        f" {folder}/{COMPARISON}."
    )
    print_outcome(console, outcome, limit_minutes)
