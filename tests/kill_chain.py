"""A chain of kill −9 at random moments of `xcal run`, each followed by a resume, all of it checked.

Now and then it is Ctrl-C instead, which lets the command tidy up, and must end with exit code 130.
What is checked after every kill, and when a run has come through, is in `left_behind.py`.

    python tests/kill_chain.py --kills 200 --seed 8     # figures: benchmarks/results/faults
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from commands import ForkedXcal, warm_up, xcal_environment
from left_behind import CLIENTS, Broken, Snapshot, compare, examine, need
from support import ROOT, sets
from xcal.cli.interrupts import INTERRUPTED
from xcal.federation.folder import commit, versions

KEYS = {
    "method": "xcal-steered",
    "rounds": 4,
    "local_epochs": 2,
    "keep_groups": False,  # as many units everywhere: one calibration less
    "road_images": 0,
    "road_test_images": 0,
    "signal_every": 2,
    "optimizer": "momentum",
    "lr": 0.1,
}
RESULTS = ROOT / "benchmarks" / "results" / "faults"


# --- the process that is killed -------------------------------------------------------------------


class Victim(Protocol):
    """An `xcal` command on its way."""

    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def kill(self) -> None:
        """Kill −9, and wait until it is gone."""
        ...

    def interrupt(self) -> None:
        """Ctrl-C; it may take its time."""
        ...


class Command:
    """The command as a user starts it, in a process of its own."""

    def __init__(self, words: list[str], log: Path) -> None:
        with open(log.with_suffix(".out"), "w") as out, open(log.with_suffix(".err"), "w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xcal", *words],
                env=xcal_environment(),
                stdout=out,
                stderr=err,
                # whoever runs us in the background may let its children ignore Ctrl-C
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def ended(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def __del__(self) -> None:
        if self._process.poll() is None:  # the chain broke off elsewhere
            self.kill()


# --- when it is killed ----------------------------------------------------------------------------

# What a watcher of the run's folder sees while the command works, by the part of the work.
SIGNS: dict[str, tuple[str, ...]] = {
    "charge": ("clients/{c}/ledger.head", "clients/{c}/ledger.sqlite-wal"),
    "save": ("clients/{c}/runs/{run}/progress.safetensors.new",),
    "reply": ("clients/{c}/runs/{run}/reply.safetensors.new",),
    "checkpoint": ("checkpoint.safetensors.new", "rounds.jsonl"),
    "finish": ("predictions.npz.new", "model.safetensors.new", "card.md.new", "result.json.new"),
}
MOMENTS = ("time", "start", "step", *SIGNS)


@dataclass(frozen=True)
class Moment:
    """Kill after `delay` seconds, counted from the start or from the count-th sign of a kind."""

    kind: str
    delay: float
    count: int = 0


def draw_moment(rng: random.Random, kind: str, lasts: float) -> Moment:
    """`lasts`: how long the undisturbed command takes, start-up and all."""
    if kind == "time":  # anywhere at all
        return Moment(kind, rng.uniform(0.0, lasts))
    if kind == "start":  # importing, preparing, making the folder and the ledgers
        return Moment(kind, rng.uniform(0.0, 0.8 * lasts))
    if kind == "step":  # between two charges
        return Moment(kind, rng.uniform(0.0, 0.02), rng.randint(1, 40))
    count = {"charge": 40, "save": 6, "reply": 4, "checkpoint": 3, "finish": 1}[kind]
    return Moment(kind, rng.choice((0.0, rng.uniform(0.0, 0.003))), rng.randint(1, count))


def _signs(out: Path, kind: str) -> list[Path]:
    about = out / "run.json"
    try:
        run = json.loads(about.read_text())["run"]
    except (OSError, ValueError):
        return []
    patterns = SIGNS["charge" if kind == "step" else kind]
    return [out / p.format(c=c, run=run) for p in dict.fromkeys(patterns) for c in CLIENTS]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def wait_for(moment: Moment, victim: Victim, out: Path, limit: float = 1200.0) -> bool:
    """Wait until the moment has come; False where the command ended before it."""
    began = time.monotonic()
    if moment.count == 0:
        while time.monotonic() - began < moment.delay:
            if victim.ended() is not None:
                return False
            time.sleep(0.002)
        return victim.ended() is None
    watched: list[Path] = []
    stamps: dict[Path, tuple[int, int] | None] = {}
    seen = 0
    while seen < moment.count:
        if victim.ended() is not None:
            return False
        if time.monotonic() - began > limit:
            raise Broken(f"the command did nothing for {limit:g} s while waiting for {moment}")
        if not watched:
            watched = _signs(out, moment.kind)
            stamps = {path: _stamp(path) for path in watched}
        for path in watched:
            stamp = _stamp(path)
            if stamp != stamps[path]:
                seen += stamp is not None
                stamps[path] = stamp
        time.sleep(0.0005 if watched else 0.005)
    end = time.monotonic() + moment.delay
    while time.monotonic() < end:
        pass
    return victim.ended() is None


# --- the chain ------------------------------------------------------------------------------------


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    interrupts: int = 0  # Ctrl-C, beside the kills
    unfinished: int = 0  # kills that left a file half written
    overcounted: int = 0  # kills that left a step paid for and not released
    most_overcounted: int = 0
    runs: int = 0  # runs that came through, each compared with the undisturbed one
    resumes: int = 0
    charges: int = 0
    seconds: float = 0.0


Say = Callable[[str], None]


def run_chain(
    folder: Path,
    *,
    kills: int,
    seed: int,
    cold_every: int = 1,
    interrupt_every: int = 5,
    seconds: float = math.inf,
    say: Say = lambda text: None,
) -> Tally:
    """Kill `kills` times, or as often as the time allows.

    `cold_every = k`: every k-th command gets a process of its own, the others are forks.
    `interrupt_every = k`: after every k kills the next command gets a Ctrl-C.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    rng, tally = random.Random(seed), Tally()
    whole, log = folder / "whole", folder / "log.txt"
    if cold_every > 1:
        warm_up(**KEYS)
    usual = Command if cold_every == 1 else ForkedXcal
    lasts = {usual: _undisturbed(usual, whole, log)}
    if usual is not Command:
        lasts[Command] = lasts[usual] + _time_of_starting()
    number, killed_in_run = 0, 0
    kinds: list[str] = []
    out, snapshot = folder / "run0", Snapshot()

    def enough() -> bool:
        return sum(tally.kills.values()) >= kills or time.monotonic() - began > seconds

    while killed_in_run or not enough():
        finishing = enough()
        launch = Command if number % cold_every == cold_every - 1 else ForkedXcal
        resumed = (out / "run.json").exists()
        words = ["run", "--resume", str(out)] if resumed else _start(out)
        victim = launch(words, log)
        number += 1
        tally.resumes += resumed
        politely = interrupt_every * (tally.interrupts + 1) <= sum(tally.kills.values())
        if not kinds:
            kinds = rng.sample(MOMENTS, len(MOMENTS))
        kind = rng.choice(MOMENTS) if politely else kinds.pop()
        moment = draw_moment(rng, kind, lasts[launch])
        came = not finishing and wait_for(moment, victim, out)
        if came and politely:
            victim.interrupt()
            _wait(victim)
        elif came:
            victim.kill()
        else:
            _wait(victim)
        if came and politely and victim.ended() != 0:  # 0: it was through already
            _check_interrupted(victim, log)
            snapshot = examine(out, snapshot)
            tally.interrupts += 1
            killed_in_run += 1
            say(f"Ctrl-C {tally.interrupts}: {moment}, {snapshot.rounds} rounds committed")
            continue
        if came and victim.ended() == -signal.SIGKILL:
            snapshot = examine(out, snapshot)
            tally.kills[kind] += 1
            killed_in_run += 1
            tally.unfinished += snapshot.unfinished > 0
            tally.overcounted += snapshot.unreleased > 0
            tally.most_overcounted = max(tally.most_overcounted, snapshot.unreleased)
            say(f"kill {sum(tally.kills.values())}: {moment}, {snapshot.rounds} rounds committed")
            continue
        need(victim.ended() == 0, f"`xcal {' '.join(words)}` failed: {_said(log)}")
        snapshot = examine(out, snapshot)
        compare(out, whole)
        tally.charges += sum(len(c) for c in snapshot.charges.values())
        tally.runs += 1
        say(f"run {tally.runs} came through after {killed_in_run} kills, equal to the undisturbed")
        killed_in_run = 0
        out, snapshot = folder / f"run{tally.runs}", Snapshot()
    tally.seconds = time.monotonic() - began
    return tally


