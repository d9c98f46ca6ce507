"""A sheet to draw on with Pillow alone: smooth lines, and letters that are always there.

Pillow's own font needs nothing from the machine, but knows Latin letters only. The two signs that
every figure of this project needs, ε and ∞, are therefore drawn; other letters lose their accents,
and what is left over becomes a question mark rather than an empty box.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from xcal.errors import UserError

INK = "#1f2328"
FAINT = "#656d76"
RULE = "#d0d7de"
RIGHT = "#00714f"
WRONG = "#b3261e"
# Two lines that stay apart for readers who see fewer colors (Okabe and Ito's palette).
MOST_FIRST = "#d55e00"
LEAST_FIRST = "#0072b2"

Anchor = Literal["left", "middle", "right"]
Point = tuple[float, float]

_FINER = 4  # lines are drawn so many times larger, then reduced: that makes them smooth
_PLAIN = {"–": "-", "—": "-", "−": "-", "‐": "-", "×": "x", "’": "'", "‘": "'", "“": '"', "”": '"'}


class Sheet:
    """A white picture of a fixed size. Places are in pixels from the upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), "white")
        self._pen = ImageDraw.Draw(self.image)

    def text(
        self,
        at: Point,
        text: str,
        size: int,
        *,
        fill: str = INK,
        anchor: Anchor = "left",
        longest: float | None = None,
    ) -> None:
        """Write one line with its baseline at `at`, shortened with … to `longest` pixels."""
        text = drawable(text)
        if longest is not None:
            text = shortened(text, size, longest)
        x, y = at
        x -= {"left": 0.0, "middle": 0.5, "right": 1.0}[anchor] * text_width(text, size)
        for piece in _pieces(text):
            if piece in _SIGNS:
                points, _ = _SIGNS[piece]
                self.line([(x + px * size, y - py * size) for px, py in points], fill, size * 0.085)
            else:
                self._pen.text((x, y), piece, fill=fill, font=_font(size), anchor="ls")
            x += _piece_width(piece, size)

    def line(self, points: Sequence[Point], fill: str, width: float) -> None:
        """A smooth line through `points`, with round ends."""
        pad = math.ceil(width) + 1
        left, top = (math.floor(min(p[axis] for p in points)) - pad for axis in (0, 1))
        right, bottom = (math.ceil(max(p[axis] for p in points)) + pad for axis in (0, 1))
        mask = Image.new("L", ((right - left) * _FINER, (bottom - top) * _FINER), 0)
        pen = ImageDraw.Draw(mask)
        fine = [((x - left) * _FINER, (y - top) * _FINER) for x, y in points]
        thick = max(1, round(width * _FINER))
        pen.line(fine, fill=255, width=thick, joint="curve")
        for x, y in (fine[0], fine[-1]):
            pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=255)
        mask = mask.resize((right - left, bottom - top), Image.Resampling.BOX)
        self.image.paste(Image.new("RGB", mask.size, fill), (left, top), mask)

    def dot(self, at: Point, fill: str, radius: float) -> None:
        self.line([at, at], fill, 2 * radius)

    def box(self, corner: Point, size: Point, *, fill: str | None = None, edge: str = RULE) -> None:
        """A rectangle whose edge of one pixel lies inside its size."""
        right, bottom = corner[0] + size[0] - 1, corner[1] + size[1] - 1
        self._pen.rectangle((*corner, right, bottom), fill=fill, outline=edge)

    def paste(self, picture: Image.Image, corner: tuple[int, int]) -> None:
        self.image.paste(picture, corner)

    def save(self, path: Path) -> None:
        """Write a PNG that holds pixels and nothing else."""
        try:
            self.image.save(path, format="PNG")
        except OSError as error:
            reason = error.strerror or "it cannot be written"
            raise UserError(f"The picture {path} was not saved: {reason}.") from None


def text_width(text: str, size: int) -> float:
    """How many pixels a line takes."""
    return sum(_piece_width(piece, size) for piece in _pieces(text))


def shortened(text: str, size: int, longest: float) -> str:
    """The text, or as much of its beginning as fits, with … at its end."""
    if text_width(text, size) <= longest:
        return text
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if text_width(text[:middle] + "…", size) <= longest:
            fits = middle
        else:
            too_long = middle
    return text[:fits].rstrip() + "…"


def drawable(text: str) -> str:
    """The text in characters that can be drawn."""
    result = []
    for character in text:
        character = _PLAIN.get(character, character)
        if character in _SIGNS or _known(character):
            result.append(character)
        else:
            bare = [c for c in unicodedata.normalize("NFKD", character) if _known(c)]
            result.append("".join(bare) or ("" if unicodedata.combining(character) else "?"))
    return "".join(result)


def _arc(center: Point, radii: Point, first: int, last: int) -> list[Point]:
    """Points of an ellipse from one angle to another, in degrees, counter-clockwise."""
    angles = [math.radians(first + (last - first) * i / 24) for i in range(25)]
    return [
        (center[0] + radii[0] * math.cos(a), center[1] + radii[1] * math.sin(a)) for a in angles
    ]


def _lemniscate(center: Point, half_width: float, flat: float) -> list[Point]:
    points = []
    for i in range(65):
        t = 2 * math.pi * i / 64
        scale = half_width / (1 + math.sin(t) ** 2)
        x = center[0] + scale * math.cos(t)
        points.append((x, center[1] + flat * scale * math.sin(t) * math.cos(t)))
    return points


# By sign: a line in units of the size of the letters, upwards from the baseline; its advance.
_SIGNS: dict[str, tuple[list[Point], float]] = {
    "ε": (
        _arc((0.26, 0.385), (0.17, 0.125), 35, 270) + _arc((0.26, 0.13), (0.19, 0.13), 90, 325),
        0.52,
    ),
    "∞": (_lemniscate((0.45, 0.26), 0.38, 1.25), 0.9),
}


def _pieces(text: str) -> list[str]:
    """Stretches that the font writes, and signs that are drawn, in order."""
    pieces: list[str] = []
    for character in text:
        if pieces and character not in _SIGNS and pieces[-1] not in _SIGNS:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def _piece_width(piece: str, size: int) -> float:
    return _SIGNS[piece][1] * size if piece in _SIGNS else float(_font(size).getlength(piece))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


@cache
def _known(character: str) -> bool:
    """Whether the font has it: what it has not is drawn like a character that nobody has."""
    font = _font(20)
    return bytes(font.getmask(character)) != bytes(font.getmask("\uffff"))
