"""Submitting, watching, stopping, resuming and fetching runs, as the federation's lead.

A job holds configuration only: which of our two classes runs where, and the run's own settings. A
run is known by its name. FLARE's job ids change with every submission, so nothing hangs on them.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcal.config import Experiment, read_toml
from xcal.errors import UserError
from xcal.federation.files import read_json, write_json
from xcal.federation.logbook import LOG, note
from xcal.federation.nvflare.hardening import CONTROLLER, EXECUTOR
from xcal.federation.nvflare.parties import Party
from xcal.federation.nvflare.provision import require_nvflare
from xcal.federation.surveys import EVALUATIONS

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")
RESULTS = "xcal"  # the folder of a job's workspace that holds what the run may tell
STATUS_TOPIC = "xcal.status"
POLL = 0.2  # seconds between a site's questions for work; FLARE's 2 s would cost a round 2 s


def check_run_name(name: str) -> str:
    if not RUN_NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a valid run name: letters, digits, - and _, at most 60.")
    return name


def set_keys(experiment: Experiment) -> dict[str, Any]:
    """An experiment as a job carries it: JSON has no word for a key that is not set."""
    return {k: v for k, v in experiment.resolved().items() if v is not None}


def write_job(folder: Path, run: str, settings: Mapping[str, Any], sites: int) -> Path:
    """A job's folder: meta.json and two configuration files, and no code."""
    shutil.rmtree(folder, ignore_errors=True)
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {
        "name": run,
        "resource_spec": {},
        "deploy_map": {"app": ["@ALL"]},
        "min_clients": sites,
    }
    server = {
        "format_version": 2,
        "server": {"task_request_interval": POLL},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "xcal", "path": CONTROLLER, "args": {"run": run, **settings}}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": EXECUTOR, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }
    write_json(folder / "meta.json", meta)
    write_json(config / "config_fed_server.json", server)
    write_json(config / "config_fed_client.json", client)
    return folder


# FLARE's states of a job in words; what else it may say is shown as it is.
STATES = {
    "SUBMITTED": "submitted, not begun",
    "APPROVED": "submitted, not begun",
    "DISPATCHED": "on its way to the sites",
    "RUNNING": "running",
    "FINISHED:COMPLETED": "finished",
    "FINISHED:ABORTED": "stopped",
    "FINISHED:CAN_NOT_SCHEDULE": "never begun",
    "FINISHED:EXECUTION_EXCEPTION": "failed",
    "FINISHED:ABNORMAL": "failed",
    "FINISHED:FAILED_TO_RUN": "failed",
    "FINISHED:ABANDONED": "given up",
}
_NOT_OURS = (
    "no party has worked on it: too few sites took it, or one refuses what it brings (code, a class"
    " that is not ours); the log of the server or of the site says which."
)
WORDLESS = {state: _NOT_OURS for state, said in STATES.items() if said in ("never begun", "failed")}


def state_words(status: str) -> str:
    """A state of FLARE's in words, with its own name, by which its manual has it."""
    return f"{STATES[status]} ({status})" if status in STATES else status


@dataclass(frozen=True)
class Job:
    """One submission of a run, as the server lists it."""

    id: str
    run: str
    status: str
    submitted: float

    @property
    def words(self) -> str:
        return state_words(self.status)

    @property
    def running(self) -> bool:
        return not self.status.startswith("FINISHED")


