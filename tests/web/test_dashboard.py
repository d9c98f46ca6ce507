"""The lead's page in a real browser: it opens, asks for nothing else, and comes again by itself.

Run by `make test-web`, where there is a Chromium; what its HTML says is tested without one in
`tests/federation/test_operations.py`.
"""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from xcal.federation.loopback import Page, serve
from xcal.federation.nvflare.dashboard import KIND, page
from xcal.federation.nvflare.observe import RunState, Snapshot

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
