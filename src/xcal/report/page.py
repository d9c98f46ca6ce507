"""Explanations as one page: a single file that needs no network and no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xcal.explain.choosing import MapChoice
from xcal.explain.overlay import css_gradient, data_uri
from xcal.methods.registry import name_today
from xcal.report.drawing import answer_text, cells_text, percent, tiles, verdict
from xcal.report.explaining import Explanation
from xcal.report.runs import LoadedRun
from xcal.report.template import render


def explanations_page(
    run: LoadedRun,
    explanations: Sequence[Explanation],
    *,
    epsilon: float | None,
    delta: float | None,
    nominal: float | None = None,
    choice: MapChoice,
) -> str:
    """The page as HTML. Every text from outside is escaped; images are part of the file."""
    return render(
        "explain.html",
        method=name_today(run.experiment),
        data=run.experiment.data,
        network=run.experiment.network,
        pixels=run.experiment.pixels,
        guarantee=_guarantee(epsilon, delta, nominal),
        maps=choice.sentence(),
        bar=css_gradient(),
        explanations=[_item(found) for found in explanations],
    )


def _guarantee(epsilon: float | None, delta: float | None, nominal: float | None) -> str:
    if epsilon is not None:
        return f"ε = {epsilon:g}, δ = {delta:g}"
    beside = "" if nominal is None else f", nominal ε = {nominal:g}"
    return f"no privacy guarantee (ε = ∞{beside})"


def _item(found: Explanation) -> dict[str, Any]:
    image, overlaid, covered = (data_uri(part) for part in tiles(found))
    ranked = sorted(zip(found.classes, found.probabilities, strict=True), key=lambda pair: -pair[1])
    return {
        "name": found.name,
        "class_name": found.answer.name,
        "answer": answer_text(found.answer),
        "verdict": verdict(found),
        "verdict_class": "" if found.right is None else "right" if found.right else "wrong",
        "notes": found.notes,
        "image": image,
        "overlay": overlaid,
        "covered": covered,
        "where": where_in_words(found),
        "cells": cells_text(found),
        "share": percent(found.covered_share),
        "covered_answer": answer_text(found.covered_answer),
        "before": percent(found.answer.confidence),
        "kept": percent(found.kept),
        "levels": [f"{level:g} %" for level in (0, *found.levels)],
        "morf": [percent(value) for value in found.morf],
        "lerf": [percent(value) for value in found.lerf],
        "road": f"{found.road:+.3f}",
        "classes": [(name, percent(value)) for name, value in ranked],
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
