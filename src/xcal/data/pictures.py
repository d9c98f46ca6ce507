"""Pictures of data: a contact sheet of a set, and a federation as class histograms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xcal.data.images import ImageData, Images
from xcal.data.partition import Partition
from xcal.plotting import FAINT, picture, shortened

# Colors that stay apart for readers who see fewer of them (Okabe and Ito's palette).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_GAP = 4
_LONGEST = 28  # letters of a class's name


def contact_sheet(data: ImageData, path: str | Path, per_class: int = 12) -> None:
    """Write a PNG with a row of training images per class, drawn at random, always the same.

    Images of different groups are preferred, so that the row shows people rather than copies.
    """
    shown = mosaic(data, per_class, seed=0)
    height, width = shown.shape[:2]
    heading = f"{data.name}: {len(data.train):,} training images"
    if data.group_name != "record":
        heading += f" of {len(np.unique(data.train.groups)):,} {data.group_name}s"
    with picture(Path(path), width=width, height=height) as drawn:
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.imshow(shown, interpolation="nearest")
        middles = (np.arange(len(data.classes)) + 0.5) * height / len(data.classes)
        axes.set_yticks(middles, [shortened(name, _LONGEST) for name in data.classes])
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.set_title(heading, loc="left")


def mosaic(data: ImageData, per_class: int, seed: int) -> NDArray[np.uint8]:
    """Training images side by side, a row a class, with white between them."""
    rng = np.random.default_rng(seed)
    images = data.train
    tile = int(np.clip(images.pixels.shape[1], 48, 160))
    step = tile + _GAP
    shown = np.full((len(data.classes) * step, per_class * step, 3), 255, np.uint8)
    for row in range(len(data.classes)):
        for column, index in enumerate(_spread(images, row, per_class, rng)):
            one = Image.fromarray(np.asarray(images.pixels[index]))
            if one.size != (tile, tile):
                one = one.resize((tile, tile), Image.Resampling.BICUBIC)
            y, x = row * step, column * step
            shown[y : y + tile, x : x + tile] = np.asarray(one)
    return shown


def partition_picture(
    images: Images, classes: tuple[str, ...], parts: Partition, path: str | Path
) -> None:
    """Write a PNG with one stacked bar per client: how many images of which class it holds."""
    names = [f"client {i}" for i in range(len(parts.shards))]
    if len({shard.brightness for shard in parts.shards}) > 1:
        names = [
            f"{name}, light ×{shard.brightness:.2f}"
            for name, shard in zip(names, parts.shards, strict=True)
        ]
    with picture(Path(path), width=900, height=120 + 26 * len(names)) as drawn:
        axes = drawn.add_subplot()
        before = np.zeros(len(names), np.int64)
        for k, name in enumerate(classes):
            of_class = images.of_class(k)
            held = np.array([of_class[shard.indices].sum() for shard in parts.shards])
            color = PALETTE[k % len(PALETTE)]
            axes.barh(names, held, left=before, color=color, label=shortened(name, _LONGEST))
            before += held
        axes.bar_label(axes.containers[-1], [f"{n:,}" for n in before], padding=4, color=FAINT)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
        axes.set_xlabel(_facts(parts), loc="left", color=FAINT)


def _facts(parts: Partition) -> str:
    facts = []
    if parts.shared_units:
        facts.append("Some units stand at several clients.")
    if parts.groups_split:
        facts.append("Some groups have images at several clients.")
    return " ".join(facts) or "No unit and no group stands at two clients."


def _spread(images: Images, label: int, count: int, rng: np.random.Generator) -> list[int]:
    """Up to `count` images of a class, of as many different groups as there are."""
    of_class = rng.permutation(np.flatnonzero(images.of_class(label)))
    _, first = np.unique(images.groups[of_class], return_index=True)
    firsts = of_class[np.sort(first)]
    rest = np.setdiff1d(of_class, firsts, assume_unique=True)
    return [int(i) for i in np.concatenate([firsts, rest])[:count]]
