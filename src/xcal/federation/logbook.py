"""What happened, one JSON line an event, in a file that does not grow for ever."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

LOG = "log.jsonl"
LARGEST = 10 << 20  # bytes of one file
KEPT = 5  # older files beside it, `.1` the newest of them


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def note(folder: Path, event: str, **about: Any) -> None:
    """Write an event into the folder's log. Never fails: a full disk changes no answer."""
    append_line(folder / LOG, {"time": now(), "event": event, **about})


def append_line(path: Path, value: dict[str, Any]) -> None:
    try:
        if path.exists() and path.stat().st_size > LARGEST:
            for number in range(KEPT, 0, -1):
                older = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
                if older.exists():
                    os.replace(older, path.with_name(f"{path.name}.{number}"))
        with open(path, "a") as file:
            file.write(json.dumps(value) + "\n")
    except OSError:
        return
