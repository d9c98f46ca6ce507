"""Studies on one page, a single file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduce.analysis import Comparison, Place
from reproduce.scales import SCALES, older_note
from reproduce.store import CellResult, Results
from reproduce.study_courses import PlaceCourse, courses_of
from reproduce.study_figures import differences, figures_of, not_scaled
from reproduce.study_panel import StudyPanel, absent_note, study_panels
from reproduce.tables import StudyView, view
from reproduce.whole import whole_grids
from xcal.errors import UserError
from xcal.report.figures import Figure
from xcal.report.template import Page, Panel, page_html, save_page
from xcal.report.words import Table
from xcal.studies.grid import Grid
from xcal.studies.statistics import Verdict

SHOWN = ("privacy-utility", "ablation", "efficiency", "clients", "overhead", "units")
# What fits a screen beside its question and answer; the rest of a study is folded away.
ROWS_SHOWN, FIGURES_SHOWN = 24, 2
Watch = Callable[[Mapping[str, Grid]], Iterable[tuple[str, Grid]]]


@dataclass(frozen=True)
class StudySection:
    view: StudyView
    figures: tuple[Figure, ...]
    note: str = ""  # why there is no figure where one would be looked for
    courses: tuple[PlaceCourse, ...] = ()

    @property
    def every_figure(self) -> tuple[Figure, ...]:
        return (*self.figures, *(f for c in self.courses for f in c.figures))

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables that are seen at once: the overviews, or one that fits a screen."""
        found = self.view.overviews or self.view.tables[:1]
        return tuple(t for t in found if len(t.rows) <= ROWS_SHOWN)

    @property
    def first_figures(self) -> tuple[Figure, ...]:
        return () if self.tables else self.figures[:FIGURES_SHOWN]

    @property
    def folded_figures(self) -> tuple[Figure, ...]:
        return self.figures[len(self.first_figures) :]

    @property
    def folded_tables(self) -> tuple[Table, ...]:
        return tuple(t for t in (*self.view.overviews, *self.view.tables) if t not in self.tables)


@dataclass(frozen=True)
class Material:
    """All that stands in the folders that were named."""

    studies: tuple[StudySection, ...]
    commands: tuple[dict[str, Any], ...]
    orphans: int  # cells that no study of this version declares
    panels: tuple[StudyPanel, ...] = ()
    older: str = ""  # which cells pin less than their method uses by now


def gather(folders: Sequence[Path], *, panels: bool = True, watch: Watch | None = None) -> Material:
    """What folders of results hold; `watch` sees the studies as they are read."""
    studies: list[StudySection] = []
    cells: list[CellResult] = []
    orphans, drawn = 0, list[StudyPanel]()
    for folder in folders:
        results = Results(folder)
        found = {scale: results.all(scale) for scale in results.scales()}
        if not any(found.values()):
            raise UserError(f"{folder} holds no results: name a folder of a study's results.")
        for scale, own in found.items():
            sections, declared = _sections(results, scale, watch or (lambda grids: grids.items()))
            studies += sections
            orphans += sum(c.id not in declared for c in own)
            cells += own
            if panels and scale in SCALES:
                drawn += study_panels(results, scale)
    commands = [
        {"name": "study", **{k: c.values[k] for k in ("command", "commit", "versions")}}
        for c in cells
    ]
    return Material(
        tuple(studies), tuple(_distinct(commands)), orphans, tuple(drawn), older_note(cells)
    )


def _sections(results: Results, scale: str, watch: Watch) -> tuple[list[StudySection], set[str]]:
    """The studies' sections, and the cells that belong to any study."""
    views, declared = [], set[str]()
    if scale not in SCALES:  # of another version
        return [], declared
    for study, grid in watch(whole_grids(scale, results)):
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


def _main(studies: Sequence[StudySection]) -> list[Comparison]:
    """The comparisons of the study that the page's question is about."""
    return [c for s in studies if s.view.study == "privacy-utility" for c in s.view.comparisons]


def in_a_word(studies: Sequence[StudySection]) -> list[str]:
    """Yes, no, or not shown: what the main comparison with static noise comes to."""
    verdicts = [
        c.f1.verdict
        for c in _main(studies)
        if c.series.method == "xcal-steered" and c.f1.verdict is not Verdict.ONE_SEED
    ]
    if not verdicts:
        return []
    better, worse = verdicts.count(Verdict.BETTER), verdicts.count(Verdict.WORSE)
    if better and not worse:
        word = "Yes" if better == len(verdicts) else "In some of the settings that were run"
    elif worse and not better:
        word = "No, it is worse" if worse == len(verdicts) else "No, and in some settings worse"
    else:
        word = "It depends on the setting" if better else "Not shown"
    return [
        f"{word}, as far as macro F1 goes and as far as the grid was run: in {len(verdicts)}"
        f" comparisons at the same ε `xcal-steered` is better in {better} and worse in {worse}."
    ]


def report_page(material: Material) -> str:
    answers = in_a_word(material.studies)
    page = Page(
        "Does noise steered by explanations give better private models than static noise?",
        answers or [s.view.answer for s in material.studies[:1]],
        lead=differences(_main(material.studies)),
        panels=[Panel(p.title, p.rows, p.note) for p in material.panels if not p.absent],
        absent=absent_note(material.panels),
        commands=material.commands,
    )
    return page_html(
        page,
        "studies.html",
        Path(__file__).parent,
        [f for s in material.studies for f in s.every_figure],
        studies=material.studies,
        orphans=material.orphans,
        older=material.older,
    )


def save_report(path: Path, material: Material) -> None:
    save_page(path, report_page(material))
