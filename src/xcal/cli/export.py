"""`xcal export`: a trained model as one file that runs without xcal."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from xcal.errors import UserError

ENDINGS = {"torchscript": ".pt", "onnx": ".onnx"}


def export_command(
    run: Path = typer.Argument(..., help="The folder of a finished run."),
    to: Literal["torchscript", "onnx"] = typer.Option(..., help="The format."),
    out: Path | None = typer.Option(
        None, help="The file; by default named as the run, in the current folder."
    ),
    calibrate: bool = typer.Option(
        True, help="Store a temperature fitted on public validation images, where there are any."
    ),
) -> None:
    """Write the model as one file, with its classes and preprocessing inside.

    The file's answers are compared with the original's before anything is written.
    """
    from xcal.cli.predict import with_temperature
    from xcal.cli.show import LiveProgress
    from xcal.data.synthetic import watched
    from xcal.federation.files import write_bytes
    from xcal.federation.folder import RunFolder
    from xcal.report.exporting import exported
    from xcal.report.trained import load

    trained = load(run)
    folder = RunFolder.find(run)
    place = out or Path(run.resolve().name + ENDINGS[to])
    if place.is_dir() or not place.parent.is_dir():
        raise UserError(f"--out {place} cannot be written: give a file in a folder that exists.")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with LiveProgress(console) as shown, watched(shown.draw):
        trained, told = with_temperature(trained, calibrate, shown)
    result = folder.result or {}
    about = {
        "run": folder.about.get("run"),
        "network": trained.experiment.network,
        "method": trained.experiment.method,
        # None: no guarantee, epsilon is infinite.
        "epsilon": result.get("epsilon_target"),
        "delta": result.get("delta"),
        "unit": result.get("unit"),
    }
    console.print(f"Writing {trained.experiment.network} as {to} …")
    content, difference = exported(trained, to, about)
    write_bytes(place, content)
    console.print(told)
    console.print(
        f"{place} holds the model, its classes and its preprocessing; on made-up images its logits"
        f" differ from the original's by at most {difference:.1g}."
    )
