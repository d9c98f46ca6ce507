"""`xcal report`: runs on one page, a single file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from xcal.errors import UserError
from xcal.report.figures import DARK, LIGHT, Figure
from xcal.report.run_figures import (
    RunView,
    Tile,
    course_figures,
    facts,
    findings_table,
    panel_rows,
    read_run,
    runs_table,
)
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
    run_figures: Sequence[Figure] = ()
    panels: Sequence[Panel] = ()
    absent: str = ""  # whose images are not on this machine
    commands: Sequence[Mapping[str, Any]] = ()


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
    order = ("fl", "centralized", "fl-dp", "agp", "agp-dp", "xcal-paper", "xcal")
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
    finished = f"{len(runs)} finished run{'s' if len(runs) > 1 else ''}"
    runs = [r for r in runs if r.result["macro_f1"] is not None]
    if not runs:
        return f"{finished}; none was measured on test images."
    by_method = {r.method: r.result for r in runs}
    if {"fl-dp", "xcal"} <= set(by_method):
        gain = by_method["xcal"]["macro_f1"] - by_method["fl-dp"]["macro_f1"]
        return (
            f"In these single runs `xcal` has a macro F1 {abs(gain):.3f}"
            f" {'above' if gain >= 0 else 'below'} static noise. One seed decides nothing: run"
            " `xcal study FILE method=fl-dp,xcal --seeds 5` for paired seeds and intervals."
        )
    best = max(runs, key=lambda r: r.result["macro_f1"])
    return f"{finished}; the highest macro F1 is {best.result['macro_f1']:.3f}, of {best.name}."


def runs_page(runs: Sequence[RunView], *, panel_images: int = 4) -> Page:
    several = "Does noise steered by explanations give better private models than static noise?"
    rows = panel_rows(runs, panel_images) if panel_images else []
    return Page(
        several if len(runs) > 1 else "What was trained, and what was promised?",
        [_runs_answer(runs)],
        runs,
        runs_table(runs),
        findings_table(runs),
        course_figures(runs),
        [Panel("The runs of this report", tuple(map(tuple, rows)))] if rows else [],
        commands=[facts(run) for run in runs],
    )


def page_html(
    page: Page,
    template: str = "report.html",
    folder: Path | None = None,
    figures: Sequence[Figure] = (),
    **more: Any,
) -> str:
    """The page as HTML. Every text from outside is escaped; scripts and images are part of it.

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


def save_report(path: Path, folders: Sequence[Path], *, panel_images: int = 4) -> Page:
    page = runs_page(gather(folders), panel_images=panel_images)
    save_page(path, page_html(page))
    return page
