"""`xcal run --engine flower`: the same experiment on Flower's simulation, over Ray.

Clients run in parallel, as many at once as their shares of CPU and GPU allow. The run's folder and
its sites are files: on a cluster they must stand where every machine sees them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from xcal.errors import UserError, first_line, how_to_install
from xcal.federation.coordinator import NullCallback, Progress
from xcal.federation.folder import RunFolder
from xcal.federation.setup import Federation, prepare
from xcal.federation.waiting import Waiting

ATTEMPTS = 3  # to start Ray, which gives itself half a minute, however busy the machine
PATIENCE = 5.0  # seconds after a Ctrl-C in which clients may keep the step they are at

# Nothing is reported or fetched behind the user's back, and Ray is quiet.
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Once Ray is shut down, a call that comes a moment later would start another one.
    "RAY_ENABLE_AUTO_CONNECT": "0",
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
    if known.experiment.only_local is not None:  # a run that the local engine began
        raise UserError(
            "Flower's clients train with cross-entropy in single precision: continue on the local"
            " engine."
        )
    with _quiet_environment():
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(RayDidNotStart):
                return _simulate(folder, progress, known, given)
            _forget_ray()
            (progress or NullCallback()).say("Ray did not start in time; trying again.")
        return _simulate(folder, progress, known, given)


def _cause(error: BaseException) -> str:
    """The first line of what was wrong at first, beneath what was made of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _forget_ray() -> None:
    """End what is left of a Ray that did not start."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


class RayDidNotStart(UserError):
    """Ray gave up before the first client was there."""


class _Clients:
    """Ray's processes of the simulation, known so that they can be ended while they are busy.

    Flower waits for its clients' answers in threads that nothing interrupts, and Ray, once it is
    shut down, never wakes them: so clients end first, then Flower, and Ray last.
    """

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self.started = False

    @contextlib.contextmanager
    def known(self, stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
        from flwr.server.superlink.fleet.vce.backend import raybackend

        stock, clients = raybackend.RayBackend, self

        class Known(stock):  # type: ignore[misc, valid-type]
            def build(self, app_fn: Any) -> None:
                if stop.is_set():
                    raise RuntimeError("stopped while Ray was starting")
                say("Ray is up; its processes load torch and the data.")
                clients.started = True
                super().build(app_fn)
                clients._actors.extend(self.pool.pool)  # all there will ever be, still idle
                if stop.is_set():  # and nobody else will end them any more
                    clients.end()

        raybackend.RayBackend = Known
        try:
            yield
        finally:
            raybackend.RayBackend = stock

    def end(self) -> None:
        """At once, as a power cut would: what a client has paid for is in its ledger."""
        import ray

        for actor in self._actors:
            # Where Ray itself has ended, they have; to be asked, it would start anew.
            if ray.is_initialized():
                with contextlib.suppress(Exception):  # it has ended by itself
                    ray.kill(actor)


def _simulate(
    folder: RunFolder, progress: Progress | None, federation: Federation, given: Resources
) -> dict[str, Any]:
    try:
        from flwr.app import Context
        from flwr.serverapp import Grid, ServerApp
        from flwr.simulation import run_simulation

        from xcal.federation.flower.client_app import app as client_app
        from xcal.federation.flower.flower_carrier import STOPPING, Stopped
        from xcal.federation.flower.server_app import run_simulated
    except ImportError:
        raise UserError(
            f"The engine flower is not installed: {how_to_install('flower')}."
        ) from None

    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what fails is told below
    server_app, stop, ended = ServerApp(), threading.Event(), threading.Event()
    results: list[dict[str, Any]] = []
    errors: list[BaseException] = []  # of the run
    failed: list[BaseException] = []  # of Flower or Ray
    sign, clients = folder.path / STOPPING, _Clients()
    say = (progress or NullCallback()).say

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

    def simulate() -> None:
        try:
            with clients.known(stop, say):
                run_simulation(
                    server_app,
                    client_app,
                    num_supernodes=len(federation.names),
                    backend_config={
                        "init_args": start,
                        "client_resources": {"num_cpus": given.cpus, "num_gpus": given.gpus},
                    },
                )
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    say(f"Starting Ray for {len(federation.names)} clients.")
    sign.unlink(missing_ok=True)
    try:
        # In a thread of its own: a Ctrl-C that struck Flower or Ray would leave their threads
        # behind, waiting for clients for good.
        threading.Thread(target=simulate, name="flower", daemon=True).start()
        ended.wait()
    finally:
        stop.set()
        if not ended.is_set():
            sign.touch()
            _end(ended, clients, say)
        sign.unlink(missing_ok=True)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    if failed and not isinstance(failed[0], (RuntimeError, ValueError, ConnectionError)):
        raise failed[0]
    if failed:
        kind = UserError if clients.started or given.address is not None else RayDidNotStart
        raise kind(
            f"Flower's simulation failed ({_cause(failed[0])}): is Ray's cluster there, are there"
            " CPUs and GPUs enough for one client, and is the machine not overloaded? Resume"
            " the run when it is so."
        ) from failed[0]
    raise UserError("Flower's simulation ended before the run did: resume it.")


def _end(ended: threading.Event, clients: _Clients, say: Callable[[str], None]) -> None:
    """Let clients keep the step they are at; end those that take too long, then wait for Ray."""
    say("Stopping: clients keep the step they are at.")
    with contextlib.suppress(KeyboardInterrupt):  # an impatient second one
        if ended.wait(PATIENCE):
            return
    with contextlib.suppress(KeyboardInterrupt):
        clients.end()
        waiting = Waiting(say)
        until = time.monotonic() + 8 * PATIENCE
        while not ended.wait(1.0) and time.monotonic() < until:
            waiting.look("Waiting for Ray to end")