class Lead:
    """A session with the federation's server. Every failure is one sentence."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @staticmethod
    @contextmanager
    def session(party: Party, patience: float = 15.0) -> Iterator[Lead]:
        require_nvflare()
        party.require_kit()
        if party.about.role not in ("lead", "viewer"):
            raise UserError(f"{party.folder} is not a person's folder: use the lead's.")
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        logging.getLogger().addHandler(logging.NullHandler())  # FLARE's own lines: not for people
        with _one_sentence(party):
            with redirect_stdout(io.StringIO()):  # FLARE prints that it connects
                session = new_secure_session(party.about.name, str(party.kit), timeout=patience)
            try:
                yield Lead(session)
            finally:
                session.close()

    def submit(self, folder: Path) -> str:
        job: str = self._session.submit_job(str(folder.resolve()))
        return job

    def jobs(self, run: str | None = None) -> list[Job]:
        """All submissions, the newest last; of one run if it is named."""
        listed = self._session.list_jobs(detailed=True, name_prefix=run)
        found = [
            Job(
                id=str(m.get("job_id", "")),
                run=str(m.get("name") or m.get("job_name") or ""),
                status=str(m.get("status", "?")),
                submitted=float(m.get("submit_time") or 0.0),
            )
            for m in listed
        ]
        chosen = [j for j in found if run is None or j.run == run]
        return sorted(chosen, key=lambda j: j.submitted)

    def last(self, run: str) -> Job:
        found = self.jobs(run)
        if not found:
            raise UserError(f"The server has no run {run!r}: see `xcal federation status`.")
        return found[-1]

    def progress(self, job: Job) -> dict[str, Any] | None:
        """What a running job tells of itself: released quantities only. None if it does not."""
        from nvflare.fuel.flare_api.api_spec import InternalError, JobNotRunning, NoReply

        try:
            answer = self._session.do_app_command(job.id, STATUS_TOPIC, {})
        except (JobNotRunning, NoReply, InternalError):
            return None
        return answer if isinstance(answer, dict) else None

    def abandoned(self, job: Job) -> bool:
        """Whether the server lists a job as running and does not work on it.

        For some seconds that is so of a job that ends; for good of one that its server died in.
        """
        from nvflare.fuel.flare_api.api_spec import InternalError, JobNotRunning, NoReply

        if job.status != "RUNNING":
            return False
        try:
            self._session.do_app_command(job.id, STATUS_TOPIC, {})
        except JobNotRunning:
            return True
        except (NoReply, InternalError):
            return False
        return False

    def stop(self, job: Job) -> None:
        self._session.abort_job(job.id)

    def give_up(self, job: Job) -> None:
        """End a job if there is anything left of it: a killed server leaves only its name."""
        from nvflare.fuel.flare_api.api_spec import InternalError, JobNotRunning

        with suppress(InternalError, JobNotRunning):
            self._session.abort_job(job.id)

    def fetch(self, job: Job, destination: Path) -> Path:
        """What the server's end left of a job, under `destination`; need not exist."""
        found = Path(self._session.download_job_result(job.id, str(destination)))
        return found / "workspace" / RESULTS

    def left(self, job: Job) -> dict[str, Any]:
        """What a finished job left: its last words (`text`) and, as while it ran, its rounds."""
        from nvflare.fuel.flare_api.api_spec import AuthorizationError

        with tempfile.TemporaryDirectory() as scratch:
            try:
                folder = self.fetch(job, Path(scratch))
            except AuthorizationError:  # who may look need not be who may fetch
                return {
                    "text": "only its lead can fetch what it left.",
                    "again": False,
                    "rounds": [],
                }
            outcome, rounds = folder / "outcome.json", folder / "rounds.jsonl"
            words = read_json(outcome) if outcome.exists() else {}
            wordless = WORDLESS.get(job.status, "it left no word: see the server's log.")
            if job.status == "FINISHED:ABORTED":  # FLARE ends it before it can say so
                wordless = f"stopped; go on with `xcal federation resume {job.run}`."
            told = rounds.read_text(encoding="utf-8").splitlines() if rounds.exists() else []
            kept, sent = folder / "experiment.toml", folder / EVALUATIONS
            return {
                "text": words.get("text", wordless),
                # Without a word it was stopped, or the server's process of it died.
                "again": words.get("again", not words),
                "total": read_toml(kept).get("rounds") if kept.exists() else None,
                "rounds": [json.loads(line) for line in told],
                "evaluations": read_json(sent) if sent.exists() else None,
            }

    def connected(self) -> list[str]:
        info = self._session.get_system_info()
        return sorted(c.name for c in info.client_info)


class ServerSilent(UserError):
    """The server gives no answer: it is down, or too busy just now."""


@contextmanager
def _one_sentence(party: Party) -> Iterator[None]:
    from nvflare.fuel.flare_api import api_spec

    where = f"{party.about.server}:{party.about.port}"
    try:
        yield
    except api_spec.NoConnection:
        raise ServerSilent(
            f"The server at {where} does not answer: is it started? `xcal federation check"
            f" {party.folder}` looks at the way to it."
        ) from None
    except api_spec.AuthenticationError:
        raise UserError(f"The server at {where} does not accept {party.about.name}.") from None
    except api_spec.AuthorizationError:
        raise UserError(f"{party.about.name} has no right to do this: only the lead has.") from None
    except api_spec.InvalidJobDefinition as error:
        kept = _engine_said(party, error)
        raise UserError(
            "The server refused the job: it brings code, names a class that is not ours, or is not"
            f" whole{kept}."
        ) from None
    except api_spec.JobNotFound:
        raise UserError("The server does not know this job.") from None
    except api_spec.JobNotDone:
        raise UserError("The run is still being worked on: wait, or stop it first.") from None
    except (api_spec.SessionClosed, api_spec.NoReply, ConnectionError) as error:
        raise ServerSilent(f"The server at {where} was lost{_engine_said(party, error)}.") from None
    except (api_spec.InternalError, RuntimeError) as error:
        kept = _engine_said(party, error)
        raise UserError(f"The server at {where} could not do it{kept}.") from None


def _engine_said(party: Party, error: BaseException) -> str:
    """FLARE's own words go into the party's log, where whoever looks for them finds them."""
    note(party.folder, "engine", detail=str(error)[:2000])
    return f" (FLARE's own words are in {party.folder / LOG})"
