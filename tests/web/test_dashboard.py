"""The lead's page in a real browser: it opens, asks for nothing else, and comes again by itself.

Run by `make test-web`, where there is a Chromium; what its HTML says is tested without one in
`tests/federation/test_operations.py`.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from xcal.federation.loopback import Page, serve
from xcal.federation.nvflare.dashboard import KIND, page
from xcal.federation.nvflare.observe import RunState, Snapshot
from xcal.federation.request_refusals import CODES

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `web` is not installed")
CHROMIUM = os.environ.get("XCAL_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")

ROUND = {
    "answered": 2,
    "missing": [],
    "refused": {"c": "epsilon-total"},
    "seconds": 2.0,
    "validation_loss": 1.0,
    "clients": [{"client": "a", "epsilon_spent": 1.0, "share_spent": 0.1}],
}


def test_it_opens_and_asks_for_nothing_else() -> None:
    rounds = [{**ROUND, "round": n, "validation_macro_f1": n / 9} for n in range(6)]
    seen = Snapshot({"a": True, "c": False}, [RunState("first", "training", 9, rounds)])
    looks = []

    def answers(path: str, query: object) -> Page | None:
        looks.append(path)
        return Page(page("three", seen, "", None, 1.0), KIND) if path == "/" else None

    server = serve(0, answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    try:
        with sync_api.sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            shown = browser.new_page()
            asked: list[str] = []
            wrong: list[str] = []
            shown.on("request", lambda request: asked.append(request.url))
            shown.on("pageerror", lambda error: wrong.append(str(error)))
            shown.goto(address)
            assert shown.locator("polyline").count() == 2
            assert shown.locator("text=all runs together would exceed").count() >= 1
            shown.wait_for_timeout(2500)
            assert looks.count("/") >= 2 and wrong == []
            assert {url for url in asked if not url.endswith("favicon.ico")} == {address}
            browser.close()
    finally:
        server.shutdown()
        server.server_close()


def test_a_phone_shows_sites_rounds_who_is_late_and_refusals_in_words(tmp_path: Path) -> None:
    rounds = [
        {**ROUND, "round": n, "validation_macro_f1": n / 9, "late": ["b"], "missing": ["b"]}
        for n in range(6)
    ]
    run = RunState("first", "training", 9, rounds, waiting=["b"])
    seen = Snapshot({"a": True, "b": True, "c": False}, [run])
    written = tmp_path / "page.html"
    written.write_text(page("three", seen, "", None, 600.0), encoding="utf-8")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, phone in ((390, True), (1280, False)):
            size = {"width": width, "height": 844}
            context = browser.new_context(viewport=size, is_mobile=phone, has_touch=phone)
            shown = context.new_page()
            shown.goto(written.as_uri())
            assert shown.evaluate("window.innerWidth") == width
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            sites = shown.locator("table").first.locator("tbody tr")
            cells = [sites.nth(i).locator("td").all_inner_texts() for i in range(sites.count())]
            assert [c[0] for c in cells] == ["a", "b", "c"]
            assert cells[0][1] == "connected" and cells[2][1] == "not connected"
            assert "waited for" in cells[1][1] and "6 late, 6 missing" in cells[1][3]
            assert CODES["epsilon-total"] in cells[2][4]
            assert cells[0][2] == "round 6" and cells[0][5].startswith("ε = 1")
            assert shown.locator("table").last.locator("tbody tr").count() == 6
            if folder := os.environ.get("XCAL_SHOTS"):
                shown.screenshot(path=f"{folder}/dashboard-{width}.png", full_page=True)
            context.close()
        browser.close()
