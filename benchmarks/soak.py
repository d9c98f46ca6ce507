"""A long run: do memory, ledgers and the time of a step stay bounded?

    python benchmarks/soak.py                 # 10,000 steps over 50 clients, network `small`
    python benchmarks/soak.py --rounds 2 --clients 5      # a quick look

Writes `benchmarks/results/soak.json` and `.md`. Times are the processor's seconds, so that other
work on the machine does not count; memory is the process's resident set after the step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import xcal
from xcal.dp.ledger.rows import verify
from xcal.federation.folder import commit, versions
from xcal.federation.ledgers_of import find_ledgers

RESULTS = Path(__file__).parent / "results"
PAGE = resource.getpagesize()


def resident() -> float:
    """Megabytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


@dataclass
class Watch:
    """Notes time and memory after every step, and the ledgers' size after every round."""

    out: Path
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    ledgers: list[int] = field(default_factory=list)
    _last: float = 0.0

    def start(self, total_steps: int, done_steps: int) -> None:
        print(f"{total_steps} steps", flush=True)
        self._last = time.process_time()

    def step(self, count: int) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self.memory.append(resident())
        self._last = now

    def round(self, record: dict[str, Any]) -> None:
        files = [f for f in self.out.glob("clients/*/*") if f.name.startswith("ledger")]
        self.ledgers.append(sum(f.stat().st_size for f in files))
        print(
            f"round {len(self.ledgers)}: {self.memory[-1]:.0f} MB,"
            f" {np.median(self.seconds[-200:]) * 1e3:.1f} ms a step,"
            f" ledgers {self.ledgers[-1] / 1e6:.2f} MB",
            flush=True,
        )
        self._last = time.process_time()  # measuring the model is no part of a step

    def measure(self, what: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None:
        print(text, flush=True)


def tenths(values: list[float], of: Any) -> list[float]:
    return [float(of(part)) for part in np.array_split(np.array(values), 10)]


def soak(clients: int, rounds: int) -> dict[str, Any]:
    keys = {
        "method": "xcal-steered",
        "data": "smear",
        "unit": "record",
        "network": "small",
        "pixels": 32,
        "clients": clients,
        "rounds": rounds,
        "expected_batch_size": 9,
        "epsilon": 5.0,
        "validation_images": 100,
        "road_images": 0,
        "road_test_images": 0,
        "threads": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        watch = Watch(out)
        began = time.monotonic()
        result = xcal.run(out, progress=watch, **keys)
        ledgers = list(find_ledgers(out))
        rows = [verify(path) for path in ledgers]
    assert all(r.ok for r in rows)
    steps = sum(c["steps"] for c in result["clients"])
    assert steps == len(watch.seconds)
    time_of, memory_of = tenths(watch.seconds, np.median), tenths(watch.memory, np.max)
    return {
        "command": f"python benchmarks/soak.py --clients {clients} --rounds {rounds}",
        "commit": commit(),
        "versions": versions(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "configuration": keys,
        "steps": steps,
        "clients": clients,
        "rounds": rounds,
        "median_ms_per_step_by_tenth": [round(1e3 * t, 3) for t in time_of],
        "mean_ms_per_step_by_tenth": [round(1e3 * t, 3) for t in tenths(watch.seconds, np.mean)],
        "largest_resident_mb_by_tenth": [round(m, 1) for m in memory_of],
        "ledger_bytes_after_round": watch.ledgers,
        "ledger_rows": sum(r.rows for r in rows),
        "ledger_bytes_per_row": round(watch.ledgers[-1] / sum(r.rows for r in rows), 1),
        "processor_seconds": round(sum(watch.seconds), 1),
        "wall_seconds": round(time.monotonic() - began, 1),
        "time_last_over_first_tenth": round(time_of[-1] / time_of[0], 3),
        "memory_last_over_second_tenth": round(memory_of[-1] / memory_of[1], 3),
    }


def as_text(found: dict[str, Any]) -> str:
    lines = [
        "# Soak",
        "",
        f"`{found['command']}`, commit {found['commit']}, {found['machine']},"
        f" torch {found['versions']['torch']}, one thread.",
        "",
        f"{found['steps']:,} steps of `xcal` with `small` at 32 pixels, spread over"
        f" {found['clients']} clients in {found['rounds']} rounds; every step charged to its"
        " client's ledger and synced. Times are processor seconds.",
        "",
        "| tenth of the run | median ms a step | mean ms a step | largest resident MB |",
        "|---:|---:|---:|---:|",
    ]
    rows = zip(
        found["median_ms_per_step_by_tenth"],
        found["mean_ms_per_step_by_tenth"],
        found["largest_resident_mb_by_tenth"],
        strict=True,
    )
    lines += [f"| {i} | {a:.2f} | {b:.2f} | {m:.0f} |" for i, (a, b, m) in enumerate(rows, 1)]
    sizes = found["ledger_bytes_after_round"]
    lines += [
        "",
        f"Median time of the last tenth over the first: {found['time_last_over_first_tenth']}."
        f" Memory of the last tenth over the second: {found['memory_last_over_second_tenth']}.",
        "",
        f"Ledgers: {found['ledger_rows']:,} rows in all, {found['ledger_bytes_per_row']:.0f} bytes"
        f" a row; {sizes[0] / 1e6:.2f} MB after the first round, {sizes[-1] / 1e6:.2f} MB after the"
        " last. They grow by what was charged and are all verified at the end.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    found = soak(chosen.clients, chosen.rounds)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "soak.json").write_text(json.dumps(found, indent=2) + "\n")
    (chosen.out / "soak.md").write_text(as_text(found))
    print(as_text(found))


if __name__ == "__main__":
    main()
