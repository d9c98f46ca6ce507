"""Who may join: fingerprints, second keys for known names, other federations, revocation."""

from __future__ import annotations

import json
import re
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from cryptography import x509

from federation.flare_support import LONG, SITES, running, wait_for
from federation.real_processes import free_port
from xcal.errors import UserError
from xcal.federation.nvflare import members, process, provision
from xcal.federation.nvflare.check import check_party
from xcal.federation.nvflare.parties import Party
from xcal.federation.nvflare.revoked import Tokens, refuse_revoked

Invoke = Callable[..., tuple[int, str, str]]


def make(folder: Path, name: str = "pair") -> provision.Coordinator:
    folder.mkdir()
    source = folder / "FEDERATION.toml"
    source.write_text(f'name = "{name}"\nport = {free_port()}\nsites = ["one", "two"]\n')
    return provision.init(source, folder / "coordinator")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> provision.Coordinator:
    return make(tmp_path_factory.mktemp("members") / "first")


@pytest.fixture
def coordinator(first: provision.Coordinator, tmp_path: Path) -> provision.Coordinator:
    """A fresh copy: every test has members of its own."""
    shutil.copytree(first.folder.parent, tmp_path / "copy")
    return provision.Coordinator.find(tmp_path / "copy" / "coordinator")


class Typed:
    """What coordinator and parties type."""

    def __init__(self, invoke: Invoke, coordinator: provision.Coordinator) -> None:
        self._invoke = invoke
        self.coordinator = coordinator

    def __call__(self, *words: object) -> tuple[int, str]:
        code, out, err = self._invoke("federation", *map(str, words))
        return code, out + err

    def join(self, name: str, folder: Path, *words: str) -> Party:
        place = words or ("--out", str(folder))
        code, said = self("join", self.coordinator.invitation_file(name), *place)
        assert code == 0, said
        return Party.find(folder)

    def approve(self, party: Party, *words: str, fingerprint: str | None = None) -> tuple[int, str]:
        read_out = fingerprint or provision.key_fingerprint(party.request_file)
        where = ("--coordinator", self.coordinator.folder, "--fingerprint", read_out)
        return self("approve", party.request_file, *where, *words)

    def signed(self, name: str) -> Path:
        return self.coordinator.folder / "approved" / f"{name}.signed.zip"

    def member(self, name: str, folder: Path) -> Party:
        party = self.join(name, folder)
        code, said = self.approve(party)
        assert code == 0, said
        provision.accept(party, self.signed(name))
        return party


@pytest.fixture
def typed(invoke: Invoke, coordinator: provision.Coordinator) -> Typed:
    return Typed(invoke, coordinator)


def events(folder: Path, root: Path) -> list[tuple[str, str]]:
    found = members.known(folder, root)
    assert found is not None
    return [(e.event, e.name) for e in found.entries]


def test_the_fingerprint_is_required(typed: Typed, tmp_path: Path) -> None:
    party = typed.join("one", tmp_path / "one")
    code, said = typed("approve", party.request_file, "--coordinator", typed.coordinator.folder)
    assert code == 2
    assert "--fingerprint" in said
    assert typed.approve(party, fingerprint="0" * 32)[0] == 2
    assert not typed.signed("one").exists()
    assert typed.approve(party)[0] == 0


def test_a_second_key_for_a_member_is_refused(typed: Typed, tmp_path: Path) -> None:
    party = typed.member("one", tmp_path / "one")
    before = typed.signed("one").read_bytes()
    impostor = typed.join("one", tmp_path / "impostor")
    for words in ((), ("--renew",), ("--override", "x"), ("--renew", "--override", " ")):
        code, said = typed.approve(impostor, *words)
        assert code == 2, said
    assert typed.signed("one").read_bytes() == before  # nothing was signed
    assert typed.coordinator.members().current("one") == process.own_key(party)


@pytest.mark.slow
def test_the_old_key_signs_its_renewal(typed: Typed, tmp_path: Path) -> None:
    party = typed.member("one", tmp_path / "one")
    old = process.own_key(party)
    typed.join("one", party.folder, "--renew", str(party.folder))
    assert typed.approve(party)[0] == 2  # a known name, and nobody said --renew
    code, said = typed.approve(party, "--renew")
    assert code == 0, said
    provision.accept(party, typed.signed("one"))
    assert process.own_key(party) != old
    assert events(party.folder, party.root)[-1] == ("renewed", "one")
    assert typed.coordinator.members().revoked == frozenset()  # it served until `accept`


