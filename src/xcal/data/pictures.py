"""Pictures of data: a contact sheet of a set, and a federation as class histograms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from xcal.data.images import ImageData, Images
from xcal.data.partition import Partition

# Colors that stay apart for readers who see fewer of them (Okabe and Ito's palette).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_INK = "#222222"
_FAINT = "#666666"
_GAP = 4
_MARGIN = 12


def contact_sheet(data: ImageData, path: str | Path, per_class: int = 12, seed: int = 0) -> None:
    """Write a PNG with a row of training images per class, drawn at random from `seed`.

    Images of different groups are preferred, so that the row shows people rather than copies.
    """
    rng = np.random.default_rng(seed)
    images = data.train
    tile = int(np.clip(images.pixels.shape[1], 48, 160))
    font = _font(14)
    label_width = _MARGIN + max(int(font.getlength(_shortened(c))) for c in data.classes)
    heading = (
        f"{data.name}: {len(images):,} training images"
        if data.group_name == "record"
        else f"{data.name}: {len(images):,} training images of "
        f"{len(np.unique(images.groups)):,} {data.group_name}s"
    )
    width = label_width + per_class * (tile + _GAP) + 2 * _MARGIN
    width = max(width, int(font.getlength(heading)) + 2 * _MARGIN)
    height = 3 * _MARGIN + 14 + len(data.classes) * (tile + _GAP)
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN), heading, fill=_INK, font=font)
    for row, name in enumerate(data.classes):
        top = 2 * _MARGIN + 14 + row * (tile + _GAP)
        pen.text((_MARGIN, top + tile // 2 - 8), _shortened(name), fill=_INK, font=font)
        for column, index in enumerate(_spread(images, row, per_class, rng)):
            picture = Image.fromarray(np.asarray(images.pixels[index]))
            if picture.size != (tile, tile):
                picture = picture.resize((tile, tile), Image.Resampling.BICUBIC)
            sheet.paste(picture, (label_width + _MARGIN + column * (tile + _GAP), top))
    sheet.save(path, format="PNG")


def partition_picture(
    images: Images, classes: tuple[str, ...], parts: Partition, path: str | Path
) -> None:
    """Write a PNG with one stacked bar per client: how many images of which class it holds."""
    font = _font(14)
    counts = np.array(
        [
            [int(images.of_class(k)[shard.indices].sum()) for k in range(len(classes))]
            for shard in parts.shards
        ]
    )
    brightness = [shard.brightness for shard in parts.shards]
    shifted = len(set(brightness)) > 1
    names = [f"client {i}" for i in range(len(counts))]
    if shifted:
        names = [f"{name}, light ×{b:.2f}" for name, b in zip(names, brightness, strict=True)]
    label_width = int(max(font.getlength(name) for name in names)) + 2 * _MARGIN
    bar_width, bar_height = 640, 18
    shown = [_shortened(name) for name in classes]
    legend_lines = _legend_lines(shown, font, label_width + bar_width)
    top = _MARGIN + len(legend_lines) * 22 + _MARGIN
    facts = _facts(parts)
    height = top + len(counts) * (bar_height + _GAP) + len(facts) * 20 + 2 * _MARGIN
    sheet = Image.new("RGB", (label_width + bar_width + 90, height), "white")
    pen = ImageDraw.Draw(sheet)
    for line, entries in enumerate(legend_lines):
        for x, number in entries:
            y = _MARGIN + line * 22
            pen.rectangle((x, y + 2, x + 12, y + 14), fill=_color(number))
            pen.text((x + 18, y), shown[number], fill=_INK, font=font)
    scale = bar_width / max(1, int(counts.sum(axis=1).max()))
    for client, row in enumerate(counts):
        y = top + client * (bar_height + _GAP)
        pen.text((_MARGIN, y), names[client], fill=_INK, font=font)
        edges = label_width + np.concatenate([[0], np.cumsum(row)]) * scale
        for number in map(int, np.flatnonzero(row)):
            box = (round(edges[number]), y, round(edges[number + 1]) - 1, y + bar_height)
            pen.rectangle((box[0], box[1], max(box[0], box[2]), box[3]), fill=_color(number))
        pen.text((round(edges[-1]) + 8, y), f"{row.sum():,}", fill=_FAINT, font=font)
    for line, fact in enumerate(facts):
        y = top + len(counts) * (bar_height + _GAP) + _MARGIN + line * 20
        pen.text((_MARGIN, y), fact, fill=_FAINT, font=font)
    sheet.save(path, format="PNG")


def _facts(parts: Partition) -> list[str]:
    facts = []
    if parts.shared_units:
        facts.append("Some units stand at several clients.")
    if parts.groups_split:
        facts.append("Some groups have images at several clients.")
    return facts or ["No unit and no group stands at two clients."]


def _spread(images: Images, label: int, count: int, rng: np.random.Generator) -> list[int]:
    """Up to `count` images of a class, of as many different groups as there are."""
    of_class = rng.permutation(np.flatnonzero(images.of_class(label)))
    _, first = np.unique(images.groups[of_class], return_index=True)
    firsts = of_class[np.sort(first)]
    rest = np.setdiff1d(of_class, firsts, assume_unique=True)
    return [int(i) for i in np.concatenate([firsts, rest])[:count]]


def _legend_lines(
    names: list[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> list[list[tuple[int, int]]]:
    """Where each class stands in the legend: lines of (x, class)."""
    lines: list[list[tuple[int, int]]] = [[]]
    x = _MARGIN
    for number, name in enumerate(names):
        needed = 18 + int(font.getlength(name)) + 20
        if lines[-1] and x + needed > width:
            lines.append([])
            x = _MARGIN
        lines[-1].append((x, number))
        x += needed
    return lines


def _shortened(name: str, longest: int = 28) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _color(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
