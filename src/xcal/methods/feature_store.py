"""What a frozen backbone makes of images, on disk, for runs that share both.

A study's cells differ in method, ε and seed, and hardly ever in images or backbone. With
`XCAL_FEATURES` naming a folder, simulations compute each image's features once, in passes of a
fixed size, so that no number depends on which cell asked first, and keep them there by the content
of the image. Sites with data of their own never do: `LocalData` of a deployed site has no store.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.dp.sampling import filled_up

ROWS = 32  # images of every pass, the last one filled up
_DIGEST = 16  # bytes of an image's key


class FeatureStore:
    """Rows of features by the digest of an image; one folder a backbone and length of row."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def of_environment(cls) -> FeatureStore | None:
        """The store that `XCAL_FEATURES` names, if any."""
        root = os.environ.get("XCAL_FEATURES")
        return cls(Path(root)) if root else None

    def rows(
        self,
        backbone: str,
        images: NDArray[np.uint8],
        brightness: float,
        like: Tensor,
        make: Callable[[NDArray[np.int64]], Tensor],
    ) -> StoredRows:
        """The features of all images, in their order; `make` computes those of some numbers.

        What is missing is computed and kept. `like`: the features of one image, for their shape.
        """
        width = like[0].numel()
        # One backbone makes rows of other lengths of images of other sizes: never in one file.
        folder = self._root / f"{backbone[:32]}-{ROWS}x{width}"
        folder.mkdir(parents=True, exist_ok=True)
        keys = np.array([_key(image, brightness) for image in images], dtype=f"V{_DIGEST}")
        known = _places(folder, width)
        missing = [i for i, key in enumerate(keys) if key.tobytes() not in known]
        for start in range(0, len(missing), ROWS):
            some = np.array(missing[start : start + ROWS], dtype=np.int64)
            made = make(some).float().cpu().numpy().reshape(len(some), width)
            _append(folder, keys[some], made)
        if missing:
            known = _places(folder, width)
        places = np.array([known[key.tobytes()] for key in keys], dtype=np.int64)
        return StoredRows(folder / "rows.bin", places, tuple(like.shape[1:]))


class StoredRows:
    """Features on disk, read when they are asked for: maps of thousands of images are gigabytes."""

    def __init__(self, path: Path, places: NDArray[np.int64], shape: tuple[int, ...]) -> None:
        self._places, self._shape = places, shape
        self._rows = np.memmap(path, dtype=np.float32, mode="r").reshape(-1, math.prod(shape))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, numbers: Tensor) -> Tensor:
        found = self._rows[self._places[numbers.numpy()]]
        return torch.from_numpy(np.asarray(found)).reshape(len(found), *self._shape)


def in_fixed_passes(begin: Callable[[Tensor], Tensor], pictures: Tensor) -> Tensor:
    """What `begin` makes of these few images, in one pass of the store's size."""
    return begin(filled_up(pictures, ROWS))[: len(pictures)]


def _key(image: NDArray[np.uint8], brightness: float) -> bytes:
    state = hashlib.sha256(f"{image.shape}{brightness}".encode())
    state.update(np.ascontiguousarray(image).tobytes())
    return state.digest()[:_DIGEST]


def _places(folder: Path, width: int) -> dict[bytes, int]:
    """Where each image's row lies, as far as keys and rows are whole: rows are written first."""
    if not (folder / "keys.bin").exists():
        return {}
    count = min(_size(folder / "keys.bin") // _DIGEST, _size(folder / "rows.bin") // (4 * width))
    keys = np.fromfile(folder / "keys.bin", dtype=f"V{_DIGEST}", count=count)
    return {key.tobytes(): i for i, key in enumerate(keys)}


def _size(path: Path) -> int:
    return path.stat().st_size


def _append(folder: Path, keys: NDArray[np.void], rows: NDArray[np.float32]) -> None:
    """Under a lock; what an interrupted writer left behind the last key is cut off first."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (folder / "keys.bin").open("ab") as of_keys, (folder / "rows.bin").open("ab") as of:
            whole = of_keys.seek(0, os.SEEK_END) // _DIGEST
            of_keys.truncate(whole * _DIGEST)
            of.truncate(whole * rows[0].nbytes)
            of.seek(0, os.SEEK_END)
            of.write(np.ascontiguousarray(rows).tobytes())
            of.flush()
            of_keys.seek(0, os.SEEK_END)
            of_keys.write(keys.tobytes())
