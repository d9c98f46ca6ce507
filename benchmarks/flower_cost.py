"""What Flower's simulation costs beside the local engine: start-up and seconds a round.

    python benchmarks/flower_cost.py [CLIENTS …]        (default 3 50)

Runs the real command on both engines, one after the other, and checks that the models are equal bit
for bit. Writes benchmarks/results/flower.csv and the table in docs/flower.md's own words to
benchmarks/results/flower.md.
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
ROUNDS = 4
KEYS = {
    "method": "xcal",
    "data": "smear",
    "network": "small",
    "pixels": 32,
    "train_images": 2000,
    "batch": 20,
    "rounds": ROUNDS,
    "threads": 1,
    "validation_images": 60,
    "road_images": 0,
    "road_test_images": 0,
}


def run(engine: str, clients: int, out: Path) -> dict[str, Any]:
    """One run of the real command, watched from outside."""
    sets = [w for k, v in {**KEYS, "clients": clients}.items() for w in ("--set", f"{k}={v}")]
    words = [sys.executable, "-m", "xcal", "run", *sets, "--engine", engine, "--out", str(out)]
    began = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    lines, first = out / "rounds.jsonl", None
    while process.poll() is None:
        if first is None and lines.exists() and lines.stat().st_size:
            first = time.monotonic() - began
        time.sleep(0.02)
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
    }


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
        "| clients | engine | until the first round | first round | later rounds (median) | whole"
        " run | load before |",
        "|---|---|---|---|---|---|---|",
    ]
    text += [
        f"| {r['clients']} | {r['engine']} | {r['start_seconds']} s | {r['first_round_seconds']} s"
        f" | {r['round_seconds']} s | {r['whole_seconds']} s | {r['load_before']} |"
        for r in rows
    ]
    (RESULTS / "flower.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
