"""How much a step gains where what a frozen backbone makes of an image is kept.

    python benchmarks/kept_activations.py

Prints processor time per image of a clipped gradient sum, by the whole network and by its rest, on
one thread; writes `benchmarks/results/kept-activations.md`. Processor time, so that a machine with
other work on it does not change the ratio much; the least of several repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from xcal.dp.clipping import ClippingEngine
from xcal.experiments import make_experiment
from xcal.federation.folder import command, commit, versions
from xcal.models.backbone import split_backbone
from xcal.models.model_registry import build_network

OUT = Path(__file__).parent / "results" / "kept-activations.md"
IMAGES, REPETITIONS = 16, 3
CASES = [
    (128, 32, "head"),
    (128, 32, "head+norm:2"),
    (128, 32, "last:1"),
    (128, 32, "last:2"),
    (64, 16, "last:2"),
    (128, 16, "last:2"),
]


def least(work: Callable[[], object]) -> float:
    """Milliseconds of processor time an image."""
    work()
    found = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        work()
        found.append((time.process_time() - began) / IMAGES * 1e3)
    return min(found)


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "| pixels | output stride | train | whole, ms | rest, ms | ratio | kept, kB an image |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    generator = torch.Generator().manual_seed(0)
    for pixels, stride, train in CASES:
        keys = {"network": "efficientnet_b0", "norm": "frozen", "output_stride": stride}
        model = build_network(make_experiment({**keys, "train": train, "pixels": pixels}), 4)
        split = split_backbone(model)
        assert split is not None
        images = torch.randn(IMAGES, 3, pixels, pixels, generator=generator)
        labels = torch.randint(0, 4, (IMAGES,), generator=generator)
        kept = split.begin(images)
        engine = ClippingEngine(model)
        whole = least(lambda: engine.clipped_sum(images, labels, clip=1.0))  # noqa: B023
        rest = least(lambda: engine.clipped_sum(kept, labels, clip=1.0, forward=split.forward_head))  # noqa: B023
        lines.append(
            f"| {pixels} | {stride} | `{train}` | {whole:.1f} | {rest:.2f} | {whole / rest:.1f} |"
            f" {kept[0].numel() * 4 / 1024:.0f} |"
        )
        print(lines[-1], flush=True)
    about = ", ".join(f"{name} {version}" for name, version in versions().items())
    OUT.write_text(
        "# Steps with and without feature cache\n\nEfficientNet-B0, one thread,"
        f" `{command()}` at commit {commit()}; {about}.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
