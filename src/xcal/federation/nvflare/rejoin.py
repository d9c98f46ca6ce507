"""One faulty site ends no run, and comes back into it.

FLARE fails the job where a worker is killed (memory ran out), and never takes a site back that was
started again. So the server notes who was lost, and the round goes on with its quorum; it starts a
dead worker again, and the worker of a site that registers while a run is on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcal.federation.files import read_json, write_json
from xcal.federation.nvflare.revoked import token_in

RESTARTS = 3  # of one site's worker in one job
RESTART_AFTER = 3.0  # seconds, in which the site's own process sees that its worker is gone
PATIENCE = 120.0  # seconds that a site which came back may take until it can start a worker


# --- who was lost: noted by the server's process, read by the job's own ---------------------------


@dataclass(frozen=True)
class Lost:
    """A site that died, or its worker: how often, and whether it is still gone."""

    times: int
    gone: bool
    what: str = "worker"  # or "site": all of it

    @property
    def for_good(self) -> bool:
        """Whether nobody starts it again."""
        return self.gone and self.what == "worker" and self.times > RESTARTS

    def text(self, site: str) -> str:
        """What happened, for who watches the run."""
        again = f" ({self.times} times)" if self.times > 1 else ""
        if self.what == "site" and not self.times:
            return f"{site} came later and takes part from now on."
        what = f"{site} was lost{again}" if self.what == "site" else f"{site}'s worker died{again}"
        if self.gone:
            return f"{what}; the round goes on with its quorum."
        return f"{what}; it was started again and takes part."


def _file(server: Path, job_id: str) -> Path:
    return server / "lost" / f"{Path(job_id).name}.json"


def note_lost(
    server: Path, job_id: str, site: str, times: int, *, gone: bool, what: str = "worker"
) -> None:
    path = _file(server, job_id)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    found = read_json(path) if path.exists() else {}
    write_json(path, {**found, site: {"times": times, "gone": gone, "what": what}})


def lost_in(server: Path, job_id: str) -> dict[str, Lost]:
    path = _file(server, job_id)
    return {s: Lost(**v) for s, v in read_json(path).items()} if path.exists() else {}


# --- in the server's process ----------------------------------------------------------------------


def survive_sites(kit: Path) -> None:
    """From now on a site that dies ends no run; its worker, or it itself, comes back into it."""
    from nvflare.apis.fl_constant import RunProcessKey
    from nvflare.apis.job_launcher_spec import JobReturnCode
    from nvflare.private.defs import CellMessageHeaderKeys
    from nvflare.private.fed.server.fed_server import FederatedServer

    report, register = FederatedServer.process_job_failure, FederatedServer.register_client
    beat = FederatedServer.client_heartbeat
    deaths = (JobReturnCode.EXCEPTION, JobReturnCode.INFRASTRUCTURE_ERROR, JobReturnCode.ABORTED)
    lock, times = threading.Lock(), dict[tuple[str, str, str], int]()

    def lost(job_id: str, name: str, what: str) -> int:
        with lock:
            count = times[job_id, name, what] = times.get((job_id, name, what), 0) + 1
            note_lost(kit.parent, job_id, name, count, gone=True, what=what)
        return count

    def process_job_failure(self: Any, request: Any) -> Any:
        from nvflare.fuel.f3.cellnet.utils import make_reply
        from nvflare.private.defs import JobFailureMsgKey

        payload, token = request.payload, request.get_header(CellMessageHeaderKeys.TOKEN)
        client = self.client_manager.clients.get(token) if token else None
        told = payload if isinstance(payload, dict) else {}
        job_id, code = str(told.get(JobFailureMsgKey.JOB_ID)), told.get(JobFailureMsgKey.CODE)
        runner = self.engine.job_runner
        if (
            client is None
            or code not in deaths
            or job_id not in self.engine.run_processes  # it is over, or being stopped
            or not runner.is_client_outcome_pending(job_id, client.name)
        ):
            return report(self, request)
        count = lost(job_id, client.name, "worker")
        if count > RESTARTS:
            runner.resolve_client_outcome(job_id, client.name)
        else:
            _later(again, self.engine, job_id, client.name, count, "worker")
        return make_reply("ok", "", None)

    def register_client(self: Any, request: Any) -> Any:
        reply = register(self, request)
        take_in(self, token_in(reply))
        return reply

    def client_heartbeat(self: Any, request: Any) -> Any:
        """After a restart of the server a site does not register again: its heart goes on."""
        reply = beat(self, request)
        take_in(self, request.get_header(CellMessageHeaderKeys.TOKEN))
        return reply

    def take_in(self: Any, token: str | None) -> None:
        """Have a site take part in what runs, where it does not yet."""
        client = self.client_manager.clients.get(token)
        if client is None:  # refused, or a person
            return
        for job_id, running in list(self.engine.run_processes.items()):
            participants = running.get(RunProcessKey.PARTICIPANTS)
            if participants is None or job_id not in self.engine.job_runner.running_jobs:
                continue
            if client.token in participants:
                continue
            known = any(c.name == client.name for c in participants.values())
            # The token it had stays: a worker that outlived a lost connection still shows it.
            participants[client.token] = client
            count = lost(job_id, client.name, "site") if known else 0
            _later(again, self.engine, job_id, client.name, count, "site")

    def again(engine: Any, job_id: str, name: str, count: int, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while job_id in engine.run_processes:
            time.sleep(RESTART_AFTER)
            try:
                _start_worker(engine, job_id, name)
            except Exception as error:
                if time.monotonic() < deadline:
                    continue
                # the run goes on without it, as it would without the site
                engine.logger.error(f"{name}'s worker was not started again: {error}")
                engine.job_runner.resolve_client_outcome(job_id, name)
                return
            with lock:
                note_lost(kit.parent, job_id, name, count, gone=False, what=what)
            return

    def resolve_missing(self: Any, client: Any, job_id: str, reason: str) -> None:
        """A site that died after its last answer takes nothing from a run that is complete."""
        self.logger.warning(f"{client.name} left the job {job_id} without a word: {reason}")
        self.engine.job_runner.resolve_client_outcome(job_id, client.name)

    FederatedServer.process_job_failure = process_job_failure
    FederatedServer.register_client = register_client
    FederatedServer.client_heartbeat = client_heartbeat
    FederatedServer._resolve_missing_client_outcome = resolve_missing


def _later(work: Any, *words: Any) -> None:
    threading.Thread(target=work, args=words, daemon=True).start()


def _start_worker(engine: Any, job_id: str, name: str) -> None:
    """Have a site start its worker of a running job. Raises where it does not."""
    from nvflare.apis.job_scheduler_spec import DispatchInfo

    runner = engine.job_runner
    job = runner.running_jobs[job_id]
    with engine.new_context() as fl_ctx:
        for deployed in (True, False):  # a site that was not there at the beginning has no job yet
            if not deployed:
                _deploy(engine, job, name, fl_ctx)
            reserved, token = engine.check_client_resources(job, {name: {}}, fl_ctx)[name]
            if not reserved:
                raise RuntimeError("the site has no room for it")
            with runner.lock:
                runner._pending_client_outcomes.setdefault(job_id, set()).add(name)
            (told,) = engine.start_client_job(job, {name: DispatchInfo("app", {}, token)}, fl_ctx)
            said = None if told.reply is None else str(told.reply.body)
            if said is None:
                raise RuntimeError("the site did not answer")
            if "Please deploy it" not in said:
                return
    raise RuntimeError(said)


def _deploy(engine: Any, job: Any, name: str, fl_ctx: Any) -> None:
    admin = engine.server.admin_server
    client = engine.get_client_from_name(name)
    for app in job.get_deployment():
        data = job.get_application(app, fl_ctx)
        message = engine.job_runner._make_deploy_message(job, data, app, fl_ctx)
        admin.send_requests_and_get_reply_dict({client.token: message}, timeout_secs=admin.timeout)
