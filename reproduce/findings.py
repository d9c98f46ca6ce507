"""Fills the generated parts of the pages below from the committed results; a test compares them.

A part stands between `<!-- KIND: STUDY SCALE -->` and `<!-- end -->`. Its kind says how much:
`answer`, `overview` (the answer and a table or two), `short` (the shortest table), `results`
(everything) or `paper` (beside what the paper prints, at its settings and at this scale).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from reproduce.beside_paper import beside_the_paper
from reproduce.store import Results
from reproduce.tables import StudyView, view
from reproduce.whole import whole_grids
from xcal.studies.grid import Grid

ROOT = Path(__file__).parent.parent
PAGES = (
    "docs/findings-probe.md",
    "docs/findings-laptop.md",
    "docs/results.md",
    "docs/results-probe.md",
)
PART = re.compile(
    r"(<!-- (answer|overview|short|results|paper): (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)


RESULTS = Results(ROOT / "results")


@cache
def _grids(scale: str) -> dict[str, Grid]:
    return whole_grids(scale, RESULTS)


@cache
def _seen(study: str, scale: str) -> StudyView:
    return view(_grids(scale)[study], RESULTS)


def part(kind: str, study: str, scale: str) -> str:
    found = _seen(study, scale)
    if kind == "paper":
        made = beside_the_paper(_seen(study, "paper").series, found.series)
        return "" if made is None else made.markdown()
    if kind == "short":
        return found.overviews[-1].markdown()
    pieces = [found.answer]
    if kind == "overview":
        pieces += [table.markdown() for table in found.overviews]
    if kind == "results":
        pieces += [found.missing, *(table.markdown() for table in found.tables)]
        if found.sentences:
            pieces.append("\n".join(f"- {text}" for text in found.sentences))
    return "\n\n".join(pieces)


def page(text: str) -> str:
    return PART.sub(lambda m: f"{m[1]}\n{part(m[2], m[3], m[4])}\n\n{m[5]}", text)


def write_pages() -> None:
    for name in PAGES:
        path = ROOT / name
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
