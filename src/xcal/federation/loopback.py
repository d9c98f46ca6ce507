"""Pages of this machine for this machine: a small server on loopback, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from xcal.errors import UserError

HOSTS = ("127.0.0.1", "localhost")
# A page of ours loads nothing and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


@dataclass(frozen=True)
class Page:
    """What is answered to one look."""

    body: str
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    policy: str | None = POLICY  # None: the page itself says what it may load


Answers = Callable[[str, Mapping[str, str]], Page | None]  # by path and query; None: no such page


def serve(port: int, answers: Answers) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers GET only; `serve_forever` is the caller's to call."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "xcal", ""

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            parts = urlsplit(self.path)
            # Another name than ours: a page elsewhere had a browser ask here.
            page = answers(parts.path, dict(parse_qsl(parts.query))) if host in HOSTS else None
            page = page or Page("There is no such page here.\n", status=404)
            data = page.body.encode()
            self.send_response(page.status)
            for name, value in (
                ("Content-Type", page.kind),
                ("Content-Length", str(len(data))),
                *((("Content-Security-Policy", page.policy),) if page.policy else ()),
                ("X-Content-Type-Options", "nosniff"),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Whoever looks is nobody's business."""

    try:
        return ThreadingHTTPServer((HOSTS[0], port), Handler)
    except (OSError, OverflowError):
        raise UserError(f"Port {port} cannot be listened on: choose another --port.") from None
