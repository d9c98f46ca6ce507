"""Finished runs for the report: their numbers, their courses, and where their models look."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from xcal.data.normalize import to_tensor
from xcal.dp.ledger.analysis import spent_text
from xcal.errors import UserError
from xcal.explain.choosing import AUTO
from xcal.explain.overlay import overlay, picture
from xcal.federation.files import read_json
from xcal.federation.folder import RunFolder
from xcal.federation.preflight import why_unexplained
from xcal.federation.setup import may_measure
from xcal.methods.registry import method_of, name_today
from xcal.report.figures import DASHES, Figure, Line, thinned, tone
from xcal.report.mapping import map_of_run
from xcal.report.panel import Entry, choose_images, image_views, shared_peak
from xcal.report.runs import load_data, load_run
from xcal.report.words import NOTHING, Table, epsilon_text

# Beyond so many clients a budget figure is a thicket: the others are said to be left out.
CLIENTS_SHOWN = 10


@dataclass(frozen=True)
class RunView:
    """What the report needs of a finished run."""

    name: str
    path: Path
    result: dict[str, Any]
    rounds: tuple[dict[str, Any], ...]
    trace: tuple[dict[str, Any], ...]
    statement: str
    opening: tuple[str, ...] = ()  # the statement's first sentences, for a reader in a hurry
    finished: bool = True

    @property
    def method(self) -> str:
        return str(self.result["method"])


def read_run(path: Path, name: str, *, live: bool = False) -> RunView:
    """A finished run; `live`, also one that still trains, as far as it has come."""
    folder = RunFolder.find(path)
    result = folder.result
    if result is None and not live:
        raise UserError(
            f"The run in {path} is not finished: continue it with `xcal run --resume {path}`,"
            f" or watch it with `xcal report --live {path}`."
        )
    statement, told = path / "statement.txt", path / "statement.json"
    rounds = tuple(folder.read_lines("rounds.jsonl"))
    return RunView(
        name,
        path,
        _so_far(folder, rounds) if result is None else result,
        rounds,
        tuple(folder.read_lines("trace.jsonl")),
        statement.read_text(encoding="utf-8") if statement.exists() else "",
        tuple(read_json(told).get("opening", ())) if told.exists() else (),
        result is not None,
    )


def _so_far(folder: RunFolder, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a result would say of a run that has none yet."""
    experiment = folder.experiment
    private = method_of(experiment).private
    clients = rounds[-1]["clients"] if rounds else []
    return {
        **dict.fromkeys(("macro_f1", "road", "epsilon_paper", "mean_sigma", "seconds")),
        "method": name_today(experiment),
        "data": experiment.data,
        "network": experiment.network,
        "epsilon_target": experiment.epsilon if private else None,
        "epsilon_nominal": None,
        "delta": experiment.delta if private else None,
        "unit": experiment.unit,
        "rounds": experiment.rounds,
        "clients": [{**c, "id": c["client"], "steps": c.get("steps") or 0} for c in clients],
    }


def _text(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}".replace("-", "−")


def _masked_text(result: Mapping[str, Any]) -> str:
    promised = result.get("epsilon_masked")
    return NOTHING if promised is None else f"{epsilon_text(promised)}, {result['honest']}"


def runs_table(runs: Sequence[RunView]) -> Table:
    # What a trusted server promises per client is never put into one column with record level.
    central = any(run.result.get("epsilon_client") is not None for run in runs)
    masked = any(run.result.get("epsilon_masked") is not None for run in runs)
    rows = []
    for run in runs:
        r = run.result
        rows.append(
            (
                run.name,
                str(r["data"]),
                str(r["network"]),
                _text(r["macro_f1"]),
                _text(r["road"]),
                epsilon_text(r["epsilon_target"]),
                *((epsilon_text(r.get("epsilon_client")),) if central else ()),
                *((_masked_text(r),) if masked else ()),
                _text(r["epsilon_paper"], 2),
                r["unit"] or NOTHING,
                _text(r["mean_sigma"]),
                str(sum(c["steps"] for c in r["clients"])),
                _text(r["seconds"], 0),
            )
        )
    head = (
        "run",
        "data",
        "network",
        "macro F1",
        "ROAD",
        "ε proved",
        *(("ε per client, server trusted",) if central else ()),
        *(("ε under masks, honest sites",) if masked else ()),
        "ε paper",
        "unit",
        "mean σ",
        "steps",
        "seconds",
    )
    note = (
        "Macro F1 and ROAD on test images. ε proved: for what ran, against the server; ∞ is no"
        " guarantee. ε paper: by the paper's own accounting. One run each: a difference between two"
        " runs proves nothing."
    )
    return Table("Runs", head, tuple(rows), note)


