"""What Flower's simulation costs beside the local engine: until the first round, and a round.

    python benchmarks/flower_cost.py [CLIENTS …]        (default 3 50)

Runs the real command on both engines, one after the other, and checks that the models are equal bit
for bit. Both wall-clock and CPU seconds are told, the latter over all processes of a run: they mean
something on a busy machine too. Writes benchmarks/results/flower.csv, in which the rows of other
numbers of clients stay, and benchmarks/results/flower.md.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from xcal.federation.files import read_tensors
from xcal.federation.folder import command, commit, versions

RESULTS = Path(__file__).parent / "results"
ROUNDS = 3
MARK = "XCAL_BENCH_RUN"
TICKS = os.sysconf("SC_CLK_TCK")
KEYS = {
    "method": "xcal-steered",
    "data": "smear",
    "network": "small",
    "pixels": 32,
    "train_images": 1000,
    "expected_batch_size": 10,
    "rounds": ROUNDS,
    "threads": 1,
    "validation_images": 60,
    "road_images": 0,
    "road_test_images": 0,
}


def cpu_seconds(mark: str) -> dict[int, float]:
    """CPU seconds so far of every process that carries the mark in its environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
        except OSError:
            continue  # gone, or not ours to read
    return found


def run(engine: str, clients: int, out: Path) -> dict[str, Any]:
    """One run of the real command, watched from outside."""
    sets = [w for k, v in {**KEYS, "clients": clients}.items() for w in ("--set", f"{k}={v}")]
    words = [sys.executable, "-m", "xcal", "run", *sets, "--engine", engine, "--out", str(out)]
    began, mark = time.monotonic(), f"{MARK}={out}"
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: str(out)},
    )
    lines, first = out / "rounds.jsonl", None
    spent: dict[int, float] = {}  # by process, as last seen
    at: list[float] = []  # CPU seconds when each round was done
    while process.poll() is None:
        spent |= cpu_seconds(mark)
        done = len(lines.read_text().splitlines()) if lines.exists() else 0
        if first is None and done:
            first = time.monotonic() - began
        at += [sum(spent.values())] * (done - len(at))
        time.sleep(0.1)
    assert process.stderr is not None
    if process.returncode:
        raise SystemExit(process.stderr.read().decode())
    wall = time.monotonic() - began
    seconds = [json.loads(line)["seconds"] for line in lines.read_text().splitlines()]
    assert first is not None
    return {
        "engine": engine,
        "clients": clients,
        "start_seconds": round(first - seconds[0], 1),
        "first_round_seconds": round(seconds[0], 2),
        "round_seconds": round(statistics.median(seconds[1:]), 2),
        "whole_seconds": round(wall, 1),
        "cpu_first_round": round(at[0], 1),
        "cpu_a_round": round((at[-1] - at[0]) / (len(at) - 1), 2),
        "cpu_whole": round(sum(spent.values()), 1),
    }


def earlier(sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of an earlier call for other numbers of clients."""
    path = RESULTS / "flower.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["clients"]) not in sizes]


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [3, 50]
    rows = []
    for clients in sizes:
        with tempfile.TemporaryDirectory() as folder:
            pair = {}
            for engine in ("local", "flower"):
                load = os.getloadavg()[0]
                row = run(engine, clients, Path(folder) / engine)
                rows.append({**row, "load_before": round(load, 1)})
                print(rows[-1], flush=True)
                found = read_tensors(Path(folder) / engine / "model.safetensors")
                assert found is not None
                pair[engine] = found[0]
            same = all(torch.equal(pair["local"][k], pair["flower"][k]) for k in pair["local"])
            if not same:
                raise SystemExit(f"the engines' models differ at {clients} clients")
    RESULTS.mkdir(exist_ok=True)
    rows = sorted(earlier(sizes) + rows, key=lambda row: int(row["clients"]))
    with open(RESULTS / "flower.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = [
        f"`{command()}`, commit {commit()}, {os.cpu_count()} CPUs ({platform.machine()}),"
        f" torch {versions()['torch']}, one thread a client, 1 CPU a client; `small` at"
        f" {KEYS['pixels']} px, {KEYS['train_images']} images in all, {ROUNDS} rounds. Models of"
        " both engines were equal bit for bit.",
        "",
        "| clients | engine | CPU s until the first round is done | CPU s a later round | CPU s in"
        " all | wall clock: start | first round | later rounds | whole run | load before |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    text += [
        f"| {r['clients']} | {r['engine']} | {r['cpu_first_round']} | {r['cpu_a_round']}"
        f" | {r['cpu_whole']} | {r['start_seconds']} s | {r['first_round_seconds']} s"
        f" | {r['round_seconds']} s | {r['whole_seconds']} s | {r['load_before']} |"
        for r in rows
    ]
    (RESULTS / "flower.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
