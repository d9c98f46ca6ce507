"""The report's figures as SVG and PDF, for papers; needs the extra `figures` (matplotlib)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.plotting import picture, require
from xcal.report.figures import LIGHT, Figure, Line

_DASHES = ("-", "--", ":", "-.", (0, (8, 3)))
_MARKS = "osD^P"


def save_figures(folder: Path, figures: Iterable[Figure]) -> None:
    """Each figure as two vector files."""
    require()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} could not be written: {error.strerror}.") from None
    for figure in figures:
        paths = [folder / f"{figure.id}.{ending}" for ending in ("svg", "pdf")]
        with picture(*paths, width=450, height=320, layout="constrained") as drawn:
            _draw(drawn.add_subplot(), figure)


def _draw(axes: Any, figure: Figure) -> None:
    named = set[str]()
    for line in figure.lines:
        _draw_line(axes, figure, line, first=line.group not in named)
        named.add(line.group)
    if figure.x_log:
        axes.set_xscale("log")
    if figure.x_ticks:
        axes.set_xticks(figure.x_ticks, [f"{t:g}" for t in figure.x_ticks], minor=False)
        axes.minorticks_off()
    if figure.across:
        axes.invert_yaxis()
    if figure.zero:
        axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(figure.x_title)
    axes.set_ylabel("" if figure.across else figure.y_title)
    axes.set_title(figure.title, fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)


def _draw_line(axes: Any, figure: Figure, line: Line, *, first: bool) -> None:
    color = LIGHT[line.tone % len(LIGHT)]
    x, y = (line.y, line.x) if figure.across else (line.x, line.y)
    error = {}
    if line.low:
        error["xerr" if figure.across else "yerr"] = [list(line.low), list(line.high)]
    axes.errorbar(
        x,
        y,
        color=color,
        linestyle=_DASHES[line.style % 5] if "lines" in line.mode else "none",
        marker=_MARKS[line.style % 5] if "markers" in line.mode else "",
        markersize=4,
        linewidth=0.7 if line.faint else 1.4,
        alpha=0.35 if line.faint else None,
        capsize=2,
        label=line.group if first else None,
        **error,
    )
