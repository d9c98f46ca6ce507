"""Every fault of a ledger, met by the real command: one sentence, exit code 2, nothing released."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import ForkedXcal, die_at, warm_up
from support import sets
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import Terms, read_rows, verify
from xcal.federation.folder import RunFolder

CLIENTS = 2
KEYS = {"method": "fl-dp", "clients": CLIENTS, "rounds": 3, "road_images": 0, "road_test_images": 0}


@dataclass(frozen=True)
class Place:
    """Sites as hospitals have them, and a run on them that was cut off after a round."""

    folder: Path

    @property
    def sites(self) -> list[Path]:
        return [self.folder / f"site{c}" for c in range(CLIENTS)]

    @property
    def ledger(self) -> Path:
        return self.sites[0] / "ledger.sqlite"

    @property
    def head(self) -> Path:
        return self.sites[0] / "ledger.head"

    @property
    def begun(self) -> Path:
        return self.folder / "begun"

    @property
    def fresh(self) -> Path:
        return self.folder / "fresh"

    def start_words(self, out: Path, sites: list[Path] | None = None) -> list[str]:
        names = json.dumps([str(h) for h in sites or self.sites])
        return ["run", *sets(**KEYS), "--set", f"sites={names}", "--out", str(out)]

    def resume_words(self) -> list[str]:
        return ["run", "--resume", str(self.begun)]

    def state(self) -> dict[str, object]:
        """Everything that a release, a charge or a lost round would change."""
        found: dict[str, object] = {}
        for file in sorted(self.folder.rglob("*")):
            # SQLite leaves empty files beside a database; locks hold nothing.
            if not file.is_file() or "sqlite-" in file.name or file.name.endswith(".lock"):
                continue
            name = str(file.relative_to(self.folder))
            if file.name == "ledger.sqlite":
                uri = f"{file.as_uri()}?mode=ro&immutable=1"
                with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                    try:
                        found[name] = connection.execute("SELECT * FROM rows").fetchall()
                    except sqlite3.DatabaseError as error:
                        found[name] = type(error).__name__
            # A resumed run first drops the records of the round that was not committed.
            elif file.suffix not in (".jsonl", ".out", ".err"):
                found[name] = file.read_bytes()
        return found


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    place = Place(folder)
    warm_up(**KEYS)
    for number, site_dir in enumerate(place.sites):
        create(site_dir / "ledger.sqlite", Terms(f"ward {number}", "record", 30.0, 1e-2))
    # An older copy, for those who restore one.
    shutil.copytree(place.sites[0], folder / "old")
    process = ForkedXcal(
        place.start_words(place.begun),
        folder / "log",
        lambda: die_at(RunFolder, "save_checkpoint", 2),
    )
    code, _, err = process.wait()
    assert code == -9, err
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(template: Path) -> Iterator[Place]:
    """A copy in a place that others may enter: some tests give up the superuser's rights."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o777)
    folder = root / "place"
    shutil.copytree(template, folder)
    _rename(folder, template)
    yield Place(folder)
    for path in root.rglob("*"):
        path.chmod(path.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(root)


def _rename(folder: Path, old: Path) -> None:
    """The run's configuration names the sites by path: let the copy name its own."""
    import hashlib

    begun = folder / "begun"
    text = (begun / "experiment.toml").read_text().replace(str(old), str(folder))
    (begun / "experiment.toml").write_text(text)
    about = json.loads((begun / "run.json").read_text())
    about["experiment"] = hashlib.sha256(text.encode()).hexdigest()
    (begun / "run.json").write_text(json.dumps(about))


def refused(
    place: Place, words: list[str], match: str, prepare: Callable[[], object] | None = None
) -> str:
    before = place.state()
    code, _, err = ForkedXcal(words, place.folder / "log", prepare).wait()
    assert "Traceback" not in err
    assert code == 2, err
    assert err.startswith("xcal: ")
    assert len(err.strip().splitlines()) == 1
    assert match in err
    assert place.state() == before
    return err


def both(place: Place, match: str, prepare: Callable[[], object] | None = None) -> None:
    """Refused for a new run and for the one that was cut off."""
    refused(place, place.start_words(place.fresh), match, prepare)
    assert not place.fresh.exists()
    refused(place, place.resume_words(), match, prepare)


def test_without_a_fault_both_go_on(place: Place) -> None:
    assert ForkedXcal(place.resume_words(), place.folder / "log").wait()[0] == 0
    done = ForkedXcal(place.start_words(place.fresh), place.folder / "log").wait()
    assert done[0] == 0, done[2]
    assert all(verify(site_dir / "ledger.sqlite").ok for site_dir in place.sites)


def scalpel(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER no_update")
        connection.execute("DROP TRIGGER no_delete")
        for statement in statements:
            connection.execute(statement)


def _forget(path: Path) -> None:
    for name in ("", "-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)


def test_deleted_ledger(place: Place) -> None:
    _forget(place.ledger)
    both(place, "is missing, but its head file says it had")


def test_deleted_ledger_and_head(place: Place) -> None:
    _forget(place.ledger)
    place.head.unlink()
    both(place, "does not exist: `xcal ledger create` makes one")


def test_a_new_ledger_in_place_of_a_deleted_one(place: Place) -> None:
    _forget(place.ledger)
    place.head.unlink()
    create(place.ledger, Terms("ward 0", "record", 30.0, 1e-2))
    refused(place, place.resume_words(), "is older than what its run or server remembers")


def test_shortened_ledger(place: Place) -> None:
    scalpel(place.ledger, "DELETE FROM rows WHERE seq = (SELECT MAX(seq) FROM rows)")
    both(place, "is shorter than its head file says")


def test_edited_ledger(place: Place) -> None:
    scalpel(place.ledger, 'UPDATE rows SET body = replace(body, \'"cost":\', \'"cost":1e-9,"x":\')')
    both(place, "does not follow from the row before")


def test_old_ledger_restored(place: Place) -> None:
    _forget(place.ledger)
    shutil.copy(place.folder / "old" / "ledger.sqlite", place.ledger)
    both(place, "is shorter than its head file says")


def test_old_site_restored(place: Place) -> None:
    """Ledger and head agree: the head that traveled with the replies tells."""
    shutil.rmtree(place.sites[0])
    shutil.copytree(place.folder / "old", place.sites[0])
    refused(place, place.resume_words(), "is older than what")


def test_ledger_of_another_population(place: Place) -> None:
    for name in ("ledger.sqlite", "ledger.head"):
        shutil.copy(place.sites[1] / name, place.sites[0] / name)
    refused(place, place.resume_words(), "or another")


def test_ledger_from_the_future(place: Place) -> None:
    with contextlib.closing(sqlite3.connect(place.ledger, isolation_level=None)) as connection:
        connection.execute("PRAGMA user_version=2")
    both(place, "was written by a newer version (schema 2, this one knows 1): update xcal")


def test_clock_jumping_back(place: Place) -> None:
    def yesterday() -> None:
        real = time.time
        time.time = lambda: real() - 86_400  # only ever in a fork

    both(place, "and this machine's clock says", yesterday)


def test_a_clock_that_is_a_little_behind_is_no_fault(place: Place) -> None:
    ahead = time.time() + 600
    os.utime(place.head, (ahead, ahead))
    assert ForkedXcal(place.resume_words(), place.folder / "log").wait()[0] == 0


def test_one_site_twice(place: Place) -> None:
    link = place.folder / "link"
    link.symlink_to(place.sites[0])
    for second in (place.sites[0], link, place.sites[0] / ".." / "site0"):
        words = place.start_words(place.fresh, [place.sites[0], second])
        refused(place, words, "names one folder twice")
        assert not place.fresh.exists()


def test_two_clients_with_one_site(place: Place) -> None:
    with Ledger(place.ledger):
        both(place, "is in use by another process")


def as_nobody() -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def test_read_only_ledger(place: Place) -> None:
    for path in (place.folder, *place.folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    for file in place.sites[0].iterdir():
        if file.is_file():
            file.chmod(0o444)
    place.sites[0].chmod(0o555)
    both(place, str(place.ledger), as_nobody)


def test_read_only_ledger_file_in_a_writable_site(place: Place) -> None:
    for path in (place.folder, *place.folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    place.ledger.chmod(0o444)
    rows = read_rows(place.ledger)
    for words in (place.start_words(place.fresh), place.resume_words()):
        code, _, err = ForkedXcal(words, place.folder / "log", as_nobody).wait()
        assert code == 2, err
        assert len(err.strip().splitlines()) == 1
        assert str(place.ledger) in err
    assert read_rows(place.ledger) == rows
