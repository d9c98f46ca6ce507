"""From the bytes of one file to one square RGB image."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from xcal.data.source_files import BadFile

FORMATS = {
    ".jpg": ("JPEG", "MPO"),
    ".jpeg": ("JPEG", "MPO"),
    ".png": ("PNG",),
    ".bmp": ("BMP",),
    ".gif": ("GIF",),
    ".tif": ("TIFF",),
    ".tiff": ("TIFF",),
    ".webp": ("WEBP",),
}
DICOM_ENDINGS = (".dcm", ".dicom")
MOST_PIXELS = 64_000_000
"""More than this in one image is taken for an attack on memory, not for medicine."""

Square = NDArray[np.uint8]


def is_image_name(name: str) -> bool:
    ending = PurePosixPath(name).suffix.lower()
    return ending in FORMATS or ending in DICOM_ENDINGS


def is_dicom_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in DICOM_ENDINGS


@contextmanager
def strict_decoding() -> Iterator[None]:
    """Have Pillow's own alarm about oversized images raised instead of printed.

    Warning filters belong to the process, so this goes around a whole import, not one thread.
    """
    with catch_warnings():
        simplefilter("error", Image.DecompressionBombWarning)
        # Odd metadata in an image that decodes is no reason to refuse it, nor to print.
        simplefilter("ignore", UserWarning)
        yield


def decode_image(data: bytes, name: str, pixels: int) -> tuple[Square, tuple[int, int]]:
    """The image as (pixels, pixels, 3) of uint8, and its own width and height.

    The whole picture is kept: sides are scaled apart, with antialiasing. Gray becomes three equal
    channels. Values beyond eight bits are scaled by the image's own range. Raises `BadFile`.
    """
    formats = FORMATS[PurePosixPath(name).suffix.lower()]
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format not in formats:
                raise BadFile(f"is named as {formats[0]} but holds {image.format}")
            size = image.size
            if size[0] * size[1] > MOST_PIXELS:
                raise BadFile(f"is too large ({size[0]:,}×{size[1]:,} pixels)")
            # A JPEG can be decoded at half or a quarter of its size, never below what is needed.
            image.draft(None, (pixels, pixels))
            picture: Image.Image = ImageOps.exif_transpose(image)
            return squared(as_rgb(picture), pixels), size
    except BadFile:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadFile("is too large: unpacking it would exhaust memory") from error
    except UnidentifiedImageError as error:
        raise BadFile("is not an image that can be recognized") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:
        raise BadFile(f"is broken or truncated ({error})") from error


def squared(image: Image.Image, pixels: int) -> Square:
    """Resize to a square, antialiased."""
    if image.size != (pixels, pixels):
        image = image.resize((pixels, pixels), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def as_rgb(image: Image.Image) -> Image.Image:
    """In eight bits, gray or RGB; values beyond eight bits are scaled by the image's own range."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return Image.fromarray(to_eight_bits(np.asarray(image)))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    # Gray is resized as one channel: the same result for a third of the work.
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def to_eight_bits(
    values: NDArray[Any], low: float | None = None, high: float | None = None
) -> NDArray[np.uint8]:
    """Scale linearly so that `low` becomes 0 and `high` 255, by default the image's own range."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise BadFile("holds values that are not finite")
    low = float(values.min()) if low is None else low
    high = float(values.max()) if high is None else high
    scaled = (values - low) / max(high - low, 1e-12)
    return (np.clip(scaled, 0.0, 1.0) * 255 + 0.5).astype(np.uint8)
