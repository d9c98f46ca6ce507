"""A client's images as the network takes them: plain or in another view, or already through the
network's frozen backbone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.data.augment import View, show
from xcal.data.normalize import to_tensor
from xcal.dp.padding import filled_up
from xcal.models.backbone import Split

# Always the same neighbors: what the beginning makes of an image is then the same to the bit,
# whichever step asks first, also after a resume. Beside any neighbors it is where `rows` is given.
_BLOCK = 32


class Inputs:
    """Every image of a client in every view, made when it is asked for."""

    def __init__(
        self, pixels: NDArray[np.uint8], views: tuple[View, ...], brightness: float, device: str
    ) -> None:
        self._pixels = pixels
        self._views = views
        self._brightness = brightness
        self._device = device
        self._kept: _Kept | None = None

    def pictures(self, images: NDArray[np.int64], views: NDArray[np.int64]) -> Tensor:
        """The images of these numbers in these views, normalized."""
        pixels = np.asarray(self._pixels[images])
        shown = show(pixels, views, self._views) if views.any() else pixels
        return to_tensor(shown, self._brightness).to(self._device)

    def keep(self, split: Split | None, views: int, megabytes: int, rows: int = 0) -> bool:
        """Whether activations are kept from now on.

        They are where the network has a frozen backbone and all of them, of all the views that
        steps may ask for, fit into `megabytes`. They are made in passes of `rows` images each,
        the last one filled up; 0: of a block each, the last one as short as it is.
        """
        if split is None or not megabytes or not len(self._pixels):
            self._kept = None
            return False
        digest = split.digest()
        if self._kept is not None and (self._kept.digest, self._kept.rows) == (digest, rows):
            self._kept.split = split  # the same weights in a network built anew
            return True
        if not self.fits(split, views, megabytes):
            self._kept = None
            return False
        one, count = self._first(split), self._count(views)
        shape = (count, *one.shape[1:])
        made = np.zeros(math.ceil(count / (rows or _BLOCK)), dtype=bool)
        # Zeros of the operating system's: memory is taken only as blocks are filled.
        table = torch.from_numpy(np.zeros(shape, dtype=one.cpu().numpy().dtype))
        self._kept = _Kept(split, digest, table, made, rows)
        return True

    def fits(self, split: Split, views: int, megabytes: int) -> bool:
        """Whether all that `split` makes, of all the views that steps may ask for, fits."""
        if not len(self._pixels):
            return False
        one = self._first(split)
        return self._count(views) * one.numel() * one.element_size() <= megabytes * 2**20

    def _first(self, split: Split) -> Tensor:
        return split.begin(self.pictures(np.zeros(1, np.int64), np.zeros(1, np.int64)))

    def _count(self, views: int) -> int:
        return (len(self._views) if views > 1 else 1) * len(self._pixels)

    def fill(self, table: Tensor) -> None:
        """Take activations that were computed elsewhere: of every image, view after view."""
        assert self._kept is not None
        self._kept.table.copy_(table)
        self._kept.made[:] = True

    def activations(self, images: NDArray[np.int64], views: NDArray[np.int64]) -> Tensor:
        """What the frozen backbone makes of these images in these views; `keep` came before."""
        kept = self._kept
        assert kept is not None
        places = views * len(self._pixels) + images
        size = kept.rows or _BLOCK
        blocks = np.unique(places // size)
        for block in blocks[~kept.made[blocks]]:
            inside = np.arange(block * size, min((block + 1) * size, len(kept.table)))
            shown = self.pictures(inside % len(self._pixels), inside // len(self._pixels))
            made = kept.split.begin(filled_up(shown, kept.rows))[: len(inside)]
            kept.table[inside[0] : inside[-1] + 1] = made.cpu()
            kept.made[block] = True
        return kept.table[torch.from_numpy(places)].to(self._device)


@dataclass
class _Kept:
    split: Split
    digest: str
    table: Tensor
    made: NDArray[np.bool_]
    rows: int


@dataclass(frozen=True)
class Rows:
    """Images of a draw, each in a view, that take no memory until they are asked for."""

    source: Inputs
    images: NDArray[np.int64]
    views: NDArray[np.int64]
    through_backbone: bool

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: Tensor) -> Rows:
        """Some rows, by number or by mark."""
        chosen = rows.cpu().numpy()
        return Rows(self.source, self.images[chosen], self.views[chosen], self.through_backbone)

    def pictures(self) -> Tensor:
        return self.source.pictures(self.images, self.views)

    def activations(self) -> Tensor:
        return self.source.activations(self.images, self.views)
