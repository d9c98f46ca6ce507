"""Commands on a finished run's model: `xcal evaluate`, `predict`, `explain` and `export`."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from xcal import plotting
from xcal.cli.show import LiveProgress, make_table, number, plain_console
from xcal.data.synthetic import watched
from xcal.errors import UserError
from xcal.federation.files import write_bytes

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


def evaluate_command(
    run: Path = Argument(..., help="The folder of a finished run."),
    data: str | None = Argument(
        None, help="Another data set with the same classes; the run's own if not given."
    ),
    images: int | None = Option(
        None, min=0, help="How many test images are explained; as many as in the run if not given."
    ),
    against: Path | None = Option(
        None, help="Another run, usually without privacy: how alike are the maps?"
    ),
    maps: str | None = Option(
        None,
        "--maps",
        "--map",
        help="How maps are made, or auto: the best by ROAD on public validation images; as the run"
        " has it (key maps) if not given.",
    ),
    as_json: bool = Option(False, "--json", help="One JSON object and nothing else."),
) -> None:
    """Measure a trained model: the classifier on all test images, explanations on a subset."""
    from xcal.report.runs import evaluate_run, load_data, load_run

    loaded = load_run(run)
    other = load_run(against) if against is not None else None
    with LiveProgress(Console(stderr=as_json)) as shown, watched(shown.draw):
        found = evaluate_run(
            loaded,
            load_data(loaded, data, beside=[] if other is None else [other]),
            explained=images,
            against=other,
            maps_by=maps,
            on_measure=shown.measure,
        )
    if as_json:
        typer.echo(json.dumps({"run": run.name, **found}, indent=2))
        return
    _show_metrics(plain_console(), found)


def _show_metrics(console: Console, found: dict[str, Any]) -> None:
    measured = found["classification"]
    console.print(_summary(found))
    confused = measured["confusion_matrix"]
    what = "class" if confused is not None else "finding"
    images = measured["images_per_class"] if confused is None else [sum(row) for row in confused]
    each = ("sensitivity", "specificity", "auroc_per_class")
    rows = (
        (name, images[k], *(number(measured[key][k]) for key in each))
        for k, name in enumerate(found["classes"])
    )
    heads = (what, ">images", ">sensitivity", ">specificity", ">AUROC")
    console.print(make_table(f"By {what}", heads, rows))
    if confused is None:  # of several findings at once none is taken for another
        return
    classes = found["classes"]
    counts = ((name, *row) for name, row in zip(classes, confused, strict=True))
    answers = ("", *(f">{name}" for name in classes))
    console.print(make_table("Truth in rows, answers in columns", answers, counts))


def _summary(found: dict[str, Any]) -> Table:
    from xcal.metrics.metric_registry import METRICS

    measured, explained = found["classification"], found["explanations"]
    title = f"{found['method']} on {measured['images']} test images of {found['data']}"
    values = [(metric, metric.value(found)) for metric in METRICS]
    rows = [(m.title, v, m.meaning) for m, v in values if v is not None or not m.of_maps]
    if explained is not None:
        low, high = explained["road"]["interval"] or (None, None)
        if low is not None:
            between = f"{number(low)} to {number(high)}"
            rows.append(("ROAD, 95 %", None, f"{between}, {explained['road']['images']} images"))
        place = explained.get("localization")
        if place is not None:
            rows.append(("area of the region", place["area"], "which chance reaches"))
    if found["sanity_check"]:
        last = found["sanity_check"][-1]["rank_correlation"]
        rows.append(("sanity check", last, "maps against those of scrambled weights; near 0"))
    if found["agreement"] is not None:
        alike = found["agreement"]
        rows += [
            ("agreement, ranks", alike["rank_correlation"], "with the other run's maps, -1 to 1"),
            ("agreement, top 20 %", alike["overlap"], "intersection over union, 0 to 1"),
        ]
    shown = ((name, number(value), meaning) for name, value, meaning in rows)
    return make_table(title, ("metric", ">value", "what it is"), shown)


PAGE = "explanations.html"


def explain_command(
    run: Path = Argument(..., help="The folder of a finished run."),
    images: list[str] = Argument(
        ..., help="Image files, folders of them, or test:ID or test:N of the run's test split."
    ),
    out: Path = Option(Path("explanations"), help="Where the pictures and the page go."),
    maps: str = Option(
        "auto",
        "--maps",
        "--map",
        help="How maps are made: gradcam, gradcam++, hirescam, layercam, occlusion, cell-occlusion,"
        " rise, two joined by +; or auto, the best by ROAD on public validation images.",
    ),
    finding: str | None = Option(
        None, help="Which finding, of a run that tells several; the likeliest if not given."
    ),
) -> None:
    """Explain images: prediction, map, what covering its top does, and the ROAD curve.

    Writes a PNG for each image and one HTML page with all of them that needs no other file.
    """
    from xcal.federation.folder import RunFolder
    from xcal.report.drawing import answer_text, explanations_page, save_explanation
    from xcal.report.explaining import explain_pictures, file_names, find_pictures
    from xcal.report.runs import load_run, map_of_run

    loaded = load_run(run)
    pictures = find_pictures(loaded, images)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {out} cannot be made: {error.strerror}.") from None
    console = plain_console()
    with LiveProgress(console) as shown:
        choice = map_of_run(loaded, maps, partial(shown.measure, "choosing a map"))
        found = explain_pictures(
            loaded,
            pictures,
            method=choice.method,
            finding=finding,
            on_images=partial(shown.measure, "images"),
        )
        drawn = zip(file_names(pictures), found, strict=True) if plotting.available() else ()
        for done, (name, explanation) in enumerate(drawn):
            save_explanation(out / name, explanation)
            shown.measure("pictures drawn", done + 1, len(found))
    page = explanations_page(loaded, found, choice, RunFolder.find(run).result or {})
    write_bytes(out / PAGE, page.encode())

    rows = (
        (
            item.name,
            item.truth or "–",
            answer_text(item.answer),
            answer_text(item.covered_answer),
            f"{item.road:+.3f}",
        )
        for item in found
    )
    title = f"{loaded.experiment.method} on {loaded.experiment.data}"
    heads = ("image", "truth", "prediction", "with its top covered", ">ROAD")
    console.print(make_table(title, heads, rows))
    for item in found:
        for note in item.notes:
            console.print(f"{item.name}: {note}")
    console.print(choice.sentence())
    where = f"One picture each and the page {PAGE} are in {out}."
    if not plotting.available():
        where = f"The page {PAGE} is in {out}. {plotting.NEEDED}"
    console.print(where)
