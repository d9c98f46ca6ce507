"""`xcal report`: runs, or a study, on one page, a single file that needs no network."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from xcal.errors import UserError
from xcal.explain.choosing import AUTO
from xcal.federation import loopback
from xcal.federation.folder import RunFolder
from xcal.methods.registry import METHODS
from xcal.metrics.metric_registry import metric_title
from xcal.report.figures import Figure, Line
from xcal.report.panel import panel_of
from xcal.report.run_figures import (
    RunView,
    course_figures,
    facts,
    findings_table,
    read_run,
    result_figure,
    runs_table,
    spending_figures,
)
from xcal.report.template import Page, page_html, save_page
from xcal.report.words import NOTHING, Table
from xcal.studies.statistics import MEASURES, Verdict

SIMULATED = "python -m reproduce report"  # from a checkout: what reports studies' results

OnPart = Callable[[str], None]  # what is being done now


def gather(folders: Sequence[Path]) -> tuple[RunView, ...]:
    """The runs of these folders: each a run, or a folder of runs."""
    runs: list[RunView] = []
    for folder in folders:
        if (folder / "run.json").exists():
            found = [folder]
        else:
            found = sorted(p.parent for p in folder.glob("*/run.json"))
        if not found:
            studies = (folder / "cells").is_dir()
            raise UserError(
                f"{folder} holds no finished run: name a run's folder or a folder of runs."
                + (f" A study's results are reported by `{SIMULATED}`." if studies else "")
            )
        runs += [read_run(path, path.name) for path in found]
    order = list(METHODS)
    runs.sort(key=lambda r: order.index(r.method) if r.method in order else len(order))
    names = [run.name for run in runs]
    return tuple(  # folders of the same name are told apart by their parents'
        replace(r, name=f"{r.path.parent.name}/{r.name}") if names.count(r.name) > 1 else r
        for r in runs
    )


def _runs_answer(runs: Sequence[RunView]) -> str:
    """One sentence: what came out, and what was promised."""
    if len(runs) == 1:
        return _run_answer(runs[0])
    measured = [r for r in runs if r.result["macro_f1"] is not None]
    if not measured:
        return f"{len(runs)} finished runs; none was measured on test images."
    private = [r for r in measured if r.result["epsilon_target"] is not None]
    plain = [r for r in measured if r.result["epsilon_target"] is None]

    def best(some: Sequence[RunView]) -> RunView:
        return max(some, key=lambda r: r.result["macro_f1"])

    if not private:
        top = best(plain)
        return (
            f"{len(runs)} runs: `{top.name}` is best, with macro F1 {top.result['macro_f1']:.3f}."
        )
    top = best(private)
    text = (
        f"With a guarantee `{top.name}` is best, with macro F1 {top.result['macro_f1']:.3f} at ε ="
        f" {top.result['epsilon_target']:g}"
    )
    if plain:
        other = best(plain)
        text += f"; without one `{other.name}` reaches {other.result['macro_f1']:.3f}"
    return f"{text}. One seed decides nothing: `xcal study` compares over several, in pairs."


def _run_answer(run: RunView) -> str:
    r = run.result
    promise = "without a guarantee"
    if r["epsilon_target"] is not None:
        unit = r["unit"] or "unit"
        promise = f"at (ε, δ) = ({r['epsilon_target']:g}, {r['delta']:g}) per {unit}"
    elif r.get("epsilon_client") is not None:
        promise = f"at ε = {r['epsilon_client']:g} per client, the server trusted"
    what = f"`{r['method']}` on {r['data']}"
    if not run.finished:
        course = [c for x in run.rounds if (c := x.get("validation_macro_f1")) is not None]
        now = f"; validation macro F1 {course[-1]:.3f}" if course else ""
        return f"{what} trains {promise}: round {len(run.rounds)} of {r['rounds']} is done{now}."
    if r["macro_f1"] is None:
        return f"{what} was trained {promise}, and not measured on test images."
    return f"{what} reaches macro F1 {r['macro_f1']:.3f} on test images {promise}."


def _notices(runs: Sequence[RunView]) -> list[str]:
    return [
        f"{run.name}: {text}" if len(runs) > 1 else text
        for run in runs
        for text in run.result.get("notices", ())  # new in 0.1
    ]


def runs_page(
    runs: Sequence[RunView],
    *,
    panel_images: int = 4,
    maps: str = AUTO,
    progress: OnPart = lambda _: None,
) -> Page:
    """One sentence and one figure; then a question a section; details folded."""
    progress("drawing figures")
    courses, spent = course_figures(runs), spending_figures(runs)
    lead: Figure | None = result_figure(runs)
    if lead is None and courses:
        lead, *courses = courses
    panel = None
    if panel_images and all(run.finished for run in runs):
        progress("drawing where the models look")
        panel = panel_of(runs, panel_images, maps)
    several = len(runs) > 1
    return Page(
        "What came out, and what was promised?",
        [_runs_answer(runs)],
        runs,
        runs_table(runs),
        findings_table=findings_table(runs),
        lead=lead,
        runs_question="How good is each model?" if several else "How good is the model?",
        course_figures=courses,
        budget_figures=spent,
        notices=_notices(runs),
        panels=[] if panel is None else [panel],
        commands=[facts(run) for run in runs],
    )


def save_report(
    path: Path,
    folders: Sequence[Path],
    *,
    panel_images: int = 4,
    maps: str = AUTO,
    progress: OnPart = lambda _: None,
) -> Page:
    """Runs, or one study of `xcal study`, on a page at `path`."""
    progress("reading")
    if len(folders) == 1 and is_study(folders[0]):
        page = study_page(folders[0])
    else:
        page = runs_page(gather(folders), panel_images=panel_images, maps=maps, progress=progress)
    progress("writing the page")
    save_page(path, page_html(page))
    return page


# --- a run that still trains, served to this machine only -----------------------------------------


class LiveReport:
    """A server of two addresses: the page, and its figures as they are now."""

    def __init__(self, run: Path, port: int = 0, images: int = 4) -> None:
        RunFolder.find(run)  # refuses what is no run
        self._run, self._images = run, images
        self._server = loopback.serve(port, self._answer)
        self.final = threading.Event()  # the finished page was fetched
        self._page: str | None = None

    @property
    def url(self) -> str:
        return f"http://{loopback.HOSTS[0]}:{self._server.server_port}/"

    def serve(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, query: Mapping[str, str]) -> loopback.Page | None:
        if path not in ("/", "/figures.json"):
            return None
        try:
            kind, body = self._told(path)
        except (UserError, OSError):  # a file in the middle of being replaced
            return loopback.Page("Look again.\n", status=503)
        return loopback.Page(body, kind, policy=None)  # the page has its own

    def _told(self, path: str) -> tuple[str, str]:
        run = read_run(self._run, self._run.resolve().name, live=True)
        if path == "/":
            if run.finished:
                self._page = self._page or page_html(runs_page([run], panel_images=self._images))
                self.final.set()
            html = self._page or page_html(runs_page([run]), live=True)
            return "text/html; charset=utf-8", html
        page = runs_page([run], panel_images=0)
        told = {
            "figures": [figure.plotly() for figure in page.run_figures],
            "answers": list(page.answers),
            "finished": run.finished,
        }
        return "application/json", json.dumps(told)


# --- a study of one's own (`xcal study`): one figure and one table --------------------------------


COMPARISON = "comparison.csv"
Row = Mapping[str, str]


def is_study(folder: Path) -> bool:
    """Whether `xcal study` wrote its comparison here."""
    return (folder / COMPARISON).is_file()


def study_page(folder: Path) -> Page:
    """What the study's own table says, nothing computed anew."""
    source = folder / COMPARISON
    try:
        with open(source, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        raise UserError(f"{source} cannot be read: run the study again.") from None
    if not rows or "macro_f1_mean" not in rows[0]:
        raise UserError(f"{source} has no finished cells: go on with the study.")
    axes = list(rows[0])[: list(rows[0]).index("diverged")]
    moving = [a for a in axes if len({row[a] for row in rows}) > 1] or axes[:1]
    named = [(", ".join(f"{a} = {row[a]}" for a in moving), row) for row in rows]
    compared = [(name, row) for name, row in named if row["macro_f1_low"]]
    measured = [(name, row) for name, row in named if row["macro_f1_mean"]]
    return Page(
        f"{folder.name}: what makes a difference?",
        [_differing(compared) if compared else _highest(measured)],
        runs_table=_study_table(moving, rows),
        lead=_difference_figure(compared) if compared else _mean_figure(measured),
        runs_question="What was measured?",
        commands=[{"name": folder.name, "command": str(source), "commit": None, "versions": {}}],
    )


def _differing(compared: Sequence[tuple[str, Row]]) -> str:
    shows = [(name, row) for name, row in compared if Verdict(row["macro_f1_verdict"]).shows]
    told = "; ".join(
        f"{name} is {row['macro_f1_verdict']} ({float(row['macro_f1_difference']):+.3f})"
        for name, row in shows
    )
    count = f"{len(shows)} of {len(compared)} comparisons show a difference in macro F1"
    return f"{count}{': ' + told if told else ''}."


def _highest(measured: Sequence[tuple[str, Row]]) -> str:
    if not measured:
        return "None of its cells was measured."
    name, row = max(measured, key=lambda one: float(one[1]["macro_f1_mean"]))
    return f"Highest mean macro F1: {name}, {float(row['macro_f1_mean']):.3f}."


def _difference_figure(compared: Sequence[tuple[str, Row]]) -> Figure:
    values = [float(row["macro_f1_difference"]) for _, row in compared]
    pairs = list(zip(values, compared, strict=True))
    low = tuple(v - float(row["macro_f1_low"]) for v, (_, row) in pairs)
    high = tuple(float(row["macro_f1_high"]) - v for v, (_, row) in pairs)
    words = "; ".join(f"{name}: {v:+.3f}" for v, (name, _) in pairs)
    names = tuple(name for name, _ in compared)
    return Figure(
        "differences",
        "Macro F1 less that of the first value, paired by seed",
        f"Differences of macro F1 with 95 % intervals: {words}.",
        "difference of macro F1",
        "",
        (Line("difference", names, tuple(values), 0, low, high, mode="markers"),),
        across=True,
        zero=True,
    )


def _mean_figure(measured: Sequence[tuple[str, Row]]) -> Figure | None:
    if not measured:
        return None
    names = tuple(name for name, _ in measured)
    spread = tuple(float(row["macro_f1_deviation"] or 0) for _, row in measured)
    values = tuple(float(row["macro_f1_mean"]) for _, row in measured)
    words = "; ".join(f"{name}: {v:.3f}" for name, v in zip(names, values, strict=True))
    return Figure(
        "means",
        "Mean macro F1 and its standard deviation over seeds",
        f"Mean macro F1: {words}.",
        "macro F1",
        "",
        (Line("mean", names, values, 0, spread, spread, mode="markers"),),
        across=True,
    )


def _study_table(moving: Sequence[str], rows: Sequence[Row]) -> Table:
    shown = [m for m in MEASURES if any(row[f"{m}_mean"] for row in rows)]
    paired = any(row["macro_f1_low"] for row in rows)
    head = [", ".join(moving), "seeds"]
    for measure in shown:
        head += [metric_title(measure), *(["difference"] if paired else [])]
    lines = []
    for row in rows:
        diverged = f", {row['diverged']} diverged" if row["diverged"] != "0" else ""
        seeds = (row["macro_f1_seeds"] or NOTHING) + diverged
        cells = [", ".join(row[a] for a in moving), seeds]
        for measure in shown:
            cells.append(_mean_text(row, measure))
            cells += [_difference_text(row, measure)] if paired else []
        lines.append(tuple(cells))
    note = "Mean ± standard deviation over seeds."
    if paired:
        note += (
            " Differences from the first value, paired by seed, with 95 % intervals that resample"
            " seeds and whole groups of test images."
        )
    return Table("All of it", tuple(head), tuple(lines), note)


def _mean_text(row: Row, measure: str) -> str:
    mean, spread = row[f"{measure}_mean"], row[f"{measure}_deviation"]
    beside = f" ± {float(spread):.3f}" if spread else ""
    return f"{float(mean):.3f}{beside}" if mean else NOTHING


def _difference_text(row: Row, measure: str) -> str:
    if not row[f"{measure}_low"]:
        return NOTHING
    mean, low, high = (float(row[f"{measure}_{what}"]) for what in ("difference", "low", "high"))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], {row[f'{measure}_verdict']}"