@pytest.mark.slow
def test_a_renewal_signed_by_another_member_is_refused(typed: Typed, tmp_path: Path) -> None:
    typed.member("one", tmp_path / "one")
    two = typed.member("two", tmp_path / "two")
    forged = typed.join("one", tmp_path / "forged")
    with zipfile.ZipFile(forged.request_file) as archive:
        kept = {n: archive.read(n) for n in archive.namelist()}
    given = json.loads(kept[provision.STATEMENT])
    given["old"] = {
        "certificate": two.certificate.read_text(),
        "signature": members.sign(two.key, members.canonical(given["statement"])),
    }
    kept[provision.STATEMENT] = json.dumps(given).encode()
    with zipfile.ZipFile(forged.request_file, "w") as archive:
        for name, data in kept.items():
            archive.writestr(name, data)
    code, said = typed.approve(forged, "--renew")
    assert code == 2
    assert "present key" in said


@pytest.mark.slow
def test_a_lost_key_is_replaced_by_an_override_that_all_are_told(
    typed: Typed, tmp_path: Path
) -> None:
    lost = typed.member("one", tmp_path / "one")
    two = typed.member("two", tmp_path / "two")
    again = typed.join("one", tmp_path / "again")
    code, said = typed.approve(again, "--renew", "--override", "disk broken, seen in person")
    assert code == 0, said
    provision.accept(again, typed.signed("one"))
    server = Party.find(typed.coordinator.server)
    assert events(server.folder, server.root)[-2:] == [("revoked", "one"), ("overridden", "one")]
    # a site takes the newer list, is told, and never goes back to an older one
    older = (two.folder / members.FILE).read_bytes()
    code, said = typed("members", two.folder, typed.coordinator.members_file)
    assert code == 0
    assert "disk broken, seen in person" in said
    assert members.take(two.folder, older, two.root, "older") == []
    told = [f.text for f in check_party(two) if f.level == "warning"]
    assert any("disk broken" in text for text in told)
    # the lost key starts nothing where the list is known
    members.take(lost.folder, typed.coordinator.members_file.read_bytes(), lost.root, "list")
    code, said = typed("start", lost.folder)
    assert code == 2
    assert "revoked" in said


@pytest.mark.slow
def test_requests_for_another_federation_are_refused(typed: Typed, tmp_path: Path) -> None:
    other = make(tmp_path / "other")  # of the same name, with the same sites
    party = provision.join(other.invitation("site", "one"), tmp_path / "one")
    code, said = typed.approve(party)
    assert code == 2
    assert "made for another federation" in said
    # and it cannot be turned into one for this federation without the key
    with zipfile.ZipFile(party.request_file) as archive:
        kept = {n: archive.read(n) for n in archive.namelist()}
    given = json.loads(kept[provision.STATEMENT])
    given["statement"]["root"] = typed.coordinator.fingerprint
    for changed in (json.dumps(given).encode(), b"{}", None):
        with zipfile.ZipFile(party.request_file, "w") as archive:
            for name, data in kept.items():
                if name != provision.STATEMENT:
                    archive.writestr(name, data)
            if changed is not None:
                archive.writestr(provision.STATEMENT, changed)
        assert typed.approve(party)[0] == 2
    assert not typed.signed("one").exists()


