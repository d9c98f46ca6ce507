"""The site's end: FLARE hands over a task, the core answers, FLARE carries the answer back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from xcal.errors import UserError
from xcal.federation.answer import answer
from xcal.federation.nvflare.members import take
from xcal.federation.nvflare.parties import site_dir_in

TASK = "round"
MESSAGE = "message"  # of a task and its result: our bytes, read by our decoder
MEMBERS = "members"  # of a task: the list of members, signed by the federation's CA


class _Aborted(BaseException):
    """The coordinator stopped the job. No `Exception`, so that nobody takes it for a failure."""


class XcalExecutor(Executor):
    """Answers rounds from the site that lies beside the kit.

    It takes no argument: a job cannot choose a site, a path or a command. What leaves is the
    core's answer or one of FLARE's fixed return codes.
    """

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        kit = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        given, listed = shareable.get(MESSAGE), shareable.get(MEMBERS)
        if isinstance(listed, bytes):
            try:
                for entry in take(
                    kit.parent, listed, kit / "startup" / "rootCA.pem", "The server's"
                ):
                    self.logger.warning(entry.text())  # who joined, renewed or was shut out
            except UserError as error:  # nothing that a round depends on
                self.logger.error(str(error))

        def on_step(_: int) -> None:
            if abort_signal.triggered:
                raise _Aborted

        try:
            # Anything but bytes is for the core to refuse: it logs what it refuses.
            sent = answer(
                site_dir_in(kit.parent), given if isinstance(given, bytes) else b"", on_step
            )
        except _Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        result = Shareable()
        result[MESSAGE] = sent
        return result
