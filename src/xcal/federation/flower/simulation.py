"""`xcal run --engine flower`: the same experiment on Flower's simulation, over Ray.

Clients run in parallel, as many at once as their shares of CPU and GPU allow. The run's folder and
its sites are files: on a cluster they must stand where every machine sees them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xcal.errors import UserError
from xcal.federation.coordinator import Progress
from xcal.federation.folder import RunFolder
from xcal.federation.masked import refuse_masked
from xcal.federation.setup import Federation, prepare

# Nothing is reported or fetched behind the user's back, and Ray is quiet.
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's own 15 is for interactive machines: beside other work, clients would hardly run at all.
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True)
class Resources:
    """What one simulated client gets, and where."""

    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None  # of a Ray cluster; None: this machine


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """The variables above and calm loggers, and as before afterwards."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    logger = logging.getLogger("flwr")
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(before)


def run_on_flower(
    folder: RunFolder,
    progress: Progress | None = None,
    federation: Federation | None = None,
    resources: Resources | None = None,
) -> dict[str, Any]:
    """Train what the folder's configuration says on Flower's simulation; return the result.

    Guarantee: the result of the local engine, bit for bit under seeded noise. Interrupted at any
    moment, it can be continued, on this engine or another.
    """
    if folder.result is not None:
        return folder.result
    given = resources or Resources()
    if given.cpus <= 0 or given.gpus < 0:
        raise UserError("A client needs more than 0 CPUs and at least 0 GPUs.")
    known = federation or prepare(folder.experiment, new=False)
    refuse_masked(known.experiment)
    if known.experiment.loss is not None:  # a run that the local engine began
        raise UserError("Flower's clients train with cross-entropy: continue on the local engine.")
    with _quiet_environment():
        return _simulate(folder, progress, known, given)


def _cause(error: BaseException) -> str:
    """The first line of what was wrong at first, beneath what was made of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _simulate(
    folder: RunFolder, progress: Progress | None, federation: Federation, given: Resources
) -> dict[str, Any]:
    try:
        from flwr.app import Context
        from flwr.serverapp import Grid, ServerApp
        from flwr.simulation import run_simulation

        from xcal.federation.flower.carrier import Stopped
        from xcal.federation.flower.client_app import app as client_app
        from xcal.federation.flower.server_app import run_simulated
    except ImportError:
        raise UserError(
            "The engine flower is not installed: pip install 'xcal-fl[flower]'."
        ) from None

    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what fails is told below
    server_app, stop = ServerApp(), threading.Event()
    results: list[dict[str, Any]] = []
    errors: list[BaseException] = []

    @server_app.main()
    def main(grid: Grid, _context: Context) -> None:
        try:
            results.append(run_simulated(grid, folder, progress, federation, stop))
        except Stopped:
            return
        except BaseException as error:  # carried over to the caller's thread
            errors.append(error)

    start: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if given.address is not None:
        start["address"] = given.address
    else:
        start["num_cpus"] = max(os.cpu_count() or 1, int(-(-given.cpus // 1)))
    try:
        run_simulation(
            server_app,
            client_app,
            num_supernodes=len(federation.names),
            backend_config={
                "init_args": start,
                "client_resources": {"num_cpus": given.cpus, "num_gpus": given.gpus},
            },
        )
    except (RuntimeError, ValueError, ConnectionError) as error:
        if not errors and not results:
            raise UserError(
                f"Flower's simulation failed ({_cause(error)}): is Ray's cluster there, are there"
                " CPUs and GPUs enough for one client, and is the machine not overloaded? Resume"
                " the run when it is so."
            ) from error
    finally:
        stop.set()
    if errors:
        raise errors[0]
    if not results:
        raise UserError("Flower's simulation ended before the run did: resume it.")
    return results[0]
