"""Figures as plain descriptions: drawn by plotly in the report and by matplotlib as vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.plotting import picture, require

# One color a method everywhere (after Okabe and Ito), for light and for dark pages.
METHODS = ("fl-dp", "xcal", "xcal-paper", "agp", "fl", "centralized", "agp-dp", "xcal-steered")
LIGHT = tuple("#0062a3 #b84a00 #00714f #8a3b7a #57606a #1f2328 #7a5c00 #5b4bb3 #b3261e".split())
DARK = tuple("#6cb6ff #ff9f5a #56d4a8 #e39ad0 #9aa4af #e6edf3 #e5c07b #b3a6ff #ff8a80".split())
# By style: dash and mark as plotly calls them, and as matplotlib does.
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
MARKS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P"}


def tone(method: str) -> int:
    """The color's number of a method; methods of one's own share what is left."""
    return METHODS.index(method) if method in METHODS else len(LIGHT) - 1


def figure_id(*words: object) -> str:
    """A name for a figure that can stand in a page and be a file's."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")


@dataclass(frozen=True)
class Line:
    """One line, or a set of points; `group` is what the legend switches on and off."""

    group: str
    x: tuple[Any, ...]
    y: tuple[float | None, ...]
    tone: int
    low: tuple[float, ...] = ()  # how far below and above y it may lie
    high: tuple[float, ...] = ()
    style: int = 0  # dash and mark
    mode: str = "lines+markers"
    label: str = ""  # in hovering, where it says more than the group
    faint: bool = False  # behind the others: a single seed of a mean

    @property
    def name(self) -> str:
        return self.label or self.group

    def of(self, styles: Mapping[str, Any]) -> tuple[str, Any]:
        return [*styles.items()][self.style % len(styles)]


@dataclass(frozen=True)
class Figure:
    """A figure with its words: `alt` says what can be seen, for those who cannot see it."""

    id: str
    title: str
    alt: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    x_log: bool = False
    x_ticks: tuple[float, ...] = ()
    across: bool = False  # points with intervals across, names down the side
    zero: bool = False  # a line at zero
    apart: bool = False  # across: what shares a name stands beside one another
    caption: str = ""

    @property
    def legend(self) -> list[tuple[str, int]]:
        """Groups in the order they appear, with their colors."""
        seen: dict[str, int] = {}
        for line in self.lines:
            seen.setdefault(line.group, line.tone)
        return list(seen.items())

    def plotly(self) -> dict[str, Any]:
        """What the page's script hands to plotly; colors are put in there, by theme."""
        return {
            "id": self.id,
            "data": [self._trace(line) for line in self.lines],
            "legend": [{"name": name, "tone": number} for name, number in self.legend],
            "layout": self._layout(),
        }

    def _trace(self, line: Line) -> dict[str, Any]:
        values: dict[str, Any] = {
            "type": "scatter",
            "mode": line.mode,
            "name": line.name,
            "meta": {"tone": line.tone, "group": line.group},
            "line": {"dash": line.of(DASHES)[0], "width": 1 if line.faint else 2},
            "marker": {"symbol": line.of(MARKS)[0], "size": 7},
            "x": list(line.y if self.across else line.x),
            "y": list(line.x if self.across else line.y),
            "hovertemplate": f"%{{{'y' if self.across else 'x'}}}"
            f"<br>{self.x_title if self.across else self.y_title}:"
            f" %{{{'x' if self.across else 'y'}:.3f}}<extra>{line.name}</extra>",
        }
        if self.apart:
            values |= {"orientation": "h", "offsetgroup": line.name}
        if line.faint:
            values["opacity"] = 0.35
        if line.low:
            values["error_x" if self.across else "error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": list(line.high),
                "arrayminus": list(line.low),
                "thickness": 1.5,
                "width": 4,
            }
        return values

    def _layout(self) -> dict[str, Any]:
        x: dict[str, Any] = {"title": {"text": self.x_title}, "automargin": True}
        y: dict[str, Any] = {"title": {"text": self.y_title}, "automargin": True}
        if self.x_log:
            x |= {"type": "log"}
        if self.x_ticks:
            x |= {"tickvals": list(self.x_ticks), "ticktext": [f"{t:g}" for t in self.x_ticks]}
        if self.across:
            y |= {"title": {"text": ""}, "autorange": "reversed", "type": "category"}
        if self.apart:
            y |= {"categoryorder": "category ascending"}
        if self.zero:
            x |= {"zeroline": True, "zerolinewidth": 2}
        names = len({v for line in self.lines for v in line.x}) if self.across else 0
        return {
            "xaxis": x,
            "yaxis": y,
            "showlegend": False,
            "height": max(320, 90 + 26 * names),
            **({"scattermode": "group", "scattergap": 0.3} if self.apart else {}),
            "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
            "hovermode": "closest",
            "dragmode": "zoom",
        }


def thinned(values: Sequence[Any], most: int = 300) -> list[Any]:
    """At most `most` of a long series, evenly, its last one included."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]


# --- as SVG and PDF, for papers (extra `figures`) -------------------------------------------------


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
        linestyle=line.of(DASHES)[1] if "lines" in line.mode else "none",
        marker=line.of(MARKS)[1] if "markers" in line.mode else "",
        markersize=4,
        linewidth=0.7 if line.faint else 1.4,
        alpha=0.35 if line.faint else None,
        capsize=2,
        label=line.group if first else None,
        **error,
    )
