"""What the lead does with runs: submit, look, stop, resume, fetch."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xcal.dp.ledger.analysis import spent_text
from xcal.errors import UserError
from xcal.experiments import load_experiment
from xcal.federation.events import EventFile
from xcal.federation.files import read_json
from xcal.federation.masked import refuse_masked
from xcal.federation.nvflare.jobs import Job, Lead, check_run_name, write_job
from xcal.federation.nvflare.parties import Party, read_federation

TIMEOUT = 3600.0  # seconds a round may take where nobody says otherwise
ENDING = 30.0  # seconds that FLARE may take to see that a job has ended


def submit(
    lead: Path,
    experiment: Path,
    sets: Sequence[str],
    name: str | None,
    quorum: int | None,
    timeout: float | None,
    simulated: bool = False,
) -> tuple[str, str]:
    """Propose an experiment; returns the run's name and FLARE's job id.

    `simulated`: the sites stand for the local engine's clients 0, 1, …, whose seeded noise and
    result they then share.
    """
    party = Party.find(lead)
    sites = read_federation(party.folder / "federation.toml").sites
    made, given = load_experiment(experiment, sets)
    refuse_masked(made)
    if "clients" in given and made.clients != len(sites):
        raise UserError(
            f"{experiment} is for {made.clients} clients, and the federation has {len(sites)}"
            f" sites ({', '.join(sites)}): make them agree."
        )
    if made.sites is not None or made.noise is not None:
        raise UserError("sites and noise are the sites' own: take them out of the experiment.")
    run = check_run_name(name or f"{experiment.stem}-{secrets.token_hex(3)}")
    asked = min(made.participants or len(sites), len(sites))
    # A quorum and a timeout always: without them one dead site would hold the run for good.
    wanted = quorum or made.quorum or asked
    patience = timeout or made.round_timeout or TIMEOUT
    if not 1 <= wanted <= asked:
        raise UserError(f"The quorum {wanted} is not between 1 and the {asked} sites of a round.")
    _check_timeout(patience)
    named = {str(i) if simulated else site: site for i, site in enumerate(sites)}
    made = made.model_copy(
        update={"clients": len(sites), "quorum": wanted, "round_timeout": patience}
    )
    with Lead.session(party) as session:
        if session.jobs(run):
            raise UserError(
                f"The run {run!r} exists already: choose another --name, or go on with it by"
                f" `xcal federation resume {run}`."
            )
        _enough(session, wanted)
        settings = {
            "experiment": {k: v for k, v in made.resolved().items() if v is not None},
            "given": sorted(given),
            "sites": named,
        }
        folder = write_job(party.folder / "jobs" / run, run, settings, wanted)
        return run, session.submit(folder)


def resume(lead: Path, run: str, quorum: int | None, timeout: float | None) -> str:
    """Submit a run again: the server goes on after its last complete round."""
    check_run_name(run)
    if timeout is not None:
        _check_timeout(timeout)
    party = Party.find(lead)
    with Lead.session(party) as session:
        before = session.last(run)
        if before.status == "FINISHED:COMPLETED":
            raise UserError(
                f"The run {run!r} is finished: `xcal federation fetch {run}` brings it."
            )
        if before.running and session.progress(before) is not None:
            raise UserError(f"The run {run!r} is being worked on: stop it first.")
        for job in session.jobs(run):
            if job.running:  # left behind by a server that was killed: FLARE never ends it itself
                session.give_up(job)
        known = party.folder / "jobs" / run / "meta.json"
        wanted = quorum or (read_json(known)["min_clients"] if known.exists() else 1)
        _enough(session, wanted)
        settings: dict[str, Any] = {"resume": True, "sites": {}}  # the server knows them
        if quorum is not None:
            settings["quorum"] = quorum
        if timeout is not None:
            settings["timeout"] = timeout
        folder = write_job(party.folder / "jobs" / run, run, settings, wanted)
        return session.submit(folder)


def stop(lead: Path, run: str) -> None:
    """Abort a run's job; the run's folder and all ledgers stay as they are."""
    with Lead.session(Party.find(lead)) as session:
        job = session.last(run)
        if not job.running:
            raise UserError(f"The run {run!r} is not being worked on ({job.status}).")
        session.stop(job)


def fetch(lead: Path, run: str, out: Path) -> Iterator[str]:
    """Bring what the server kept of a run: result, rounds, model, statement, card."""
    if out.exists():
        raise UserError(f"{out} exists already: choose another folder.")
    party = Party.find(lead)
    with Lead.session(party) as session, tempfile.TemporaryDirectory(dir=party.folder) as scratch:
        job = session.last(run)
        if job.running:
            raise UserError(f"The run {run!r} is still being worked on: wait, or stop it first.")
        found = session.fetch(job, Path(scratch))
        if not found.is_dir():
            raise UserError(f"The run {run!r} left no results ({job.status}): resume it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found, out)
    outcome = read_json(out / "outcome.json")
    yield f"{run}: {outcome['text']}"
    yield f"Its folder is {out}."


def _check_timeout(timeout: float) -> None:
    if not 1 <= timeout <= 30 * 86400:
        raise UserError(f"--timeout {timeout:g} is not between 1 second and 30 days.")


def _enough(session: Lead, wanted: int) -> None:
    there = session.connected()
    if len(there) < wanted:
        raise UserError(
            f"{len(there)} sites are connected ({', '.join(there) or 'none'}), {wanted} are needed:"
            " wait for them, or lower --quorum."
        )


# --- looking --------------------------------------------------------------------------------------


class Look:
    """A run as it comes along, in lines."""

    def __init__(self, session: Lead, run: str | None, events: EventFile | None = None) -> None:
        self._session = session
        self._events = events
        self._run = run
        self._job: Job | None = None
        self._told = 0
        self._last = ""
        self._alone: float | None = None  # since when nobody works on a job that "runs"

    def first(self) -> Iterator[str]:
        there = self._session.connected()
        yield f"connected: {', '.join(there) or 'no site'}"
        if self._run is None:
            jobs = {job.run: job for job in self._session.jobs()}  # the last submission counts
            for job in jobs.values():
                yield f"{job.run:30} {job.status}"
            if not jobs:
                yield "no runs yet"
            return
        yield from self.news()

    def goes_on(self) -> bool:
        return self._job is not None and self._job.running and not self._given_up()

    def last(self) -> Iterator[str]:
        """What is left to say when looking ends."""
        if self._alone is not None:
            yield (
                f"{self._run}: the server does not work on it. If that stays so, the server was"
                f" restarted in the middle of it: xcal federation resume {self._run}"
            )

    def _given_up(self) -> bool:
        return self._alone is not None and time.monotonic() - self._alone > ENDING

    def news(self) -> Iterator[str]:
        """What was not told yet."""
        assert self._run is not None
        self._job = self._session.last(self._run)
        finished = not self._job.running
        # The last rounds may have come between two looks: a finished job keeps them.
        progress = (
            self._session.left(self._job) if finished else self._session.progress(self._job)
        ) or {}
        if finished or progress or not self._session.abandoned(self._job):
            self._alone = None
        elif self._alone is None:
            self._alone = time.monotonic()
        for record in progress.get("rounds", [])[self._told :]:
            self._told += 1
            if self._events is not None:
                self._events.round(record)
            yield round_line(record, progress.get("total"))
        # A job that begins or ends tells nothing of itself: what was said last still holds.
        state = progress.get("state") or (not finished and self._last) or self._job.status
        if state != self._last:
            said, self._last = self._last, state
            yield f"{self._run}: {state}"
            if finished and state != "FINISHED:COMPLETED" and progress["text"] != said:
                yield f"{self._run}: {progress['text']}"


@contextmanager
def look(lead: Path, run: str | None, events: Path | None = None) -> Iterator[Look]:
    """`events`: a folder for TensorBoard, which gets what is told and nothing else."""
    file = None if events is None else EventFile(events)
    try:
        with Lead.session(Party.find(lead)) as session:
            yield Look(session, run, file)
    finally:
        if file is not None:
            file.close()


def round_line(record: dict[str, Any], total: int | None) -> str:
    """One round in one line: public measurements and what the sites released."""
    parts = [f"round {record['round'] + 1}" + (f"/{total}" if total else "")]
    parts.append(f"{record['answered']} answered")
    if record.get("validation_macro_f1") is not None:
        parts.append(f"macro F1 {record['validation_macro_f1']:.3f}")
    if record.get("road_validation") is not None:
        parts.append(f"ROAD {record['road_validation']:+.3f}")
    for client in record.get("clients", []):
        epsilon, share = client.get("epsilon_spent"), client.get("share_spent")
        if epsilon is not None or share is not None:
            parts.append(f"{client['client']} spent {spent_text(epsilon, share)}")
    for kind in ("missing", "exhausted"):
        if record.get(kind):
            parts.append(f"{kind}: {', '.join(record[kind])}")
    versions = record.get("versions", {})
    for client, code in record.get("refused", {}).items():
        told = (
            f": server {versions['server']}, site {versions[client]}" if client in versions else ""
        )
        parts.append(f"{client} refused ({code}{told})")
    return ", ".join(parts)
