"""How much of a difference between two methods is variance of their noise.

    python -m reproduce.noise_variance --streams 6

Trains one cell of the study (`fl-dp`, blood cells, `small`, ε = 5) several times with the same
seed, so the same partition and first weights, and other draws and noise each time. The spread of F1
and ROAD is what a comparison of two methods by one pair of runs cannot see below. Writes
`benchmarks/results/noise-variance.md`, a row as each run ends; rows that stand there are kept.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from reproduce.scales import get_scale, make_cell
from xcal.dp.noise import NoiseKey
from xcal.federation.folder import commit, versions
from xcal.methods.context import StepContext
from xcal.studies.cell import Talk, run_cell

OUT = Path(__file__).parent.parent / "benchmarks" / "results" / "noise-variance.md"
ROW = re.compile(r"^\| (\S+) \| (\d+) \| ([\d.]+) \| ([\d.-]+) \|$", re.MULTILINE)


class Quiet(Talk):
    def tell(self, **values: Any) -> None: ...


def measured(stream: str, seed: int) -> tuple[float, float]:
    """F1 and ROAD of static noise with the draws and the noise of another stream."""

    def key(self: StepContext, step: int, block: str) -> NoiseKey:
        return NoiseKey(self.client, stream, self.round, step, block)

    scale = get_scale("laptop")
    values = scale.values("fl-dp", "blood-cells", "small", 5.0, seed)
    values["paired"] = False  # the study's cells share their noise; here each stream is its own
    cell = make_cell("laptop", values, scale.explained)
    own = StepContext.key
    StepContext.key = key  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as work:
            found, _ = run_cell(cell, Path(work) / "run", "", Quiet())
    finally:
        StepContext.key = own  # type: ignore[method-assign]
    return found["macro_f1"], found["road"]


def page(rows: list[tuple[str, int, float, float]]) -> str:
    about = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [f"| {s} | {seed} | {f1:.3f} | {road:.3f} |" for s, seed, f1, road in rows]
    text = (
        "# Variance of the noise alone\n\nStatic noise, blood cells, `small`, ε = 5, laptop scale:"
        " one method, one seed, other draws and noise (`python -m reproduce.noise_variance`, commit"
        f" {commit()}; {about}).\n\n| stream | seed | macro F1 | ROAD |\n|---|---:|---:|---:|\n"
        + "\n".join(lines)
        + "\n"
    )
    if len(rows) > 1:
        for name, values in (("F1", [r[2] for r in rows]), ("ROAD", [r[3] for r in rows])):
            text += (
                f"\n{name}: mean {statistics.mean(values):.3f}, standard deviation"
                f" {statistics.stdev(values):.3f}, from {min(values):.3f} to {max(values):.3f}.\n"
            )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    standing = OUT.read_text(encoding="utf-8") if OUT.exists() else ""
    rows = [(s, int(n), float(f1), float(road)) for s, n, f1, road in ROW.findall(standing)]
    for number in range(given.streams):
        stream = f"luck-{number}"
        if (stream, given.seed) in {(r[0], r[1]) for r in rows}:
            continue
        rows.append((stream, given.seed, *measured(stream, given.seed)))
        OUT.write_text(page(rows), encoding="utf-8")
        print(f"{stream}: F1 {rows[-1][2]:.3f}, ROAD {rows[-1][3]:.3f}", flush=True)


if __name__ == "__main__":
    main()
