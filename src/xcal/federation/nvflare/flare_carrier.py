"""Asking sites through FLARE: one task a site, one deadline for all of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable

from xcal.errors import UserError
from xcal.federation.nvflare.executor import MEMBERS, MESSAGE, TASK
from xcal.federation.nvflare.members import FILE, Members
from xcal.federation.nvflare.rejoin import Lost, lost_in
from xcal.federation.waiting import Waiting, listed

ASK_AGAIN = 5.0  # seconds until a site is asked anew whose question FLARE dropped
COMES_BACK = 150.0  # seconds in which a lost site may come back, where the quorum needs it


class Stopped(Exception):
    """The job was aborted, by its lead or by FLARE."""


class FlareCarrier:
    """Carries the coordinator's messages to sites and their answers back.

    Every question has a deadline: without one, a site killed in mid-round would hold the job for
    good. What comes after the deadline is dropped here; the site keeps its answer and gives it
    again when it is asked again.
    """

    def __init__(self, controller: Controller, stopped: Callable[[], bool]) -> None:
        self._controller = controller
        self._stopped = stopped
        self.sites: dict[str, str] = {}  # FLARE's name of each client
        self._late: list[str] = []
        self._gone: dict[str, float] = {}  # since when, for those lost while the job ran
        self.quorum = 0  # answers that a round needs: who is lost is waited for where it must be
        self.folder: Path | None = None  # of the server's party, for its list of members
        self.job_id = ""
        self.lost: dict[str, Lost] = {}  # sites that died in this job, or their workers
        self.say: Callable[[str], None] = lambda _: None
        self.waiting: list[str] = []  # sites whose answer to the present question is not there yet

    def gone(self, site: str, *, for_good: bool = False) -> None:
        """A site was lost: a round waits for it only where its quorum needs it, and not for long.

        `for_good`: nobody starts it again. It may still be asked, and take part once it has come.
        """
        self._gone[site] = -math.inf if for_good else time.monotonic()

    def back(self, site: str) -> None:
        self._gone.pop(site, None)

    def _expected(self, silent: list[str], answered: int) -> list[str]:
        """Of the clients that are silent, those whose answer is worth waiting for."""
        here = [client for client in silent if self.sites[client] not in self._gone]
        lacking = self.quorum - answered - len(here)
        if lacking <= 0:
            return here
        now = time.monotonic()
        coming = [
            client
            for client in silent
            if client not in here and now - self._gone[self.sites[client]] < COMES_BACK
        ]
        return [c for c in silent if c in here or c in coming] if len(coming) >= lacking else here

    def too_late(self, site: str) -> None:
        """FLARE brought an answer to a question that is closed."""
        self._late += [client for client, name in self.sites.items() if name == site]

    def late(self) -> list[str]:
        told, self._late = sorted(set(self._late)), []
        return told

    def _members(self) -> tuple[bytes | None, frozenset[str]]:
        """The list as it is now, and whom it shuts out: a run asks them no more."""
        if self.folder is None or not (self.folder / FILE).exists():
            return None, frozenset()
        data = (self.folder / FILE).read_bytes()
        root = self.folder / "kit" / "startup" / "rootCA.pem"
        return data, Members.read(data, root, str(self.folder / FILE)).shut_out()

    def _look_for_lost(self) -> None:
        """A site that died is not waited for until it, or its worker, is started again."""
        if self.folder is None:
            return
        for site, found in lost_in(self.folder, self.job_id).items():
            if self.lost.get(site) != found:
                self.lost[site] = found
                if found.gone:
                    self.gone(site, for_good=found.for_good)
                else:
                    self.back(site)
                self.say(found.text(site))

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        if timeout is None:
            raise UserError("A round over FLARE needs a timeout: set round_timeout.")
        answers: dict[str, bytes | None] = {}
        changed = threading.Condition()

        def listen(client: str) -> Callable[..., None]:
            def received(client_task: Any, fl_ctx: Any) -> None:  # noqa: ARG001
                result = client_task.result
                good = result is not None and result.get_return_code() == ReturnCode.OK
                data = result.get(MESSAGE) if good else None
                client_task.result = None  # FLARE would keep it for as long as the job lives
                with changed:
                    answers[client] = data if isinstance(data, bytes) else None
                    changed.notify()

            return received

        self._look_for_lost()
        members, shut_out = self._members()
        messages = {c: m for c, m in messages.items() if self.sites[c] not in shut_out}
        tasks: dict[str, Task] = {}
        sent: dict[str, float] = {}
        deadline = time.monotonic() + timeout

        def send(client: str) -> None:
            data = Shareable()
            data[MESSAGE] = messages[client]
            if members is not None:
                data[MEMBERS] = members
            left = max(deadline - time.monotonic(), 0.0)
            tasks[client] = Task(
                name=TASK,
                data=data,
                timeout=math.ceil(left) + 1,
                result_received_cb=listen(client),
            )
            sent[client] = time.monotonic()
            self._controller.send(
                task=tasks[client], fl_ctx=self._controller.fl_ctx, targets=[self.sites[client]]
            )

        for client in messages:
            send(client)
        waiting = Waiting(self.say)
        try:
            while True:
                with changed:
                    came = len(answers)
                    good = sum(data is not None for data in answers.values())
                    silent = [client for client in messages if client not in answers]
                left_out = self._expected(silent, good)
                left = deadline - time.monotonic()
                if not left_out or left <= 0:
                    break
                if self._stopped():
                    raise Stopped
                self.waiting = [self.sites[client] for client in left_out]
                waiting.look(f"Round {round_number + 1} waits for {listed(self.waiting)}")
                # FLARE drops what it asked of a site that died: one that is back is asked anew.
                # Not while answers are locked, which FLARE brings under a lock of its own.
                for client in left_out:
                    dropped = tasks[client].completion_status is not None
                    if dropped and time.monotonic() - sent[client] > ASK_AGAIN:
                        send(client)
                with changed:
                    if len(answers) == came:
                        changed.wait(min(left, 0.5))
                self._look_for_lost()
        finally:
            self.waiting = []
            for task in tasks.values():
                if task.completion_status is None:
                    self._controller.cancel_task(task, fl_ctx=self._controller.fl_ctx)
        with changed:
            return {client: data for client, data in answers.items() if data is not None}
