"""FLARE's process of a party, with two things added.

Was the key of who comes revoked? FLARE asks everybody for a signature with their certificate's key,
in one place: the server asks sites and people, a site asks the server. That is where the list of
members is looked at.

One site's worker that dies (memory ran out) does not end the run: FLARE would fail the job. The
server notes who was lost, so that the round goes on with its quorum, and has it started again.

`python -m xcal.federation.nvflare.main MODULE -m KIT …`
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.federation.nvflare.lost import note_lost
from xcal.federation.nvflare.members import fingerprint_of_key, known

RESTARTS = 3  # of one site's worker in one job
RESTART_AFTER = 3.0  # seconds, in which the site's own process sees that its worker is gone


def refuse_revoked(kit: Path) -> None:
    """From now on no revoked key proves anybody's identity to this process."""
    from nvflare.private.fed.utils import identity_utils

    verifier = identity_utils.IdentityVerifier
    ask = verifier.verify_common_name

    def verify_common_name(self: Any, *words: Any, asserter_cert: Any, **named: Any) -> Any:
        key = fingerprint_of_key(asserter_cert.public_key())
        try:
            members = known(kit.parent, kit / "startup" / "rootCA.pem")
        except UserError as error:  # a list that somebody changed admits nobody
            raise identity_utils.InvalidAsserterCert(str(error)) from None
        if members is not None and key in members.revoked:
            raise identity_utils.InvalidAsserterCert(f"the key {key} was revoked")
        return ask(self, *words, asserter_cert=asserter_cert, **named)

    verifier.verify_common_name = verify_common_name


def survive_workers(kit: Path) -> None:
    """From now on a site's worker that dies is started again, some times, and ends no run."""
    from nvflare.apis.job_launcher_spec import JobReturnCode
    from nvflare.private.fed.server.fed_server import FederatedServer

    report = FederatedServer.process_job_failure
    deaths = (JobReturnCode.EXCEPTION, JobReturnCode.INFRASTRUCTURE_ERROR, JobReturnCode.ABORTED)
    lock, times = threading.Lock(), dict[tuple[str, str], int]()

    def process_job_failure(self: Any, request: Any) -> Any:
        from nvflare.fuel.f3.cellnet.utils import make_reply
        from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey

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
        with lock:
            count = times[job_id, client.name] = times.get((job_id, client.name), 0) + 1
            note_lost(kit.parent, job_id, client.name, count, gone=True)
        if count > RESTARTS:
            runner.resolve_client_outcome(job_id, client.name)
        else:
            threading.Thread(
                target=again, args=(self.engine, job_id, client.name, count), daemon=True
            ).start()
        return make_reply("ok", "", None)

    def again(engine: Any, job_id: str, name: str, count: int) -> None:
        from nvflare.apis.job_scheduler_spec import DispatchInfo

        time.sleep(RESTART_AFTER)
        runner = engine.job_runner
        try:
            job = runner.running_jobs[job_id]
            with engine.new_context() as fl_ctx:
                reserved, token = engine.check_client_resources(job, {name: {}}, fl_ctx)[name]
                if not reserved:
                    raise RuntimeError("the site has no room for it")
                engine.start_client_job(job, {name: DispatchInfo("app", {}, token)}, fl_ctx)
            with lock:
                note_lost(kit.parent, job_id, name, count, gone=False)
        except Exception as error:  # the run goes on without it, as it would without the site
            engine.logger.error(f"{name}'s worker was not started again: {error}")
            runner.resolve_client_outcome(job_id, name)

    FederatedServer.process_job_failure = process_job_failure


def main() -> None:
    module, *words = sys.argv[1:]
    kit = Path(words[words.index("-m") + 1])
    refuse_revoked(kit)
    if ".server." in module:
        survive_workers(kit)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
