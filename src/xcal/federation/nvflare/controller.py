"""The server's end: a FLARE job that runs the core's coordinator over FLARE's tasks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.workflows.model_controller import ModelController

from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.coordinator import NullCallback, TooFewAnswers
from xcal.federation.files import read_json, write_json
from xcal.federation.folder import RunFolder
from xcal.federation.known_heads import FILE as HEADS
from xcal.federation.local import run_experiment
from xcal.federation.logbook import note
from xcal.federation.nvflare.flare_carrier import FlareCarrier, Stopped
from xcal.federation.nvflare.jobs import RESULTS, STATUS_TOPIC, check_run_name, set_keys
from xcal.federation.setup import Federation, prepare_remote, settled
from xcal.federation.surveys import EVALUATIONS, STATISTICS, statistics_of, tell_final

# What of a run's folder goes with the job's results: the checkpoint and the ledger of a trusted
# server stay with the server.
RESULT_FILES = (
    "experiment.toml run.json schedule.json plans.json statement.txt statement.json rounds.jsonl"
    " trace.jsonl refusals.jsonl result.json predictions.npz model.safetensors card.md"
    f" {EVALUATIONS} {STATISTICS}".split()
)


class XcalController(ModelController):
    """Runs or resumes one run, known by its name.

    The run's folder lies beside the server's kit, not in the job: a job that ends with its server
    leaves the run's checkpoint, and the next job of that name goes on from it.
    """

    def __init__(
        self,
        run: str,
        sites: Mapping[str, str],
        experiment: Mapping[str, Any] | None = None,
        given: Sequence[str] = (),
        resume: bool = False,
        quorum: int | None = None,
        timeout: float | None = None,
        statistics: Sequence[float] | None = None,
    ) -> None:
        super().__init__(persistor_id="", task_check_period=0.1)
        self._run_name = check_run_name(run)
        self._sites = {str(client): str(site) for client, site in sites.items()}
        self._experiment = None if experiment is None else dict(experiment)
        self._given = tuple(given)
        self._resume = bool(resume)
        self._statistics = None if statistics is None else (statistics[0], statistics[1])
        self._changes = {"quorum": quorum, "round_timeout": timeout}
        self._watch = Watch()
        self._carrier = FlareCarrier(self, lambda: bool(self.abort_signal.triggered))

    def start_controller(self, fl_ctx: Any) -> None:
        super().start_controller(fl_ctx)
        self.engine.register_app_command(STATUS_TOPIC, self._status)
        _know_who_came_back(self.engine)

    def _status(self, topic: str, data: Any, fl_ctx: Any) -> dict[str, Any]:
        return {**self._watch.told(), "waiting": list(self._carrier.waiting)}

    def run(self) -> None:
        self._carrier.folder = Path(self.engine.get_workspace().get_root_dir()).parent
        self._carrier.job_id = str(self.fl_ctx.get_job_id())
        self._carrier.say = self._watch.say
        self._watch.log = self._carrier.folder
        runs = self._carrier.folder / "runs"
        path = runs / self._run_name
        note(self._carrier.folder, "began", run=self._run_name, job=self._carrier.job_id)
        try:
            if self._statistics is not None:
                self._count(path, self._statistics)
                return
            folder = self._folder(path)
            federation = self._federation(folder)
            self._watch.begin(folder, federation.experiment.rounds)
            heads = self._carrier.folder / HEADS
            run_experiment(folder, self._watch, federation, self._carrier, heads=heads)
            self._tell_final(folder, federation)
            self._leave(path, True, "finished.")
        except Stopped:
            self._leave(path, False, "stopped; resume it to go on.", again=True)
        except UserError as error:
            # Who was missing may come back; what was refused stays refused.
            again = isinstance(error, TooFewAnswers) and not error.refused
            self._leave(path, False, str(error), again)
            self.panic(str(error))
        except Exception:
            self._leave(path, False, "it failed for a reason of ours: see the server's log.")
            raise

    def _tell_final(self, folder: RunFolder, federation: Federation) -> None:
        """The run is finished whatever becomes of this."""
        self._watch.state = "the sites get the final model"
        try:
            tell_final(folder, federation, self._carrier)
        except (UserError, Stopped) as error:
            self.error(f"the final model did not reach all sites: {error}")

    def _count(self, path: Path, target: tuple[float, float]) -> None:
        """Counts by class instead of a training."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        experiment = make_experiment(self._experiment or {}, "the job")
        self._reach(self._sites)
        found = statistics_of(path.name, experiment, list(self._sites), target, self._carrier)
        write_json(path / STATISTICS, found)
        self._leave(path, True, "finished.")

    def _folder(self, path: Path) -> RunFolder:
        if self._resume:
            return RunFolder.find(path)
        if self._experiment is None:
            raise UserError("The job brings no experiment and does not resume one.")
        path.parent.mkdir(exist_ok=True, mode=0o700)
        folder = RunFolder.create(path, settled(make_experiment(self._experiment)), self._given)
        about = {**folder.about, "command": f"xcal federation submit --name {path.name}"}
        write_json(path / "run.json", about)
        write_json(path / "sites.json", self._sites)
        return folder

    def _federation(self, folder: RunFolder) -> Federation:
        """As the run began; only how long to wait, and for how many, may change on the way."""
        stored = folder.path / "sites.json"
        sites = read_json(stored) if stored.exists() else self._sites
        changes = {key: value for key, value in self._changes.items() if value is not None}
        experiment = make_experiment({**set_keys(folder.experiment), **changes}, "the job")
        if experiment.round_timeout is None or experiment.quorum is None:
            raise UserError("A federation's run needs a quorum and a round_timeout.")
        self._reach(sites)
        self._carrier.quorum = experiment.quorum
        return prepare_remote(experiment, list(sites))

    def _reach(self, sites: Mapping[str, str]) -> None:
        self._carrier.sites = dict(sites)
        # No round waits for a site that is not here now; it takes part once it has come.
        there = {str(client.name) for client in self.engine.get_clients()}
        for site in sites.values():
            if site not in there:
                self._carrier.gone(site, for_good=True)

    def _leave(self, path: Path, ok: bool, text: str, again: bool = False) -> None:
        """Put what the run may tell where FLARE keeps a job's results.

        `again`: whether the same run may get further when it is submitted once more.
        """
        self._watch.state = text
        if self._carrier.folder is not None:
            note(self._carrier.folder, "ended", run=path.name, ok=ok, text=text)
        out = Path(self.get_run_dir()) / RESULTS
        out.mkdir(exist_ok=True)
        for name in RESULT_FILES:
            if (path / name).exists():
                shutil.copyfile(path / name, out / name)
        outcome = {"run": path.name, "ok": ok, "text": text, "again": again}
        write_json(out / "outcome.json", outcome)

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.CLIENT_DISCONNECTED:
            self._carrier.gone(str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME)))
        elif event_type == EventType.CLIENT_RECONNECTED:
            self._carrier.back(str(fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME)))

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Any, fl_ctx: Any
    ) -> None:
        """An answer that came too late: the site keeps it, and gives it when asked again."""
        self._carrier.too_late(str(client.name))


