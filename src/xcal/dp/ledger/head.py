"""The head file beside a ledger: written durably, and not from the future."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from xcal.dp.ledger.rows import Head, head_path, refuse

CLOCK_SLACK = 3600.0
"""Seconds by which a ledger may lie in the future of the clock: machines differ by minutes."""


def write_head(path: Path, head: Head) -> None:
    """Durably, the head file beside a ledger."""
    target = head_path(path)
    scratch = target.with_name(target.name + ".new")
    with open(scratch, "w") as file:
        file.write(f"{head.count} {head.hash}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, target)


def check_clock(path: Path) -> None:
    """Refuse a ledger that was written in what this machine takes for the future.

    Nothing is computed from the time of day. But a clock that went back is what a machine
    restored from an old image has, and its ledger may then be old as well: someone should look.
    """
    try:
        written = head_path(path).stat().st_mtime
    except OSError:
        return  # a missing head file is refused for itself
    if written > time.time() + CLOCK_SLACK:
        times = [datetime.fromtimestamp(t, UTC) for t in (written, time.time())]
        when, now = (f"{t:%Y-%m-%d %H:%M} UTC" for t in times)
        raise refuse(
            path,
            f"was last written at {when}, and this machine's clock says {now}: set the clock."
            " If it is right, and was wrong then, make sure that this is the newest copy and say"
            f" `touch {head_path(path)}`.",
        )
