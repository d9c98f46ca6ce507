"""Runs what a grid lacks: cells side by side, each a process of one thread.

Guaranteed: a cell whose result stands in the results is not run again; whatever dies, the runner,
a cell or the machine, costs at most what a run saves between two steps; two runners on one folder
do not work on one cell.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from xcal.data.image_store import read_info
from xcal.errors import UserError
from xcal.studies.grid import BUSY, PROBE, Cell, Grid, without_repetition
from xcal.studies.store import Results

TABLE_SECONDS = 120.0  # between two tables: each reads every finished cell
# Rough needs of one process, in bytes: torch, the images, the activations of a chunk.
MEMORY = {"small": 1.0e9, "resnet18": 2.5e9, "efficientnet_b0": 2.5e9, PROBE: 2.0e9}


class Watcher(Protocol):
    """Who wants to see how a grid comes along."""

    def begin(self, total: int, known: int) -> None: ...

    def started(self, cell: Cell) -> None: ...

    def moved(self, done: float, seconds_left: float | None) -> None: ...

    def ended(self, cell: Cell, message: dict[str, Any]) -> None: ...


class NullWatcher:
    def begin(self, total: int, known: int) -> None: ...

    def started(self, cell: Cell) -> None: ...

    def moved(self, done: float, seconds_left: float | None) -> None: ...

    def ended(self, cell: Cell, message: dict[str, Any]) -> None: ...


@dataclass
class Outcome:
    """What became of a call: how many cells there are now, and what went wrong in words."""

    total: int
    finished: int
    failed: list[tuple[Cell, str]] = field(default_factory=list)
    elsewhere: list[Cell] = field(default_factory=list)  # another process is at them
    out_of_time: bool = False


@dataclass(frozen=True)
class Options:
    results: Path = Path("results")
    work: Path = Path("runs/studies")
    jobs: int | None = None  # None: as many as cores and memory allow
    limit_minutes: float | None = None
    command: str = "xcal study"
    keep: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)  # see `Cell.experiment`
    worker: str = "xcal.studies.cell"  # the module that a cell's process runs


def free_memory() -> float:
    """Bytes that can be had now; a cautious guess where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 4e9


def how_many(grid: Grid, jobs: int | None) -> int:
    """Cells at once: what was asked for, or one a core as far as the memory goes."""
    if grid.one_at_a_time:
        return 1
    if jobs is not None:
        return max(1, jobs)
    need = max((MEMORY.get(c.network, 2.5e9) for c in grid.cells), default=1e9)
    return max(1, min(os.cpu_count() or 1, int(0.8 * free_memory() / need)))


class Estimate:
    """Seconds a cell takes, from the finished cells most like it."""

    def __init__(self, grid: Grid, results: Results) -> None:
        self._known: list[tuple[Cell, float]] = [
            (cell, float(found.values["seconds_in_all"]))
            for cell, found in results.of_grid(grid).items()
            if "seconds_in_all" in found.values
        ]

    def add(self, cell: Cell, seconds: float) -> None:
        self._known.append((cell, seconds))

    def of(self, cell: Cell) -> float | None:
        for names in (("method", "data", "clients"), ("data",), ()):
            like = [
                seconds
                for other, seconds in self._known
                if other.network == cell.network
                and all(other.keys.get(n) == cell.keys.get(n) for n in names)
            ]
            if like:
                return median(like[-20:])
        return None


def check_data(cells: Sequence[Cell]) -> None:
    """Refuse a grid whose data sets are not on this machine, before hundreds of cells fail."""
    for name, pixels in sorted({(str(c.keys["data"]), int(c.keys["pixels"])) for c in cells}):
        if name == "smear" or ":" in name:  # drawn, or a function of the user's own
            continue
        try:
            read_info(name, pixels)
        except UserError as error:
            raise UserError(f"{error} Or choose other data sets.") from None


