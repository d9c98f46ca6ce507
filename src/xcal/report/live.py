"""The report of a run that still trains, in the browser: served to this machine only."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from xcal.errors import UserError
from xcal.federation import loopback
from xcal.federation.folder import RunFolder
from xcal.report.report import page_html, runs_page
from xcal.report.run_figures import read_run


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
