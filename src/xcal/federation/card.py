"""The model card: what stands beside the weights of every run, for whoever finds them later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xcal.config import Experiment
from xcal.data.images import RECORD_GROUPS, ImageData
from xcal.federation.evaluation import Predictions
from xcal.metrics.metric_registry import METRICS

CERTAIN = 0.995  # shown as 100 %
FALL = 0.05  # of macro F1 from its best round to the last
INTENDED_USE = (
    "Research on private federated learning and on measured explanations. This is not a medical"
    " device: it has not been validated for diagnosis, screening or triage, and no decision about a"
    " person may rest on it."
)
LIMITS = (
    "Measured on test images of the same source as the training images: other hospitals, scanners,"
    " stains and populations were not looked at, and results there can be much worse.",
    "The shares of the classes in the test set are seldom those of a clinic; macro F1, accuracy and"
    " calibration change with them.",
    "A confidence is the softmax of the network, not the probability that an answer is right; the"
    " calibration error says how far the two are apart on average.",
    "An explanation shows, coarsely, what the network used, and not whether that is right in"
    " medicine.",
    "An image of something the classes do not name is given one of them all the same.",
)
LIMITS_OF_FINDINGS = (
    *LIMITS[:2],
    "A confidence is the sigmoid of the network for one finding, not the probability that it is"
    " there; the calibration error says how far the two are apart on average.",
    LIMITS[3],
    "A finding that is not named here is not told, and one that is called at a half was not tuned"
    " for any clinic.",
)
LOADING = (
    "In the folder of this card:",
    "",
    "```python",
    "import xcal",
    "",
    'trained = xcal.load(".")',
    'found = trained.predict(["image.png"])',
    "print(found.names, found.confidences, trained.classes)",
    'network, images = trained.model, trained.preprocess("image.png")[None]',
    "```",
)


def card_text(
    experiment: Experiment,
    data: ImageData,
    statement: Mapping[str, Any],
    result: Mapping[str, Any],
) -> str:
    """The card in Markdown, from what the run's own files say.

    Of the private images it tells the declared number of units and nothing else: how they spread
    over classes or groups would be a release of its own. Public splits are described in full.
    """
    sections = [
        _heading(data, result),
        _section("Intended use", [INTENDED_USE]),
        _section("Use it", LOADING),
        _section("Privacy", _privacy(statement, result)),
        _section("Measured on the test images", _metrics(data, result)),
        _section("Data", _data(experiment, data, statement, result)),
        _section("Limits", _limits(data, statement, result)),
        _section("How it was made", _making(experiment, result)),
    ]
    return "\n".join(sections)


def _heading(data: ImageData, result: Mapping[str, Any]) -> str:
    return (
        f"# {result['network']} on {_plain(data.name)}, trained by {result['method']}\n\n"
        f"An image classifier of {len(data.classes)}"
        f" {'findings, each told by itself' if data.multi_label else 'classes'}, trained over"
        f" {_count(len(result['clients']), 'client')} in"
        f" {_count(result['rounds'], 'round')}. The weights are in `model.safetensors`.\n"
    )


def _privacy(statement: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    lines = [*statement["opening"], "", statement["promise"]]
    promised = []
    if result["epsilon_target"] is not None:
        spent = [c["epsilon_spent"] for c in result["clients"] if c["epsilon_spent"] is not None]
        promised.append(
            f"Guaranteed: ε = {result['epsilon_target']:g}, δ = {result['delta']:g}, per"
            f" {result['unit']}, {result['noise']} noise."
        )
        if spent:
            promised.append(f"Odometer of the client that spent most: ε = {max(spent):.4g}.")
        if result["epsilon_paper"] is not None:
            promised.append(f"By the paper's own accounting: ε = {result['epsilon_paper']:.4g}.")
    elif result.get("epsilon_masked") is not None:
        promised.append(
            f"Guaranteed while {result['honest']} of {len(result['clients'])} sites are honest: ε"
            f" = {result['epsilon_masked']:g}, δ = {result['delta']:g}, per {result['unit']},"
            f" {result['noise']} noise shared under masks."
        )
    elif result.get("epsilon_client") is not None:
        promised += [
            f"At client level, against all but the server: ε = {result['epsilon_client']:g}, δ ="
            f" {result['delta']:g}, {result['noise']} noise.",
            "At record level, against the server: ε = ∞.",
        ]
    elif result["epsilon_nominal"] is not None:
        lines += [
            "",
            f"- Guaranteed: nothing, ε = ∞. Nominal: ε = {result['epsilon_nominal']:g},"
            f" {result['noise']} noise on part of each update.",
        ]
    if promised:
        lines += ["", *_bullets(promised)]
        lines += ["", "Not protected:", "", *_bullets(statement["not_protected"])]
    plugins = _bullets([_plain(text) for text in statement["plugins"]])
    if plugins:
        lines += ["", "Plug-ins:", "", *plugins]
    return [*lines, "", "The whole statement is in `statement.txt`."]


def _metrics(data: ImageData, result: Mapping[str, Any]) -> list[str]:
    found = result["classification"]
    values = [(metric, metric.value(result)) for metric in METRICS]
    rows = [(m.title, _number(v), m.meaning) for m, v in values if not m.of_maps]
    explained = result["explanations"]
    if explained is not None:
        count = explained["road"]["images"]
        low, high = explained["road"].get("interval") or (None, None)
        rows += [
            (m.title, _number(v), f"{m.meaning}; {count} images")
            for m, v in values
            if m.of_maps and v is not None
        ]
        if low is not None:
            rows.append(("ROAD, 95 % interval", f"{_number(low)} to {_number(high)}", ""))
        place = explained.get("localization")
        if place is not None:
            rows.append(("area of the true region", _number(place["area"]), "which chance reaches"))
    per_class = zip(
        map(_plain, data.classes),
        map(str, data.test.per_class(len(data.classes))),
        map(_number, found["sensitivity"]),
        map(_number, found["specificity"]),
        map(_number, found["auroc_per_class"]),
        strict=True,
    )
    lines = [
        *_table(("metric", f"{found['images']} test images", "what it is"), rows),
        "",
        *_table(
            (
                "finding" if data.multi_label else "class",
                "test images",
                "sensitivity",
                "specificity",
                "AUROC",
            ),
            per_class,
        ),
    ]
    if found["broken_images"]:
        lines += ["", f"On {found['broken_images']} images the network gave no finite answer."]
    return lines


def _data(
    experiment: Experiment,
    data: ImageData,
    statement: Mapping[str, Any],
    result: Mapping[str, Any],
) -> list[str]:
    grouped = data.group_name != RECORD_GROUPS
    units = [str(client["units"]) for client in result["clients"]]
    unit = data.group_name if experiment.unit == "group" and grouped else "image"
    lines = [
        f"Set: {_plain(data.name)}, {experiment.pixels}×{experiment.pixels} pixels. License:"
        f" {_plain(data.license)}.",
        f"{'Findings' if data.multi_label else 'Classes'}: {', '.join(map(_plain, data.classes))}.",
        f"Groups: images of one {data.group_name} belong together."
        if grouped
        else "Groups: none known; every image counts for itself.",
        f"Training: {' + '.join(units)} units (one unit: one {unit}), one number a client;"
        f" partition {experiment.partition}.",
    ]
    for name, images in (("Validation", data.validation), ("Test", data.test)):
        groups = f" of {len(np.unique(images.groups))} {data.group_name}s" if grouped else ""
        lines.append(f"{name}: {_count(len(images), 'image')}{groups if len(images) else ''}.")
    lines.append(f"Measured on: {_plain(statement['public_images'])}.")
    return _bullets(lines)


def _limits(data: ImageData, statement: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """What is to be feared of all such models, and of this very run."""
    found = [*(LIMITS_OF_FINDINGS if data.multi_label else LIMITS)]
    found += [*map(_plain, result.get("notices", ())), *statement["warnings"]]
    halted = [str(client["id"]) for client in result["clients"] if client["halted"]]
    if halted:
        found.append(f"The budget of client {', '.join(halted)} ended before the last round.")
    return _bullets(found)


def _making(experiment: Experiment, result: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    preset = [] if experiment.preset is None else [f"Settings: preset {experiment.preset}"]
    return _bullets(
        [
            *preset,
            f"Command: `{result['command']}`",
            f"Commit: {result['commit'] or 'not from a checkout'}",
            f"Versions: {versions}",
            f"Seed {experiment.seed}, {_count(result['threads'], 'thread')},"
            f" {result['seconds']:g} seconds. Every setting is in `experiment.toml`.",
        ]
    )


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}", "", *lines, ""])


def _bullets(items: Sequence[str]) -> list[str]:
    return [f"- {item[:1].upper()}{item[1:]}" for item in items]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return [
        f"| {' | '.join(head)} |",
        f"|{rule}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _plain(name: str) -> str:
    """A name from outside, so that it cannot break out of its line or table cell."""
    return " ".join(name.split()).replace("|", "\\|").replace("<", "&lt;")


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def notices(
    test: Predictions, classes: Sequence[str], rounds: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What to look at first: one class for all, confidences that say nothing, rounds that fall."""
    found = []
    answers = np.unique(test.predicted)
    if len(answers) == 1 and len(np.unique(test.labels)) > 1:
        found.append(
            f"The model calls every test image {classes[int(answers[0])]!r}: it learnt nothing that"
            " tells the classes apart."
        )
    if len(test.confidence) and np.nanmin(test.confidence) >= CERTAIN:
        found.append(
            "Every confidence on the test images rounds to 100 %, so they say nothing: lower lr or"
            " max_grad_norm, or use `xcal.load(…).calibrated()`."
        )
    course = [
        (r["round"] + 1, float(r["validation_macro_f1"]))
        for r in rounds  # a line that was damaged says nothing
        if type(r.get("round")) is int and type(r.get("validation_macro_f1")) in (int, float)
    ]
    if course:
        best, last = max(course, key=lambda point: point[1]), course[-1]
        if best[1] - last[1] >= FALL:
            found.append(
                f"Validation macro F1 fell from {best[1]:.2f} (round {best[0]}) to {last[1]:.2f}"
                " after the last: a lower lr, a lower average or larger batches end steadier."
            )
    return found
