"""A ledger that is not kept: enforced like any other, gone with the process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import GENESIS, Row, Terms


class MemoryLedger(Ledger):
    """The rules of a `Ledger` without its file: nothing of it outlives the process."""

    def __init__(self, terms: Terms) -> None:
        self.path, self.terms = Path("(in memory)"), terms
        self._lock = -1
        self._rows = [Row(1, "create", {"terms": asdict(terms)}, GENESIS, GENESIS)]
        self._runs = {}
        self._lifetime = None

    def _append(self, kind: str, body: dict[str, Any]) -> None:
        self._rows.append(Row(len(self._rows) + 1, kind, body, GENESIS, GENESIS))
