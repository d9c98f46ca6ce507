"""What reusing freed memory saves in a forward pass: interleaved, each in a process of its own.

    python benchmarks/freed_memory.py

EfficientNet-B0, 64 images of 64 pixels, one thread. Writes `benchmarks/results/freed-memory.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parent / "results" / "freed-memory.md"
PASSES = 12


def measure(keep: bool) -> dict[str, float]:
    """Processor seconds a pass, of the process and of the system, and page faults."""
    import torch

    from xcal.federation.loaded_site import keep_freed_memory
    from xcal.models.efficientnet import efficientnet_b0

    if keep and not keep_freed_memory():
        raise SystemExit("This C library has no mallopt: nothing to measure.")
    torch.set_num_threads(1)
    model = efficientnet_b0(4, norm="frozen", seed=0).eval()
    images = torch.randn(64, 3, 64, 64)
    with torch.no_grad():
        model(images)
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(PASSES):
            model(images)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user": (after.ru_utime - before.ru_utime) / PASSES,
        "system": (after.ru_stime - before.ru_stime) / PASSES,
        "faults": (after.ru_minflt - before.ru_minflt) / PASSES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--one", choices=("as it is", "reused"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.one == "reused")))
        return
    from xcal.federation.folder import commit, versions

    found: dict[str, list[dict[str, float]]] = {"as it is": [], "reused": []}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(given.repetitions):
        for how, runs in found.items():
            done = subprocess.run(
                [sys.executable, __file__, "--one", how],
                capture_output=True, text=True, check=True, env=environment,
            )  # fmt: skip
            runs.append(json.loads(done.stdout))
    lines = []
    for how, runs in found.items():
        user, system, faults = (
            statistics.median(run[k] for run in runs) for k in ("user", "system", "faults")
        )
        lines.append(f"| {how} | {1e3 * user:.0f} | {1e3 * system:.0f} | {faults:.0f} |")
    ratios = [
        (one["user"] + one["system"]) / (two["user"] + two["system"])
        for one, two in zip(found["as it is"], found["reused"], strict=True)
    ]
    about = ", ".join(f"{name} {version}" for name, version in versions().items())
    OUT.write_text(
        "# Memory that is reused\n\nOne forward pass of EfficientNet-B0, 64 images of 64 pixels,"
        f" one thread: medians of {given.repetitions} interleaved processes of {PASSES} passes"
        f" (`python benchmarks/freed_memory.py`, commit {commit()}; {about}).\n\n"
        "| freed memory | user ms | system ms | page faults |\n|---|---:|---:|---:|\n"
        + "\n".join(lines)
        + f"\n\nProcessor time as it is over reused: median {statistics.median(ratios):.2f}, from"
        f" {min(ratios):.2f} to {max(ratios):.2f}.\n",
        encoding="utf-8",
    )
    print(OUT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