def _check_interrupted(victim: Victim, log: Path) -> None:
    """Exit code 130 without a traceback; before our first line is reached, Python's own end."""
    said = log.with_suffix(".err").read_text()
    if victim.ended() == -signal.SIGINT and "in main" not in said:
        return
    need(victim.ended() == INTERRUPTED, f"Ctrl-C ended with {victim.ended()}: {said[-500:]}")
    need("Traceback" not in said, f"Ctrl-C gave a traceback: {said[-500:]}")


def _start(out: Path) -> list[str]:
    return ["run", *sets(**KEYS), "--out", str(out)]


def _time_of_starting() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def _said(log: Path) -> str:
    return log.with_suffix(".err").read_text()[-500:]


def _wait(victim: Victim, limit: float = 1200.0) -> None:
    began = time.monotonic()
    while victim.ended() is None:
        if time.monotonic() - began > limit:
            victim.kill()
            raise Broken(f"the command hangs: it did not end within {limit:g} s")
        time.sleep(0.01)


def _undisturbed(launch: type[Command] | type[ForkedXcal], place: Path, log: Path) -> float:
    began = time.monotonic()
    victim = launch(_start(place), log)
    _wait(victim)
    need(victim.ended() == 0, f"the undisturbed run failed: {_said(log)}")
    return time.monotonic() - began


