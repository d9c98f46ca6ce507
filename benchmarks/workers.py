"""How much sooner a round is over with a second worker process: interleaved, equal clients.

    python benchmarks/workers.py [--quick]

The experiment of `xcal run` with no options, whose rounds are long, and one at 32 pixels with 250
images a client, whose rounds are short; measuring between rounds included. Two numbers a
federation: the ratio of wall times, which neighbors on the machine move, and that of processor
times along the longest way (the server's, and of the workers the longest one's), which they hardly
do. Writes `benchmarks/results/workers.md`, not with --quick.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a first optimizer imports, for seconds: not what is measured here

from xcal.experiments import make_experiment
from xcal.federation import local
from xcal.federation.folder import RunFolder, commit, versions
from xcal.federation.setup import Federation, prepare

KINDS = (
    (None, 64, (3,)),
    (250, 32, (3, 4, 10, 50)),
)  # images a client (all of them), pixels, clients
OUT = Path(__file__).parent / "results" / "workers.md"
BOUND = 0.6
_TICKS = os.sysconf("SC_CLK_TCK")


def processor_time(pid: int) -> float:
    """Seconds of the process and of its threads, user and system."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


class Rounds(local.NullCallback):
    """Wall time of every round, and processor time of this process and of each worker in it."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.way: list[float] = []
        self.pids: list[int] = []
        self._before: list[float] = []

    def start(self, total_steps: int, done_steps: int) -> None:
        self._before = self._now()

    def _now(self) -> list[float]:
        return [processor_time(pid) for pid in (os.getpid(), *self.pids)]

    def round(self, record: dict[str, Any]) -> None:
        now = self._now()
        own, *theirs = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        self.wall.append(record["seconds"])
        self.way.append(own + max(theirs, default=0.0))


def run(federation: Federation, workers: int, folder: Path) -> Rounds:
    seen = Rounds()
    made = local.Workers.__init__

    def noted(self: local.Workers, *args: Any) -> None:
        made(self, *args)
        seen.pids = self.pids

    local.Workers.__init__ = noted  # type: ignore[method-assign]
    try:
        made_folder = RunFolder.create(folder, federation.experiment, [])
        local.run_experiment(made_folder, seen, federation, workers=workers)
    finally:
        local.Workers.__init__ = made  # type: ignore[method-assign]
        shutil.rmtree(folder)
    return seen


def compare(
    clients: int, units: int | None, pixels: int, rounds: int, repetitions: int
) -> dict[str, Any]:
    keys = {"clients": clients, "rounds": rounds, "pixels": pixels, "units_per_client": units}
    federation = prepare(make_experiment({**keys, "road_test_images": 0}))
    found: dict[int, list[Rounds]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as scratch:
        for repetition in range(repetitions):
            for workers in (1, 2) if repetition % 2 == 0 else (2, 1):
                found[workers].append(run(federation, workers, Path(scratch) / "run"))

    def ratios(what: str) -> list[float]:
        one, two = ([sum(getattr(r, what)) for r in found[w]] for w in (1, 2))
        return [b / a for a, b in zip(one, two, strict=True)]

    return {
        "clients": clients,
        "seconds": statistics.median(sum(r.wall) / rounds for r in found[1]),
        "wall": ratios("wall"),
        "way": ratios("way"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition, two rounds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds, repetitions = (2, 1) if given.quick else (4, 3)
    lines = []
    for units, pixels, clients in [(u, p, c) for u, p, many in KINDS for c in many]:
        load = os.getloadavg()[0]
        row = compare(clients, units, pixels, rounds, repetitions)
        wall, way = (statistics.median(row[k]) for k in ("wall", "way"))
        spread = f"{min(row['way']):.2f} to {max(row['way']):.2f}"
        lines.append(
            f"| {clients} | {units or 'all'} | {pixels} | {row['seconds']:.2f} | {wall:.2f}"
            f" | {way:.2f} | {spread} | {'yes' if way <= BOUND else 'no'} | {load:.1f} |"
        )
        print(lines[-1], flush=True)
    about = ", ".join(f"{name} {version}" for name, version in versions().items())
    if not given.quick:
        OUT.write_text(
            "# Clients side by side\n\nA round with two worker processes against one: medians of"
            f" {repetitions} interleaved pairs of runs of {rounds} rounds on {os.cpu_count()}"
            " cores (`benchmarks/workers.py`). By processor time: of the server and of the busier"
            f" worker together, over that of one process; the bound is {BOUND}.\n\n"
            "| clients | images a client | pixels | s a round, one process | wall time"
            " | processor time | from, to | within the bound"
            " | load before |\n|---:|---:|---:|---:|---:|---:|---|---|---:|\n"
            + "\n".join(lines)
            + f"\n\n{about}; commit {commit()}.\n"
        )


if __name__ == "__main__":
    main()
