"""The report of a run that still trains, in the browser: served to this machine only."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.federation.folder import RunFolder
from xcal.report.report import page_html, runs_page
from xcal.report.run_figures import read_run

LOOPBACK = "127.0.0.1"


class LiveReport:
    """A server of two addresses: the page, and its figures as they are now."""

    def __init__(self, run: Path, port: int = 0, images: int = 4) -> None:
        RunFolder.find(run)  # refuses what is no run
        self._run, self._images = run, images
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), self._handler())
        except OSError as error:
            raise UserError(
                f"Port {port} cannot be used ({error.strerror}): give another."
            ) from None
        self.final = threading.Event()  # the finished page was fetched
        self._page: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str) -> tuple[str, bytes] | None:
        if path not in ("/", "/figures.json"):
            return None
        run = read_run(self._run, self._run.resolve().name, live=True)
        if path == "/":
            if run.finished and self._page is None:
                shown = runs_page([run], panel_images=self._images)
                self._page = page_html(shown).encode()
            if run.finished:
                self.final.set()
            made = self._page or page_html(runs_page([run]), live=True).encode()
            return "text/html; charset=utf-8", made
        page = runs_page([run], panel_images=0)
        told = {
            "figures": [figure.plotly() for figure in page.run_figures],
            "answers": list(page.answers),
            "finished": run.finished,
        }
        return "application/json", json.dumps(told).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        live = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host = (self.headers.get("Host") or "").rpartition(":")[0]
                # A page from elsewhere that has its own name lead here is not answered.
                if host not in (LOOPBACK, "localhost"):
                    self.send_error(403)
                    return
                try:
                    found = live._answer(self.path.partition("?")[0])
                except (UserError, OSError):  # a file in the middle of being replaced
                    self.send_error(503)
                    return
                if found is None:
                    self.send_error(404)
                    return
                kind, body = found
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed between a run's lines."""

        return Handler
