"""The report in a real browser: it opens, draws, answers to hands and keys, and fetches nothing.

Run by `make test-web`. Needs playwright (the extra `web`) and a Chromium: the system's, or the one
that XCAL_CHROMIUM names. XCAL_SHOTS names a folder for pictures of what was seen.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xcal
from made_up import made_up_results
from reproduce import report as studies
from reproduce.__main__ import RESULTS
from support import TINY
from xcal.report.report import gather, page_html, runs_page, save_page

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `web` is not installed")
CHROMIUM = os.environ.get("XCAL_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    for method in ("fl", "fl-dp", "xcal-steered"):
        xcal.run(base / "runs" / method, method=method, **TINY, signal_every=1)
    made_up_results(base / "results", seeds=2)
    # All that can stand on a page, on one: runs, and a study's sections.
    found = studies.gather([base / "results"])
    html = page_html(
        runs_page(gather([base / "runs"])),
        "studies.html",
        Path(studies.__file__).parent,
        [f for s in found.studies for f in s.every_figure],
        studies=found.studies,
        orphans=0,
        older="",
    )
    save_page(base / "report.html", html)
    return base / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Seen:
    """A page, with all that went wrong on it and all that it asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri(), timeout=120_000)
        self.page.wait_for_selector(".plot .main-svg", timeout=120_000)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def shot(self, name: str, *, whole: bool = True) -> None:
        if folder := os.environ.get("XCAL_SHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=whole)


LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {
        "color_scheme": "light",
        "viewport": {"width": 390, "height": 844},
        "has_touch": True,
        "is_mobile": True,
    },
}


@pytest.mark.parametrize("look", sorted(LOOKS))
def test_it_opens_draws_and_fetches_nothing(browser: Any, page_path: Path, look: str) -> None:
    seen = Seen(browser, page_path, **LOOKS[look])
    page = seen.page
    assert seen.wrong == []
    assert {u for u in seen.asked if not u.startswith("data:")} == {page_path.as_uri()}
    plots = page.locator(".plot")
    folded = page.locator("details:not([open]) .plot")
    drawn = page.locator(".plot .scatterlayer .trace")
    assert plots.count() > 10 and folded.locator(".main-svg").count() == 0
    assert drawn.count() >= plots.count() - folded.count() > 0
    # Nothing but tables and panels may be wider than the window, and these scroll by themselves.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    # plotly offers to upload a figure unless it is told which buttons to have
    titles = page.locator(".modebar-btn").evaluate_all("b => b.map((x) => x.dataset.title || '')")
    assert titles and not [t for t in titles if "hare" in t or "loud" in t]
    seen.shot(look)
    seen.context.close()


def test_a_legend_button_hides_and_shows_its_lines_by_keyboard(
    browser: Any, page_path: Path
) -> None:
    seen = Seen(browser, page_path, **LOOKS["light"])
    page = seen.page
    button = page.locator("#legend-budget button", has_text="xcal-steered").first
    lines = page.locator("#budget .scatterlayer .trace")
    before = lines.count()
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == before - 3  # one line a client
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert lines.count() == before
    assert seen.wrong == []
    seen.context.close()


def test_hovering_tells_and_dragging_zooms(browser: Any, page_path: Path) -> None:
    seen = Seen(browser, page_path, **LOOKS["light"])
    page = seen.page
    page.locator("summary", has_text="Round by round").click()
    plot = page.locator("#rounds-validation-macro-f1")
    plot.locator(".main-svg").first.wait_for(timeout=20_000)
    plot.scroll_into_view_if_needed()
    point = plot.locator(".points path").first.bounding_box()
    page.mouse.move(point["x"] + 3, point["y"] + 3)
    page.wait_for_selector("#rounds-validation-macro-f1 .hoverlayer .hovertext", timeout=20_000)
    ranges = "document.getElementById('rounds-validation-macro-f1').layout.xaxis.range"
    before = page.evaluate(ranges)
    box = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.7 * box["height"], steps=5)
    page.mouse.up()
    page.wait_for_timeout(500)
    after = page.evaluate(ranges)
    assert after[1] - after[0] < before[1] - before[0]
    assert seen.wrong == []
    seen.context.close()


def test_a_picture_enlarges_and_escape_closes_it(browser: Any, page_path: Path) -> None:
    seen = Seen(browser, page_path, **LOOKS["light"])
    page = seen.page
    page.locator(".tile").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog[open] img").count() == 1
    assert page.locator("dialog img").get_attribute("alt")
    seen.shot("enlarged", whole=False)
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    seen.context.close()


