"""Reconstructions beside originals, as one small picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from xcal.audit.inversion import Inverted

_CELL, _GAP, _HEAD, _FOOT = 80, 6, 30, 14


def column_title(result: Inverted) -> str:
    # The built-in font has no Greek.
    level = "no privacy" if result.epsilon is None else f"epsilon {result.epsilon:g}"
    return f"{result.attack}\n{level}"


def draw_inversion(results: Sequence[Inverted], path: Path, *, rows: int = 6) -> None:
    """Single steps: originals on the left, a column each attack and level, PSNR underneath."""
    shown = [r for r in results if r.setting == "one step"]
    shown = [r for r in shown if r.network == shown[0].network]
    shown.sort(key=lambda r: (r.attack != "dlg", -(r.epsilon or math.inf)))
    rows = min(rows, len(shown[0].psnr))
    width = (_CELL + _GAP) * (len(shown) + 1) + _GAP
    height = _HEAD + (_CELL + _FOOT + _GAP) * rows
    canvas = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(10)
    columns: list[tuple[str, Tensor, tuple[float, ...] | None]]
    columns = [("original", shown[0].originals, None)]
    columns += [(column_title(r), r.found, r.psnr) for r in shown]
    for column, (title, pictures, figures) in enumerate(columns):
        x = _GAP + column * (_CELL + _GAP)
        pen.multiline_text((x, 2), title, fill="black", font=font, spacing=1)
        for row in range(rows):
            y = _HEAD + row * (_CELL + _FOOT + _GAP)
            values = _bytes(pictures[row].permute(1, 2, 0))
            cell = Image.fromarray(values).resize((_CELL, _CELL), Image.Resampling.NEAREST)
            canvas.paste(cell, (x, y))
            if figures is not None:
                pen.text((x, y + _CELL), f"{figures[row]:.1f} dB", fill="black", font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.quantize(128).save(path, optimize=True)


def _bytes(pictures: Tensor) -> NDArray[np.uint8]:
    return (pictures.numpy() * 255).round().astype(np.uint8)


def save_inverted(results: Sequence[Inverted], path: Path) -> None:
    """All originals and reconstructions, with what they are."""
    about = [r.summary() | {"psnr": r.psnr, "ssim": r.ssim} for r in results]
    arrays: dict[str, NDArray[Any]] = {"about": np.array(json.dumps(about))}
    for i, result in enumerate(results):
        arrays[f"originals{i}"] = _bytes(result.originals)
        arrays[f"found{i}"] = _bytes(result.found)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load_inverted(path: Path) -> list[Inverted]:
    """What `save_inverted` wrote."""
    with np.load(path) as saved:
        return [
            Inverted(
                one["setting"],
                one["network"],
                one["epsilon"],
                one["attack"],
                tuple(one["psnr"]),
                tuple(one["ssim"]),
                torch.from_numpy(saved[f"originals{i}"]).float() / 255,
                torch.from_numpy(saved[f"found{i}"]).float() / 255,
            )
            for i, one in enumerate(json.loads(str(saved["about"])))
        ]
