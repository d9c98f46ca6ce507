"""A ledger that was lost, cut, swapped or edited is refused in one line, and nothing is written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from xcal.dp.account import Account
from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import (
    GENESIS,
    Head,
    Release,
    RunTerms,
    Terms,
    canonical,
    head_path,
    read_head,
    row_hash,
    verify,
)
from xcal.errors import UserError

RATE, ORDER, SIGMA = 0.05, 8.0, 2.0
RUN = RunTerms("run", "xcal", "record", 3.0, 1e-5, ORDER, budget_at(ORDER, 3.0, 1e-5), 100)
FIRST_CHARGE = 3  # after the rows "create" and "run"


def pay(account: Account, step: int) -> None:
    account.pay(
        0,
        step,
        rate=RATE,
        sigma=SIGMA,
        cost=step_cost(RATE, SIGMA, ORDER),
        releases=(Release("gradient", SIGMA, 1.0),),
        inputs=None,
    )


def pay_some(path: Path, steps: range) -> Head:
    with Ledger(path) as ledger:
        account = Account(ledger, RUN, replayable=False)
        for step in steps:
            pay(account, step)
        return ledger.head


@pytest.fixture
def path(tmp_path) -> Path:
    """A ledger with five charges."""
    place = tmp_path / "site" / "ledger.sqlite"
    create(place, Terms("people", "record", 4.0, 1e-4))
    pay_some(place, range(5))
    return place


@contextlib.contextmanager
def scalpel(path: Path):
    """The database without its guards, as someone with an editor has it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER no_update")
        connection.execute("DROP TRIGGER no_delete")
        yield connection


def chain_anew(connection: sqlite3.Connection) -> Head:
    """Recompute all hashes, as a careful forger would."""
    previous, seq = GENESIS, 0
    for seq, kind, body in connection.execute("SELECT seq, kind, body FROM rows ORDER BY seq"):
        digest = row_hash(seq, kind, body, previous)
        connection.execute(
            "UPDATE rows SET prev = ?, hash = ? WHERE seq = ?", (previous, digest, seq)
        )
        previous = digest
    return Head(seq, previous)


def edit_charge(connection: sqlite3.Connection, seq: int, **changes) -> None:
    (body,) = connection.execute("SELECT body FROM rows WHERE seq = ?", (seq,)).fetchone()
    text = canonical({**json.loads(body), **changes})
    connection.execute("UPDATE rows SET body = ? WHERE seq = ?", (text, seq))


def contents(folder: Path) -> dict[str, object]:
    """All that a site says: the rows, and every other file to the byte.

    SQLite may note in its own header how it was opened, and leaves empty files beside a database.
    """
    found: dict[str, object] = {}
    for file in folder.iterdir():
        if file.name == "ledger.sqlite":
            uri = f"{file.as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                try:
                    found["rows"] = connection.execute("SELECT * FROM rows").fetchall()
                except sqlite3.DatabaseError as error:
                    found["rows"] = type(error).__name__
        elif file.suffix not in (".lock", ".sqlite-shm") and file.stat().st_size:
            found[file.name] = file.read_bytes()
    return found


def assert_refused(path: Path, match: str, expected: Head | None = None) -> None:
    before = contents(path.parent)
    with pytest.raises(UserError, match=match) as caught:
        Ledger(path, expected=expected).close()
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    assert text.endswith((".", "?"))
    assert contents(path.parent) == before
    with pytest.raises(UserError):  # the lock was let go, and the answer is the same
        Ledger(path, expected=expected).close()


def test_an_undamaged_ledger_is_taken_up(path):
    head = read_head(path)
    with Ledger(path, expected=head) as ledger:
        assert ledger.head == head == Head(7, head.hash)


def test_missing(path):
    path.unlink()
    assert_refused(path, "is missing, but its head file says it had 7 rows: restore it")
    with pytest.raises(UserError, match="is missing, but"):
        create(path, Terms("people", "record", 4.0, 1e-4))


