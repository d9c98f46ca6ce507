"""`xcal run`: one training, resumable."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from typer import Argument, Option

from xcal.cli.interrupts import interruptible
from xcal.config import nearest
from xcal.errors import UserError, how_to_install

ENGINES = ("local", "flower")
GRACE = 5.0  # seconds in which a browser fetches the finished page


@contextmanager
def _shown(console: Console, folder: Path, watch: bool) -> Iterator[None]:
    """Within, a process of its own serves the run's page: training forks, and has no threads."""
    if not watch:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "xcal", "report", "--live", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said:
            console.print(said, soft_wrap=True, highlight=False)
        yield
        if process.poll() is None:
            time.sleep(GRACE)
    finally:
        process.terminate()
        process.wait()


def run_command(
    experiment: Path | None = Argument(None, help="An experiment file (TOML)."),
    sets: list[str] = Option([], "--set", help="key=value on top of it; may be repeated."),
    out: Path | None = Option(None, help="The run's folder; must not exist yet."),
    resume: Path | None = Option(None, help="Continue the run in this folder."),
    engine: str = Option(
        "local", help="local: on this machine; flower: clients in parallel, over Ray."
    ),
    workers: int | None = Option(
        None,
        min=1,
        max=256,
        help="local: processes that clients train in, side by side; also with --resume.",
    ),
    client_cpus: float = Option(1.0, help="flower: CPUs for one client."),
    client_gpus: float = Option(0.0, help="flower: GPUs for one client, or a share of one."),
    ray_address: str | None = Option(None, help="flower: a Ray cluster's address."),
    watch: bool = Option(
        False, "--watch", help="Also show it in the browser while it trains, on this machine only."
    ),
) -> None:
    """Train one experiment, or continue one that was cut off."""
    from xcal.cli.show import LiveProgress, show_result
    from xcal.data.synthetic import watched
    from xcal.experiments import load_experiment
    from xcal.federation.constants import with_constants
    from xcal.federation.folder import RunFolder
    from xcal.federation.local import run_experiment
    from xcal.federation.setup import prepare

    if engine not in ENGINES:
        raise UserError(f"Unknown engine {engine!r}.{nearest(engine, ENGINES)}")
    if engine == "flower" and workers is not None:
        raise UserError("--workers is for the local engine: with flower, give --client-cpus.")
    if engine == "flower" and find_spec("flwr") is None:
        raise UserError(f"The engine flower is not installed: {how_to_install('flower')}.")
    console = Console(markup=False, emoji=False)
    federation = None
    if resume is not None:
        if experiment is not None or sets or out is not None:
            raise UserError(
                "--resume takes the run's own configuration: give nothing else with it."
            )
        folder = RunFolder.find(resume)
    else:
        if out is None:
            raise UserError(
                "Say where the run goes with --out DIR, or continue one with --resume DIR."
            )
        made, given = load_experiment(experiment, sets)
        if engine == "flower" and made.sites is not None:
            raise UserError("Flower's simulation makes sites of its own: leave out sites.")
        if engine == "flower" and made.only_local is not None:
            raise UserError(
                "Flower's clients train with cross-entropy in single precision: leave out"
                f" {made.only_local}."
            )
        console.print(f"Preparing {made.data} for {made.method}, {made.clients} clients …")
        if (found := with_constants(made)) != made:
            console.print(f"Constants of the public validation images are in {found.weights}.")
            made = found
        with LiveProgress(console) as shown, watched(shown.draw):
            federation = prepare(made)
        fits = federation.experiment.expected_batch_size
        if fits != made.expected_batch_size:
            console.print(
                f"expected_batch_size = {fits} instead of the preset's {made.expected_batch_size}:"
                " no more than the smallest client holds."
            )
        folder = RunFolder.create(out, federation.experiment, sorted(given))
    again = f"Nothing is lost: continue with `xcal run --resume {folder.path}`."
    with (
        _shown(console, folder.path, watch),
        interruptible(console, again),
        LiveProgress(console) as progress,
    ):
        if engine == "flower":
            from xcal.federation.flower.simulation import Resources, run_on_flower

            resources = Resources(client_cpus, client_gpus, ray_address)
            result = run_on_flower(folder, progress, federation, resources)
        else:
            result = run_experiment(folder, progress, federation, workers=workers)
    show_result(console, result, folder.path)
