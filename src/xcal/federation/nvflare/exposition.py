"""A party's metrics in Prometheus' text format; a monitor on the same machine reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from xcal.federation.loopback import Page
from xcal.federation.nvflare.observe import Snapshot, Watched, refusals_of

KIND = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, str], float | None]

# Every metric once: its type and what it says.
METRICS: dict[str, tuple[str, str]] = {
    "xcal_running": ("gauge", "Whether the party's process runs."),
    "xcal_certificate_days_left": ("gauge", "Days until the party's certificate expires."),
    "xcal_rounds_done": ("gauge", "Complete rounds of a run."),
    "xcal_rounds_planned": ("gauge", "Rounds of a run."),
    "xcal_round_answers": ("gauge", "Answers in a run's last round."),
    "xcal_missing_total": ("counter", "Rounds of a run in which a site gave no answer."),
    "xcal_refusals_total": ("counter", "Refusals by code; at the server also by run and site."),
    "xcal_epsilon_spent": ("gauge", "Epsilon that a site's data spent in a run, by the odometer."),
    "xcal_validation_macro_f1": ("gauge", "Macro F1 of a run's model on public images."),
    "xcal_site_connected": ("gauge", "Whether a site is connected."),
    "xcal_answers_total": ("counter", "Rounds that this site answered."),
    "xcal_last_event_timestamp_seconds": ("gauge", "When the party last wrote to its log."),
    "xcal_epsilon_limit": ("gauge", "The ledger's limit for life."),
    "xcal_epsilon_left": ("gauge", "Epsilon that further runs may reserve or spend."),
    "xcal_delta_left": ("gauge", "Delta that further runs may reserve."),
    "xcal_ledger_rows": ("gauge", "Rows of the ledger."),
    "xcal_ledger_ok": ("gauge", "Whether the ledger was in order when it was last verified."),
    "xcal_ledger_verified_timestamp_seconds": ("gauge", "When the ledger was last verified."),
}


def exposed(samples: Mapping[str, Iterable[Sample]]) -> str:
    lines = []
    for name, found in samples.items():
        kind, text = METRICS[name]
        rows = [(labels, value) for labels, value in found if value is not None]
        if rows:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {float(value)!r}" for labels, value in rows]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inside = ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def of_runs(snapshot: Snapshot) -> dict[str, list[Sample]]:
    """What a lead or a server tells of its runs."""
    found: dict[str, list[Sample]] = {name: [] for name in METRICS}
    for site, connected in snapshot.sites.items():
        found["xcal_site_connected"].append(
            ({"site": site}, None if connected is None else float(connected))
        )
    for run in snapshot.runs:
        named = {"run": run.name}
        found["xcal_rounds_done"].append((named, run.done))
        found["xcal_rounds_planned"].append((named, run.total))
        refused: Counter[tuple[str, str]] = Counter()
        missing: Counter[str] = Counter()
        for record in run.rounds:
            refused.update((site, code) for site, code in record.get("refused", {}).items())
            missing.update(record.get("missing", []))
        for (site, code), count in refused.items():
            found["xcal_refusals_total"].append(({**named, "site": site, "code": code}, count))
        for site, count in missing.items():
            found["xcal_missing_total"].append(({**named, "site": site}, count))
        if run.rounds:
            last = run.rounds[-1]
            found["xcal_round_answers"].append((named, last["answered"]))
            found["xcal_validation_macro_f1"].append((named, last.get("validation_macro_f1")))
            for report in last.get("clients", []):
                labels = {**named, "site": str(report["client"])}
                found["xcal_epsilon_spent"].append((labels, report.get("epsilon_spent")))
    return found


def of_party(watched: Watched) -> dict[str, list[Sample]]:
    """What a party tells of itself, from its own files."""
    found: dict[str, list[Sample]] = {name: [] for name in METRICS}
    events = watched.events()
    found["xcal_running"] = [({}, float(watched.running()))]
    found["xcal_certificate_days_left"] = [({}, round(watched.certificate_days(), 3))]
    if events:
        when = datetime.fromisoformat(str(events[-1]["time"])).timestamp()
        found["xcal_last_event_timestamp_seconds"] = [({}, when)]
    if watched.party.about.role != "site":
        return found
    found["xcal_answers_total"] = [({}, sum(e["event"] == "answered" for e in events))]
    found["xcal_refusals_total"] = [({"code": c}, n) for c, n in refusals_of(events).items()]
    book = watched.ledger()
    sound = watched.found is not None and watched.found.ok
    found["xcal_ledger_ok"] = [({}, float(sound))]
    found["xcal_ledger_verified_timestamp_seconds"] = [({}, watched.verified)]
    if book is not None:
        found["xcal_ledger_rows"] = [({}, book["rows"])]
        found["xcal_epsilon_limit"] = [({}, book["epsilon"])]
        found["xcal_epsilon_left"] = [({}, _epsilon_left(book))]
        found["xcal_delta_left"] = [({}, book.get("delta_left"))]
        found["xcal_epsilon_spent"] = [
            ({"run": run["run"]}, run["epsilon_spent"]) for run in book["runs"]
        ]
    return found


def _epsilon_left(book: Mapping[str, Any]) -> float | None:
    """By the ledger's rule: what is not reserved, or under `renyi` the limit less the odometer."""
    if book["epsilon"] is None:
        return None
    if "epsilon_left" in book:
        return float(book["epsilon_left"])
    return max(0.0, float(book["epsilon"]) - float(book["epsilon_spent"]))


def health(watched: Watched) -> Page:
    """200 where nothing needs a look; else 503 and what does."""
    wrong = watched.problems()
    if not wrong:
        return Page("ok\n")
    return Page("".join(f"{text}\n" for text in wrong), status=503)
