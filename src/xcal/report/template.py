"""What a report's page is, and how it is written: a single file that needs no network."""

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
from xcal.report.figures import DARK, LIGHT, Figure
from xcal.report.words import Table, percent
from xcal.studies.statistics import Verdict


@dataclass(frozen=True)
class Tile:
    """One picture of a panel."""

    uri: str
    alt: str
    caption: str
    verdict: str  # right, wrong or nothing


@dataclass(frozen=True)
class Panel:
    """Pictures of one heading, row by row."""

    title: str
    rows: tuple[tuple[Tile, ...], ...]
    note: str = ""
    choices: tuple[str, ...] = ()  # which map every run is shown by, and why


@dataclass(frozen=True)
class Page:
    """What a page says, whatever it is about; a template that extends the page's may take more."""

    question: str
    answers: Sequence[str]
    runs: Sequence[Any] = ()  # `RunView`s
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
    return render(
        template,
        folder,
        page=page,
        figures=_script_json([f.plotly() for f in everything]),
        palettes=_script_json({"light": LIGHT, "dark": DARK}),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")) if everything else "",
        light=LIGHT,
        dark=DARK,
        live=live,
        **more,
    )


def render(template: str, folder: Path | None = None, **values: Any) -> str:
    """A template of this package, or of another folder, as HTML; every text is escaped."""
    loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader("xcal", "report")]
    if folder is not None:
        loaders.insert(0, jinja2.FileSystemLoader(folder))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"code": _code, "cell": _cell, "class_of": _class_of, "percent": percent}
    return environment.get_template(template).render(**values)


def _class_of(cell: object) -> str:
    """A verdict that shows something stands out."""
    return f"is-{cell}" if isinstance(cell, Verdict) and cell.shows else ""


def _script_json(value: Any) -> Markup:
    """JSON that can stand inside a script: nothing in it can close the element."""
    text = json.dumps(value, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# Spaces at which a cell may break: not inside brackets, nor beside a sign that joins two numbers.
_BREAK = re.compile(r" (?![^\[(]*[\])])(?![±=%])(?<![±=] )")


def _code(text: str, plain: Callable[[str], str] = str) -> Markup:
    """`names` in back quotes become code; everything else is escaped."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else plain(part)
        for i, part in enumerate(str(text).split("`"))
    )


def _cell(text: str) -> Markup:
    """As `_code`; a cell that must break does so between a value, its interval and its record."""

    def kept(part: str) -> Markup:
        return Markup(" ").join(
            Markup('<span class="keep">{}</span>').format(p) if re.search("[ -]", p) else p
            for p in _BREAK.split(part)
        )

    return _code(text, kept)


def save_page(path: Path, html: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(f"The report {path} was not saved: {error.strerror}.") from None
