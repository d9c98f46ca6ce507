"""A run's released and public numbers for TensorBoard, MLflow or Weights & Biases: key `log`.

A logger gets what `scalars_of` lets through and nothing else: what was measured on public images,
and what clients released. It is no part of a run: one that fails is left behind, and the run goes
on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xcal.config import nearest
from xcal.errors import UserError, first_line, how_to_install

if TYPE_CHECKING:
    from xcal.federation.coordinator import Progress

PROJECT = "xcal"  # the experiment of MLflow, the project of Weights & Biases
RESULT = ("macro_f1", "road", "epsilon_target")  # of public test images, and the promise
# What of a round's record may be drawn: measured on public images, or released by a client.
MEASURED = ("validation_macro_f1", "validation_loss", "road_validation", "answered")
RELEASED = ("share_spent", "epsilon_spent", "mean_sigma", "mean_signal")


def scalars_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round's record that may be drawn, by tag."""
    for name in MEASURED:
        if record.get(name) is not None:
            yield f"server/{name}", float(record[name])
    for report in record.get("clients", []):
        for name in RELEASED:
            if report.get(name) is not None:
                yield f"{report['client']}/{name}", float(report[name])


class Logger(Protocol):
    """Where numbers go: all that a logger of your own needs."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The numbers of one round, by name; `step` is the round, from 1."""

    def close(self) -> None:
        """After the last; called where xcal made the logger, not for one that was handed in."""


class EventFile:
    """TensorBoard's, in a folder; every round is flushed, so that a watcher sees it at once."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(f"Event files need TensorBoard: {how_to_install('loggers')}.") from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise UserError(f"{folder} could not be written: {error.strerror}.") from None

    def round(self, record: Mapping[str, Any]) -> None:
        self.log(dict(scalars_of(record)), int(record["round"]) + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run in the experiment `xcal`: where `MLFLOW_TRACKING_URI` says, else in the run's folder.

    A run that is resumed goes on in the same one.
    """

    def __init__(self, folder: Path, run: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if where is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = (folder / "mlruns").absolute().as_uri()
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=where)
        known = self._client.get_experiment_by_name(PROJECT)
        found = known.experiment_id if known else self._client.create_experiment(PROJECT)
        runs = self._client.search_runs([found], filter_string=f"tags.`xcal.run` = '{run}'")
        made = runs[0] if runs else self._client.create_run(found, tags={"xcal.run": run})
        self._run = made.info.run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandB:
    """A run in the project `xcal`; in the run's folder only, unless `WANDB_MODE` says otherwise.

    Nothing but the numbers is handed over: no code, console, host or machine.
    """

    def __init__(self, folder: Path, run: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run: Any = wandb.init(
            project=PROJECT,
            id=run,
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "round": step})

    def close(self) -> None:
        self._run.finish()


class _Kind(NamedTuple):
    module: str
    extra: str
    make: Callable[[Path, str], Logger]


LOGGERS: Mapping[str, _Kind] = {
    "tensorboard": _Kind("tensorboard", "loggers", lambda d, _: EventFile(d / "tensorboard")),
    "mlflow": _Kind("mlflow", "mlflow", MLflow),
    "wandb": _Kind("wandb", "wandb", WandB),
}


def check_logger(name: str) -> None:
    """Refuse, in one sentence, a logger that is not known or not installed."""
    if name == "none":
        return
    if name not in LOGGERS:
        raise UserError(f"Unknown logger {name!r}.{nearest(name, ('none', *LOGGERS))}")
    kind = LOGGERS[name]
    if find_spec(kind.module) is None:
        raise UserError(
            f"log = {name!r} needs {kind.module}, which is not installed:"
            f" {how_to_install(kind.extra)}."
        )


def make_logger(name: str, folder: Path, run: str) -> Logger | None:
    """The logger of that name for a run; None for "none"."""
    check_logger(name)
    if name == "none":
        return None
    try:
        return LOGGERS[name].make(folder, run)
    except UserError:
        raise
    except Exception as error:  # whatever a server elsewhere or its client makes of it
        raise UserError(f"log = {name!r} could not be opened: {first_line(error)}.") from error


class Logged:
    """Progress that is also logged, round by round."""

    def __init__(self, progress: Progress, logger: Logger) -> None:
        self.start, self.step, self.say = progress.start, progress.step, progress.say
        self.measure = progress.measure
        self._progress = progress
        self._logger: Logger | None = logger

    def round(self, record: dict[str, Any]) -> None:
        self._progress.round(record)
        self._log(dict(scalars_of(record)), int(record["round"]) + 1)

    def result(self, result: Mapping[str, Any], rounds: int) -> None:
        """What was measured after the last round."""
        found = {f"result/{k}": float(result[k]) for k in RESULT if result.get(k) is not None}
        self._log(found, rounds)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._logger is None:
            return
        try:
            self._logger.log(values, step)
        except Exception as error:
            self._logger = None
            self.say(f"The logger failed and gets nothing more: {first_line(error)}.")
