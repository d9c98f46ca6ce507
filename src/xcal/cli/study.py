"""`xcal study`: run a declared grid of experiments, or go on with one; merge results."""

from __future__ import annotations

import math
import shlex
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xcal.cli.interrupts import interruptible
from xcal.errors import UserError

if TYPE_CHECKING:
    from xcal.studies.grid import Cell


class GridProgress:
    """One bar over the whole grid with what is left of its time, and one line a finished cell."""

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

    def __enter__(self) -> GridProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._bar.stop()

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
        from xcal.cli.show import number
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


def _split(option: str, text: str | None) -> tuple[str, ...] | None:
    """The names that an option lists; None where it was not given."""
    if text is None:
        return None
    words = tuple(part.strip() for part in text.split(",") if part.strip())
    if not words:
        raise UserError(f"{option} names nothing: give names with commas between, or leave it out.")
    return words


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


def study_command(
    name: str = typer.Argument(..., help="The study, or `merge` to take over others' results."),
    folders: list[Path] = typer.Argument(None, help="With `merge`: the others' result folders."),
    scale: str = typer.Option("smoke", help="smoke, laptop or paper."),
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
    results: Path = typer.Option(Path("results"), help="Where finished cells are kept."),
    work: Path = typer.Option(Path("runs/studies"), help="Where unfinished cells are."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    keep: bool = typer.Option(False, "--keep", help="Keep finished cells' run folders."),
    plan: bool = typer.Option(False, "--plan", help="Only say what there is and what is missing."),
) -> None:
    """Run a study: privacy-utility, clients, ablation, efficiency, overhead, panel or units.

    The same command again goes on where it stopped; more seeds add to what is there.
    """
    from xcal.studies.declared import declare
    from xcal.studies.grid import Choice, only_variants
    from xcal.studies.runner import Options, run_grid
    from xcal.studies.scales import SCALES
    from xcal.studies.store import Results, merge
    from xcal.studies.whole import whole_grid, whole_grids

    console = Console()
    if name == "merge":
        if not folders:
            raise UserError("Name the folders to merge: `xcal study merge DIR…`.")
        ours = Results(results)
        merged = merge(ours, [Results(folder) for folder in folders])
        for known in ours.scales():
            for grid in whole_grids(known, ours).values() if known in SCALES else ():
                if ours.of_grid(grid):
                    ours.write_table(grid)
        console.print(
            f"{merged.added} cells added to {results}, {merged.known} known already"
            + (
                f", {len(merged.different)} of them with other results: kept ours."
                if merged.different
                else "."
            )
        )
        return
    if folders:
        raise UserError(f"{folders[0]} is one argument too many: only `merge` takes folders.")
    choice = Choice(
        _split("--data", data),
        _split("--network", network),
        _split("--methods", methods),
        _numbers(epsilons),
        seeds,
    )
    grid = declare(name, scale, choice)
    if variants is not None:
        grid = only_variants(grid, _split("--variants", variants) or ())
    if plan:
        there = Results(results).of_grid(grid)
        for cell in grid.cells:
            console.print(f"{'done   ' if cell in there else 'missing'}  {cell.title}")
        console.print(f"{len(there)} of {len(grid.cells)} cells are finished.")
        return
    options = Options(
        results=results,
        work=work,
        jobs=jobs,
        limit_minutes=limit_minutes,
        weights=weights,
        command=shlex.join(["xcal", *sys.argv[1:]]),
        keep=keep,
        device=device,
    )
    again = "The same command goes on from here."
    said = f"[bold]{name}[/bold], {scale} scale, {len(grid.cells)} cells. {grid.question}"
    with interruptible(console, again), GridProgress(console, name, said) as progress:
        outcome = run_grid(
            grid, options, progress, whole=lambda: whole_grid(name, scale, Results(results))
        )
    console.print(
        f"{outcome.finished} of {outcome.total} cells are finished; the table is"
        f" {Results(results).table_path(name, scale)}."
    )
    if outcome.elsewhere:
        others = len(outcome.elsewhere)
        console.print(
            f"{others} cell{' is' if others == 1 else 's are'} being made by other processes, which"
            " write the results; the same command later sees them."
        )
    if outcome.out_of_time:
        console.print(f"The {limit_minutes:g} minutes are over. {again}")
    if outcome.failed:
        cell, why = outcome.failed[0]
        raise UserError(
            f"{len(outcome.failed)} cell{'s' if len(outcome.failed) > 1 else ''} failed; the first"
            f" ({cell.title}): {why}"
        )
