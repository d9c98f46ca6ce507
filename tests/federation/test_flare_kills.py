"""Workers, whole sites and the server are killed three times each in one run, which comes through.

The tests share the run, and go through it in order: its lead keeps it going all the while.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from federation.flare_support import EXPERIMENT, LONG, SITES, Federation, wait_for
from xcal.dp.ledger.rows import read_rows, verify
from xcal.federation.nvflare import process
from xcal.federation.nvflare.rejoin import Lost, lost_in

pytestmark = LONG

ROUNDS, KILLS = 40, 3
KILLED = SITES[1]


class Run:
    """One run of a federation, kept going by its lead in a process of its own."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.said = federation.folder / "watched.txt"
        text = EXPERIMENT.replace("rounds = 3", f"rounds = {ROUNDS}")
        text = text.replace("epsilon = 8.0", "epsilon = 7.5")
        federation.experiment.write_text(text)
        words = ["submit", str(federation.experiment), "--name", "nine", "--simulated"]
        words += ["--quorum", "2", "--timeout", "300", "--keep-going"]
        with self.said.open("w") as out:
            self.lead = subprocess.Popen(
                [sys.executable, "-m", "xcal", "federation", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "XCAL_LEAD": str(federation.lead), "COLUMNS": "200"},
            )

    def records(self) -> list[dict[str, Any]]:
        path = self.federation.party("server").runs / "nine" / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_all(self) -> None:
        """Until a round that begins from now on has the answers of all three."""
        now = len(self.records())
        assert now < ROUNDS - 2, "the run was too fast for this test"

        def whole() -> bool:
            assert self.lead.poll() is None, self.said.read_text()
            return any(r["answered"] == 3 for r in self.records()[now + 1 :])

        wait_for(whole, f"a round of all three after round {now}", 600)

    def paid(self) -> list[int]:
        """How many steps of the run each site's ledger knows as paid."""
        found = []
        for site in SITES:
            rows = read_rows(self.federation.site_dir(site) / "ledger.sqlite")
            found.append(sum(row.kind == "charge" for row in rows))
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    federation = Federation(tmp_path_factory.mktemp("kills") / "three")
    made = None
    try:
        federation.start()
        federation.wait_connected()
        made = Run(federation)
        yield made
    finally:
        federation.halt()
        if made is not None:
            made.lead.kill()
            made.lead.wait()


def workers(federation: Federation, site: str) -> list[int]:
    """The processes that train for a site: not the one that holds its connection."""
    return [
        pid
        for pid in process.processes(federation.party(site))
        if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@contextmanager
def held(run: Run, patience: float = 400) -> Iterator[None]:
    """No round can end: one site is dead, and another one's worker is made to wait.

    So that a fast machine does not come to the last round before a site has come back.
    """
    before = workers(run.federation, KILLED)
    pids = workers(run.federation, SITES[0])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        wait_for(
            lambda: [p for p in workers(run.federation, KILLED) if p not in before],
            f"{KILLED}'s new worker",
            patience,
        )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_worker_killed_three_times(run: Run) -> None:
    run.wait_for_all()
    for kill in range(1, KILLS + 1):
        before = run.paid()
        with held(run, patience=60):
            for pid in workers(run.federation, KILLED):
                os.kill(pid, signal.SIGKILL)
        run.wait_for_all()
        server = run.federation.party("server").folder
        (job,) = (server / "lost").iterdir()
        assert lost_in(server, job.stem) == {KILLED: Lost(kill, False)}
        assert all(now >= then for now, then in zip(run.paid(), before, strict=True))
    said = run.said.read_text()
    assert f"{KILLED}'s worker died" in said
    assert f"{KILLED}'s worker died (3 times); it was started again and takes part." in said


@pytest.mark.slow
def test_a_whole_site_killed_three_times(run: Run) -> None:
    run.wait_for_all()
    for kill in range(KILLS):
        run.federation.kill(KILLED)
        if (
            kill == 0
        ):  # it stays away: the round goes on with the quorum, and says for whom it waits
            wait_for(
                lambda: any(
                    r["missing"] == ["1"] and r["answered"] == 2 for r in run.records()[-2:]
                ),
                "a round without the site",
                400,
            )
            assert f"waits for {KILLED}" in run.said.read_text()
        with held(run):
            run.federation.start(KILLED)
        run.wait_for_all()
    assert f"{KILLED} was lost (3 times); it was started again" in run.said.read_text()


@pytest.mark.slow
def test_the_server_killed_three_times(run: Run) -> None:
    run.wait_for_all()
    for _ in range(KILLS):
        run.federation.kill("server")
        run.federation.start("server")
        run.federation.wait_connected()
        run.wait_for_all()
    assert run.said.read_text().count("Resumed 'nine' after round") >= KILLS


@pytest.mark.slow
def test_the_run_comes_to_its_end_and_nothing_is_under_counted(run: Run) -> None:
    assert run.lead.wait(timeout=1500) == 0, run.said.read_text()
    said = run.said.read_text()
    assert "FINISHED:COMPLETED" in said
    assert f"round {ROUNDS}/{ROUNDS}, 3 answered" in said
    fetched = run.federation.fetch("nine")
    traced = [json.loads(line) for line in (fetched / "trace.jsonl").read_text().splitlines()]
    for number, site in enumerate(SITES):
        ledger = run.federation.site_dir(site) / "ledger.sqlite"
        assert verify(ledger).ok
        rows = [r.body for r in read_rows(ledger) if r.kind == "charge"]
        paid = [(r["round"], r["step"]) for r in rows]
        # every step that went into the model was paid for; seeded noise, so each once
        used = {(t["round"], t["step"]) for t in traced if t["client"] == str(number)}
        assert used <= set(paid)
        assert len(paid) == len(set(paid))
        assert len(used) > 50