# --- the record -----------------------------------------------------------------------------------


def record(tally: Tally, seed: int, cold_every: int) -> dict[str, Any]:
    return {
        "command": f"python tests/kill_chain.py --kills {sum(tally.kills.values())} --seed {seed}"
        + (f" --cold-every {cold_every}" if cold_every > 1 else ""),
        "commit": commit(),
        "versions": versions(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
        "commands": "all in processes of their own"
        if cold_every == 1
        else f"every {cold_every}th in a process of its own, the others forked from a warm one",
        "configuration": KEYS,
        "kills": sum(tally.kills.values()),
        "kills_by_moment": dict(sorted(tally.kills.items())),
        "interrupts_besides": tally.interrupts,
        "resumes": tally.resumes,
        "runs_completed_and_compared": tally.runs,
        "charges_checked": tally.charges,
        "kills_with_an_unfinished_file": tally.unfinished,
        "kills_with_a_paid_step_not_released": tally.overcounted,
        "most_paid_steps_not_released": tally.most_overcounted,
        "undercounted": 0,  # the chain stops at the first, and writes nothing
        "committed_rounds_lost": 0,
        "models_that_differ": 0,
        "seconds": round(tally.seconds, 1),
    }


def as_text(figures: dict[str, Any]) -> str:
    lines = [
        "# A chain of kill −9",
        "",
        f"`{figures['command']}`, commit {figures['commit']}, {figures['machine']},"
        f" torch {figures['versions']['torch']}. Commands: {figures['commands']}.",
        "",
        "Commands are `xcal run` and `xcal run --resume`, killed at a moment drawn from the seed:",
        "by time, while starting, stepping, charging, saving, answering, writing the",
        'checkpoint, finishing. After every fifth kill comes a Ctrl-C ("interrupts besides"),',
        "which must end with exit code 130. The checks after each are described in",
        "`tests/left_behind.py`; the script stops at the first that fails and records nothing.",
        "",
        "| | |",
        "|---|---:|",
    ]
    for key, value in figures.items():
        if isinstance(value, int | float) and key != "seed":
            lines.append(f"| {key.replace('_', ' ')} | {value:,} |")
    for kind, count in figures["kills_by_moment"].items():
        lines.append(f"| – of these, by moment: {kind} | {count} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--cold-every", type=int, default=1, help="fork the other commands")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no kill after these")
    parser.add_argument("--record", type=Path, default=RESULTS, help="where figures go")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tally = run_chain(
            Path(folder),
            kills=chosen.kills,
            seed=chosen.seed,
            cold_every=chosen.cold_every,
            seconds=60 * chosen.minutes,
            say=lambda text: print(text, flush=True),
        )
    figures = record(tally, chosen.seed, chosen.cold_every)
    chosen.record.mkdir(parents=True, exist_ok=True)
    stem = chosen.record / f"kill-chain-seed{chosen.seed}"
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
    stem.with_suffix(".md").write_text(as_text(figures))
    print(as_text(figures))


if __name__ == "__main__":
    main()
