"""Worker processes that are killed, or whose parent is: nothing lost, nobody left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from commands import ForkedXcal, warm_up
from support import TINY, Micro, sets
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.federation import local
from xcal.federation.files import read_tensors

KEYS: dict[str, Any] = {
    "method": "xcal-steered",
    "road_images": 0,
    "road_test_images": 0,
    "workers": 2,
}


def slowly() -> None:
    """In the fork that the command is: a run that lasts long enough to be hit."""
    forward = Micro.forward

    def slow(self: Micro, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return forward(self, images)

    Micro.forward = slow  # type: ignore[method-assign]


def children(pid: int) -> list[int]:
    """The processes whose parent this is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(what: Callable[[], Any], limit: float = 60.0) -> Any:
    end = time.monotonic() + limit
    while not (found := what()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as it is when nobody disturbs it, by one process."""
    folder = tmp_path_factory.mktemp("workers") / "whole"
    xcal.run(folder, **{**TINY, **KEYS, "workers": 1})
    return folder


@pytest.fixture
def running(tmp_path: Path, whole: Path) -> Iterator[tuple[ForkedXcal, Path, list[int]]]:
    """A run with two workers in the middle of its second round."""
    warm_up(**KEYS)
    out = tmp_path / "run"
    command = ForkedXcal(["run", *sets(**KEYS), "--out", str(out)], tmp_path / "log", slowly)
    try:
        until(lambda: (out / "rounds.jsonl").exists() and (out / "rounds.jsonl").read_text())
        workers = until(lambda: (found := children(command._pid)) and len(found) == 2 and found)
        time.sleep(0.1)
        yield command, out, workers
    finally:
        command.kill()


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return found[0]


def charges(folder: Path, client: str) -> list[tuple[int, int]]:
    rows = read_rows(folder / "clients" / client / "ledger.sqlite")
    (run,) = runs_of(rows)
    return [(c.round, c.step) for c in charges_of(rows, run)]


def resumed_is(whole: Path, out: Path, **keys: Any) -> None:
    xcal.run(out, resume=True, **keys)
    first, second = model_of(whole), model_of(out)
    assert all(torch.equal(first[k], second[k]) for k in first)
    for client in ("0", "1", "2"):
        assert charges(out, client) == charges(whole, client)
        assert verify(out / "clients" / client / "ledger.sqlite").ok


def test_no_worker_outlives_a_killed_parent(
    running: tuple[ForkedXcal, Path, list[int]], whole: Path
) -> None:
    command, out, workers = running
    command.kill()
    # At once: the lock lets nobody in before the last worker is gone.
    resumed_is(whole, out, workers=3)
    assert not any(alive(pid) for pid in workers)


def test_a_killed_worker_is_one_sentence_and_the_run_goes_on(
    running: tuple[ForkedXcal, Path, list[int]], whole: Path
) -> None:
    command, out, workers = running
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = command.wait()
    assert code == 2
    assert "Traceback" not in err
    told = " ".join(err.split())
    assert "SIGKILL" in told and "code -9" in told and "client" in told and "resume" in told
    assert not any(alive(pid) for pid in workers)
    resumed_is(whole, out, workers=1)


def test_ctrl_c_ends_all_and_keeps_the_step(
    running: tuple[ForkedXcal, Path, list[int]], whole: Path
) -> None:
    command, out, workers = running
    for pid in workers:
        os.kill(pid, signal.SIGINT)  # a terminal sends it to all
    command.interrupt()
    code, told, err = command.wait()
    assert code == 130
    assert "Traceback" not in err + told
    assert f"xcal run --resume {out}" in " ".join(told.split())
    assert not any(alive(pid) for pid in workers)
    resumed_is(whole, out)


def test_a_worker_that_cannot_begin_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nothing(*args: Any) -> Any:
        os._exit(3)

    monkeypatch.setattr(local, "in_worker", nothing)
    with pytest.raises(UserError, match="exit code 3"):
        xcal.run(tmp_path / "run", **{**TINY, **KEYS})
    monkeypatch.undo()
    xcal.run(tmp_path / "run", resume=True)