def test_never_made(tmp_path):
    with pytest.raises(UserError, match="does not exist: `xcal ledger create` makes one"):
        Ledger(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_never_replaced(path):
    before = contents(path.parent)
    with pytest.raises(UserError, match="exists already"):
        create(path, Terms("others", "record", 9.0, 1e-4))
    assert contents(path.parent) == before


@pytest.mark.parametrize("rows", [1, 3])
def test_shortened(path, rows):
    with scalpel(path) as connection:
        connection.execute("DELETE FROM rows WHERE seq > ?", (7 - rows,))
    assert_refused(path, r"is shorter than its head file says \(7 rows\)")


def test_emptied(path):
    with scalpel(path) as connection:
        connection.execute("DELETE FROM rows")
    assert_refused(path, "is shorter than its head file says")


def test_row_taken_out_of_the_middle(path):
    with scalpel(path) as connection:
        connection.execute("DELETE FROM rows WHERE seq = 4")
    assert_refused(path, "row 4 does not follow from the row before")


def test_older_copy(path, tmp_path):
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    pay_some(path, range(5, 8))
    shutil.copy(copy, path)
    assert_refused(path, r"is shorter than its head file says \(10 rows\)")


def test_older_copy_that_was_spent_from_elsewhere(path, tmp_path):
    """As long as the true one, but another history."""
    elsewhere = tmp_path / "elsewhere" / "ledger.sqlite"
    shutil.copytree(path.parent, elsewhere.parent)
    pay_some(path, range(5, 8))
    pay_some(elsewhere, range(15, 18))
    shutil.copy(elsewhere, path)
    assert_refused(path, "is not the one its head file tells of")


def test_older_copy_of_the_whole_site(path, tmp_path):
    """Ledger and head agree; only the head that traveled with the replies tells."""
    shutil.copytree(path.parent, tmp_path / "copy")
    newest = pay_some(path, range(5, 8))
    shutil.rmtree(path.parent)
    shutil.copytree(tmp_path / "copy", path.parent)
    assert_refused(path, "is older than what its run or server", expected=newest)


def test_a_new_ledger_in_place_of_the_old(path):
    newest = read_head(path)
    shutil.rmtree(path.parent)
    create(path, Terms("people", "record", 4.0, 1e-4))
    assert_refused(path, "is older than what its run or server", expected=newest)


def test_edited_row(path):
    with scalpel(path) as connection:
        edit_charge(connection, 5, cost=1e-9)
    assert_refused(path, "row 5 does not follow from the row before")


def test_edited_row_with_all_hashes_made_anew(path):
    with scalpel(path) as connection:
        edit_charge(connection, 5, cost=1e-9)
        chain_anew(connection)
    assert_refused(path, "row 7 is not the one its head file tells of")


def test_edited_row_with_hashes_and_head_made_anew(path):
    newest = read_head(path)
    with scalpel(path) as connection:
        edit_charge(connection, 5, cost=1e-9)
        head = chain_anew(connection)
    head_path(path).write_text(f"{head.count} {head.hash}\n")
    assert_refused(path, "or another: put the newest", expected=newest)
    # And the auditor, who recomputes every cost, sees it without any head.
    check = verify(path)
    assert (check.ok, check.row) == (False, 5)
    assert "records less than its step costs" in check.problem


@pytest.mark.parametrize("body", ["{", "[]", "null", "", '{"a":1}'])
def test_row_that_says_something_else(path, body):
    with scalpel(path) as connection:
        connection.execute("UPDATE rows SET body = ? WHERE seq = 5", (body,))
    assert_refused(path, "row 5 does not follow|is damaged or read-only")


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_row_with_a_number_that_is_none(path, number):
    with scalpel(path) as connection:
        connection.execute("UPDATE rows SET body = ? WHERE seq = 5", (f'{{"cost":{number}}}',))
    assert_refused(path, "row 5 holds a number that is not finite")


def test_rows_are_append_only_for_those_who_do_not_cheat(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="append only"):
            connection.execute("UPDATE rows SET body = '{}' WHERE seq = 5")
        with pytest.raises(sqlite3.IntegrityError, match="append only"):
            connection.execute("DELETE FROM rows")


def test_newer_schema(path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA user_version=99")
    assert_refused(path, "was written by a newer version .* update xcal")


@pytest.mark.parametrize("garbage", [b"", b"not a database at all" * 100])
def test_no_database(path, garbage):
    path.write_bytes(garbage)
    assert_refused(path, "is damaged or read-only")


def test_head_file_deleted(path):
    head_path(path).unlink()
    assert_refused(path, "has lost its head file")


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n"])
def test_head_file_emptied(path, text):
    """It is replaced as a whole and then only grows: no crash leaves it without a line."""
    with scalpel(path) as connection:
        connection.execute("DELETE FROM rows WHERE seq > 4")
    head_path(path).write_text(text)
    assert_refused(path, "head file")


def test_head_file_cut_in_the_middle_of_a_line(path):
    """That is what a crash leaves: the last whole line counts, and the ledger may be ahead."""
    lines = [f"{row} {'0' * 64}" for row in (98, 99)]
    head = read_head(path)
    head_path(path).write_text(f"{head.count} {head.hash}\n{lines[0][:30]}")
    with Ledger(path) as ledger:
        assert ledger.head == head


@contextlib.contextmanager
def ordinary_user():
    """Without the superuser's right to write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def locked_site(path):
    """The same site in a folder that may be read by all and written by nobody."""
    folder = Path(tempfile.mkdtemp())
    site_dir = folder / "site"
    shutil.copytree(path.parent, site_dir)
    for file in site_dir.iterdir():
        file.chmod(0o444)
    site_dir.chmod(0o555)
    folder.chmod(0o755)
    yield site_dir
    site_dir.chmod(0o755)
    shutil.rmtree(folder)


def test_read_only_folder(locked_site):
    with ordinary_user():
        assert_refused(locked_site / "ledger.sqlite", "cannot be locked: is its folder writable")
        with pytest.raises(UserError, match="cannot be created: is the folder writable"):
            create(locked_site / "new" / "ledger.sqlite", Terms("people", "record", 4.0, 1e-4))


def test_read_only_file(locked_site):
    """At the latest the first charge is refused: nothing can be released."""
    locked_site.chmod(0o777)
    (locked_site / "ledger.lock").chmod(0o666)
    path = locked_site / "ledger.sqlite"
    before = contents(locked_site)
    with ordinary_user(), Ledger(path) as ledger:
        account = Account(ledger, RUN, replayable=False)
        with pytest.raises(UserError, match=r"could not be written .* nothing was released"):
            pay(account, 5)
        assert ledger.head.count == 7
    assert contents(locked_site) == before


def test_an_auditor_may_read_what_nobody_may_write(locked_site):
    with ordinary_user():
        assert verify(locked_site / "ledger.sqlite").ok


# --- the auditor's command ------------------------------------------------------------------------


def xcal(*arguments: object):
    """The command in this process: starting one takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's import of click's names
        from typer.testing import CliRunner

        from xcal.cli.app import app
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_verify_of_a_good_ledger(path):
    for place in (path, path.parent):
        result = xcal("ledger", "verify", place)
        assert result.exit_code == 0
        assert "7 rows, all in order" in result.output


@pytest.mark.parametrize("row", [FIRST_CHARGE, 5, 7])
def test_verify_names_the_edited_row(path, row):
    with scalpel(path) as connection:
        edit_charge(connection, row, cost=1e-9)
    before = contents(path.parent)
    result = xcal("ledger", "verify", path)
    assert result.exit_code == 1
    assert f"row {row} does not follow from the row before" in result.output
    assert contents(path.parent) == before


def test_verify_of_a_shortened_ledger(path):
    with scalpel(path) as connection:
        connection.execute("DELETE FROM rows WHERE seq = 7")
    result = xcal("ledger", "verify", path)
    assert result.exit_code == 1
    assert "row 6 is shorter than its head file says (7 rows)" in result.output


def test_verify_finds_a_run_past_its_budget(path):
    """Rows that hold together, of a client whose filter did not work."""
    with scalpel(path) as connection:
        (body,) = connection.execute("SELECT body FROM rows WHERE seq = 2").fetchone()
        small = {**json.loads(body), "budget": 3.5 * step_cost(RATE, SIGMA, ORDER)}
        connection.execute("UPDATE rows SET body = ? WHERE seq = 2", (canonical(small),))
        head = chain_anew(connection)
    head_path(path).write_text(f"{head.count} {head.hash}\n")
    result = xcal("ledger", "verify", path)
    assert result.exit_code == 1
    assert "row 6 takes its run past its budget" in result.output


@pytest.mark.slow
def test_verify_as_a_user_types_it(path, tmp_path):
    command = [Path(sys.executable).with_name("xcal"), "ledger", "verify"]
    nothing = subprocess.run([*command, tmp_path / "no"], capture_output=True, text=True)
    assert nothing.returncode == 2
    assert nothing.stdout == ""
    assert nothing.stderr.startswith("xcal: There is no ledger at ")
    assert nothing.stderr.count("\n") == 1
    with scalpel(path) as connection:
        edit_charge(connection, 4, rate=0.01)
    damaged = subprocess.run([*command, path], capture_output=True, text=True)
    assert damaged.returncode == 1
    assert "row 4 does not follow from the row before" in damaged.stderr
