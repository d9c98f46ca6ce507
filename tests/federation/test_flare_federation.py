"""Three hospitals, a server and a lead: real processes, mutual TLS, on loopback."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from federation.flare_support import LONG, SITES, VIEWER, Federation, Relay, tls_records
from inventory import INVENTORY
from xcal.dp.ledger.rows import read_rows, runs_of, verify
from xcal.experiments import load_experiment
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.nvflare.check import handshake
from xcal.federation.nvflare.jobs import write_job
from xcal.federation.nvflare.provision import Coordinator, init

pytestmark = LONG


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One federation for all tests of this file; hospital-c speaks through a recording relay."""
    made = Federation(tmp_path_factory.mktemp("federation") / "three")
    made.relay = Relay(made.port)  # type: ignore[attr-defined]
    settings = made.party("hospital-c").startup / "fed_client.json"
    near, far = f"localhost:{made.port}", f"localhost:{made.relay.port}"  # type: ignore[attr-defined]
    assert near in settings.read_text()
    settings.write_text(settings.read_text().replace(near, far))
    try:
        made.start()
        made.wait_connected()
        yield made
    finally:
        made.halt()
        made.relay.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def local_run(federation: Federation) -> Path:
    experiment, given = load_experiment(federation.experiment)
    folder = RunFolder.create(federation.folder / "local", experiment, sorted(given))
    run_experiment(folder)
    return folder.path


def test_equals_the_local_engine(federation: Federation, local_run: Path) -> None:
    federation.submit("equal")
    said = federation.wait_end("equal")
    assert "round 3/3, 3 answered" in said
    assert "FINISHED:COMPLETED" in said
    fetched = federation.fetch("equal")
    for name in ("model.safetensors", "trace.jsonl", "plans.json"):
        assert (fetched / name).read_bytes() == (local_run / name).read_bytes(), name
    # Who is a group at a site, and whose the public images are, is said differently elsewhere.
    said_there, said_here = (
        json.loads((folder / "statement.json").read_text()) for folder in (fetched, local_run)
    )
    for key in ("promise", "unit", "clients", "sampling", "noise", "accounting", "assumptions"):
        assert said_there[key] == said_here[key], key
    ours, theirs = (json.loads((p / "result.json").read_text()) for p in (fetched, local_run))
    assert ours["clients"] == theirs["clients"]  # ε of each client, never averaged
    assert ours["macro_f1"] == theirs["macro_f1"]


def test_nothing_but_tls_on_the_wire(federation: Federation) -> None:
    """What hospital-c and the server said to each other in the run above."""
    streams = [bytes(kept) for pair in federation.relay.recorded for kept in pair]  # type: ignore[attr-defined]
    spoken = [s for s in streams if s]
    assert sum(map(len, spoken)) > 100_000  # three rounds of weights both ways
    for stream in spoken:
        kinds = tls_records(stream)
        assert kinds[0] == 22  # a handshake comes first
    for secret in (b"hospital", b"weights", b"smear", b"ledger"):
        assert all(secret not in s for s in spoken)


def test_sites_send_inventoried_fields_only(federation: Federation) -> None:
    for site in SITES:
        lines = (federation.site_dir(site) / "messages.jsonl").read_text().splitlines()
        sent = [line for line in map(json.loads, lines) if line["direction"] == "sent"]
        assert len([s for s in sent if s["kind"] == "reply"]) >= 3
        for message in sent:
            known = {f.name for f in INVENTORY if f.is_in(message["kind"])}
            assert set(message["fields"]) <= known


def test_discrete_noise_equals_the_local_engine(federation: Federation, tmp_path: Path) -> None:
    words = ["method=fl-dp", "noise_kind=discrete", "rounds=2", "epsilon=2.0", "delta=1e-4"]
    federation.submit("discrete", *(word for pair in words for word in ("--set", pair)))
    assert "FINISHED:COMPLETED" in federation.wait_end("discrete")
    fetched = federation.fetch("discrete")
    experiment, given = load_experiment(federation.experiment, words)
    folder = RunFolder.create(tmp_path / "local", experiment, sorted(given))
    run_experiment(folder)
    for name in ("model.safetensors", "trace.jsonl", "plans.json"):
        assert (fetched / name).read_bytes() == (folder.path / name).read_bytes(), name
    for site in SITES:
        ledger = federation.site_dir(site) / "ledger.sqlite"
        assert verify(ledger).ok
        kinds = {r.method: r.noise_kind for r in runs_of(read_rows(ledger)).values()}
        assert kinds["fl-dp"] == "discrete"


