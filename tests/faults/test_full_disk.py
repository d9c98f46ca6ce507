"""A disk that is full or failing, at every point of a run: one sentence, and nothing lost."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import ForkedXcal, warm_up
from kill_chain import KEYS, Snapshot, compare, examine
from support import sets

LONG = os.environ.get("XCAL_FAULTS") == "long"
RUN = {**KEYS, "rounds": 1}


def start(out: Path) -> list[str]:
    return ["run", *sets(**RUN), "--out", str(out)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run is when nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    warm_up(**RUN)
    code, _, err = ForkedXcal(start(folder / "run"), folder / "log").wait()
    assert code == 0, err
    return folder / "run"


def hit(out: Path, log: Path, prepare: Callable[[], object] | None = None) -> bool:
    """Run into the fault; whether it was met."""
    words = ["run", "--resume", str(out)] if out.exists() else start(out)
    code, _, err = ForkedXcal(words, log, prepare).wait()
    assert "Traceback" not in err, err
    assert code in (0, 2), err
    if code == 2:
        assert err.startswith("xcal: ")
        assert len(err.strip().splitlines()) == 1, err
        # A folder without its configuration is never left behind, nor half of one beside it.
        assert not out.exists() or (out / "run.json").exists()
        assert [p.name for p in out.parent.iterdir() if p.name.startswith(f".{out.name}.")] == []
    return code == 2


def mends(out: Path, log: Path, whole: Path) -> None:
    """What was released is paid for; with room again the run is the one it would have been."""
    examine(out, Snapshot())
    words = ["run", "--resume", str(out)] if out.exists() else start(out)
    code, _, err = ForkedXcal(words, log).wait()
    assert code == 0, err
    compare(out, whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room, where the system lets us have one."""
    place = tmp_path / "disk"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=2m") != 0:
        pytest.skip(f"no file system may be mounted here ({os.strerror(ctypes.get_errno())})")
    try:
        yield place
    finally:
        assert libc.umount2(bytes(place), 2) == 0


# Kilobytes left: none, enough for the folder, for ledgers, for some steps, for some rounds, …
ROOM = (0, 40, 80) if not LONG else tuple(range(0, 200, 4))


@pytest.mark.slow
def test_disk_full(small_disk: Path, tmp_path: Path, whole: Path) -> None:
    met = 0
    for room in ROOM:
        out, ballast = small_disk / f"run{room}", small_disk / "ballast"
        free = os.statvfs(small_disk)
        ballast.write_bytes(bytes(max(free.f_bavail * free.f_frsize - room * 1024, 0)))
        met += hit(out, tmp_path / "log", None)
        ballast.unlink()
        mends(out, tmp_path / "log", whole)
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()
    assert met >= len(ROOM) // 2


SIZES = (1_000, 30_000) if not LONG else tuple(range(0, 200_000, 4_000))


@pytest.mark.slow
def test_files_may_not_grow(tmp_path: Path, whole: Path) -> None:
    """As a quota does it: no file past so many bytes."""
    met = 0
    for size in SIZES:
        out = tmp_path / f"run{size}"
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)

        def limit(size: int = size, writers: tuple[int, ...] = writers) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            # What is said must still come through: a pipe has no size.
            for number in (1, 2):
                os.dup2(writers[number - 1], number)

        process = ForkedXcal(start(out), tmp_path / "log", limit)
        for handle in writers:
            os.close(handle)
        code, _, _ = process.wait()
        err = b""
        while piece := os.read(readers[1], 65_536):
            err += piece
        for handle in readers:
            os.close(handle)
        assert b"Traceback" not in err, err.decode()
        assert code in (0, 2)
        assert code == 0 or len(err.strip().splitlines()) == 1, err.decode()
        met += code == 2
        mends(out, tmp_path / "log", whole)
    assert met >= 1


def failing_sync(count: int) -> Callable[[], object]:
    """From the count-th on, nothing that is written can be made durable."""

    def prepare() -> None:
        calls = [0]
        real = os.fsync

        def sync(handle: int) -> None:
            calls[0] += 1
            if calls[0] >= count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(handle)

        os.fsync = sync  # only ever in a fork

    return prepare


COUNTS = (1, 20) if not LONG else tuple(range(1, 60))


@pytest.mark.slow
def test_failing_disk(tmp_path: Path, whole: Path) -> None:
    met = 0
    for count in COUNTS:
        out = tmp_path / f"run{count}"
        met += hit(out, tmp_path / "log", failing_sync(count))
        mends(out, tmp_path / "log", whole)
    assert met >= 1
