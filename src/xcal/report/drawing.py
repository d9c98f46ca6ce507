"""One explanation as a picture: image, map, what is left when its top is covered, ROAD curve; and
explanations as one page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from xcal.explain.choosing import MapChoice
from xcal.explain.overlay import color_map, css_gradient, data_uri, overlay, picture
from xcal.methods.registry import name_today
from xcal.plotting import FAINT, INK, RIGHT, WRONG, shortened, tile
from xcal.plotting import picture as drawn_picture
from xcal.report.explaining import Answer, Explanation
from xcal.report.runs import LoadedRun
from xcal.report.template import render
from xcal.report.words import percent

# Two lines that stay apart for readers who see fewer colors (Okabe and Ito's palette).
MOST_FIRST = "#d55e00"
LEAST_FIRST = "#0072b2"
_LONGEST = 36  # letters below a tile


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
    kept = f"{percent(found.answer.confidence)} before, {percent(found.kept)} now"
    below = (
        (answer_text(found.answer), verdict(found)),
        ("", ""),
        (answer_text(found.covered_answer), f"{found.answer.name}: {kept}"),
    )
    heads = (
        "image",
        f"where it looks ({cells_text(found)})",
        f"top {percent(found.covered_share)} covered",
        "confidence, by % of pixels removed",
    )
    right = INK if found.right is None else RIGHT if found.right else WRONG
    with drawn_picture(path, width=4.8 * side, height=1.5 * side) as drawn:
        *places, curve = drawn.subplots(1, 4)
        drawn.subplots_adjust(left=0, right=1, bottom=0.15, top=0.85)
        drawn.suptitle(shortened(found.name, 110), x=0, ha="left", fontsize=12)
        for axes, part, lines, color in zip(places, parts, below, (right, INK, INK), strict=True):
            told = "\n".join(shortened(line, _LONGEST) for line in lines)
            tile(axes, part, told, color=color)
        for axes, head in zip((*places, curve), heads, strict=True):
            axes.set_title(head, loc="left", fontsize=9, color=FAINT)
        scale(places[1].inset_axes([0, -0.08, 1, 0.04]), "map's maximum")
        _draw_curve(curve, found)
        drawn.text(0, 0, "\n".join(found.notes), color=WRONG, va="top")


def scale(axes: Any, top: str) -> None:
    """The colors of maps from 0 to what `top` says."""
    axes.imshow([range(256)], cmap=color_map(), aspect="auto")
    axes.set_xticks([0, 255], ["0", top], color=FAINT)
    axes.get_xticklabels()[-1].set_ha("right")
    axes.set_yticks([])


def _draw_curve(axes: Any, found: Explanation) -> None:
    """Confidence in the class first answered, by percent of pixels removed, in both orders."""
    levels = (0, *found.levels)
    for values, color, style, label in (
        (found.lerf, LEAST_FIRST, "o--", "least salient first"),
        (found.morf, MOST_FIRST, "o-", "most salient first"),
    ):
        axes.plot(levels, (found.answer.confidence, *values), style, color=color, label=label)
    axes.set(xlim=(-3, 103), ylim=(-0.03, 1.03), xticks=levels, yticks=[0, 0.5, 1], box_aspect=1)
    axes.set_xlabel(f"ROAD {found.road:+.3f}", loc="left", color=FAINT)
    axes.grid(axis="y", alpha=0.4)
    axes.legend(frameon=False, fontsize=8)


# --- as a page that needs no network and no other file --------------------------------------------


def explanations_page(
    run: LoadedRun,
    explanations: Sequence[Explanation],
    choice: MapChoice,
    result: Mapping[str, Any],
) -> str:
    """The page as HTML. Every text from outside is escaped; images are part of the file."""
    told = "no privacy guarantee (ε = ∞)"
    if (epsilon := result.get("epsilon_target")) is not None:
        told = f"ε = {epsilon:g}, δ = {result['delta']:g}"
    elif (nominal := result.get("epsilon_nominal")) is not None:
        told = f"no privacy guarantee (ε = ∞, nominal ε = {nominal:g})"
    return render(
        "explain.html",
        method=name_today(run.experiment),
        data=run.experiment.data,
        network=run.experiment.network,
        pixels=run.experiment.pixels,
        guarantee=told,
        maps=choice.sentence(),
        bar=css_gradient(),
        explanations=[_item(found) for found in explanations],
    )


def _item(found: Explanation) -> dict[str, Any]:
    image, overlaid, covered = (data_uri(part) for part in tiles(found))
    ranked = sorted(zip(found.classes, found.probabilities, strict=True), key=lambda pair: -pair[1])
    return {
        "found": found,
        "answer": answer_text(found.answer),
        "verdict": verdict(found),
        "verdict_class": "" if found.right is None else "right" if found.right else "wrong",
        "image": image,
        "overlay": overlaid,
        "covered": covered,
        "where": where_in_words(found),
        "cells": cells_text(found),
        "covered_answer": answer_text(found.covered_answer),
        "classes": ranked,
        "chart": _chart(found),
    }


def where_in_words(found: Explanation) -> str:
    """Where the map is highest, for readers who cannot see it."""
    values = found.saliency.detach().double()
    if not math.isfinite(float(values.sum())) or float(values.max()) <= 0:
        return "it highlights nothing"
    height, width = values.shape
    row, column = divmod(int(values.argmax()), width)
    down = ("upper", "middle", "lower")[min(2, 3 * row // height)]
    across = ("left", "middle", "right")[min(2, 3 * column // width)]
    if down == across:
        return "it is strongest in the middle"
    return f"it is strongest at the {down} {across}"


def _chart(found: Explanation) -> dict[str, Any]:
    """The curve in the units of a drawing of 256 by 256."""
    left, right, top, bottom = 36, 250, 10, 226

    def place(level: float, confidence: float) -> tuple[float, float]:
        x = left + (right - left) * level / 100
        return round(x, 1), round(bottom - (bottom - top) * confidence, 1)

    def curve(kind: str, values: Sequence[float], label: str, key: float) -> dict[str, Any]:
        dots = [place(0, found.answer.confidence)]
        dots += [place(level, v) for level, v in zip(found.levels, values, strict=True)]
        line = " ".join(f"{x},{y}" for x, y in dots)
        return {"kind": kind, "dots": dots, "points": line, "label": label, "key": key}

    # The key stands in the half that the curves leave free.
    low = sum(found.lerf + found.morf) / (2 * len(found.levels)) > 0.5
    key = place(0, 0.4 if low else 0.95)[1]
    return {
        "left": left,
        "right": right,
        "bottom": bottom,
        "y_ticks": [
            {"at": place(0, value)[1], "label": f"{100 * value:g}"} for value in (0, 0.5, 1)
        ],
        "x_ticks": [{"at": place(v, 0)[0], "label": f"{v:g}"} for v in (0, *found.levels)],
        "curves": [
            curve("least", found.lerf, "least salient first (dashed)", key),
            curve("most", found.morf, "most salient first", key + 16),
        ],
    }
