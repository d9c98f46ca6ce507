"""What an audit keeps: its finished parts, until it is complete, so that an interrupted one goes on
after them; and reconstructions, as arrays and beside their originals in one small picture.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.audit.inversion import Inverted
from xcal.errors import UserError
from xcal.federation.files import read_json, write_json
from xcal.plotting import picture, tile


class Parts:
    """What was found so far, by what was asked: the same question is not worked on twice.

    A part belongs to the code, the settings and the effort in `about`; what another commit, or code
    that was edited since, found is never taken for it. A damaged part is made again.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        edited = str(about.get("commit")).endswith("+changes")
        self._folder = None if edited else folder
        self._about = json.dumps(about, sort_keys=True, default=str)
        self.seconds = 0.0  # of all parts that were asked for, whenever they were made

    def part(
        self, attack: str, what: Sequence[Any], make: Callable[[], list[Any]]
    ) -> tuple[list[Any], bool]:
        """The rows or reconstructions that `make` gives, and whether an earlier call made them."""
        path = self._path(attack, what)
        arrays = None if path is None or attack != "inversion" else path.with_suffix(".npz")
        if path is not None and path.exists():
            with suppress(UserError, OSError, ValueError, KeyError, TypeError):
                kept = read_json(path)
                found = kept["rows"] if arrays is None else load_inverted(arrays)
                self.seconds += kept["seconds"]
                return found, True
        began = time.monotonic()
        found = make()
        seconds = time.monotonic() - began
        self.seconds += seconds
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if arrays is not None:
                save_inverted(found, arrays)
            # Last, and whole or not at all: a part counts once this is there.
            write_json(path, {"seconds": seconds, "rows": found if arrays is None else []})
        return found, False

    def remove(self) -> None:
        """The audit is complete: the next one begins anew."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, attack: str, what: Sequence[Any]) -> Path | None:
        if self._folder is None:
            return None
        asked = json.dumps([self._about, attack, list(what)], default=str)
        return self._folder / f"{attack}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"


def draw_inversion(results: Sequence[Inverted], path: Path) -> None:
    """Single steps: originals on the left, a column each attack and level, PSNR underneath."""
    shown = [r for r in results if r.setting == "one step"]
    shown = [r for r in shown if r.network == shown[0].network]
    shown.sort(key=lambda r: (r.attack != "dlg", -(r.epsilon or math.inf)))
    rows = min(6, len(shown[0].psnr))
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, width=95 * (len(shown) + 1), height=110 * rows) as drawn:
        grid = drawn.subplots(rows, 1 + len(shown), squeeze=False)
        for row in range(rows):
            tile(grid[row, 0], _bytes(shown[0].originals[row].permute(1, 2, 0)))
            for axes, result in zip(grid[row, 1:], shown, strict=True):
                found = _bytes(result.found[row].permute(1, 2, 0))
                tile(axes, found, f"{result.psnr[row]:.1f} dB")
        levels = ["no privacy" if r.epsilon is None else f"ε = {r.epsilon:g}" for r in shown]
        titles = [f"{r.attack}\n{level}" for r, level in zip(shown, levels, strict=True)]
        for axes, title in zip(grid[0], ("original", *titles), strict=True):
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
