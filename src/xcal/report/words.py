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


def number_text(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}".replace("-", "−")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def epsilon_text(epsilon: float | None, nominal: float | None = None) -> str:
    """ε proved; where there is none, ∞ with the nominal ε beside it, if there is one."""
    if epsilon is not None:
        return f"{epsilon:g}"
    return "∞" if nominal is None else f"∞ (nominal {nominal:g})"
