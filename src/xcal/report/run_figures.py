"""Finished runs for the report: their numbers and their courses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from xcal.dp.ledger.analysis import spent_text
from xcal.errors import UserError
from xcal.federation.files import read_json
from xcal.federation.folder import RunFolder
from xcal.methods.registry import method_of, name_today
from xcal.report.figures import DASHES, Figure, Line, thinned, tone
from xcal.report.words import NOTHING, Table, epsilon_text, number_text

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


def _masked_text(result: Mapping[str, Any]) -> str:
    promised = result.get("epsilon_masked")
    return NOTHING if promised is None else f"{epsilon_text(promised)}, {result['honest']}"


def runs_table(runs: Sequence[RunView]) -> Table:
    """A row a run; columns that say nothing of any run are left out."""
    columns: dict[str, Callable[[RunView, Mapping[str, Any]], str]] = {
        "run": lambda run, _: run.name,
        "data": lambda _, r: str(r["data"]),
        "network": lambda _, r: str(r["network"]),
        "macro F1": lambda _, r: number_text(r["macro_f1"]),
        "ROAD": lambda _, r: number_text(r["road"]),
        "ε proved": lambda _, r: epsilon_text(r["epsilon_target"]),
        # What a trusted server promises per client is never put into one column with record level.
        "ε per client, server trusted": lambda _, r: epsilon_text(r.get("epsilon_client")),
        "ε under masks, honest sites": lambda _, r: _masked_text(r),
        "ε paper": lambda _, r: number_text(r["epsilon_paper"], 2),
        "unit": lambda _, r: r["unit"] or NOTHING,
        "mean σ": lambda _, r: number_text(r["mean_sigma"]),
        "steps": lambda _, r: str(sum(c["steps"] for c in r["clients"])),
        "seconds": lambda _, r: number_text(r["seconds"], 0),
    }
    for key, head in (
        ("epsilon_client", "ε per client, server trusted"),
        ("epsilon_masked", "ε under masks, honest sites"),
        ("epsilon_paper", "ε paper"),
    ):
        if all(run.result.get(key) is None for run in runs):
            del columns[head]
    rows = tuple(tuple(cell(run, run.result) for cell in columns.values()) for run in runs)
    note = "Macro F1 and ROAD on test images. ε proved: against the server; ∞ is no guarantee."
    if "ε paper" in columns:
        note += " ε paper: by the paper's own accounting."
    if len(runs) > 1:
        note += " One run each: a difference between two runs proves nothing."
    return Table("Runs", tuple(columns), rows, note)


def findings_table(runs: Sequence[RunView]) -> Table | None:
    """AUROC by finding, of runs that tell several at once; None where there are none."""
    told = [(run.name, run.result.get("classification") or {}) for run in runs]
    several = [(name, found) for name, found in told if found.get("auroc_per_finding")]
    if not several:
        return None
    names = list(dict.fromkeys(n for _, found in several for n in found["auroc_per_finding"]))
    rows = [
        (run, *map(number_text, (found["auroc"], *map(found["auroc_per_finding"].get, names))))
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
        lines, words = [], []
        for number, run in enumerate(runs):
            points = _points(run.rounds, key, [r["round"] + 1 for r in run.rounds])
            if points:
                x, y = zip(*points, strict=True)
                lines.append(Line(run.name, x, y, _tone(runs, number)))
                words.append(f"{run.name} from {y[0]:.3f} to {y[-1]:.3f}")
        if lines:
            alt = f"{label} after each round: {'; '.join(words)}."
            name = f"rounds-{key.replace('_', '-')}"
            made.append(Figure(name, _by(label, "by round"), alt, "round", label, tuple(lines)))
    return made


def _points(
    records: Iterable[Mapping[str, Any]], key: str, places: Iterable[int]
) -> list[tuple[int, float]]:
    """What is known of `key`, each at its round or step."""
    return [(x, r[key]) for x, r in zip(places, records, strict=False) if r.get(key) is not None]


def _by(label: str, what: str) -> str:
    return f"{label[:1].upper()}{label[1:]} {what}"


def spending_figures(runs: Sequence[RunView]) -> list[Figure]:
    """Each client's budget as it was spent, then σ and signal by step."""
    return [*filter(None, [_budget_figure(runs)]), *_step_figures(runs)]


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
    released = "All of it was released with noise, or follows from what was."
    for key, label, alt, caption in (
        ("sigma", "noise multiplier σ", "The noise multiplier of each step", released),
        (
            "signal",
            "released signal",
            "The released signal of the steps that carry one",
            f"{released} A mean of scores, so noise carries it outside 0 to 1.",
        ),
    ):
        lines, words = [], []
        for number, run in enumerate(runs):
            for client, steps in list(_by_client(run).items())[:1]:
                points = _points(steps, key, count(1))
                if not any(value for _, value in points):  # without noise there is none to show
                    continue
                lines.append(_client_line(runs, number, client, thinned(points)))
                y = [value for _, value in thinned(points)]
                words.append(f"{run.name} between {min(y):.3f} and {max(y):.3f}")
        if lines:
            title = _by(label, "over the steps of client 0")
            told = f"{alt}: {'; '.join(words)}."
            figure = Figure(f"steps-{key}", title, told, "step", label, tuple(lines))
            made.append(replace(figure, caption=caption))
    return made


def _client_line(
    runs: Sequence[RunView],
    number: int,
    client: str,
    points: Sequence[tuple[int, float]],
    style: int = 0,
) -> Line:
    x, y = zip(*points, strict=True)
    name = runs[number].name
    label = f"{name}, client {client}"
    return Line(name, x, y, _tone(runs, number), style=style, mode="lines", label=label)


def _budget_figure(runs: Sequence[RunView]) -> Figure | None:
    lines, words = [], []
    for number, run in enumerate(runs):
        clients = _by_client(run)
        spent = {str(c["id"]): c.get("epsilon_spent") for c in run.result["clients"]}
        for k, (client, steps) in enumerate(list(clients.items())[:CLIENTS_SHOWN]):
            points = thinned(_points(steps, "share_spent", count(1)), 120)
            if any(value for _, value in points):
                lines.append(_client_line(runs, number, client, points, k % len(DASHES)))
                last, share = points[-1]
                told = spent_text(spent.get(client), share)
                words.append(f"{lines[-1].label}: {told} in {last} steps")
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


def facts(run: RunView) -> dict[str, Any]:
    """Where it came from: for the report's last section."""
    about = read_json(run.path / "run.json")
    return {
        "name": run.name,
        "command": about.get("command"),
        "commit": about.get("commit"),
        "versions": about.get("versions", {}),
    }
