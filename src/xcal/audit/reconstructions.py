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
from torch import Tensor

from xcal.audit.inversion import Inverted
from xcal.plotting import picture, tile


def column_title(result: Inverted) -> str:
    level = "no privacy" if result.epsilon is None else f"ε = {result.epsilon:g}"
    return f"{result.attack}\n{level}"


def draw_inversion(results: Sequence[Inverted], path: Path, *, rows: int = 6) -> None:
    """Single steps: originals on the left, a column each attack and level, PSNR underneath."""
    shown = [r for r in results if r.setting == "one step"]
    shown = [r for r in shown if r.network == shown[0].network]
    shown.sort(key=lambda r: (r.attack != "dlg", -(r.epsilon or math.inf)))
    rows = min(rows, len(shown[0].psnr))
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, width=95 * (len(shown) + 1), height=110 * rows) as drawn:
        grid = drawn.subplots(rows, 1 + len(shown), squeeze=False)
        for row in range(rows):
            tile(grid[row, 0], _bytes(shown[0].originals[row].permute(1, 2, 0)))
            for axes, result in zip(grid[row, 1:], shown, strict=True):
                found = _bytes(result.found[row].permute(1, 2, 0))
                tile(axes, found, f"{result.psnr[row]:.1f} dB")
        for axes, title in zip(grid[0], ("original", *map(column_title, shown)), strict=True):
            axes.set_title(title, loc="left", fontsize=9)


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
