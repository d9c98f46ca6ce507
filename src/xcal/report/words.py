"""How figures are written in tables: the same in the terminal, the documents and the report."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{self.title}**", ""]
        lines.append("| " + " | ".join(self.head) + " |")
        lines.append("|" + "---|" * len(self.head))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines)


def epsilon_text(epsilon: float | None) -> str:
    return "∞" if epsilon is None else f"{epsilon:g}"
