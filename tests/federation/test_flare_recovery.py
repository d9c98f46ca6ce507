"""Power cuts and slow sites: nothing is under-counted, and the run comes to the same end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from federation.flare_support import LONG, SITES, Federation, wait_for
from xcal.dp.ledger.rows import read_rows
from xcal.experiments import load_experiment
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.nvflare import process

pytestmark = LONG

# More steps a round, so that a power cut finds a site at work.
LONGER = ("--set", "local_epochs=4", "--set", "rounds=4")
PATIENT = ("--timeout", "150")  # on a busy machine a site's first round takes long


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("recovery") / "three")
    try:
        made.start()
        made.wait_connected()
        yield made
    finally:
        made.halt()


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> Path:
    """The same experiment by the local engine, which the federation equals."""
    experiment, given = load_experiment(federation.experiment, [s for s in LONGER if "=" in s])
    folder = RunFolder.create(federation.folder / "undisturbed", experiment, sorted(given))
    run_experiment(folder)
    return folder.path


def charged(ledger: Path, run: str) -> list[tuple[int, int]]:
    """The steps of a run that a ledger knows as paid, by round and step."""
    return sorted(
        (row.body["round"], row.body["step"])
        for row in read_rows(ledger)
        if row.kind == "charge" and row.body["run"].startswith(f"{run}-")
    )


def at_work(federation: Federation, site: str, run: str, beyond: int) -> int:
    """Wait until the site has paid for more steps of the run than `beyond`; how many."""
    ledger = federation.site_dir(site) / "ledger.sqlite"
    return int(
        wait_for(
            lambda: (n := len(charged(ledger, run))) > beyond and n, f"{site} to be at work", 240
        )
    )


def check_the_end(federation: Federation, run: str, undisturbed: Path) -> None:
    assert "FINISHED:COMPLETED" in federation.wait_end(run)
    fetched = federation.fetch(run)
    same = (fetched / "model.safetensors").read_bytes()
    assert same == (undisturbed / "model.safetensors").read_bytes()
    for number, site in enumerate(SITES):  # every step of the finished model was paid for
        ours = charged(federation.site_dir(site) / "ledger.sqlite", run)
        ledger = undisturbed / "clients" / str(number) / "ledger.sqlite"
        assert set(ours) >= set(charged(ledger, "undisturbed"))
        assert len(charged(ledger, "undisturbed")) > 20


def test_a_client_killed_three_times(federation: Federation, undisturbed: Path) -> None:
    """The quorum is all sites: the round waits for the one that is started again."""
    federation.submit("client-cut", *LONGER, "--timeout", "300")
    paid = 0
    for _ in range(3):
        paid = at_work(federation, "hospital-b", "client-cut", paid) + 1
        federation.kill("hospital-b")
        federation.start("hospital-b")
    check_the_end(federation, "client-cut", undisturbed)


def test_the_server_killed_three_times(federation: Federation, undisturbed: Path) -> None:
    federation.submit("server-cut", *LONGER, *PATIENT)
    paid = 0
    for kill in range(3):
        paid = at_work(federation, "hospital-b", "server-cut", paid) + 1
        federation.kill("server")
        federation.start("server")
        federation.wait_connected()
        if kill == 0:  # FLARE lists the job as running for good: the lead is told what to do
            said = federation.wait_end("server-cut")
            assert "xcal federation resume server-cut" in said
        done = federation.xcal("resume", "server-cut")
        assert done.returncode == 0, done.stderr
    check_the_end(federation, "server-cut", undisturbed)


def test_a_slow_site_past_the_timeout(federation: Federation) -> None:
    """Two of three make a round; the third is reported, and what it paid for stays paid."""
    federation.submit("slow", *LONGER, "--quorum", "2", "--timeout", "60")
    at_work(federation, "hospital-c", "slow", 2)
    pids = process.processes(federation.party("hospital-c"))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    rounds = federation.party("server").runs / "slow" / "rounds.jsonl"
    try:
        wait_for(
            lambda: rounds.exists() and '"missing": ["2"]' in rounds.read_text(),
            "a round without hospital-c",
        )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert "FINISHED:COMPLETED" in federation.wait_end("slow")
    fetched = federation.fetch("slow")
    records = [json.loads(line) for line in (fetched / "rounds.jsonl").read_text().splitlines()]
    assert len(records) == 4
    without = [r for r in records if r["missing"] == ["2"]]
    assert without and all(r["answered"] == 2 for r in without)
    time.sleep(1)
