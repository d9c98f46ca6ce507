"""Arrays of whole numbers as short text, for results that are kept as JSON."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack(values: NDArray[Any]) -> str:
    """An integer array as text: its type, then its compressed bytes."""
    small = np.ascontiguousarray(values)
    text = base64.b64encode(zlib.compress(small.tobytes(), 9)).decode("ascii")
    return f"{small.dtype.str}:{text}"


def unpack(text: str) -> NDArray[Any]:
    """What `pack` was given, flat; ValueError of any other text."""
    kind, _, body = text.partition(":")
    try:
        plain = zlib.decompress(base64.b64decode(body, validate=True))
        return np.frombuffer(plain, dtype=np.dtype(kind))
    except (zlib.error, TypeError, SyntaxError) as error:
        raise ValueError("no packed array") from error
