"""From the bytes of one file, picture or DICOM (extra `dicom`), to one square RGB image."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from xcal.data.listing import somebody
from xcal.data.source_files import BadFile, Files
from xcal.errors import UserError, how_to_install

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


def _ending(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def is_image_name(name: str) -> bool:
    return _ending(name) in FORMATS or is_dicom_name(name)


def is_dicom_name(name: str) -> bool:
    return _ending(name) in DICOM_ENDINGS


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
    formats = FORMATS[_ending(name)]
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


# --- DICOM ----------------------------------------------------------------------------------------


def is_dicom(files: Files, name: str) -> bool:
    """Whether a file is DICOM by its ending, or by its first bytes where no ending says other."""
    if is_image_name(name):
        return is_dicom_name(name)
    return files.head(name, 132)[128:] == b"DICM"


def is_image(files: Files, name: str) -> bool:
    """Whether a file is one that `decode_file` reads."""
    return is_image_name(name) or is_dicom(files, name)


class OnlyDicom(Files):
    """The DICOM files of a set and its tables, as if there were no others."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.sizes: Mapping[str, int] = {
            name: size
            for name, size in files.sizes.items()
            if name.lower().endswith((".csv", ".tsv")) or is_dicom(files, name)
        }

    def open(self, name: str) -> IO[bytes]:
        return self._files.open(name)

    def checksum(self, name: str) -> int:
        return self._files.checksum(name)


def decode_file(files: Files, name: str, pixels: int) -> tuple[Square, tuple[int, int]]:
    """Read and decode one image file of any kind; raises `BadFile`."""
    data = files.read(name)
    if _ending(name) in FORMATS:
        return decode_image(data, name, pixels)
    return decode_dicom(data, pixels)  # by its ending or by its first bytes


def patient_of_file(files: Files, name: str) -> str | None:
    """The patient that the file itself names; None where it or its format names nobody."""
    if _ending(name) in FORMATS:
        return None
    try:
        header = _read(files.read(name), header_only=True)
        with _read_lazily():
            return somebody(str(header.get("PatientID", "") or "")) or None
    except BadFile:
        return None  # decoding will say what is wrong with it


def decode_dicom(data: bytes, pixels: int) -> tuple[Square, tuple[int, int]]:
    """The first frame as a reader of X-rays would see it, and its width and height.

    Rescale slope and intercept, the file's own window (its first; without one, the image's own
    range) and the photometric interpretation (MONOCHROME1 is shown inverted) are applied.
    """
    dataset = _read(data, header_only=False)
    with _read_lazily():
        return _picture(dataset, pixels)


@contextmanager
def _read_lazily() -> Iterator[None]:
    """pydicom understands a field when it is first asked for, and can fail anywhere in that."""
    try:
        yield
    except (BadFile, MemoryError):
        raise
    except Exception as error:
        raise BadFile(f"has a broken DICOM header ({type(error).__name__})") from error


def _picture(dataset: Any, pixels: int) -> tuple[Square, tuple[int, int]]:
    width, height = int(dataset.get("Columns", 0) or 0), int(dataset.get("Rows", 0) or 0)
    if width * height > MOST_PIXELS:
        raise BadFile(f"is too large ({width:,}×{height:,} pixels)")
    if width * height == 0:
        raise BadFile("holds no image")
    try:
        values: NDArray[Any] = np.asarray(dataset.pixel_array)
    except Exception as error:  # pydicom raises almost anything on damaged or compressed data
        raise BadFile(f"has pixels that cannot be decoded ({type(error).__name__})") from error
    colors = int(dataset.get("SamplesPerPixel", 1) or 1)
    if values.ndim == (4 if colors > 1 else 3):
        values = values[0]
    kind = str(dataset.get("PhotometricInterpretation", "MONOCHROME2"))
    if colors > 1:
        return squared(_color(values, kind), pixels), (width, height)
    slope = float(dataset.get("RescaleSlope", 1) or 1)
    values = values.astype(np.float64) * slope + float(dataset.get("RescaleIntercept", 0) or 0)
    low, high = _window(dataset)
    gray = to_eight_bits(values, low, high)
    if kind == "MONOCHROME1":
        gray = 255 - gray
    return squared(Image.fromarray(gray), pixels), (width, height)


def _color(values: NDArray[Any], kind: str) -> Image.Image:
    if values.dtype != np.uint8 or values.shape[-1] != 3:
        raise BadFile(f"has colors of a kind that is not read ({kind})")
    if kind.startswith("YBR_FULL"):
        channels = [Image.fromarray(np.ascontiguousarray(values[..., i])) for i in range(3)]
        return Image.merge("YCbCr", channels).convert("RGB")
    if kind != "RGB":
        raise BadFile(f"has colors of a kind that is not read ({kind})")
    return Image.fromarray(values)


def _window(dataset: Any) -> tuple[float | None, float | None]:
    """The first window's darkest and brightest value, by the DICOM standard's linear formula."""
    center, width = dataset.get("WindowCenter"), dataset.get("WindowWidth")
    try:
        center = float(center[0] if hasattr(center, "__getitem__") else center)
        width = float(width[0] if hasattr(width, "__getitem__") else width)
    except (TypeError, ValueError, IndexError):
        return None, None
    if not width > 1:
        return None, None
    return center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2


def _read(data: bytes, *, header_only: bool) -> Any:
    try:
        import pydicom
        from pydicom.errors import InvalidDicomError
    except ImportError as error:
        raise UserError(f"Reading DICOM files needs pydicom: {how_to_install('dicom')}.") from error
    try:
        return pydicom.dcmread(io.BytesIO(data), stop_before_pixels=header_only)
    except InvalidDicomError as error:
        raise BadFile("is named as DICOM but holds something else") from error
    except Exception as error:  # a damaged header can fail anywhere in pydicom
        raise BadFile(f"has a broken DICOM header ({type(error).__name__})") from error