def findings_table(runs: Sequence[RunView]) -> Table | None:
    """AUROC by finding, of runs that tell several at once; None where there are none."""
    told = [(run.name, run.result.get("classification") or {}) for run in runs]
    several = [(name, found) for name, found in told if found.get("auroc_per_finding")]
    if not several:
        return None
    names = list(dict.fromkeys(n for _, found in several for n in found["auroc_per_finding"]))
    rows = [
        (run, _text(found["auroc"]), *(_text(found["auroc_per_finding"].get(n)) for n in names))
        for run, found in several
    ]
    note = "AUROC on test images, of each finding by itself, and their mean; 0.5 is chance."
    return Table("AUROC by finding", ("run", "mean", *names), tuple(rows), note)


def course_figures(runs: Sequence[RunView]) -> list[Figure]:
    """F1 and ROAD by round."""
    made = []
    for key, label in (
        ("validation_macro_f1", "validation macro F1"),
        ("road_validation", "validation ROAD"),
    ):
        lines: list[Line] = []
        words: list[str] = []
        for number, run in enumerate(runs):
            points = [(r["round"] + 1, r[key]) for r in run.rounds if r.get(key) is not None]
            if points:
                x, y = zip(*points, strict=True)
                lines.append(Line(run.name, x, y, _tone(runs, number)))
                words.append(f"{run.name} from {y[0]:.3f} to {y[-1]:.3f}")
        if lines:
            made.append(
                Figure(
                    f"rounds-{key.replace('_', '-')}",
                    f"{label[:1].upper()}{label[1:]} by round",
                    f"{label} after each round: {'; '.join(words)}.",
                    "round",
                    label,
                    tuple(lines),
                )
            )
    return made


def spending_figures(runs: Sequence[RunView]) -> list[Figure]:
    """Each client's budget as it was spent, then σ and signal by step."""
    budget = _budget_figure(runs)
    return [*([budget] if budget else []), *_step_figures(runs)]


def result_figure(runs: Sequence[RunView]) -> Figure | None:
    """Test macro F1 of several runs, one point each; None where fewer than two were measured."""
    known = [
        (i, r, float(r.result["macro_f1"]))
        for i, r in enumerate(runs)
        if r.result["macro_f1"] is not None
    ]
    if len(known) < 2:
        return None
    lines = []
    for number, run, value in known:
        epsilon = epsilon_text(run.result["epsilon_target"])
        place = f"{run.name}, ε = {epsilon}"
        lines.append(Line(run.name, (place,), (value,), _tone(runs, number), mode="markers"))
    words = "; ".join(f"{line.x[0]}: {line.y[0]:.3f}" for line in lines)
    return Figure(
        "result",
        "Test macro F1 of every run",
        f"Test macro F1: {words}.",
        "test macro F1",
        "",
        tuple(lines),
        across=True,
        caption="One run each: a difference between two of them proves nothing.",
    )


def _tone(runs: Sequence[RunView], number: int) -> int:
    """A method's own color; where runs share a method, one color after the other."""
    methods = [run.method for run in runs]
    return tone(methods[number]) if len(set(methods)) == len(methods) else number % 8


def _by_client(run: RunView) -> dict[str, list[dict[str, Any]]]:
    clients: dict[str, list[dict[str, Any]]] = {}
    for line in run.trace:
        clients.setdefault(str(line["client"]), []).append(line)
    return clients


def _step_figures(runs: Sequence[RunView]) -> list[Figure]:
    made = []
    for key, label, alt in (
        ("sigma", "noise multiplier σ", "The noise multiplier of each step"),
        ("signal", "released signal", "The released signal of the steps that carry one"),
    ):
        lines, words = [], []
        for number, run in enumerate(runs):
            for client, steps in list(_by_client(run).items())[:1]:
                points = [(i + 1, s[key]) for i, s in enumerate(steps) if s.get(key) is not None]
                if not any(value for _, value in points):  # without noise there is none to show
                    continue
                x, y = zip(*thinned(points), strict=True)
                lines.append(
                    Line(
                        run.name,
                        x,
                        y,
                        _tone(runs, number),
                        mode="lines",
                        label=f"{run.name}, client {client}",
                    )
                )
                words.append(f"{run.name} between {min(y):.3f} and {max(y):.3f}")
        if lines:
            made.append(
                Figure(
                    f"steps-{key}",
                    f"{label[:1].upper()}{label[1:]} over the steps of client 0",
                    f"{alt}: {'; '.join(words)}.",
                    "step",
                    label,
                    tuple(lines),
                    caption="All of it was released with noise, or follows from what was."
                    + (
                        " A mean of scores, so noise carries it outside 0 to 1."
                        if key == "signal"
                        else ""
                    ),
                )
            )
    return made