def test_revoked_keys_prove_nobodys_identity(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvflare.private.fed.utils import identity_utils

    party = typed.member("one", tmp_path / "one")
    words = ("--coordinator", str(typed.coordinator.folder))
    assert typed("revoke", "nobody", *words, "--reason", "x")[0] == 2
    assert typed("revoke", "one", *words, "--reason", " ")[0] == 2
    server = Party.find(typed.coordinator.server)
    ask = identity_utils.IdentityVerifier.verify_common_name
    monkeypatch.setattr(identity_utils.IdentityVerifier, "verify_common_name", ask)
    refuse_revoked(server.kit)
    verifier = identity_utils.IdentityVerifier(str(server.root))
    asserter = identity_utils.IdentityAsserter(str(party.key), str(party.certificate))
    proof = {
        "asserted_cn": "one",
        "nonce": "n",
        "asserter_cert": x509.load_pem_x509_certificate(party.certificate.read_bytes()),
        "signature": asserter.sign_common_name("n"),
    }
    assert verifier.verify_common_name(**proof)
    code, said = typed("revoke", "one", *words, "--reason", "left the study")
    assert code == 0, said
    with pytest.raises(identity_utils.InvalidAsserterCert, match="revoked"):
        verifier.verify_common_name(**proof)
    assert typed.coordinator.members().shut_out() == {"one"}
    assert typed.approve(typed.join("one", tmp_path / "again"))[0] == 2  # it does not come back so
    # a list that somebody shortened admits nobody
    path = server.folder / members.FILE
    values = json.loads(path.read_text())
    values["list"]["entries"].pop()
    path.write_text(json.dumps(values))
    with pytest.raises(identity_utils.InvalidAsserterCert, match="signed by"):
        verifier.verify_common_name(**proof)


def test_a_coordinator_older_than_lists_knows_its_members(typed: Typed, tmp_path: Path) -> None:
    party = typed.member("one", tmp_path / "one")
    for path in typed.coordinator.folder.rglob(members.FILE):
        path.unlink()
    assert typed.coordinator.members().current("one") == process.own_key(party)
    assert typed.approve(typed.join("one", tmp_path / "impostor"))[0] == 2


def test_start_says_that_its_port_is_taken(typed: Typed) -> None:
    server = Party.find(typed.coordinator.server)
    with socket.create_server(("127.0.0.1", server.about.port)):
        code, said = typed("start", server.folder)
    assert code == 2
    assert f"Port {server.about.port} is in use" in said
    assert process.processes(server) == []


def test_a_foreign_list_is_not_taken(typed: Typed, tmp_path: Path) -> None:
    party = typed.member("one", tmp_path / "one")
    before = (party.folder / members.FILE).read_bytes()
    foreign = make(tmp_path / "other")
    for data in (foreign.members_file.read_bytes(), b"{}", b"\xff", b"[]"):
        with pytest.raises(UserError, match="signed by this federation"):
            members.take(party.folder, data, party.root, "it")
    assert (party.folder / members.FILE).read_bytes() == before


def test_a_token_is_worth_no_more_than_its_key(typed: Typed, tmp_path: Path) -> None:
    party = typed.member("one", tmp_path / "one")
    other = typed.member("two", tmp_path / "two")
    server = Party.find(typed.coordinator.server)
    tokens = Tokens(server.folder, server.root)
    tokens.given("first", process.own_key(party))
    tokens.given("second", process.own_key(other))
    assert tokens.refusal("one", "first") is None
    words = ("--coordinator", str(typed.coordinator.folder), "--reason", "left the study")
    assert typed("revoke", "one", *words)[0] == 0
    for known in (tokens, Tokens(server.folder, server.root)):  # also after a restart
        assert "revoked" in str(known.refusal("one", "first"))
        assert "revoked" in str(known.refusal("one", "a token from before tokens were kept"))
        assert "revoked" in str(known.refusal("another name", "first"))
        assert known.refusal("two", "second") is None
    assert "first" not in (server.folder / "tokens.json").read_text()  # it would open the door
    path = server.folder / members.FILE  # a list that somebody changed admits nobody
    path.write_text(path.read_text().replace("left the study", "left the city!"))
    assert tokens.refusal("two", "second") is not None


@LONG[0]
@LONG[1]
def test_real_processes_shut_out_who_was_revoked(tmp_path: Path) -> None:
    with running(tmp_path / "three") as federation:
        federation.wait_connected()
        coordinator = federation.place / "coordinator"
        done = federation.xcal(
            "revoke", SITES[2], "--coordinator", str(coordinator), "--reason", "left the study"
        )
        assert done.returncode == 0, done.stderr
        # its open connection ends with its next message, a heartbeat at the latest
        log = federation.party("server").kit / "log.txt"
        wait_for(lambda: "its connection is ended" in log.read_text(), "the server to end it", 120)
        wait_for(
            lambda: federation.xcal("status").stdout.startswith(
                f"connected: {', '.join(SITES[:2])}\n"
            ),
            "the server to list it no more",
            120,
        )
        # the run goes on with the others, and their lists tell why
        federation.submit("without", "--quorum", "2")
        said = federation.wait_end("without")
        assert "FINISHED:COMPLETED" in said
        assert "3/3, 2 answered" in said
        for name in SITES[:2]:
            party = federation.party(name)
            assert events(party.folder, party.root)[-1] == ("revoked", SITES[2])
        # started again, the server does not take it back
        federation.kill(SITES[2])
        federation.kill("server")
        federation.start("server")
        federation.start(SITES[2])  # its own list is old: it does not know yet
        federation.wait_connected(*SITES[:2])
        wait_for(
            lambda: re.search("the key [0-9a-f]{32} was revoked", log.read_text()),
            "the server to refuse it",
            120,
        )
        done = federation.xcal("status")
        assert done.stdout.splitlines()[0] == f"connected: {', '.join(SITES[:2])}"
