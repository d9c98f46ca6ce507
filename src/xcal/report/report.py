"""`xcal report`: runs and studies on one page, a single file that needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
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
    panel_rows,
    read_run,
    runs_table,
)
from xcal.report.study_courses import PlaceCourse, courses_of
from xcal.report.study_figures import figures_of, not_scaled
from xcal.report.study_panel import StudyPanel, absent_note, study_panels
from xcal.studies.analysis import Place
from xcal.studies.scales import SCALES
from xcal.studies.store import Results
from xcal.studies.tables import StudyView, view
from xcal.studies.whole import whole_grids
from xcal.studies.wording import Table

SHOWN = ("privacy-utility", "ablation", "efficiency", "clients", "overhead", "units")


@dataclass(frozen=True)
class StudySection:
    view: StudyView
    figures: tuple[Figure, ...]
    note: str = ""  # why there is no figure where one would be looked for
    courses: tuple[PlaceCourse, ...] = ()

    @property
    def every_figure(self) -> tuple[Figure, ...]:
        return (*self.figures, *(f for c in self.courses for f in c.figures))


@dataclass(frozen=True)
class Material:
    """All that stands in the folders that were named."""

    runs: tuple[RunView, ...]
    studies: tuple[StudySection, ...]
    commands: tuple[dict[str, Any], ...]  # of the studies' cells
    orphans: int  # cells that no study of this version declares
    panels: tuple[StudyPanel, ...] = ()


def gather(folders: Sequence[Path], *, panels: bool = True) -> Material:
    """A run, a folder of runs, or a folder of results; each as often as one likes."""
    runs: list[RunView] = []
    studies: list[StudySection] = []
    commands: list[dict[str, Any]] = []
    orphans, drawn = 0, list[StudyPanel]()
    for folder in folders:
        found = False
        if (folder / "run.json").exists():
            runs.append(read_run(folder, folder.name))
            found = True
        elif folder.is_dir():
            for inner in sorted(p.parent for p in folder.glob("*/run.json")):
                runs.append(read_run(inner, inner.name))
                found = True
        results = Results(folder)
        for scale in results.scales():
            sections, declared = _sections(results, scale)
            studies += sections
            cells = results.all(scale)
            orphans += sum(c.id not in declared for c in cells)
            commands += [
                {
                    "name": "study",
                    "command": c.values["command"],
                    "commit": c.values["commit"],
                    "versions": c.values["versions"],
                }
                for c in cells
            ]
            found = found or bool(cells)
            if panels and scale in SCALES:
                drawn += study_panels(results, scale)
        if not found:
            raise UserError(
                f"{folder} holds no finished run and no results: name a run's folder, a folder of"
                " runs or a results folder."
            )
    runs.sort(key=lambda r: _rank(r.method))
    return Material(
        tuple(_named(runs)), tuple(studies), tuple(_distinct(commands)), orphans, tuple(drawn)
    )


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


def _sections(results: Results, scale: str) -> tuple[list[StudySection], set[str]]:
    """The studies' sections, and the cells that belong to any study."""
    views, declared = [], set[str]()
    if scale not in SCALES:  # of another version
        return [], declared
    for study, grid in whole_grids(scale, results).items():
        declared |= {cell.id for cell in grid.cells}
        if study not in SHOWN:
            continue
        seen = view(grid, results)
        if seen.series:
            views.append(seen)
    views.sort(key=lambda v: SHOWN.index(v.study))
    sections, told = [], set[Place]()
    for seen in views:
        # Studies share cells: a place's course stands with the first study that went there.
        places = dict.fromkeys(
            s.place for s in seen.series if s.place.epsilon is not None and s.place not in told
        )
        told |= set(places)
        note = not_scaled(seen) if seen.study == "clients" else ""
        figures = tuple(figures_of(seen, results))
        sections.append(StudySection(seen, figures, note, tuple(courses_of(seen, places))))
    return sections, declared


def _distinct(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(v, sort_keys=True): v for v in values}.values())


def answer_of(material: Material) -> tuple[str, list[str]]:
    """The page's question and its answers, one sentence or two each."""
    answers = [*_in_a_word(material.studies), *(s.view.answer for s in material.studies)]
    if not answers and material.runs:
        answers.append(_runs_answer(material.runs))
    question = (
        "Does noise steered by explanations give better private models than static noise?"
        if len(material.studies) or len(material.runs) > 1
        else "What was trained, and what was promised?"
    )
    return question, answers


def _in_a_word(studies: Sequence[StudySection]) -> list[str]:
    """Yes, no, or not shown: what the main comparison of `xcal` with static noise comes to."""
    verdicts = [
        row[4]
        for s in studies
        if s.view.study == "privacy-utility"
        for table in s.view.tables
        for row in table.rows
        if row[0] == "`xcal`" and row[4] not in ("–", "one seed")
    ]
    if not verdicts:
        return []
    better, worse = verdicts.count("better"), verdicts.count("worse")
    if better and not worse:
        word = "Yes" if better == len(verdicts) else "In some of the settings that were run"
    elif worse and not better:
        word = "No, it is worse" if worse == len(verdicts) else "No, and in some settings worse"
    else:
        word = "It depends on the setting" if better else "Not shown"
    return [f"{word}, as far as macro F1 goes and as far as the grid was run."]


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
            " `xcal study privacy-utility --scale laptop` for paired seeds and intervals."
        )
    best = max(runs, key=lambda r: r.result["macro_f1"])
    return f"{finished}; the highest macro F1 is {best.result['macro_f1']:.3f}, of {best.name}."


def report_page(material: Material, *, panel_images: int = 4) -> str:
    """The page as HTML. Every text from outside is escaped; scripts and images are part of it."""
    from plotly.offline import get_plotlyjs

    figures = course_figures(material.runs) if material.runs else []
    everything = [*figures, *(f for s in material.studies for f in s.every_figure)]
    question, answers = answer_of(material)
    template = files("xcal.report").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["code"] = _code
    environment.filters["cell"] = _cell
    rows: list[list[Tile]] = panel_rows(material.runs, panel_images) if panel_images else []
    return environment.from_string(template).render(
        question=question,
        answers=answers,
        runs=material.runs,
        runs_table=runs_table(material.runs) if material.runs else None,
        run_figures=figures,
        studies=material.studies,
        panels=[
            *([StudyPanel("The runs of this report", tuple(map(tuple, rows)))] if rows else []),
            *(p for p in material.panels if not p.absent),
        ],
        absent=absent_note(material.panels),
        commands=[*(facts(r) for r in material.runs), *material.commands],
        orphans=material.orphans,
        figures=_script_json([f.plotly() for f in everything]),
        palettes=_script_json({"light": LIGHT, "dark": DARK}),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")) if everything else "",
        light=LIGHT,
        dark=DARK,
    )


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


def save_report(path: Path, folders: Sequence[Path], *, panel_images: int = 4) -> Material:
    material = gather(folders, panels=panel_images > 0)
    page = report_page(material, panel_images=panel_images)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"The report {path} was not saved: {error.strerror}.") from None
    return material


__all__ = ["Material", "Table", "gather", "report_page", "save_report"]
