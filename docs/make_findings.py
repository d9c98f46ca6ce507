"""Fills the generated parts of docs/findings.md from the committed results; a test compares them.

A part stands between `<!-- results: STUDY SCALE -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from xcal.studies.declared import declare
from xcal.studies.store import Results
from xcal.studies.tables import view

HERE = Path(__file__).parent
PART = re.compile(r"(<!-- results: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def part(study: str, scale: str) -> str:
    found = view(declare(study, scale), Results(HERE.parent / "results"))
    pieces = [found.answer, found.missing, *(table.markdown() for table in found.tables)]
    if found.sentences:
        pieces.append("\n".join(f"- {text}" for text in found.sentences))
    return "\n\n".join(pieces)


def page(text: str) -> str:
    return PART.sub(lambda m: f"{m[1]}\n{part(m[2], m[3])}\n\n{m[4]}", text)


if __name__ == "__main__":
    path = HERE / "findings.md"
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
