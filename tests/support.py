"""A data set and a network that train in a second, and the keys of such a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xcal.data.images import ImageData, Images
from xcal.explain.signal import SignalSettings, image_components, scores
from xcal.methods.fl_dp import StaticNoise

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def _images(rng: np.random.Generator, count: int, pixels: int, split: str, first: int) -> Images:
    labels = np.arange(count, dtype=np.int64) % 3
    pictures = rng.integers(90, 110, (count, pixels, pixels, 3), dtype=np.uint8)
    for i, label in enumerate(labels):  # a bright square whose place tells the class
        x = 2 + int(label) * (pixels - 6) // 3
        pictures[i, 3:8, x : x + 5] = 230
    return Images(
        pixels=pictures,
        labels=labels,
        groups=first + np.arange(count, dtype=np.int64) // 3,
        ids=np.array([f"secret-{split}-{i}" for i in range(count)]),
    )


def tiny(*, pixels: int = 16, seed: int = 0, train: int = 150) -> ImageData:
    """Three classes, 16 pixels, groups of three images; learnt in a few steps."""
    rng = np.random.default_rng(seed)
    return ImageData(
        name="tiny",
        classes=("left", "middle", "right"),
        group_name="patient",
        license="none",
        train=_images(rng, train, pixels, "train", 0),
        validation=_images(rng, 30, pixels, "validation", 10_000),
        test=_images(rng, 45, pixels, "test", 20_000),
    )


def colored(*, pixels: int = 16, seed: int = 0) -> ImageData:
    """`tiny` with a tint that tells the class, so that even `micro` learns it nearly perfectly."""
    data = tiny(pixels=pixels, seed=seed)
    for _, images in data.splits():
        for i, label in enumerate(images.labels):
            images.pixels[i, :, :, int(label)] += 60
    return data


class Micro(nn.Module):
    cam_layer = "act"
    head_layer: str | None = "head"

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.ReLU()
        self.head = nn.Linear(8 * 1, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.act(self.norm(self.conv(images)))
        return self.head(features.mean(dim=(2, 3)))


def micro(classes: int, *, seed: int | None = None) -> nn.Module:
    """Some 300 parameters; initialized without touching the global generator."""
    model = Micro(classes)
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("norm"):
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


# A method of one's own, as a user would add one: static noise under another name.
own_method = StaticNoise(name="own")


TINY: dict[str, Any] = {
    "data": "support:tiny",
    "network": "support:micro",
    "pixels": 16,
    "clients": 3,
    "unit": "record",
    "rounds": 3,
    "batch": 10,
    "epsilon": 8.0,
    "delta": 1e-3,
    "lr": 0.5,
    "road_images": 4,  # half of such a run would be spent on it
    "road_test_images": 6,
    "threads": 1,
    "workers": 1,  # spies and faults that tests put in are in this process
}


def sets(**changes: Any) -> list[str]:
    """TINY with changes, as --set arguments."""
    words = []
    for key, value in {**TINY, **changes}.items():
        words += ["--set", f"{key}={value}"]
    return words


def image_scores(
    model: nn.Module, images: Tensor, logits: Tensor, features: Tensor, settings: SignalSettings
) -> Tensor:
    """The score (N,) of each image, in [0, 1] and float64."""
    parts = image_components(model, images, logits, features, settings)
    return scores(parts, settings.alpha, settings.beta, settings.gamma)
