"""The guarantee covers all images of a patient: python examples/patients.py [SEED]

Three hospitals with 500 patients each, (5, 1e-4)-DP per patient, static noise. Patients are drawn
and clipped, not images, and every step takes all of them. The data are synthetic and handed over as
your own would be: arrays of images and labels, and the patient of every image.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import xcal
from xcal.data.catalog import load
from xcal.data.images import Images

KEYS: dict[str, Any] = {
    "method": "fl-dp",
    "unit": "group",
    "images_per_unit": 4,
    "clients": 3,
    "rounds": 16,
    "expected_batch_size": 500,
    "lr": 1.0,
    "average": 0.2,
    "epsilon": 5.0,
    "delta": 1e-4,
    "road_images": 0,
    "road_test_images": 0,
}


def arrays(images: Images) -> tuple[Any, Any]:
    return images.pixels, images.labels


def train(out: Path, seed: int = 0, images: int = 9000, **changes: Any) -> dict[str, Any]:
    cells = load("smear", pixels=32, train=images)  # six images a patient
    return xcal.run(
        out,
        data=(arrays(cells.train), arrays(cells.validation), arrays(cells.test)),
        groups=cells.train.groups,
        classes=cells.classes,
        **{**KEYS, "seed": seed, **changes},
    )


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp()) / "run"
    result = train(folder, *map(int, sys.argv[1:2]))
    print(f"test macro F1 {result['macro_f1']:.2f}, {result['seconds']:.0f} s: {folder}")