def test_a_request_beyond_a_sites_policy_is_refused(federation: Federation) -> None:
    sites = [federation.site_dir(site) for site in SITES]
    before = [len(read_rows(site_dir / "ledger.sqlite")) for site_dir in sites]
    federation.submit("greedy", "--set", "epsilon=9.0")
    federation.wait_end("greedy")
    done = federation.xcal("fetch", "greedy", "--out", str(federation.folder / "greedy"))
    assert "refused (epsilon-run)" in done.stdout
    lines = (federation.folder / "greedy" / "refusals.jsonl").read_text().splitlines()
    assert {json.loads(line)["code"] for line in lines} == {"epsilon-run"}
    for site_dir in sites:  # logged with the detail at the site, which nothing was charged to
        last = json.loads((site_dir / "refusals.jsonl").read_text().splitlines()[-1])
        assert last["code"] == "epsilon-run"
        assert "epsilon_run = 8 in policy.toml" in last["detail"]
    assert before == [len(read_rows(site_dir / "ledger.sqlite")) for site_dir in sites]


# --- who is not let in ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_no_foreign_or_old_connection(federation: Federation, tmp_path: Path) -> None:
    site, port = federation.party("hospital-a"), federation.port
    assert handshake("localhost", port, site.root, site.certificate, site.key) == "TLSv1.3"
    with pytest.raises((ssl.SSLError, OSError)):  # no certificate
        handshake("localhost", port, site.root, None, None)
    (tmp_path / "F.toml").write_text(
        f'name = "other"\nserver = "localhost"\nport = {port}\nsites = ["x"]'
    )
    foreign: Coordinator = init(tmp_path / "F.toml", tmp_path / "other")
    kit = foreign.lead / "kit" / "startup"
    with pytest.raises((ssl.SSLError, OSError)):  # a certificate of another CA
        handshake("localhost", port, site.root, kit / "client.crt", kit / "client.key")
    with pytest.raises(ssl.SSLCertVerificationError):  # and a server of another CA, by a site
        handshake("localhost", port, kit / "rootCA.pem", site.certificate, site.key)
    for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        with pytest.raises((ssl.SSLError, OSError)):
            handshake("localhost", port, site.root, site.certificate, site.key, newest=old)
    for plain in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        with socket.create_connection(("localhost", port), timeout=5) as connection:
            connection.sendall(plain)
            assert connection.recv(100) == b""


def job(tmp_path: Path, name: str, executor: str, **arguments: object) -> Path:
    folder = write_job(tmp_path / name, name, {"sites": {}, "resume": True}, 3)
    path = folder / "app" / "config" / "config_fed_client.json"
    config = json.loads(path.read_text())
    config["executors"][0]["executor"] = {"path": executor, "args": arguments}
    path.write_text(json.dumps(config))
    return folder


def test_a_job_with_code_is_refused(federation: Federation, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    folder = job(tmp_path, "code", "evil.Evil")
    custom = folder / "app" / "custom"
    custom.mkdir()
    (custom / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: ...\n")
    said = federation.submit_folder(folder)
    assert "COMPLETED" not in said
    assert "refused" in said or "ended" in said, said
    assert not mark.exists()


def test_a_class_not_on_the_list_is_refused(federation: Federation, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    said = federation.submit_folder(
        job(tmp_path, "popen", "subprocess.Popen", args=["touch", str(mark)])
    )
    assert "COMPLETED" not in said
    assert "refused" in said or "ended" in said, said
    assert not mark.exists()


def test_an_admin_without_the_role_is_refused(federation: Federation, tmp_path: Path) -> None:
    viewer = federation.place / VIEWER
    said = federation.submit_folder(job(tmp_path, "viewer", "x.y"), viewer)
    assert "refused" in said
    assert "no right" in said
    looked = federation.xcal("status", lead=viewer)
    assert "hospital-a" in looked.stdout
    stopped = federation.xcal("stop", "equal", lead=viewer)
    assert stopped.returncode == 2


def test_check_speaks_with_the_running_server(federation: Federation) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xcal", "federation", "check", str(federation.place / "hospital-a")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "accepts this certificate" in done.stdout
