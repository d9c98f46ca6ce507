"""What a server was told last of every site's ledger, whatever the run: an older one is noticed.

A site that is put back whole, ledger and all, forgets what it released and cannot know it. Whoever
was told of newer rows sends their head with the next question, and the site refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from xcal.dp.ledger.rows import Head
from xcal.federation.files import read_as, write_json

FILE = "heads.json"


class KnownHeads:
    """The newest head of each client's ledger, in a file: what answers told, and no more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads = read_as(dict[str, Head], path) if path.exists() else {}

    def newest(self, client: str, head: Head | None) -> Head | None:
        """The longer of `head` and what is known here."""
        known = self._heads.get(client)
        return known if known and (head is None or known.count > head.count) else head

    def learn(self, told: Mapping[str, Head]) -> None:
        """Durably, before an answer is used: a lost round or a void attempt was paid for, too."""
        longer = {c: head for c, head in told.items() if self.newest(c, head) is head}
        if any(self._heads.get(c) != head for c, head in longer.items()):
            self._heads |= longer
            write_json(self._path, {c: asdict(head) for c, head in self._heads.items()})
