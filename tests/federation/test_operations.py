"""Operating a party: metrics, health, logs that turn, folders that are cleaned, the lead's page."""

from __future__ import annotations

import datetime
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from made_sites import tiny_site
from wire import a_request, ask, changed
from xcal.federation import logbook
from xcal.federation.loopback import Page, serve
from xcal.federation.messages import Refusal, Reply
from xcal.federation.nvflare import cleaning, exposition
from xcal.federation.nvflare.dashboard import page
from xcal.federation.nvflare.observe import RunState, Snapshot, Watched
from xcal.federation.nvflare.parties import Invitation, Party
from xcal.federation.request_refusals import CODES

Invoke = Callable[..., tuple[int, str, str]]
SAMPLE = re.compile(r'([a-z_0-9]+)(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? (-?[0-9.e+-]+)')


def a_party(folder: Path, role: Any = "site", days: int = 100) -> Party:
    """A party's folder with a certificate; no FLARE starts from it."""
    about = Invitation("three", role, "hospital-a", "a", "localhost", 8002, "AB")
    startup = folder / "kit" / "startup"
    startup.mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hospital-a")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=200))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    stem = "server" if role == "server" else "client"
    (startup / f"{stem}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (startup / f"{stem}.key").write_text("not used")
    (folder / "party.json").write_text(json.dumps(asdict(about)))
    return Party.find(folder)


def samples(text: str) -> dict[str, float]:
    """A strict reader of the text format: every sample has a type above it."""
    typed, found = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            matched = SAMPLE.fullmatch(line)
            assert matched and matched[1] in typed, line
            found[line.rpartition(" ")[0]] = float(matched[4])
    return found


@pytest.fixture
def site_party(tmp_path: Path) -> Party:
    party = a_party(tmp_path / "party")
    os.replace(tiny_site(tmp_path), party.folder / "site")
    (party.folder / "experiment.toml").write_text((tmp_path / "experiment.toml").read_text())
    return party


def test_a_sites_metrics_tell_budget_refusals_and_ledger(site_party: Party, invoke: Invoke) -> None:
    assert isinstance(ask(site_party.site_dir, a_request()), Reply)
    assert isinstance(ask(site_party.site_dir, changed(epsilon=100.0)), Refusal)
    code, out, _ = invoke("federation", "metrics", str(site_party.folder), "--once")
    assert code == 0
    found = samples(out)
    assert found["xcal_answers_total"] == 1
    assert found['xcal_refusals_total{code="epsilon-run"}'] == 1
    assert found["xcal_epsilon_limit"] == 20 and found["xcal_epsilon_left"] == 12
    assert 0 < found['xcal_epsilon_spent{run="trial"}'] <= 8
    assert 99 < found["xcal_certificate_days_left"] <= 100
    assert found["xcal_ledger_ok"] == 1 and found["xcal_running"] == 0
    assert abs(found["xcal_ledger_verified_timestamp_seconds"] - time.time()) < 600


def test_health_names_what_is_wrong(site_party: Party) -> None:
    watched = Watched(site_party)
    found = exposition.health(watched)
    assert found.status == 503 and found.body == "its process does not run\n"
    (site_party.site_dir / "ledger.head").unlink()
    again = exposition.health(Watched(site_party))
    assert "head file" in again.body


def test_health_as_a_supervisor_asks_for_it(site_party: Party, invoke: Invoke) -> None:
    code, out, _ = invoke("federation", "metrics", str(site_party.folder), "--health")
    assert code == 1 and out == "its process does not run\n"


def test_a_ledger_is_verified_again_only_after_a_while(site_party: Party) -> None:
    watched = Watched(site_party, every=1000.0)
    watched.ledger()
    first = watched.verified
    watched.ledger()
    assert watched.verified == first
    watched.every = 0.0
    watched.ledger()
    assert watched.verified != first


RECORD = {
    "round": 0,
    "answered": 1,
    "missing": ["hospital-b"],
    "late": ["hospital-b"],
    "exhausted": [],
    "refused": {"hospital-c": "epsilon-run"},
    "seconds": 3.0,
    "validation_macro_f1": 0.25,
    "validation_loss": 1.5,
    "clients": [{"client": "hospital-a", "epsilon_spent": 1.41, "share_spent": 0.17}],
}
RUN = RunState("first<b>", "training", 6, [RECORD, {**RECORD, "round": 1}], ["hospital-b"])
SEEN = Snapshot({"hospital-a": True, "hospital-b": False, "hospital-c": True}, [RUN])


def test_a_leads_metrics_are_by_run_and_site() -> None:
    found = samples(exposition.exposed(exposition.of_runs(SEEN)))
    assert found['xcal_rounds_done{run="first<b>"}'] == 2
    assert found['xcal_refusals_total{run="first<b>",site="hospital-c",code="epsilon-run"}'] == 2
    assert found['xcal_missing_total{run="first<b>",site="hospital-b"}'] == 2
    assert found['xcal_site_connected{site="hospital-b"}'] == 0
    assert found['xcal_epsilon_spent{run="first<b>",site="hospital-a"}'] == 1.41


class Read(HTMLParser):
    """Tags, addresses and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        self.words += f"{data}\n"


def test_the_leads_page_tells_all_and_fetches_nothing() -> None:
    text = page("three", SEEN, "", None, 5.0)
    read = Read(text)
    assert "script" not in read.tags and "link" not in read.tags and "img" not in read.tags
    assert all(address.startswith("/?run=") for address in read.addresses)
    assert "<b>" not in text and read.tags.count("polyline") == 2
    assert CODES["epsilon-run"] in read.words  # in words, not by its code alone
    assert "ε = 1.41 (17.0 % of Σρ)" in read.words
    assert "2 late, 2 missing" in read.words
    assert "not connected, its answer is waited for" in read.words
    assert "2/6" in read.words


def test_a_server_that_is_down_is_told_of() -> None:
    read = Read(page("three", None, "The server does not answer.", None, 5.0))
    assert "The server does not answer." in read.words


def test_only_this_machine_is_answered() -> None:
    server = serve(0, lambda path, _: Page("here\n") if path == "/metrics" else None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        assert server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(f"{base}/metrics") as got:
            assert got.read() == b"here\n"
            assert "default-src 'none'" in got.headers["Content-Security-Policy"]
        for request in (
            urllib.request.Request(f"{base}/metrics", headers={"Host": "evil.example"}),
            urllib.request.Request(f"{base}/../etc/passwd"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == 404
            refused.value.close()
    finally:
        server.shutdown()
        server.server_close()


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbook, "LARGEST", 200)
    for number in range(60):
        logbook.note(tmp_path, "round", number=number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [logbook.LOG, *(f"{logbook.LOG}.{n}" for n in range(1, logbook.KEPT + 1))]
    assert all((tmp_path / name).stat().st_size < 400 for name in files)
    newest = json.loads((tmp_path / logbook.LOG).read_text().splitlines()[-1])
    assert newest["event"] == "round" and newest["number"] == 59


def test_old_jobs_go_and_what_counts_stays(site_party: Party, invoke: Invoke) -> None:
    job = "0b9f6b5e-55a4-4f3f-9b58-2f6f2a8f8b11"
    gone = [site_party.kit / job, site_party.folder / "tmp" / "scratch"]
    stays = [site_party.site_dir / "runs" / "first", site_party.kit / "local"]
    stays.append(site_party.kit / job.replace("0b", "0c"))  # written to today
    for path in (*gone, *stays):
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    long_ago = time.time() - 100 * cleaning.DAY
    for path in (*gone, *stays[:2]):
        for each in (path / "file", path):
            os.utime(each, (long_ago, long_ago))
    words = ("federation", "clean", str(site_party.folder))
    assert invoke(*words, "--dry-run")[0] == 0 and all(path.exists() for path in gone)
    code, out, _ = invoke(*words)
    assert code == 0 and "2 of more than 90 days" in out
    assert not any(path.exists() for path in gone) and all(path.exists() for path in stays)
    assert (site_party.site_dir / "ledger.sqlite").exists()
    assert invoke(*words, "--older-than", "0")[0] == 2
