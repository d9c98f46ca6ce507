"""Pictures drawn by matplotlib, which the extra `figures` brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

from xcal.errors import UserError, how_to_install

INK = "#1f2328"
FAINT = "#656d76"
RIGHT = "#00714f"
WRONG = "#b3261e"
NEEDED = f"Pictures need matplotlib: {how_to_install('figures')}."

_DPI = 100
_STYLE = {
    "text.parse_math": False,  # a name with dollars is a name
    "text.color": INK,
    "axes.labelcolor": INK,
    "font.size": 9,
    "svg.fonttype": "none",  # letters stay letters, so that a journal can set them
    "pdf.fonttype": 42,
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require() -> None:
    """Refuse before any work what could not be drawn after it."""
    if not available():
        raise UserError(NEEDED)


@contextmanager
def picture(*paths: Path, width: float, height: float, **options: Any) -> Iterator[Any]:
    """Within, a figure of about so many pixels is drawn; then it is saved to `paths`.

    The files hold what is seen and nothing else: no date, no name of a program.
    """
    require()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), catch_warnings():
        filterwarnings("ignore", "Glyph")  # of a letter that no font has a box is drawn
        drawn = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, **options)
        yield drawn
        for path in paths:
            try:
                _save(drawn, path)
            except OSError as error:
                reason = error.strerror or "it cannot be written"
                raise UserError(f"The picture {path} was not saved: {reason}.") from None


def _save(drawn: Any, path: Path) -> None:
    unsaid: dict[str, dict[str, Any]] = {
        ".svg": {"metadata": {"Date": None, "Creator": None}},
        ".pdf": {"metadata": {"CreationDate": None, "Creator": None, "Producer": None}},
    }
    options = unsaid.get(
        path.suffix, {"format": "png", "metadata": {"Software": None}, "pil_kwargs": {"dpi": None}}
    )
    drawn.savefig(path, bbox_inches="tight", pad_inches=0.12, **options)


def shortened(text: str, longest: int) -> str:
    """The text, or as much of its beginning as `longest` letters hold, with … at its end."""
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def tile(axes: Any, shown: Any, below: str = "", *, color: str = INK) -> None:
    """A picture without axes, with a line or two below its left edge."""
    axes.imshow(shown, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_xlabel(below, loc="left", color=color)
