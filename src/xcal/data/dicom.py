"""DICOM files (extra `dicom`), and the one place where a file's ending picks its decoder."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xcal.data.decode import (
    MOST_PIXELS,
    Square,
    decode_image,
    is_dicom_name,
    is_image_name,
    squared,
    to_eight_bits,
)
from xcal.data.listing import somebody
from xcal.data.source_files import BadFile, Files
from xcal.errors import UserError, how_to_install


def is_dicom(files: Files, name: str) -> bool:
    """Whether a file is DICOM by its ending, or by its first bytes where no ending says other."""
    if is_image_name(name):
        return is_dicom_name(name)
    return files.head(name, 132)[128:] == b"DICM"


def is_image(files: Files, name: str) -> bool:
    """Whether a file is one that `decode_file` reads."""
    return is_image_name(name) or is_dicom(files, name)


class OnlyDicom:
    """The DICOM files of a set and its tables, as if there were no others."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.sizes: Mapping[str, int] = {
            name: size
            for name, size in files.sizes.items()
            if name.lower().endswith((".csv", ".tsv")) or is_dicom(files, name)
        }
        self.read, self.head = files.read, files.head
        self.fingerprint, self.close = files.fingerprint, files.close


def decode_file(files: Files, name: str, pixels: int) -> tuple[Square, tuple[int, int]]:
    """Read and decode one image file of any kind; raises `BadFile`."""
    data = files.read(name)
    if is_dicom_name(name) or not is_image_name(name):  # which is then one by its first bytes
        return decode_dicom(data, pixels)
    return decode_image(data, name, pixels)


def patient_of_file(files: Files, name: str) -> str | None:
    """The patient that the file itself names; None where it or its format names nobody."""
    if not is_dicom_name(name) and is_image_name(name):
        return None
    try:
        header = _read(files.read(name), header_only=True)
        with _read_lazily():
            patient = somebody(str(header.get("PatientID", "") or ""))
    except BadFile:
        return None  # decoding will say what is wrong with it
    return patient or None


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
