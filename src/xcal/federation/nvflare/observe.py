"""How a federation stands, for whoever operates it: released and public quantities only."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from xcal.config import read_toml
from xcal.dp.ledger.analysis import lifetime, spending
from xcal.dp.ledger.rows import Verification, read_rows, terms_of, verify
from xcal.errors import UserError
from xcal.federation.files import read_json, whole_lines
from xcal.federation.logbook import KEPT, LOG
from xcal.federation.nvflare import process
from xcal.federation.nvflare.jobs import Lead
from xcal.federation.nvflare.parties import Party, read_federation

SHOWN_RUNS = 20  # the newest ones


@dataclass(frozen=True)
class RunState:
    """A run as its rounds' records tell of it."""

    name: str
    state: str
    total: int | None
    rounds: Sequence[Mapping[str, Any]]
    waiting: Sequence[str] = ()  # sites whose answer to the present round is not there yet
    evaluations: Mapping[str, Any] | None = None

    @property
    def done(self) -> int:
        return len(self.rounds)


@dataclass(frozen=True)
class Snapshot:
    """A federation at one moment, as its lead or its server sees it."""

    sites: Mapping[str, bool | None]  # whether it is connected; None: not known here
    runs: Sequence[RunState]
    taken: float = field(default_factory=time.time)


def of_lead(session: Lead, party: Party) -> Snapshot:
    """By asking the server."""
    there = session.connected()
    listed = read_federation(party.folder / "federation.toml").sites
    jobs = list({job.run: job for job in session.jobs()}.values())[-SHOWN_RUNS:]
    runs = []
    for job in jobs:
        told = (session.progress(job) if job.running else session.left(job)) or {}
        runs.append(
            RunState(
                job.run,
                str(told.get("state") or told.get("text") or job.words),
                told.get("total"),
                told.get("rounds", []),
                told.get("waiting", []),
                told.get("evaluations"),
            )
        )
    return Snapshot({site: site in there for site in (*listed, *there)}, runs)


def of_server(party: Party) -> Snapshot:
    """From the files that the server's runs leave; who is connected FLARE alone knows."""
    runs = []
    folders = sorted(party.runs.glob("*/rounds.jsonl"), key=lambda p: p.stat().st_mtime)
    sites: dict[str, bool | None] = {}
    for path in folders[-SHOWN_RUNS:]:
        folder, rounds = path.parent, whole_lines(path, strict=False)
        if (folder / "sites.json").exists():
            sites |= dict.fromkeys(read_json(folder / "sites.json").values())
        total = read_toml(folder / "experiment.toml").get("rounds")
        state = "finished" if (folder / "result.json").exists() else "not finished"
        runs.append(RunState(folder.name, state, total, rounds))
    return Snapshot(sites, runs)


@dataclass
class Watched:
    """A party's own state; its ledger is verified now and then, since that takes a while."""

    party: Party
    every: float = 3600.0  # seconds between two verifications
    verified: float | None = None
    found: Verification | None = None

    def certificate_days(self) -> float:
        own = x509.load_pem_x509_certificate(self.party.certificate.read_bytes())
        left = own.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        return left / datetime.timedelta(days=1)

    def events(self) -> list[dict[str, Any]]:
        folder = self.party.site_dir if self.party.about.role == "site" else self.party.folder
        names = [*(f"{LOG}.{n}" for n in range(KEPT, 0, -1)), LOG]
        return [line for name in names for line in whole_lines(folder / name, strict=False)]

    def running(self) -> bool:
        return bool(process.processes(self.party))

    def ledger(self) -> dict[str, Any] | None:
        """A site's ledger as it stands; None where it cannot be read."""
        path = self.party.site_dir / "ledger.sqlite"
        if self.verified is None or time.time() - self.verified > self.every:
            try:
                self.found = verify(path)
            except UserError as error:
                self.found = Verification(False, 0, str(error), 0)
            self.verified = time.time()
        try:
            rows = read_rows(path)
        except UserError:
            return None
        return {
            "rows": len(rows),
            "runs": spending(rows),
            **lifetime(rows),
            "terms": terms_of(rows),
        }

    def problems(self) -> list[str]:
        """What somebody has to look at; nothing where all is well."""
        found = [] if self.running() else ["its process does not run"]
        days = self.certificate_days()
        if days <= 0:
            found.append("its certificate has expired")
        if self.party.about.role == "site":
            self.ledger()
            if self.found is not None and not self.found.ok:
                found.append(f"the ledger's row {self.found.row} {self.found.problem}")
        return found


def refusals_of(events: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(str(e.get("code")) for e in events if e.get("event") == "refused")


def party_of(folder: Path) -> Party:
    party = Party.find(folder)
    party.require_kit()
    return party
