"""Explanations as pictures: a map over its image, in a color scale of our own.

Blood smears are pink and violet, X-rays gray, skin brown: the scale runs through hues that none of
them has, from deep teal over green to light yellow, and gets steadily lighter, so that it can be
read in gray as well. A map covers the image in proportion to its value: where nothing is salient
the image is seen as it is.
"""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from xcal.errors import UserError
from xcal.explain.gradcam import enlarge_maps

# Stops of the scale from 0 to 1, as red, green, blue; between them straight lines.
_STOPS = (
    (0, 64, 110),
    (0, 110, 128),
    (0, 150, 100),
    (110, 196, 30),
    (245, 226, 20),
    (255, 250, 200),
)


@cache
def _color_table() -> NDArray[np.uint8]:
    places = np.linspace(0, 1, len(_STOPS))
    grid = np.linspace(0, 1, 256)
    channels = [np.interp(grid, places, [stop[c] for stop in _STOPS]) for c in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)


def colors(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Values in [0, 1] of any shape to colors (..., 3); what lies outside is brought inside."""
    index = np.clip(np.nan_to_num(values) * 255, 0, 255).round().astype(np.intp)
    return _color_table()[index]


def scaled_map(saliency: Tensor, size: tuple[int, int], peak: float | None) -> NDArray[np.float64]:
    """A map (h, w) enlarged to (height, width), in [0, 1] of `peak`, by default its own maximum.

    A shared peak makes maps comparable. A map that is not finite, or never positive, is 0.
    """
    values = saliency.detach().cpu().double()
    if not bool(torch.isfinite(values).all()):
        return np.zeros(size)
    top = float(values.max()) if peak is None else peak
    if top <= 0:
        return np.zeros(size)
    # Divided first: interpolating a map of tiny numbers would lose them.
    enlarged = enlarge_maps((values / top).clamp(0, 1).unsqueeze(0), size)
    return enlarged[0].numpy()


def picture(image: Tensor, *, side: int | None = None) -> Image.Image:
    """An image (1 or 3, H, W) with values in [0, 1] as a picture, its longer side `side` pixels.

    Enlarged without smoothing, so that small images keep their pixels.
    """
    drawn = Image.fromarray(_to_pixels(image))
    if side is None:
        return drawn
    # Smaller than the original, leaving pixels out would show patterns that are not there.
    how = Image.Resampling.LANCZOS if side < max(drawn.size) else Image.Resampling.NEAREST
    return ImageOps.contain(drawn, (side, side), how)


def overlay(
    image: Tensor,
    saliency: Tensor,
    *,
    side: int | None = None,
    peak: float | None = None,
    opacity: float = 0.7,
) -> Image.Image:
    """The map (h, w) over its image (1 or 3, H, W) with values in [0, 1].

    `peak` is the map value that gets the top color (default: this map's maximum; share one to
    compare maps); `opacity` is how much of the image that color hides.
    """
    base = np.asarray(picture(image, side=side), dtype=np.float64)
    values = scaled_map(saliency, (base.shape[0], base.shape[1]), peak)
    # In proportion to the value: a low tail must not veil the image.
    cover = (opacity * values)[:, :, None]
    mixed = base * (1 - cover) + colors(values) * cover
    return Image.fromarray(mixed.round().astype(np.uint8))


def color_map() -> Any:
    """The scale for matplotlib."""
    from matplotlib.colors import ListedColormap

    return ListedColormap(_color_table() / 255)


def data_uri(drawn: Image.Image) -> str:
    """The picture as part of a page."""
    stream = io.BytesIO()
    drawn.save(stream, format="PNG")  # a smaller file would take seven times as long
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def css_gradient() -> str:
    """The scale as a background of a page, low at the left."""
    return f"linear-gradient(to right, {', '.join(f'rgb{stop}' for stop in _STOPS)})"


def _to_pixels(image: Tensor) -> NDArray[np.uint8]:
    if image.dim() != 3 or image.shape[0] not in (1, 3):
        raise UserError(
            f"An image of the shape {tuple(image.shape)} cannot be drawn: give one or three "
            "channels, height and width."
        )
    values = image.detach().cpu().double().nan_to_num(0).clamp(0, 1)
    return (values.expand(3, -1, -1).permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