def _budget_figure(runs: Sequence[RunView]) -> Figure | None:
    lines, words = [], []
    for number, run in enumerate(runs):
        clients = _by_client(run)
        spent = {str(c["id"]): c.get("epsilon_spent") for c in run.result["clients"]}
        for k, (client, steps) in enumerate(list(clients.items())[:CLIENTS_SHOWN]):
            points = [
                (i + 1, s["share_spent"])
                for i, s in enumerate(steps)
                if s.get("share_spent") is not None
            ]
            if any(value for _, value in points):
                x, y = zip(*thinned(points, 120), strict=True)
                lines.append(
                    Line(
                        run.name,
                        x,
                        y,
                        _tone(runs, number),
                        style=k % len(DASHES),
                        mode="lines",
                        label=f"{run.name}, client {client}",
                    )
                )
                told = spent_text(spent.get(client), y[-1])
                words.append(f"{run.name}, client {client}: {told} in {x[-1]} steps")
    if not lines:
        return None
    return Figure(
        "budget",
        "Each client's budget as it was spent",
        "Share of the privacy budget spent after each step, and ε by the odometer at the end."
        f" {'; '.join(words)}.",
        "step",
        "share spent, Σρ/R",
        tuple(lines),
        caption="1 is the whole budget; the filter lets nobody past it. The share is not that of ε,"
        " most of which goes with the first steps.",
    )


# --- where the models look ------------------------------------------------------------------------


def data_uri(drawn: Image.Image) -> str:
    stream = io.BytesIO()
    drawn.save(stream, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Tile:
    """One picture of the panel."""

    uri: str
    alt: str
    caption: str
    verdict: str  # right, wrong or nothing


def panel_rows(
    runs: Sequence[RunView], count: int = 4, maps: str = AUTO
) -> tuple[list[list[Tile]], str]:
    """One row an image: the image, every run's map over it, on one scale; how maps were made."""
    entries = [Entry(r.method, r.result["epsilon_target"], load_run(r.path)) for r in runs]
    runs, entries = _explained(runs, entries)
    if not entries:
        return [], ""
    first = entries[0].run
    if first.multi_label:
        return [], ""
    like = [
        (r, e)
        for r, e in zip(runs, entries, strict=True)
        if (e.run.experiment.data, e.run.experiment.pixels, e.run.classes)
        == (first.experiment.data, first.experiment.pixels, first.classes)
    ]
    # Images of a real population are shown only where somebody agreed to it, in every run.
    if not all(may_measure(entry.run.experiment) for _, entry in like):
        return [], ""
    images = choose_images(load_data(first).test, count, len(first.classes))
    if not len(images):
        return [], ""
    choices = [map_of_run(entry.run, maps) for _, entry in like]
    views = [
        image_views(entry.run, images, choice.method)
        for (_, entry), choice in zip(like, choices, strict=True)
    ]
    peak = shared_peak(views)
    colors = to_tensor(np.asarray(images.pixels), mean=(0, 0, 0), std=(1, 1, 1))
    side = max(128, images.pixels.shape[1])
    rows = []
    for i in range(len(images)):
        truth = first.classes[int(images.labels[i])]
        row = [Tile(data_uri(picture(colors[i], side=side)), f"Test image of {truth}", truth, "")]
        for (run, _), seen in zip(like, views, strict=True):
            said = first.classes[seen[i].predicted]
            drawn = overlay(colors[i], seen[i].saliency, side=side, peak=peak)
            row.append(
                Tile(
                    data_uri(drawn),
                    f"The same image under {run.name}, its map laid over it; it answers {said}",
                    f"{run.name}: {said}, {100 * seen[i].confidence:.0f} %",
                    "right" if said == truth else "wrong",
                )
            )
        rows.append(row)
    told = (f"{run.name}: {c.sentence()}" for (run, _), c in zip(like, choices, strict=True))
    return rows, " ".join(told)


def _explained(
    runs: Sequence[RunView], entries: Sequence[Entry]
) -> tuple[list[RunView], list[Entry]]:
    """Those whose network says where it looked."""
    both = [
        (run, entry)
        for run, entry in zip(runs, entries, strict=True)
        if why_unexplained(entry.run.model, entry.run.experiment.pixels) is None
    ]
    return [run for run, _ in both], [entry for _, entry in both]


def facts(run: RunView) -> dict[str, Any]:
    """Where it came from: for the report's last section."""
    about = read_json(run.path / "run.json")
    return {
        "name": run.name,
        "command": about.get("command"),
        "commit": about.get("commit"),
        "versions": about.get("versions", {}),
    }