def test_everything_has_words(browser: Any, page_path: Path) -> None:
    """Pictures and figures have alternative texts, and text stands out from what is behind it."""
    seen = Seen(browser, page_path, **LOOKS["light"])
    page = seen.page
    assert page.locator("main img:not([alt]), main img[alt='']").count() == 0
    assert page.locator(".plot:not([aria-label])").count() == 0
    assert page.locator("h1").count() == 1
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in ("--ink", "--faint", "--link", "--right", "--wrong"):
            assert page.evaluate(CONTRAST, [name, "--page"]) >= 4.5, (scheme, name)
            assert page.evaluate(CONTRAST, [name, "--card"]) >= 4.5, (scheme, name)
        for number in range(8):  # lines and marks: graphics need 3
            assert page.evaluate(CONTRAST, [f"--tone-{number}", "--card"]) >= 3, (scheme, number)
    seen.context.close()


def wait_until(page: Any, condition: str) -> None:
    """By hand: the page's own policy forbids the browser to evaluate a condition by itself."""
    for _ in range(240):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(250)
    raise AssertionError(f"It never came true that {condition}")


def test_nothing_overlaps_or_is_cut_on_paper(browser: Any, page_path: Path) -> None:
    seen = Seen(browser, page_path, **LOOKS["dark"])
    page = seen.page
    # The body as wide as A4 less the page's margins. Paper comes without an event of a new size.
    page.evaluate("document.body.style.width = '703px'; document.body.style.margin = '0'")
    page.emulate_media(media="print")
    drawn = f"{SHOWN}.every((p) => p.querySelector('.main-svg'))"
    wait_until(page, f"{SHOWN}.length > 5 && {drawn}")  # what is folded opens a moment later
    seen.shot("paper")
    plots = page.evaluate(ON_PAPER)
    # All of a run's figures, folded or not; a study's places only where somebody unfolds them.
    assert len(plots) == page.locator(".plot").count() - page.locator(".aside .plot").count() > 5
    for plot in plots:
        left, _, right, _ = plot["box"]
        assert 0 <= left < right <= 703, plot
        assert right <= plot["frame"][2], plot
        assert all(left <= low and high <= right for low, high in plot["points"]), plot
        assert plot["names"] and all(plot["names"]), plot
        assert set(plot["lines"]) <= set(plot["names"]), plot
    for i, one in enumerate(plots):
        for other in plots[i + 1 :]:
            apart_across = one["box"][2] <= other["box"][0] or other["box"][2] <= one["box"][0]
            apart_down = one["box"][3] <= other["box"][1] or other["box"][3] <= one["box"][1]
            assert apart_across or apart_down, (one["id"], other["id"])
    wide = "[...document.querySelectorAll('table')].filter((t) => t.offsetWidth > 704).length"
    assert page.evaluate(wide) == 0
    # Legends have the colors of paper, also where the screen is dark.
    assert page.evaluate(CONTRAST, ["--tone-0", "--page"]) >= 4.5
    # Back on the screen: folded parts are folded, plots are as wide as their frames again.
    page.emulate_media(media="screen")
    page.evaluate("document.body.style.width = document.body.style.margin = ''")
    wait_until(page, "!document.querySelector('details.more[open]')")
    # What was opened by hand is printed, and stays open.
    page.evaluate("document.querySelector('details.aside:has(.plot)').open = true")
    page.emulate_media(media="print")
    wait_until(page, f"{SHOWN}.length > {len(plots)} && {drawn}")
    page.emulate_media(media="screen")
    wait_until(page, "document.querySelectorAll('details.more[open]').length === 1")
    assert seen.wrong == []
    seen.context.close()


def test_it_prints_by_itself(browser: Any, page_path: Path, tmp_path: Path) -> None:
    """Straight to PDF, as a script does it: the page is told just before, and draws for paper."""
    seen = Seen(browser, page_path, **LOOKS["dark"])
    page = seen.page
    before = page.evaluate(WIDTHS)
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = ({WIDTHS})(); }})")
    paper = page.pdf(path=str(tmp_path / "report.pdf"), format="A4")
    assert len(paper) > 20_000
    printed = page.evaluate("window.printed")
    assert len(printed) == page.locator(".plot").count() - page.locator(".aside .plot").count()
    assert max(printed) <= 677  # 703 less a frame and its padding
    wait_until(page, f"String(({WIDTHS})()) === '{','.join(map(str, before))}'")
    if folder := os.environ.get("XCAL_SHOTS"):
        shutil.copy(tmp_path / "report.pdf", Path(folder) / "print.pdf")
    seen.context.close()


