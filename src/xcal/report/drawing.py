"""One explanation as one picture: image, map, what is left when its top is covered, ROAD curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from xcal.explain.overlay import color_bar, overlay, picture
from xcal.report.explaining import Answer, Explanation
from xcal.report.sheet import (
    FAINT,
    INK,
    LEAST_FIRST,
    MOST_FIRST,
    RIGHT,
    RULE,
    WRONG,
    Point,
    Sheet,
)

_MARGIN = 24
_GAP = 24
_TITLE = 20
_HEAD = 15
_SMALL = 13


def tile_side(pixels: int) -> int:
    """A whole multiple of the image's side that is good to look at, so that pixels stay square."""
    return pixels * max(1, math.ceil(224 / pixels))


def tiles(found: Explanation) -> tuple[Image.Image, Image.Image, Image.Image]:
    """The image, the map over it in colors up to the map's own maximum, the covered image."""
    side = tile_side(found.image.shape[1])
    return (
        picture(found.image, side=side),
        overlay(found.image, found.saliency, side=side),
        picture(found.covered, side=side),
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def cells_text(found: Explanation) -> str:
    """How fine the map is: nothing smaller than a cell can be read from it."""
    return f"{found.saliency.shape[0]}×{found.saliency.shape[1]} cells"


def answer_text(answer: Answer) -> str:
    return f"{answer.name} {percent(answer.confidence)}"


def verdict(found: Explanation) -> str:
    """What is known of the truth, in words."""
    if found.truth is None:
        return "true class not known"
    return f"true class: {found.truth}" + ("" if found.right else " (wrong answer)")


def save_explanation(path: Path, found: Explanation) -> None:
    """Write the four pictures side by side as one PNG."""
    parts = tiles(found)
    side = parts[0].width
    width = 2 * _MARGIN + 4 * side + 3 * _GAP
    top = _MARGIN + 64
    sheet = Sheet(width, top + side + 76)
    sheet.text((_MARGIN, _MARGIN + 14), found.name, _TITLE, longest=width - 2 * _MARGIN)
    heads = (
        "image",
        f"where it looks ({cells_text(found)})",
        f"top {percent(found.covered_share)} covered",
        "confidence, by % of pixels removed",
    )
    lefts = [_MARGIN + i * (side + _GAP) for i in range(4)]
    for left, head in zip(lefts, heads, strict=True):
        sheet.text((left, top - 10), head, _HEAD, fill=FAINT, longest=side)
    for left, part in zip(lefts, parts, strict=False):
        sheet.paste(part, (left, top))
    below = top + side + 24
    color = INK if found.right is None else RIGHT if found.right else WRONG
    sheet.text((lefts[0], below), answer_text(found.answer), _HEAD, fill=color, longest=side)
    sheet.text((lefts[0], below + 22), verdict(found), _SMALL, fill=FAINT, longest=side)
    sheet.paste(color_bar(side, 10), (lefts[1], below - 12))
    sheet.text((lefts[1], below + 22), "0", _SMALL, fill=FAINT)
    sheet.text((lefts[1] + side, below + 22), "map's maximum", _SMALL, fill=FAINT, anchor="right")
    sheet.text((lefts[2], below), answer_text(found.covered_answer), _HEAD, longest=side)
    kept = (
        f"{found.answer.name}: {percent(found.answer.confidence)} before, {percent(found.kept)} now"
    )
    sheet.text((lefts[2], below + 22), kept, _SMALL, fill=FAINT, longest=side)
    _draw_curve(sheet, found, (lefts[3], top), side)
    sheet.text((lefts[3], below + 22), f"ROAD {found.road:+.3f}", _SMALL, fill=FAINT)
    for line, note in enumerate(found.notes):
        sheet.text(
            (_MARGIN, below + 42 + 18 * line), note, _SMALL, fill=WRONG, longest=width - 2 * _MARGIN
        )
    sheet.save(path)


def _draw_curve(sheet: Sheet, found: Explanation, corner: tuple[int, int], side: int) -> None:
    """Confidence in the class first answered, by percent of pixels removed, in both orders."""
    left, right = corner[0] + 34, corner[0] + side - 4
    top, bottom = corner[1] + 8, corner[1] + side - 8

    def place(level: float, confidence: float) -> Point:
        return left + (right - left) * level / 100, bottom - (bottom - top) * confidence

    for confidence in (0.0, 0.5, 1.0):
        sheet.line([place(0, confidence), place(100, confidence)], RULE, 1)
        x, y = place(0, confidence)
        sheet.text((x - 6, y + 4), percent(confidence)[:-2], 12, fill=FAINT, anchor="right")
    for level in (0, *found.levels):
        x, y = place(level, 0)
        sheet.text((x, y + 20), f"{level:g}", 12, fill=FAINT, anchor="middle")
    sheet.text((right, bottom + 20), "%", 12, fill=FAINT, anchor="right")
    curves: Sequence[tuple[tuple[float, ...], str, str]] = (
        (found.lerf, LEAST_FIRST, "least salient first"),
        (found.morf, MOST_FIRST, "most salient first"),
    )
    for values, color, _ in curves:
        points = [place(0, found.answer.confidence)]
        points += [place(level, v) for level, v in zip(found.levels, values, strict=True)]
        sheet.line(points, color, 2.5)
        for point in points:
            sheet.dot(point, color, 3.5)
    # The key stands in the upper or the lower half, whichever the curves leave free.
    middle = sum(found.lerf + found.morf) / (2 * len(found.levels))
    first = place(0, 0.40 if middle > 0.5 else 0.90)[1]
    for row, (_, color, label) in enumerate(curves):
        y = first + 20 * row
        sheet.line([(left + 12, y - 4), (left + 32, y - 4)], color, 2.5)
        sheet.text((left + 40, y), label, 13, fill=color)
