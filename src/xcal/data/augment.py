"""Views of an image that keep its label: a fixed, public, finite set, the plain image first.

Which views an image gets is decided by uniforms of its own, so it depends on nobody else's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xcal.errors import UserError

Augment = Literal["turns", "shifts"]


@dataclass(frozen=True)
class View:
    """One way to show an image: mirrored left to right, turned, moved by sixteenths of its side."""

    turns: int = 0
    mirrored: bool = False
    right: int = 0
    down: int = 0

    def of(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Images (N, H, W, 3) in this view; what a shift uncovers repeats the edge."""
        shown = pixels[:, :, ::-1] if self.mirrored else pixels
        shown = np.rot90(shown, self.turns, axes=(1, 2))
        if self.right or self.down:
            height, width = shown.shape[1:3]
            rows = np.arange(height) - self.down * max(1, height // 16)
            columns = np.arange(width) - self.right * max(1, width // 16)
            shown = shown[:, rows.clip(0, height - 1)][:, :, columns.clip(0, width - 1)]
        return shown


_STEPS = (0, -1, 1)
VIEWS: dict[str, tuple[View, ...]] = {
    # A cell or a mole has no upper side: the eight symmetries of the square.
    "turns": tuple(View(turns, mirrored) for mirrored in (False, True) for turns in range(4)),
    # A chest does have one: mirrored, and moved a little.
    "shifts": tuple(
        View(0, mirrored, right, down)
        for mirrored in (False, True)
        for right in _STEPS
        for down in _STEPS
    ),
}


def check_views(views: int, augment: Augment) -> None:
    """Refuse more views than there are."""
    if not 1 <= views <= len(VIEWS[augment]):
        raise UserError(
            f"views = {views} exceeds the {len(VIEWS[augment])} that augment = {augment!r} has:"
            " choose fewer."
        )


def show(
    pixels: NDArray[np.uint8], views: NDArray[np.int64], known: tuple[View, ...]
) -> NDArray[np.uint8]:
    """Each image (of square shape) in the view whose number in `known` stands beside it."""
    shown = np.empty_like(pixels)
    for view in np.unique(views):
        rows = np.flatnonzero(views == view)
        shown[rows] = known[view].of(pixels[rows])
    return shown


def choose_views(uniforms: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Of each image the plain view and `count` − 1 different others, as numbers (N, count).

    `uniforms` (N, V − 1) holds one value for each of an image's other V − 1 views: those with the
    smallest are taken.
    """
    chosen = np.zeros((len(uniforms), count), dtype=np.int64)
    if count > 1:
        others = np.argsort(uniforms, axis=1, kind="stable")[:, : count - 1]
        chosen[:, 1:] = 1 + np.sort(others, axis=1)
    return chosen