class _Worker:
    """A process that runs one cell after another; its lines come into the runner's queue."""

    def __init__(self, options: Options, news: queue.Queue[Any]) -> None:
        self._options, self._news = options, news
        # A cell finds every module that its runner finds: a method of one's own, for instance.
        known = os.pathsep.join(p or os.getcwd() for p in sys.path)
        environment = {**os.environ, "PYTHONPATH": known}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", options.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, cell: Cell) -> None:
        options = self._options
        self.cell, self.share, self.began = cell, 0.0, time.monotonic()
        self.log = options.work / cell.scale / f"{cell.id}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        orders = {
            "scale": cell.scale,
            "keys": dict(cell.keys),
            "explained": cell.explained,
            "variant": cell.variant,
            "work": str(options.work / cell.scale / cell.id),
            "results": str(options.results),
            "command": options.command,
            "keep": options.keep,
            "changes": dict(options.changes),
            "log": str(self.log),
        }
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died: its listener says so
            self.process.stdin.write(json.dumps(orders) + "\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        last: dict[str, Any] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            ended = "code" in said
            last = {**last, **said} if ended else said
            self._news.put((self, last))
            last = {} if ended else last
        self._news.put((self, {**last, "code": self.process.wait(), "gone": True}))

    def stop(self) -> None:
        """It ends at once, and its cell with it, whose run stands where it last saved."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def complaint(self) -> str:
        lines = self.log.read_text().strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else "it ended without a word"


def run_grid(
    grid: Grid,
    options: Options,
    watcher: Watcher | None = None,
    full_grid: Callable[[], Grid] | None = None,
) -> Outcome:
    """Run the cells that the results lack, and write the grid's table from time to time.

    `full_grid` tells all of the study where `grid` is a part of it: the table shows what is there
    of both. It is asked each time, for other runners finish cells too.
    """

    def listed() -> Grid:
        full = () if full_grid is None else full_grid().cells
        return replace(grid, cells=without_repetition((*full, *grid.cells)))

    listed()  # results that cannot be read are refused before anything starts
    watcher = watcher or NullWatcher()
    results = Results(options.results)
    missing = [cell for cell in grid.cells if not results.has(cell)]
    for cell in missing:  # a grid that cannot be run is refused before any of it is
        cell.experiment(options.changes)
    check_data(missing)
    estimate = Estimate(grid, results)
    jobs = how_many(grid, options.jobs)
    known = len(grid.cells) - len(missing)
    outcome = Outcome(len(grid.cells), known)
    watcher.begin(len(grid.cells), known)
    began = time.monotonic()
    limit = math.inf if options.limit_minutes is None else 60 * options.limit_minutes
    waiting, running, idle = list(missing), list[_Worker](), list[_Worker]()
    news: queue.Queue[tuple[_Worker, dict[str, Any]]] = queue.Queue()
    written = began
    try:
        while waiting or running:
            if time.monotonic() - began >= limit:
                outcome.out_of_time = True
                break
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                if results.has(cell):  # another runner was quicker
                    outcome.finished += 1
                    continue
                worker = idle.pop() if idle else _Worker(options, news)
                worker.start(cell)
                running.append(worker)
                watcher.started(cell)
            try:
                who, message = news.get(timeout=0.5)
            except queue.Empty:
                message = {}
            else:
                who.share = message.get("share", who.share)
                if "code" in message and who in running:
                    running.remove(who)
                    _settle(who, message, outcome, watcher, estimate)
                    if "gone" not in message:
                        idle.append(who)
                    if time.monotonic() - written > TABLE_SECONDS:
                        results.write_table(listed())
                        written = time.monotonic()
                elif "gone" in message and who in idle:
                    idle.remove(who)
            done = outcome.finished + sum(r.share for r in running)
            watcher.moved(done, _time_left(waiting, running, estimate, jobs))
    finally:
        for worker in (*running, *idle):
            worker.stop()
    others_made = [cell for cell in outcome.elsewhere if results.has(cell)]
    outcome.finished += len(others_made)
    outcome.elsewhere = [cell for cell in outcome.elsewhere if cell not in others_made]
    results.write_table(listed())
    return outcome


def _settle(
    who: _Worker,
    message: dict[str, Any],
    outcome: Outcome,
    watcher: Watcher,
    estimate: Estimate,
) -> None:
    code = message["code"]
    if code == 0:
        outcome.finished += 1
        estimate.add(who.cell, time.monotonic() - who.began)
        who.log.unlink(missing_ok=True)
    elif code == BUSY:  # who is at it writes the result
        outcome.elsewhere.append(who.cell)
        who.log.unlink(missing_ok=True)
    else:
        message["error"] = message.get("error") or who.complaint()
        outcome.failed.append((who.cell, message["error"]))
    watcher.ended(who.cell, message)


def _time_left(
    waiting: Sequence[Cell], running: Sequence[_Worker], estimate: Estimate, jobs: int
) -> float | None:
    """Seconds until the grid is complete; None where nothing alike has ended yet."""
    total = 0.0
    for cell, share in [(c, 0.0) for c in waiting] + [(r.cell, r.share) for r in running]:
        seconds = estimate.of(cell)
        if seconds is None:
            return None
        total += seconds * (1 - share)
    return total / max(1, min(jobs, len(waiting) + len(running)))
