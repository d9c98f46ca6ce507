"""What passes of one fixed size cost a real site: `python benchmarks/fixed_passes.py`.

The clipped sums of the same Poisson draws (expected batch 64, one thread, 64 pixels), in passes as
large as the draw and in passes of 32 that are filled up; in turns in one process, by processor
time.
Writes `benchmarks/results/fixed-passes.md`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from xcal.config import SECURE_ROWS
from xcal.dp.clipping import ClippingEngine
from xcal.federation.folder import commit, versions
from xcal.federation.loaded_site import keep_freed_memory
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18
from xcal.models.small import small

OUT = Path(__file__).parent / "results" / "fixed-passes.md"
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "`small`": lambda: small(4, seed=0),
    "ResNet-18": lambda: resnet18(4, norm="group", trainable="all", seed=0),
    "EfficientNet-B0, last two stages": lambda: efficientnet_b0(
        4, norm="frozen", trainable="last:2", output_stride=16, seed=0
    ),
}


def seconds(engine: ClippingEngine, images: torch.Tensor, labels: torch.Tensor) -> float:
    began = time.process_time()
    engine.clipped_sum(images, labels, clip=1.0)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    sizes = np.random.default_rng(0).binomial(1000, 0.064, size=given.draws)
    lines = []
    for name, build in NETWORKS.items():
        model = build()
        engines = [ClippingEngine(model), ClippingEngine(model, rows=SECURE_ROWS)]
        took: list[list[float]] = [[], []]
        for turn, size in enumerate([64, *map(int, sizes)]):
            images, labels = torch.randn(size, 3, 64, 64), torch.randint(0, 4, (size,))
            for which in (0, 1) if turn % 2 else (1, 0):
                spent = seconds(engines[which], images, labels)
                if turn:  # the first warms up
                    took[which].append(spent)
        ratios = sorted(b / a for a, b in zip(*took, strict=True))
        whole = sum(took[1]) / sum(took[0])
        lines.append(
            f"| {name} | {1e3 * statistics.median(took[0]):.0f} | {whole:.2f} |"
            f" {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
        print(lines[-1], flush=True)
    about = ", ".join(f"{what} {version}" for what, version in versions().items())
    filled = statistics.mean(-(-int(n) // SECURE_ROWS) * SECURE_ROWS / n for n in sizes)
    OUT.write_text(
        f"# Passes of one fixed size\n\n{given.draws} Poisson draws of 64 expected images of 64"
        f" pixels, one thread: processor time of a clipped sum in passes of {SECURE_ROWS}, filled"
        " up, over that in one pass as large as the draw, in turns. Filling up alone is"
        f" {filled:.2f} times the images here; a larger expected batch has less of it.\n\n"
        "| network | as drawn, ms | fixed / as drawn | single draws |\n|---|---:|---:|---|\n"
        + "\n".join(lines)
        + f"\n\n`python benchmarks/fixed_passes.py --draws {given.draws}`, commit {commit()}"
        f" ({about}).\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
