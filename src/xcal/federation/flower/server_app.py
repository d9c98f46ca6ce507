"""The ServerApp: the server's loop over a grid of real SuperNodes, or of simulated ones.

    flwr run deploy/flower silo -c 'experiment="/path/experiment.toml" out="/path/run"'

The same command again resumes the run: it goes on from its last complete round. With
`simulated=true` the nodes are Flower's own simulation, as under `xcal run --engine flower`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from xcal.errors import UserError
from xcal.experiments import load_experiment
from xcal.federation.coordinator import NullCallback, Progress, round_line
from xcal.federation.files import read_json, write_json
from xcal.federation.flower.flower_carrier import GridCarrier
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment, threads_of
from xcal.federation.setup import Federation, prepare, prepare_remote, settled
from xcal.federation.simulated import make_sites

ROUND_TIMEOUT = 3600.0  # without one, a dead client would hold a round up for good

app = ServerApp()


class Spoken(NullCallback):
    """One line a round, and whom it waits for, for the log of whoever watches the run."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def round(self, record: dict[str, Any]) -> None:
        print(round_line(record), flush=True)


def run_simulated(
    grid: Grid,
    folder: RunFolder,
    progress: Progress | None = None,
    federation: Federation | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """A run whose clients are a simulation's nodes: their sites are made in the run's folder."""
    experiment = folder.experiment
    if experiment.sites is not None:
        raise UserError(
            "Flower's simulation makes sites of its own: leave out sites, or give every SuperNode"
            " its site in a deployment."
        )
    known = federation or prepare(experiment, new=False)
    make_sites(folder, known, threads_of(folder))
    say = (progress or NullCallback()).say
    carrier = GridCarrier(grid, sites=folder.path.resolve() / "clients", stop=stop, say=say)
    carrier.find(len(known.names))
    return run_experiment(folder, progress, known, carrier)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One federated run over the SuperNodes that are connected."""
    settings = context.run_config
    if not settings.get("out"):
        raise UserError('Say where the run goes: -c \'out="DIR" experiment="FILE"\'.')
    out = Path(str(settings["out"])).expanduser()
    if (out / "run.json").exists():
        folder = RunFolder.find(out)
    else:
        path = settings.get("experiment")
        made, given = load_experiment(Path(str(path)).expanduser() if path else None)
        if made.round_timeout is None and not settings.get("simulated"):
            made = made.model_copy(update={"round_timeout": ROUND_TIMEOUT})
        folder = RunFolder.create(out, settled(made), sorted(given))
    if settings.get("simulated"):
        _done(run_simulated(grid, folder, Spoken()), out)
        return
    experiment = folder.experiment
    carrier = GridCarrier(grid, say=Spoken().say)
    wait = float(settings.get("wait-seconds") or 600)
    listed = folder.path / "clients.json"
    if listed.exists():  # a resumed run keeps its clients, whoever is there now
        names = tuple(read_json(listed))
        carrier.find(min(experiment.quorum or len(names), len(names)), wait)
    else:
        names = carrier.find(experiment.clients, wait)
        write_json(listed, list(names))
    _done(run_experiment(folder, Spoken(), prepare_remote(experiment, names), carrier), out)


def _done(result: dict[str, Any], out: Path) -> None:
    found = "not measured" if result["macro_f1"] is None else f"{result['macro_f1']:.3f}"
    print(f"test macro F1 {found}; everything is in {out}", flush=True)
