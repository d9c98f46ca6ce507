"""One faulty site does not stop a run: its worker dies, the round goes on, it comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from federation.flare_support import EXPERIMENT, LONG, SITES, Federation, running, wait_for
from xcal.federation.nvflare import process
from xcal.federation.nvflare.lost import Lost, lost_in, note_lost


def workers(federation: Federation, site: str) -> list[int]:
    """The processes that train for a site: not the one that holds its connection."""
    found = []
    for pid in process.processes(federation.party(site)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"worker_process" in words:
            found.append(pid)
    return found


def test_notes_of_lost_workers_are_per_job(tmp_path: Path) -> None:
    assert lost_in(tmp_path, "job") == {}
    note_lost(tmp_path, "job", "a", 1, gone=True)
    note_lost(tmp_path, "job", "b", 2, gone=False)
    assert lost_in(tmp_path, "job") == {"a": Lost(1, True), "b": Lost(2, False)}
    assert lost_in(tmp_path, "another") == {}


@LONG[0]
@LONG[1]
def test_a_killed_worker_ends_no_run_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path / "three") as federation:
        text = EXPERIMENT.replace("rounds = 3", "rounds = 40").replace(
            "epsilon = 8.0", "epsilon = 7.5"
        )
        federation.experiment.write_text(text)
        federation.wait_connected()
        federation.submit("killed", "--quorum", "2")
        records = federation.party("server").runs / "killed" / "rounds.jsonl"

        def rounds() -> int:
            return len(records.read_text().splitlines()) if records.exists() else 0

        wait_for(lambda: rounds() >= 2, "two rounds", 300)
        before = workers(federation, SITES[1])
        assert before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        again = wait_for(
            lambda: [p for p in workers(federation, SITES[1]) if p not in before],
            "a new worker",
            60,
        )
        assert again
        said = federation.wait_end("killed")
        assert "FINISHED:COMPLETED" in said
        assert f"{SITES[1]}'s worker died" in said
        assert "round 40/40, 3 answered" in said
        server = federation.party("server")
        (job,) = (server.folder / "lost").iterdir()
        assert lost_in(server.folder, job.stem) == {SITES[1]: Lost(1, False)}
