"""The table of docs/messages.md: every field that a client sends, and what pays for it."""

from __future__ import annotations

from typing import NamedTuple

from support import ROOT

KINDS = ("charged", "function of releases", "public", "no guarantee")


class Field(NamedTuple):
    """One field of a client's messages."""

    name: str  # as `messages.fields_of` names it
    message: str  # reply, refusal, disclosure, introduction, several of them, or all
    what: str
    kind: str  # of KINDS
    why: str  # the event that pays for it, or the reason why it is public or leaves without

    def is_in(self, kind: str) -> bool:
        """Whether messages of this kind have it."""
        return self.message == "all" or kind in self.message.split(", ")


def _read() -> tuple[Field, ...]:
    lines = (ROOT / "docs" / "messages.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    found = tuple(Field(name.strip("`"), *cells) for name, *cells in rows)
    assert all(all(field) and field.kind in KINDS for field in found)
    return found


INVENTORY = _read()