def _know_who_came_back(engine: Any) -> None:
    """A site that was started again shows a new token: who is unknown is asked for once more."""
    agent = engine.server.command_agent
    find = agent._get_client

    def get_client(token: str) -> Any:
        found = find(token)
        if found is None:
            now = engine._retrieve_clients_data(engine.args.job_id)
            if now:
                engine.client_manager.set_clients(now)
                found = find(token)
        return found

    agent._get_client = get_client


class Watch(NullCallback):
    """What the lead sees of a running job: the rounds' records, which hold releases only.

    And notes of what happened besides: who is waited for, who was lost, who came back.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self.log: Path | None = None  # where the server's own log lies
        self._run = ""
        self._notes: list[str] = []
        self._rounds: list[dict[str, Any]] = []
        self._total = 0

    def begin(self, folder: RunFolder, total: int) -> None:
        self._run = folder.path.name
        self._rounds = folder.read_lines("rounds.jsonl")
        self._total = total
        self.state = "training"

    def round(self, record: dict[str, Any]) -> None:
        self._rounds = [r for r in self._rounds if r["round"] < record["round"]] + [record]
        if self.log is not None:
            note(
                self.log,
                "round",
                run=self._run,
                **{k: record[k] for k in ("round", "answered", "missing", "refused", "seconds")},
            )

    def say(self, text: str) -> None:
        self._notes.append(f"{datetime.now(UTC):%H:%M:%S} UTC: {text}")
        if self.log is not None:
            note(self.log, "said", run=self._run, text=text)

    def told(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "total": self._total,
            "rounds": self._rounds,
            "notes": self._notes,
        }
