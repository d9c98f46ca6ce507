"""A copy of a ledger that is whole, whenever it is taken.

Copying the file by hand is not enough: SQLite keeps the newest rows in a second file until the
ledger is closed, and a process that was killed did not close it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from xcal.dp.ledger.head import write_head
from xcal.dp.ledger.rows import (
    UNREADABLE,
    Head,
    check_chain,
    check_head,
    connect,
    load,
    read_head,
    read_rows,
    refuse,
)
from xcal.durable import sync_folder
from xcal.errors import UserError


def back_up(ledger: Path, folder: Path) -> Head:
    """Copy a ledger and its head into a folder, also while a client spends from it; its head.

    An older copy of the same ledger there is replaced; any other ledger is left alone.
    """
    target = folder / ledger.name
    if target.exists() and target.samefile(ledger):
        raise UserError(f"{folder} is where the ledger itself lies: choose another folder.")
    head = read_head(ledger)  # before the rows: a running client may add some in between
    scratch = target.with_name(target.name + ".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(scratch, isolation_level=None)) as copy:
            read_rows(ledger)  # one sentence about a ledger that cannot be read
            with contextlib.closing(connect(ledger, read_only=True)) as source:
                source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, whole in itself
            rows = load(copy, scratch)
        for check in (check_chain(rows), check_head(rows, head)):
            if not check.ok:
                raise refuse(ledger, f"was not copied: row {check.row} {check.problem}.")
        if target.exists():
            copied = read_rows(target)
            if not check_head(rows, Head(len(copied), copied[-1].hash)).ok:
                raise refuse(
                    target,
                    f"is not an older copy of {ledger}, and was left: choose another folder.",
                )
        made = Head(len(rows), rows[-1].hash)
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The rows first: a ledger ahead of its head is in order, one behind it is refused.
        os.replace(scratch, target)
        write_head(target, made)
        sync_folder(folder)
        return made
    except (*UNREADABLE, OSError) as error:
        raise UserError(
            f"{ledger} could not be copied to {folder}: is the folder writable, and the disk not"
            " full?"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
