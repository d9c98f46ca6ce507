"""`xcal predict` and `xcal export`: a model's answers as a table, and the model as a file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from typer import Argument, Option

from xcal.cli.show import LiveProgress, plain_console
from xcal.errors import UserError

if TYPE_CHECKING:
    from xcal.report.trained import Predicted, Trained

_AT_ONCE = 64
_NAMED = 5  # bad files that are named; more would hide the first


def predict_command(
    run: Path = Argument(..., help="The folder of a finished run."),
    files: list[Path] = Argument(
        ..., help="Image files (PNG, JPEG, DICOM and others), or folders of them."
    ),
    out: Path = Option(Path("predictions.csv"), help="The table that is written."),
    calibrate: bool = Option(
        True, help="Fit one temperature on public validation images, where there are any."
    ),
) -> None:
    """Predict images: one row each, with the class and the confidence in every class.

    If one file cannot be read it is named, and nothing is written.
    """
    from xcal.data.synthetic import watched
    from xcal.federation.files import write_bytes
    from xcal.report.trained import load

    trained = load(run)
    paths = _paths(files)
    _check_out(out, paths)
    console = plain_console(soft_wrap=True)
    with LiveProgress(console) as shown, watched(shown.draw):
        trained, told = with_temperature(trained, calibrate, shown)
        found = _predict(trained, paths, shown)
    write_bytes(out, _table(trained, paths, found).encode("utf-8", "surrogateescape"))
    for name, count in Counter(found.names).most_common():
        console.print(f"{count:>8}  {'no finite answer' if name is None else name or 'nothing'}")
    console.print(told)
    console.print(f"One row for each of {len(paths)} files is in {out}.")


def with_temperature(trained: Trained, calibrate: bool, shown: LiveProgress) -> tuple[Trained, str]:
    """The model with a fitted temperature where that may be, and what there is to say of it."""
    if not calibrate:
        return trained, "Confidences are not calibrated: --no-calibrate was given."
    try:
        fitted = trained.calibrated(partial(shown.measure, "validation images"))
    except UserError as reason:
        return trained, f"Confidences are not calibrated: {reason}"
    return fitted, (
        f"Confidences are calibrated: temperature {fitted.temperature:.3f}, fitted on"
        f" {fitted.fitted_on}."
    )


def _paths(words: list[Path]) -> list[Path]:
    from xcal.report.explaining import folder_images

    found: list[Path] = []
    for word in words:
        found += folder_images(word) if word.is_dir() else [word]
    return found


def _check_out(out: Path, paths: Sequence[Path] = ()) -> None:
    """Before the work: a place that cannot be written, or that would cost an image."""
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out} cannot be written: give a file in a folder that exists.")
    if out.exists() and any(path.exists() and path.samefile(out) for path in paths):
        raise UserError(f"--out {out} is one of the images: choose another name.")


def _predict(trained: Trained, paths: list[Path], shown: LiveProgress) -> Predicted:
    bad: list[str] = []
    logits: list[NDArray[np.float64]] = []
    for start in range(0, len(paths), _AT_ONCE):
        images = []
        for path in paths[start : start + _AT_ONCE]:
            try:
                images.append(trained.preprocess(path))
            except UserError as problem:
                bad.append(str(problem))
        if not bad:  # otherwise the rest is only looked at, to name all that is bad
            logits.append(trained.logits(images))
        shown.measure("files", min(start + _AT_ONCE, len(paths)), len(paths))
    if bad:
        more = f" And {len(bad) - _NAMED} more." if len(bad) > _NAMED else ""
        raise UserError(f"Nothing was written. {' '.join(dict.fromkeys(bad[:_NAMED]))}{more}")
    return trained.answers(np.concatenate(logits))


def _table(trained: Trained, paths: list[Path], found: Predicted) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    columns = [f"confidence: {name}" for name in trained.classes]
    what = "findings" if trained.run.multi_label else "class"
    rows.writerow(["file", what, "confidence", *columns, "calibrated"])
    calibrated = "yes" if found.calibrated else "no"
    for path, name, values in zip(paths, found.names, found.confidences, strict=True):
        numbers = ["" if np.isnan(v) else f"{v:.6f}" for v in (values.max(), *values)]
        rows.writerow([path, name or "", *numbers, calibrated])
    return text.getvalue()


ENDINGS = {"torchscript": ".pt", "onnx": ".onnx"}


def export_command(
    run: Path = Argument(..., help="The folder of a finished run."),
    to: Literal["torchscript", "onnx"] = Option(..., help="The format."),
    out: Path | None = Option(
        None, help="The file; by default named as the run, in the current folder."
    ),
    calibrate: bool = Option(
        True, help="Store a temperature fitted on public validation images, where there are any."
    ),
) -> None:
    """Write the model as one file, with its classes and preprocessing inside.

    The file's answers are compared with the original's before anything is written.
    """
    from xcal.data.synthetic import watched
    from xcal.federation.files import write_bytes
    from xcal.federation.folder import RunFolder
    from xcal.report.exporting import exported
    from xcal.report.trained import load

    trained = load(run)
    folder = RunFolder.find(run)
    place = out or Path(run.resolve().name + ENDINGS[to])
    _check_out(place)
    console = plain_console(soft_wrap=True)
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
