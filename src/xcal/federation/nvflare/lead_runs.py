"""What the lead does with runs: submit, look, stop, resume, fetch."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xcal.dp.calibration import check_target
from xcal.errors import UserError
from xcal.experiments import load_experiment
from xcal.federation.coordinator import round_line
from xcal.federation.files import read_json
from xcal.federation.loggers import EventFile
from xcal.federation.nvflare.jobs import (
    Job,
    Lead,
    ServerSilent,
    check_run_name,
    set_keys,
    state_words,
    write_job,
)
from xcal.federation.nvflare.parties import Party, read_federation
from xcal.federation.surveys import STATISTICS
from xcal.federation.waiting import Waiting

RESUBMISSIONS = 5  # of a run that its lead keeps going, without a further complete round
COME_BACK = 900.0  # seconds that server and sites may take to come back before one of them
LOOK_AGAIN = 5.0
STOPPED = "stopped"  # a file beside a run's job at the lead: it was the lead who stopped it
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
        settings = {"experiment": set_keys(made), "given": sorted(given), "sites": named}
        return run, _send(session, party, run, settings, wanted)


def statistics(
    lead: Path,
    experiment: Path,
    sets: Sequence[str],
    name: str | None,
    target: tuple[float, float],
    timeout: float | None,
) -> dict[str, Any]:
    """Ask all sites for counts by class and wait for what they answer."""
    check_target(*target)
    party = Party.find(lead)
    sites = read_federation(party.folder / "federation.toml").sites
    made, _ = load_experiment(experiment, sets)
    run = check_run_name(name or f"statistics-{secrets.token_hex(3)}")
    patience = timeout or TIMEOUT
    _check_timeout(patience)
    made = made.model_copy(
        update={"clients": len(sites), "quorum": 1, "round_timeout": patience, "sites": None}
    )
    with Lead.session(party) as session:
        if session.jobs(run):
            raise UserError(f"The name {run!r} is taken: choose another --name.")
        settings = {
            "experiment": set_keys(made),
            "sites": {site: site for site in sites},
            "statistics": list(target),
        }
        _send(session, party, run, settings, 1)
        deadline = time.monotonic() + patience + 10 * ENDING
        while session.last(run).running:
            if time.monotonic() > deadline:
                raise UserError(f"{run} gets no end: `xcal federation stop {run}` ends it.")
            time.sleep(1.0)
        with tempfile.TemporaryDirectory(dir=party.folder) as scratch:
            folder = session.fetch(session.last(run), Path(scratch))
            if not (folder / STATISTICS).exists():
                outcome = folder / "outcome.json"
                told = read_json(outcome)["text"] if outcome.exists() else "it left no word."
                raise UserError(f"{run}: {told}")
            found: dict[str, Any] = read_json(folder / STATISTICS)
            return found


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
        settings: dict[str, Any] = {"resume": True, "sites": {}}  # the server knows them
        if quorum is not None:
            settings["quorum"] = quorum
        if timeout is not None:
            settings["timeout"] = timeout
        return _send(session, party, run, settings, wanted)


def stop(lead: Path, run: str) -> None:
    """Abort a run's job; the run's folder and all ledgers stay as they are."""
    with Lead.session(Party.find(lead)) as session:
        job = session.last(run)
        if not job.running:
            raise UserError(f"The run {run!r} is not being worked on: {job.words}.")
        told = Party.find(lead).folder / "jobs" / run
        told.mkdir(parents=True, exist_ok=True)
        (told / STOPPED).touch()
        session.stop(job)


def was_stopped(lead: Path, run: str) -> bool:
    """Whether it was the lead, from this folder, who stopped the run as it was last submitted."""
    return (Party.find(lead).folder / "jobs" / run / STOPPED).exists()


def continue_run(lead: Path, run: str, say: Callable[[str], None]) -> str:
    """Resume a run as soon as the server answers and enough sites are connected."""
    deadline = time.monotonic() + COME_BACK
    waiting = Waiting(say)
    while True:
        try:
            return resume(lead, run, None, None)
        except (ServerSilent, TooFewSites) as error:
            if time.monotonic() > deadline:
                raise
            waiting.look(f"Still waiting: {str(error).rstrip('.')}")
            time.sleep(LOOK_AGAIN)


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
            raise UserError(f"The run {run!r} left no results ({job.words}): resume it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found, out)
    outcome = read_json(out / "outcome.json")
    yield f"{run}: {outcome['text']}"
    yield f"Its folder is {out}."


def _check_timeout(timeout: float) -> None:
    if not 1 <= timeout <= 30 * 86400:
        raise UserError(f"--timeout {timeout:g} is not between 1 second and 30 days.")


class TooFewSites(UserError):
    """Fewer sites are connected than a run needs."""


def _send(session: Lead, party: Party, run: str, settings: dict[str, Any], wanted: int) -> str:
    """Submit a job, once as many sites are connected as it wants; FLARE's id of it."""
    there = session.connected()
    if len(there) < wanted:
        raise TooFewSites(
            f"{len(there)} sites are connected ({', '.join(there) or 'none'}), {wanted} are needed:"
            " wait for them, or lower --quorum."
        )
    return session.submit(write_job(party.folder / "jobs" / run, run, settings, wanted))


# --- looking --------------------------------------------------------------------------------------


class Look:
    """A run as it comes along, in lines."""

    def __init__(self, session: Lead, run: str | None, events: EventFile | None = None) -> None:
        self._session = session
        self._events = events
        self._run = run
        self._job: Job | None = None
        self._told = 0
        self._noted = 0
        self._last = ""
        self._again = False  # whether the run ended for a reason that may have passed
        self._alone: float | None = None  # since when nobody works on a job that "runs"

    @property
    def rounds(self) -> int:
        """How many complete rounds were told of."""
        return self._told

    def first(self) -> Iterator[str]:
        there = self._session.connected()
        yield f"connected: {', '.join(there) or 'no site'}"
        if self._run is None:
            jobs = {job.run: job for job in self._session.jobs()}  # the last submission counts
            for job in jobs.values():
                yield f"{job.run:30} {job.words}"
            if not jobs:
                yield "no runs yet"
            return
        yield from self.news()

    def goes_on(self) -> bool:
        return self._job is not None and self._job.running and not self._given_up()

    def may_continue(self) -> bool:
        """Whether a run that is not worked on any more may get further if it is resumed."""
        if self._job is None or self._run is None or self._job.status == "FINISHED:COMPLETED":
            return False
        return self._again or self._given_up()

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
        before, self._job = self._job, self._session.last(self._run)
        if before is not None and before.id != self._job.id:
            self._noted = 0  # another submission, which notes anew
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
        for note in progress.get("notes", [])[self._noted :]:
            self._noted += 1
            yield f"  {note}"
        self._again = finished and bool(progress.get("again"))
        # A job that begins or ends tells nothing of itself: what was said last still holds.
        state = progress.get("state") or (not finished and self._last) or self._job.status
        if state != self._last:
            said, self._last = self._last, state
            yield f"{self._run}: {state_words(state)}"
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
