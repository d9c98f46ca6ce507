"""Finished parts of an audit, kept until it is complete: an interrupted one goes on after them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from xcal.audit.inversion import Inverted
from xcal.audit.reconstructions import load_inverted, save_inverted
from xcal.errors import UserError
from xcal.federation.files import read_json, write_json

Rows = list[dict[str, Any]]
Found = TypeVar("Found")


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
        found, _ = self._part(attack, what, make, lambda rows, _: rows, lambda kept, _: kept)
        return found

    def inverted(
        self, what: Sequence[Any], make: Callable[[], list[Inverted]]
    ) -> tuple[list[Inverted], bool]:
        """The reconstructions that `make` gives, and whether they come from an earlier call."""

        def save(found: list[Inverted], path: Path) -> Rows:
            save_inverted(found, path.with_suffix(".npz"))
            return []

        def load(_: Rows, path: Path) -> list[Inverted]:
            return load_inverted(path.with_suffix(".npz"))

        return self._part("inversion", what, make, save, load)

    def _part(
        self,
        attack: str,
        what: Sequence[Any],
        make: Callable[[], Found],
        save: Callable[[Found, Path], Rows],
        load: Callable[[Rows, Path], Found],
    ) -> tuple[Found, bool]:
        """What `make` gives, and whether it was loaded; saved are rows, and what `save` writes."""
        path = self._path(attack, what)
        if path is not None and path.exists():
            with suppress(UserError, OSError, ValueError, KeyError, TypeError):
                kept = read_json(path)
                found = load(kept["rows"], path)
                self.seconds += kept["seconds"]
                return found, True
        began = time.monotonic()
        found = make()
        seconds = time.monotonic() - began
        self.seconds += seconds
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = save(found, path)
            # Last, and whole or not at all: a part counts once this is there.
            write_json(path, {"seconds": seconds, "rows": rows})
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