def test_a_folded_course_is_drawn_when_it_is_opened(browser: Any, page_path: Path) -> None:
    seen = Seen(browser, page_path, **LOOKS["light"])
    page = seen.page
    outer = page.locator("details.courses:has(> details.more)").first
    outer.locator("> summary").click()
    first = outer.locator("> details.more").first
    assert first.locator(".main-svg").count() == 0
    first.locator("summary").first.click()
    first.locator(".plot .main-svg").first.wait_for(timeout=20_000)
    frame, plot = (first.locator(s).first.bounding_box() for s in ("figure", ".main-svg"))
    assert 0.8 * frame["width"] < plot["width"] < frame["width"]
    seen.shot("course", whole=False)
    assert seen.wrong == []
    seen.context.close()


def test_tables_fit_a_window(browser: Any, page_path: Path) -> None:
    seen = Seen(browser, page_path, **LOOKS["light"])
    seen.page.evaluate("for (const d of document.querySelectorAll('details.more')) d.open = true")
    wide = seen.page.evaluate(
        "[...document.querySelectorAll('.scroll')]"
        ".filter((s) => s.scrollWidth > s.clientWidth + 1).map((s) => s.ariaLabel)"
    )
    assert wide == []
    seen.context.close()


MOST_PAGES, MOST_WORDS = 10, 5000


def pages_of(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on the results that are part of the repository."""
    path = tmp_path_factory.mktemp("committed") / "report.html"
    studies.save_report(path, studies.gather([RESULTS], panels=False))
    return path


def test_a_report_of_runs_prints_on_ten_pages(browser: Any, page_path: Path) -> None:
    alone = page_path.parent / "runs.html"
    save_page(alone, page_html(runs_page(gather([page_path.parent / "runs"]))))
    seen = Seen(browser, alone, **LOOKS["phone"])
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
    seen.shot("runs-phone")
    seen.context.close()
    seen = Seen(browser, alone, **LOOKS["light"])
    seen.shot("runs")
    assert 1 <= pages_of(seen.page.pdf(format="A4")) <= MOST_PAGES
    assert seen.wrong == []
    seen.context.close()


def test_the_committed_results_read_on_a_phone_and_print_on_ten_pages(
    browser: Any, committed: Path
) -> None:
    seen = Seen(browser, committed, **LOOKS["phone"])
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert len(seen.page.locator("body").inner_text().split()) <= MOST_WORDS
    seen.shot("committed-phone")
    seen.context.close()
    seen = Seen(browser, committed, **LOOKS["light"])
    # The one sentence and the one figure stand before everything else, and no figure is empty.
    assert seen.page.locator("header .plot .points path").count() > 10
    empty = f"{SHOWN}.filter((p) => !p.querySelector('.scatterlayer .trace')).map((p) => p.id)"
    assert seen.page.evaluate(empty) == []
    assert 1 <= pages_of(seen.page.pdf(format="A4")) <= MOST_PAGES
    assert seen.wrong == []
    seen.context.close()


WIDTHS = """() => [...document.querySelectorAll('.plot')]
  .filter((p) => p.querySelector('.main-svg') && !p.closest('details:not([open])'))
  .map((p) => Math.round(p.querySelector('.main-svg').getBoundingClientRect().width))"""

SHOWN = (
    """[...document.querySelectorAll('.plot')].filter((p) => !p.closest('details:not([open])'))"""
)

ON_PAPER = (
    f"() => {SHOWN}"
    + """.map((plot) => {
  const box = (element) => {
    const found = element.getBoundingClientRect();
    return [found.left, found.top, found.right, found.bottom];
  };
  const legend = [...document.querySelectorAll(`#legend-${plot.id} button`)];
  return {
    id: plot.id,
    box: box(plot.querySelector('.main-svg')),
    frame: box(plot.closest('figure')),
    points: [...plot.querySelectorAll('.points path')].map((p) => box(p)).map((b) => [b[0], b[2]]),
    names: legend.filter((b) => b.offsetWidth && b.offsetHeight).map((b) => b.textContent),
    lines: plot.data.map((trace) => trace.meta.group),
  };
})"""
)

CONTRAST = """([front, back]) => {
  const value = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const light = (hex) => {
    const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const [a, b] = [light(value(front)), light(value(back))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""
