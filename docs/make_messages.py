"""Writes the table of refusal codes in docs/federation.md."""

from __future__ import annotations

import re
from pathlib import Path

from xcal.federation.request_refusals import CODES

PAGE = Path(__file__).parent / "federation.md"
TABLE = re.compile(r"\| code \| what it says \|\n(\|.*\n)*")


def codes() -> str:
    """The refusal codes as a table."""
    rows = "".join(f"| `{code}` | {text} |\n" for code, text in CODES.items())
    return f"| code | what it says |\n|---|---|\n{rows}"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: codes(), PAGE.read_text()))
