"""What a party may throw away by age: FLARE's folders of ended jobs, scratch files, old logs.

Never a ledger, a run of the server's, a site's answers or evaluations, or FLARE's list of jobs.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from xcal.errors import UserError
from xcal.federation.nvflare.parties import Party

DAY = 86400.0
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _newest(path: Path) -> float:
    """When anything in it was last written."""
    times = [path.lstat().st_mtime]
    for folder, _, names in os.walk(path):
        times += [(Path(folder) / name).lstat().st_mtime for name in names]
    return max(times)


def _candidates(party: Party) -> Iterator[Path]:
    places = [party.kit, party.folder / "lost", party.folder / "tmp"]
    for place in places:
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if place.name == "tmp" or _JOB.fullmatch(path.stem):
                yield path
    yield from sorted(party.kit.glob("log*.[0-9]*"))
    yield from sorted(party.folder.glob("log.txt.[0-9]*"))
    if party.about.role == "lead":
        yield from sorted((party.folder / "jobs").glob("*"))


def old(party: Party, days: float, *, now: float | None = None) -> list[Path]:
    """What nobody wrote to for so many days."""
    if not days >= 1:
        raise UserError(f"--older-than {days:g} is less than a day: give days, 1 or more.")
    before = (now or time.time()) - days * DAY
    return [path for path in _candidates(party) if _newest(path) < before]


def clean(party: Party, days: float) -> list[Path]:
    """Remove it; what could not be removed is left out of what is told."""
    gone = []
    for path in old(party, days):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not path.exists():
            gone.append(path)
    return gone
