"""`xcal report`: runs on one page, a single file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from xcal.errors import UserError
from xcal.explain.choosing import AUTO
from xcal.report.figures import DARK, LIGHT, Figure
from xcal.report.run_figures import (
    RunView,
    Tile,
    course_figures,
    facts,
    findings_table,
    panel_rows,
    read_run,
    result_figure,
    runs_table,
    spending_figures,
)
from xcal.report.study_view import is_study, study_view
from xcal.report.words import Table
from xcal.studies.statistics import Verdict

SIMULATED = "python -m reproduce report"  # from a checkout: what reports studies' results


@dataclass(frozen=True)
class Panel:
    """Pictures of one heading, row by row."""

    title: str
    rows: tuple[tuple[Tile, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What a page says, whatever it is about; a template that extends the page's may take more."""

    question: str
    answers: Sequence[str]
    runs: Sequence[RunView] = ()
    runs_table: Table | None = None
    findings_table: Table | None = None  # AUROC by finding, where runs tell several at once
    lead: Figure | None = None  # the one figure beside the answer
    runs_question: str = "How good is each model?"
    course_figures: Sequence[Figure] = ()
    budget_figures: Sequence[Figure] = ()
    notices: Sequence[str] = ()
    panels: Sequence[Panel] = ()
    absent: str = ""  # whose images are not on this machine
    commands: Sequence[Mapping[str, Any]] = ()

    @property
    def run_figures(self) -> list[Figure]:
        """All of the runs' figures, in the order they stand on the page."""
        lead = [] if self.lead is None else [self.lead]
        return [*lead, *self.course_figures, *self.budget_figures]


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
    runs.sort(key=lambda r: _rank(r.method))
    return tuple(_named(runs))


def _rank(method: str) -> int:
    order = ("fl", "centralized", "fl-dp", "agp", "agp-dp", "xcal-paper", "xcal-steered", "xcal")
    return order.index(method) if method in order else len(order)


def _named(runs: Sequence[RunView]) -> list[RunView]:
    """Folders of the same name are told apart by their parents'."""
    names = [run.name for run in runs]
    return [
        RunView(**{**r.__dict__, "name": f"{r.path.parent.name}/{r.name}"})
        if names.count(r.name) > 1
        else r
        for r in runs
    ]


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
    result = result_figure(runs)
    if result is not None:
        lead: Figure | None = result
    else:
        lead, courses = (courses[0], courses[1:]) if courses else (None, [])
    finished = all(run.finished for run in runs)
    rows: list[list[Tile]] = []
    told = ""
    if panel_images and finished:
        progress("drawing where the models look")
        rows, told = panel_rows(runs, panel_images, maps)
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
        panels=[Panel("The runs of this report", tuple(map(tuple, rows)), told)] if rows else [],
        commands=[facts(run) for run in runs],
    )


def page_html(
    page: Page,
    template: str = "report.html",
    folder: Path | None = None,
    figures: Sequence[Figure] = (),
    live: bool = False,
    **more: Any,
) -> str:
    """The page as HTML. Every text from outside is escaped; scripts and images are part of it.

    `live`: it asks the server that it came from for what is new.

    A `template` in another `folder` may extend `report.html`, and takes `more`; its own `figures`
    are drawn by the page's script as those of the runs are.
    """
    from plotly.offline import get_plotlyjs

    everything = [*page.run_figures, *figures]
    loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader("xcal", "report")]
    if folder is not None:
        loaders.insert(0, jinja2.FileSystemLoader(folder))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["code"] = _code
    environment.filters["cell"] = _cell
    environment.filters["class_of"] = _class_of
    return environment.get_template(template).render(
        page=page,
        figures=_script_json([f.plotly() for f in everything]),
        palettes=_script_json({"light": LIGHT, "dark": DARK}),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")) if everything else "",
        light=LIGHT,
        dark=DARK,
        live=live,
        **more,
    )


def _class_of(cell: object) -> str:
    """A verdict that shows something stands out."""
    return f"is-{cell}" if isinstance(cell, Verdict) and cell.shows else ""


def _script_json(value: Any) -> Markup:
    """JSON that can stand inside a script: nothing in it can close the element."""
    text = json.dumps(value, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _code(text: str) -> Markup:
    """`names` in back quotes become code; everything else is escaped."""
    parts = str(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts)
    )


# Spaces at which a cell may break: not inside brackets, nor beside a sign that joins two numbers.
_BREAK = re.compile(r" (?![^\[(]*[\])])(?![±=%])(?<![±=] )")


def _cell(text: str) -> Markup:
    """As `_code`; a cell that must break does so between a value, its interval and its record."""
    made = Markup("")
    for i, part in enumerate(str(text).split("`")):
        if i % 2:
            made += Markup("<code>{}</code>").format(part)
            continue
        pieces = _BREAK.split(part)
        made += Markup(" ").join(
            Markup('<span class="keep">{}</span>').format(p) if re.search("[ -]", p) else p
            for p in pieces
        )
    return made


def save_page(path: Path, html: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(f"The report {path} was not saved: {error.strerror}.") from None


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
        shown = study_view(folders[0])
        page = Page(
            shown.question,
            [shown.answer],
            runs_table=shown.table,
            lead=shown.figure,
            runs_question="What was measured?",
            commands=shown.commands,
        )
    else:
        page = runs_page(gather(folders), panel_images=panel_images, maps=maps, progress=progress)
    progress("writing the page")
    save_page(path, page_html(page))
    return page
