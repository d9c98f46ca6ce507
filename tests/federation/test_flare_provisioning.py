"""Kits: keys that stay where they are made, policies that are ours, and what `check` finds."""

from __future__ import annotations

import datetime
import json
import shutil
import socket
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from federation.real_processes import free_port
from made_sites import tiny_site
from xcal.config import to_toml
from xcal.errors import UserError
from xcal.federation.nvflare import process, provision
from xcal.federation.nvflare.check import check_party
from xcal.federation.nvflare.parties import Invitation, Party

Invoke = Callable[..., tuple[int, str, str]]

SOURCE = """
name = "pair"
server = "localhost"
port = {port}
sites = ["one", "two", "three"]
"""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> provision.Coordinator:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "FEDERATION.toml").write_text(SOURCE.format(port=free_port()))
    return provision.init(folder / "FEDERATION.toml", folder / "coordinator")


@pytest.fixture(scope="module")
def site(coordinator: provision.Coordinator) -> Party:
    invited = Invitation.read(coordinator.invitation_file("one"))
    party = provision.join(invited, coordinator.folder.parent / "one")
    provision.accept(party, approve(coordinator, party))
    return party


def approve(coordinator: provision.Coordinator, party: Party, **options: object) -> Path:
    """With the fingerprint that the party reads out."""
    read_out = provision.key_fingerprint(party.request_file)
    return provision.approve(coordinator, party.request_file, read_out, **options)  # type: ignore[arg-type]


def copy(party: Party, to: Path) -> Party:
    shutil.copytree(party.folder, to)
    return Party.find(to)


def texts(party: Party, level: str, **options: object) -> str:
    found = check_party(party, **options)  # type: ignore[arg-type]
    return " ".join(f.text for f in found if f.level == level)


def test_private_keys_are_their_owners_alone(
    coordinator: provision.Coordinator, site: Party
) -> None:
    keys = [p for p in coordinator.folder.parent.rglob("*.key") if p.is_file()]
    names = sorted(str(p.relative_to(coordinator.folder.parent)) for p in keys)
    assert names == [
        "coordinator/ca/rootCA.key",
        "coordinator/lead/kit/startup/client.key",
        "coordinator/server/kit/startup/server.key",
        "one/kit/startup/client.key",
    ]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in keys)
    assert stat.S_IMODE(coordinator.ca.stat().st_mode) == 0o700


def test_what_travels_holds_no_key(coordinator: provision.Coordinator, tmp_path: Path) -> None:
    party = provision.join(Invitation.read(coordinator.invitation_file("two")), tmp_path / "two")
    signed = approve(coordinator, party)
    for path in (party.request_file, signed):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                assert b"PRIVATE" not in archive.read(name)
    assert b"PRIVATE" not in coordinator.invitation_file("two").read_bytes()


def test_nothing_of_the_stock_kit_is_left(site: Party) -> None:
    left = {p.name for p in site.local.iterdir()}
    assert left == {"authorization.json", "resources.json", "log_config.json"}
    assert not list(site.startup.glob("*.sh"))
    rights = json.loads((site.local / "authorization.json").read_text())["permissions"]
    assert set(rights) == {"project_admin", "org_admin", "lead", "member"}
    for role in rights.values():
        assert role["byoc"] == role["shell_commands"] == role["operate"] == "none"
    resources = json.loads((site.local / "resources.json").read_text())
    assert resources["class_allow_list"] == ["xcal.federation.nvflare.executor.XcalExecutor"]
    assert resources["allow_log_streaming"] is False


def test_uninvited_and_other_roles_are_refused(
    coordinator: provision.Coordinator, tmp_path: Path
) -> None:
    stranger = Invitation.read(coordinator.invitation_file("one"))
    stranger = Invitation(**{**vars(stranger), "name": "mallory"})
    party = provision.join(stranger, tmp_path / "mallory")
    with pytest.raises(UserError, match="did not invite"):
        approve(coordinator, party)
    climber = Invitation(**{**vars(stranger), "name": "one", "role": "server"})
    party = provision.join(climber, tmp_path / "climber")
    with pytest.raises(UserError, match="another role"):
        approve(coordinator, party)
    (tmp_path / "x.zip").write_bytes(b"PK nonsense")
    with pytest.raises(UserError, match="is not a request"):
        provision.approve(coordinator, tmp_path / "x.zip", "")


@pytest.mark.parametrize("broken", ["stream", "encrypted"])
def test_a_request_with_an_unreadable_member_is_refused(
    coordinator: provision.Coordinator, tmp_path: Path, broken: str
) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one.csr", b"a certificate signing request " * 50)
    content = bytearray(path.read_bytes())
    if broken == "stream":
        begin = 30 + len("one.csr")  # the member's compressed bytes follow its header
        content[begin : begin + 8] = b"\xff" * 8
    else:
        for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            content[content.index(header) + flags] |= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="is not a request"):
        provision.approve(coordinator, path, "")


def test_an_answer_of_another_ca_is_refused(
    coordinator: provision.Coordinator, tmp_path: Path
) -> None:
    wrong = Invitation.read(coordinator.invitation_file("two"))
    wrong = Invitation(**{**vars(wrong), "fingerprint": "SHA256:" + ":".join(["AB"] * 32)})
    party = provision.join(wrong, tmp_path / "two")
    with pytest.raises(UserError, match="made for another federation"):
        approve(coordinator, party)
    signed = coordinator.folder / "approved" / f"{coordinator.about.lead}.signed.zip"
    with pytest.raises(UserError, match="ingerprint"):
        provision.accept(party, signed)
    assert not party.accepted()


