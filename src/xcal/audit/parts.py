"""Finished parts of an audit, kept until it is complete: an interrupted one goes on after them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xcal.audit.inversion import Inverted
from xcal.audit.reconstructions import load_inverted, save_inverted
from xcal.errors import UserError
from xcal.federation.files import read_json, write_json

Rows = list[dict[str, Any]]


class Parts:
    """What was found so far, by what was asked: the same question is not worked on twice.

    A part belongs to the code, the settings and the effort in `about`; what another commit, or code
    that was edited since, found is never taken for it. A damaged part is made again.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        edited = str(about.get("commit")).endswith("+changes")
        self._folder = None if edited else folder
        self._about = json.dumps(about, sort_keys=True, default=str)
        self.seconds = 0.0  # of all parts that were asked for, whenever they were made

    def rows(self, attack: str, what: Sequence[Any], make: Callable[[], Rows]) -> Rows:
        """The rows that `make` gives, from an earlier call if it came that far."""
        path = self._path(attack, what)
        if path is not None and path.exists():
            try:
                kept = read_json(path)
                self.seconds += kept["seconds"]
                rows: Rows = kept["rows"]
                return rows
            except (UserError, KeyError, TypeError):
                pass
        began = time.monotonic()
        rows = make()
        self._finish(path, began, rows)
        return rows

    def inverted(
        self, what: Sequence[Any], make: Callable[[], list[Inverted]]
    ) -> tuple[list[Inverted], bool]:
        """The reconstructions that `make` gives, and whether they come from an earlier call."""
        path = self._path("inversion", what)
        pictures = None if path is None else path.with_suffix(".npz")
        if path is not None and pictures is not None and path.exists():
            try:
                kept = load_inverted(pictures)
                self.seconds += read_json(path)["seconds"]
                return kept, True
            except (UserError, OSError, ValueError, KeyError, TypeError):
                pass
        began = time.monotonic()
        found = make()
        if pictures is not None:
            pictures.parent.mkdir(parents=True, exist_ok=True)
            save_inverted(found, pictures)
        self._finish(path, began, [])
        return found, False

    def remove(self) -> None:
        """The audit is complete: the next one begins anew."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, attack: str, what: Sequence[Any]) -> Path | None:
        if self._folder is None:
            return None
        asked = json.dumps([self._about, attack, list(what)], default=str)
        return self._folder / f"{attack}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"

    def _finish(self, path: Path | None, began: float, rows: Rows) -> None:
        seconds = time.monotonic() - began
        self.seconds += seconds
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Last, and whole or not at all: a part counts once this is there.
            write_json(path, {"seconds": seconds, "rows": rows})
