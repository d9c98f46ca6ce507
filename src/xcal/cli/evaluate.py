"""`xcal evaluate`: all metrics of a run's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from xcal.cli.show import LiveProgress, make_table, number, plain_console


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
    from xcal.data.synthetic import watched
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
    _show(plain_console(), found)


def _show(console: Console, found: dict[str, Any]) -> None:
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