def test_check_finds_a_bad_certificate_or_clock(site: Party, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert "expired on" in texts(site, "problem", now=now + datetime.timedelta(days=400))
    assert "set the clock" in texts(site, "problem", now=now - datetime.timedelta(days=2))
    assert "expires on" in texts(site, "warning", now=now + datetime.timedelta(days=340))
    assert "valid until" in texts(site, "ok")
    moved = copy(site, tmp_path / "foreign")
    other = site.folder.parent / "coordinator" / "ca" / "rootCA.pem"
    moved.certificate.write_bytes(other.read_bytes())
    assert "another key" in texts(moved, "problem")
    # a certificate for the right key that the site made itself
    key = serialization.load_pem_private_key(moved.key.read_bytes(), password=None)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "one")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=90))
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    moved.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    assert "signed by another CA" in texts(moved, "problem")


def test_a_port_in_use_is_found_and_nothing_is_said_to_be_started(
    coordinator: provision.Coordinator, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE", 0.0)
    server = Party.find(coordinator.server)
    for reuse in (False, True):  # gRPC shares ports with whoever else asked for that
        with socket.create_server(("127.0.0.1", server.about.port), reuse_port=reuse):
            assert "is in use by another process" in texts(server, "problem")
            code, out, err = invoke("federation", "start", str(server.folder))
        assert (code, out) == (2, "") and "in use by another process" in err
    assert process.processes(server) == []


def test_accept_makes_the_site_and_checks(
    coordinator: provision.Coordinator, tmp_path: Path, invoke: Invoke
) -> None:
    invited = Invitation.read(coordinator.invitation_file("three"))
    party = provision.join(invited, tmp_path / "three")
    signed = approve(coordinator, party)
    words = ["federation", "accept", str(party.folder), str(signed), "--data", "smear"]
    code, _, err = invoke(*words)
    assert code == 2
    assert "all of --data, --population" in err
    assert not party.accepted()
    code, out, err = invoke(
        *words, "--population", "smears of two", "--epsilon", "5", "--delta", "1e-5"
    )
    assert code == 0, err
    assert "epsilon_total = 5.0" in (party.site_dir / "policy.toml").read_text()
    assert "data: " in out
    assert "problem" not in out


def test_check_finds_a_loosened_kit(site: Party, tmp_path: Path) -> None:
    party = copy(site, tmp_path / "loose")
    path = party.local / "authorization.json"
    values = json.loads(path.read_text())
    values["permissions"]["lead"]["byoc"] = "any"
    values["permissions"]["project_admin"] = "any"
    path.write_text(json.dumps(values))
    path = party.local / "resources.json"
    values = json.loads(path.read_text())
    values["class_allow_list"].append("subprocess.Popen")
    values["allow_log_streaming"] = True
    values["components"].append({"id": "x", "path": "nvflare.x.SiteLogStreamer"})
    path.write_text(json.dumps(values))
    path = party.startup / "fed_client.json"
    path.write_text(path.read_text().replace("mtls", "tls"))
    (party.local / "custom").mkdir()
    party.key.chmod(0o644)
    found = texts(party, "problem")
    for word in (
        "byoc",
        "project_admin the right to everything",
        "other classes",
        "logs go to the server",
        "SiteLogStreamer",
        "mutual TLS",
        "custom",
        "chmod 600",
    ):
        assert word in found, word


def test_check_finds_what_is_wrong_with_a_site(site: Party, tmp_path: Path) -> None:
    party = copy(site, tmp_path / "homeless")
    assert "xcal site init" in texts(party, "problem")
    made = tiny_site(tmp_path / "made", epsilon_total=20.0, sigma_min=0.1)
    made.rename(party.site_dir)
    shutil.copy(tmp_path / "made" / "experiment.toml", party.folder)
    assert "data: " in texts(party, "ok")
    loose = texts(party, "warning")
    assert "epsilon_total = 20" in loose
    assert "sigma_min = 0.1" in loose
    about = party.site_dir / "site.toml"
    about.write_text(about.read_text().replace("shard = 0", "shard = 9"))
    assert "data cannot be had" in texts(party, "problem")
    table = {"client": "two", "population": "simulated client 0", "data": "not-imported"}
    about.write_text(to_toml(table))
    found = texts(party, "problem")
    assert "no data set called 'not-imported'" in found
    assert "the server asks for 'one'" in found
    (party.site_dir / "ledger.sqlite").unlink()
    assert "ledger.sqlite does not exist" in texts(party, "problem")


def test_check_finds_jobs_kept_elsewhere(
    coordinator: provision.Coordinator, tmp_path: Path
) -> None:
    server = copy(Party.find(coordinator.server), tmp_path / "server")
    assert "move the job store" in texts(server, "problem")  # it still points to the first folder
    assert "is free" in texts(Party.find(coordinator.server), "ok")


def test_renewal_keeps_the_owners_settings(
    coordinator: provision.Coordinator, site: Party, tmp_path: Path
) -> None:
    party = copy(site, tmp_path / "renewed")
    mark = party.local / "resources.json"
    mark.write_text(mark.read_text().replace('"retry_timeout": 30', '"retry_timeout": 31'))
    before = party.certificate.read_bytes()
    provision.renew(party)
    assert party.certificate.read_bytes() == before  # the old kit serves until the answer comes
    provision.accept(party, approve(coordinator, party, renew=True))
    assert party.certificate.read_bytes() != before
    assert {p.name for p in party.kit.iterdir()} == {p.name for p in site.kit.iterdir()}
    assert {p.name for p in party.startup.iterdir()} == {p.name for p in site.startup.iterdir()}
    assert '"retry_timeout": 31' in mark.read_text()
    assert "fits" in texts(party, "ok")
