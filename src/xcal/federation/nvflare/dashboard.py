"""What the lead sees: a page on loopback, drawn anew at every look, that loads and runs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xcal.dp.ledger.analysis import spent_text
from xcal.errors import UserError
from xcal.federation.clinicians_page import number, page_html, safe, table_html
from xcal.federation.loopback import Page
from xcal.federation.nvflare.jobs import Lead
from xcal.federation.nvflare.observe import RunState, Snapshot, of_lead
from xcal.federation.nvflare.parties import Party
from xcal.federation.request_refusals import CODES

KIND = "text/html; charset=utf-8"
WIDTH, HEIGHT = 560, 160
_STYLE = (
    "body{font:16px/1.45 system-ui,sans-serif;max-width:70rem;margin:1.5rem auto;padding:0 1rem;"
    "color:#111;background:#fff}table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}"
    "th,td{border:1px solid #999;padding:.25rem .6rem;text-align:left;vertical-align:top}"
    ".bad{color:#a00;font-weight:600}svg{max-width:100%;border:1px solid #ccc}"
    "nav a{margin-right:1rem}figure{margin:1rem 0}"
)


class Eye:
    """Looks at the server from time to time, in a thread of its own; a page shows the last look."""

    def __init__(self, party: Party, every: float) -> None:
        self._party, self._every = party, every
        self.snapshot: Snapshot | None = None
        self.problem = "The server was not asked yet."

    def look(self) -> None:
        try:
            with Lead.session(self._party) as session:
                self.snapshot, self.problem = of_lead(session, self._party), ""
        except UserError as error:
            self.problem = str(error)

    def start(self) -> None:
        def watch() -> None:
            while True:
                self.look()
                time.sleep(self._every)

        threading.Thread(target=watch, daemon=True).start()

    def answers(self, name: str, every: float) -> Callable[[str, Mapping[str, str]], Page | None]:
        def answer(path: str, query: Mapping[str, str]) -> Page | None:
            if path != "/":
                return None
            html = page(name, self.snapshot, self.problem, query.get("run"), every)
            return Page(html, KIND)

        return answer


def page(
    name: str, snapshot: Snapshot | None, problem: str, chosen: str | None, every: float
) -> str:
    parts = [f"<h1>{safe(name)}</h1>"]
    if problem:
        parts.append(f"<p class=bad role=alert>{safe(problem)}</p>")
    if snapshot is not None:
        taken = time.strftime("%H:%M:%S UTC", time.gmtime(snapshot.taken))
        parts.append(f"<p>As the server told it at {taken}; this page looks again by itself.</p>")
        run = next((r for r in snapshot.runs if r.name == chosen), None)
        run = run or (snapshot.runs[-1] if snapshot.runs else None)
        parts += [_sites(snapshot, run), _runs(snapshot.runs)]
        if run is not None:
            parts += _run(run)
    again = f"<meta http-equiv=refresh content={max(1, round(every))}>"
    return page_html(name, _STYLE, parts, again)


def _sites(snapshot: Snapshot, run: RunState | None) -> str:
    rows = []
    names = list(snapshot.sites)
    rounds = run.rounds if run is not None else ()
    reports = {str(c["client"]): c for record in rounds for c in record.get("clients", [])}
    names += [client for client in reports if client not in names]
    for site in names:
        there = {True: "connected", False: "not connected", None: ""}[snapshot.sites.get(site)]
        answered = [r["round"] for r in rounds if site in _answered(r)]
        report = reports.get(site, {})
        spent = spent_text(report.get("epsilon_spent"), report.get("share_spent"))
        late = sum(site in r.get("late", []) for r in rounds)
        missing = sum(site in r.get("missing", []) for r in rounds)
        waited = run is not None and site in run.waiting
        rows.append(
            [
                site,
                there + (", its answer is waited for" if waited else ""),
                f"round {answered[-1] + 1}" if answered else "–",
                f"{late} late, {missing} missing" if late or missing else "–",
                "; ".join(dict.fromkeys(_refusals(rounds, site))) or "–",
                spent,
            ]
        )
    heads = ["site", "now", "answered last", "too late", "refused because", "spent in this run"]
    return "<h2>Sites</h2>" + table_html(heads, rows)


def _answered(record: Mapping[str, Any]) -> list[str]:
    return [str(report["client"]) for report in record.get("clients", [])]


def _refusals(rounds: Sequence[Mapping[str, Any]], site: str) -> list[str]:
    codes = [r["refused"][site] for r in rounds if site in r.get("refused", {})]
    return [f"{CODES.get(code, code)} ({code})" for code in codes]


def _runs(runs: Sequence[RunState]) -> str:
    links = "".join(f'<a href="/?run={safe(run.name)}">{safe(run.name)}</a>' for run in runs)
    rows = []
    for run in reversed(runs):
        f1 = run.rounds[-1].get("validation_macro_f1") if run.rounds else None
        done = f"{run.done}/{run.total}" if run.total else str(run.done)
        rows.append([run.name, run.state, done, number(f1)])
    listed = table_html(["run", "state", "rounds", "public macro F1"], rows)
    return f"<h2>Runs</h2><nav>{links}</nav>{listed}" if runs else "<p>No runs yet.</p>"


def _run(run: RunState) -> list[str]:
    parts = [f"<h2>{safe(run.name)}</h2>"]
    for key, title in (("validation_macro_f1", "macro F1"), ("validation_loss", "loss")):
        points = [(r["round"] + 1, r[key]) for r in run.rounds if r.get(key) is not None]
        if len(points) > 1:
            parts.append(_curve(points, f"{title} on public validation images"))
    rows = []
    for record in reversed(run.rounds):
        refused = [f"{s}: {code}" for s, code in record.get("refused", {}).items()]
        rows.append(
            [
                record["round"] + 1,
                record["answered"],
                ", ".join(record.get("missing", [])) or "–",
                ", ".join(record.get("exhausted", [])) or "–",
                "; ".join(refused) or "–",
                f"{record['seconds']:.0f} s" if "seconds" in record else "–",
            ]
        )
    heads = ["round", "answers", "no answer", "budget used up", "refused", "took"]
    parts.append(table_html(heads, rows))
    sent = {s: v for s, v in ((run.evaluations or {}).get("sites") or {}).items() if v}
    if sent:
        parts.append("<h3>On the sites' own held-out patients, with noise</h3>")
        parts.append(
            table_html(
                ["site", "macro F1", "accuracy", "calibration error", "paid for it"],
                (
                    [
                        site,
                        *(number(v[k]) for k in ("macro_f1", "accuracy", "calibration_error")),
                        f"({v['epsilon']:g}, {v['delta']:g})",
                    ]
                    for site, v in sent.items()
                ),
            )
        )
    for site, exact in ((run.evaluations or {}).get("exact") or {}).items():
        parts += _exact(site, exact)
    return parts


def _exact(site: str, told: Mapping[str, Any]) -> list[str]:
    """People by class as a site counted them, and what can be said where cells are withheld."""
    floor, classes = told["floor"], told["classes"]
    ends = [
        f"{what} " + ("unknown" if told[key] is None else f"{told[key][0]:.3f}–{told[key][1]:.3f}")
        for key, what in (("accuracy", "accuracy"), ("macro_f1", "macro F1"))
    ]
    rows = (
        [name, *(f"< {floor}" if c is None else c for c in row)]
        for name, row in zip(classes, told["counts"], strict=True)
    )
    title = f"On held-out patients of {site}: exact, no guarantee (ε = ∞) for held-out people"
    people = f"{told['units'][0]} to {told['units'][1]} people"
    text = f"{people} by true (row) and predicted class, least and most: {', '.join(ends)}."
    return [
        f"<h3>{safe(title)}</h3>",
        f"<p>{safe(text)}</p>",
        table_html(["is", *(f"called {name}" for name in classes)], rows),
    ]


def _curve(points: Sequence[tuple[int, float]], title: str) -> str:
    """A line of points in SVG, with its ends and its extremes written beside it."""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]
    room = (high - low) or 1.0

    def at(x: float, y: float) -> str:
        across = 50 + (WIDTH - 70) * (x - first) / ((last - first) or 1)
        return f"{across:.1f},{HEIGHT - 25 - (HEIGHT - 45) * (y - low) / room:.1f}"

    line = " ".join(at(x, y) for x, y in points)
    texts = (
        (2, 20, f"{high:.3f}"),
        (2, HEIGHT - 25, f"{low:.3f}"),
        (50, HEIGHT - 6, f"round {first}"),
        (WIDTH - 80, HEIGHT - 6, f"round {last}"),
    )
    told = "".join(f'<text x="{x}" y="{y}" font-size="12">{t}</text>' for x, y, t in texts)
    return (
        f"<figure><figcaption>{safe(title)}: {points[-1][1]:.3f} after round {last}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role=img aria-label="{safe(title)}">'
        f'<polyline fill="none" stroke="#0553b1" stroke-width="2" points="{line}"/>{told}</svg>'
        "</figure>"
    )
