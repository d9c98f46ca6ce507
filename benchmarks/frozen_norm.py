"""What frozen batch norm saves over torch's own: `python benchmarks/frozen_norm.py`.

The clipped sum of 32 images of 64 pixels through EfficientNet-B0, all of it training but its batch
norm, whose fixed scale and shift are applied as such or by `torch.batch_norm`; in turns, one
thread, processor time. Writes `benchmarks/results/frozen-norm.md`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from xcal.dp.clipping import ClippingEngine
from xcal.dp.fix import FrozenBatchNorm2d
from xcal.federation.folder import commit, versions
from xcal.federation.loaded_site import keep_freed_memory
from xcal.models.efficientnet import efficientnet_b0

OUT = Path(__file__).parent / "results" / "frozen-norm.md"
FORWARDS = {"fixed map": FrozenBatchNorm2d.forward, "torch": nn.BatchNorm2d.forward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    engine = ClippingEngine(efficientnet_b0(2, norm="frozen", trainable="all", seed=0).train())
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(0, 2, (32,))
    took: dict[str, list[float]] = {name: [] for name in FORWARDS}
    for turn in range(given.steps + 1):
        for name, forward in FORWARDS.items():
            FrozenBatchNorm2d.forward = forward  # type: ignore[method-assign]
            began = time.process_time()
            engine.clipped_sum(images, labels, clip=1.0)
            if turn:  # the first warms up
                took[name].append(time.process_time() - began)
    ours, theirs = took.values()
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    said = (
        f"{statistics.median(ratios):.2f} of the time with `torch.batch_norm`"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f} in single turns;"
        f" {1e3 * statistics.median(ours):.0f} and {1e3 * statistics.median(theirs):.0f} ms)"
    )
    print(said)
    about = ", ".join(f"{what} {version}" for what, version in versions().items())
    OUT.write_text(
        "# Frozen batch norm\n\nA clipped sum of 32 images of 64 pixels through EfficientNet-B0,"
        f" all trained but its batch norm, one thread, in turns: {said}.\n\n`python"
        f" benchmarks/frozen_norm.py --steps {given.steps}`, commit {commit()} ({about}).\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
