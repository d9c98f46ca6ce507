"""From nothing to kits: init, join, approve, accept.

Keys are made where they are used. The coordinator signs requests that hold public keys only; what
it sends back holds certificates only. FLARE's own tools make keys, requests, certificates and kits;
this module calls them, compares fingerprints, hardens the kit and keeps files where they belong.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes

from xcal.errors import UserError, how_to_install
from xcal.federation.files import check_unused, own_folder, write_bytes, write_json
from xcal.federation.nvflare import members
from xcal.federation.nvflare.hardening import harden, remove_scripts
from xcal.federation.nvflare.members import Members, canonical, fingerprint_of_key, sign, signed_by
from xcal.federation.nvflare.parties import (
    FederationFile,
    Invitation,
    Party,
    Role,
    organization_of,
    read_federation,
)

VERSION = "2.9.0"
# What FLARE calls a role: among its participants, in a request, and in the certificate.
_CALLED = {
    "server": ("server", "server", "server"),
    "site": ("client", "site", "client"),
    "lead": ("admin", "user", "lead"),
    "viewer": ("admin", "user", "member"),
}
STATEMENT = "xcal.json"  # in a request: for which federation it was made, signed by its key


def require_nvflare() -> None:
    """One sentence where the extra is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise UserError(f"NVIDIA FLARE is not installed: {how_to_install('nvflare')}.")


def _nvflare(records: Path, *words: str) -> None:
    """Run one of FLARE's commands; its records stay in our folder, its error is one sentence."""
    require_nvflare()
    records.mkdir(parents=True, exist_ok=True, mode=0o700)
    done = subprocess.run(
        [sys.executable, "-c", "from nvflare.cli import main; main()", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(records)},
        cwd=records,
    )
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        told = [line for line in lines if not line.startswith(("usage:", " ", "Hint", "Code"))]
        raise UserError(
            f"FLARE's {words[0]} tool failed: {(told or ['no reason'])[0].strip()[:300]}"
        )


def fingerprint_of(certificate: Path) -> str:
    """A certificate's SHA-256, as people read it to each other."""
    try:
        return _fingerprint(certificate.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{certificate} is not a certificate.") from None


def _fingerprint(pem: bytes) -> str:
    digest = x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex().upper()
    return "SHA256:" + ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


def key_fingerprint(request: Path) -> str:
    """The SHA-256 of the public key in a request, to be compared by telephone."""
    return fingerprint_of_key(_csr(request)[1].public_key())


# What a damaged or an encrypted member raises.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, RuntimeError)


@contextmanager
def _archive(path: Path, otherwise: str) -> Iterator[zipfile.ZipFile]:
    """A request or an answer; what is wrong with it or in it is one sentence."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (*_UNREADABLE, OSError, ValueError, LookupError, TypeError):
        raise UserError(otherwise) from None


def _csr(request: Path) -> tuple[bytes, x509.CertificateSigningRequest]:
    if not request.exists():
        raise UserError(f"There is not a request {request}: check the path.")
    otherwise = f"{request} is not a request: ask the site to send it again."
    with _archive(request, otherwise) as archive:
        names = [n for n in archive.namelist() if n.endswith(".csr")]
        data = _member(archive, names[0])
        return data, x509.load_pem_x509_csr(data)


def _member(archive: zipfile.ZipFile, name: str, limit: int = 100_000) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > limit:
        raise ValueError(name)
    return archive.read(info)


# --- the coordinator ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's folder: CA, invitations, and the server's and the lead's own parties."""

    folder: Path
    about: FederationFile

    @staticmethod
    def find(folder: Path) -> Coordinator:
        if not (folder / "ca" / "rootCA.key").exists():
            raise UserError(
                f"{folder} is not a coordinator's folder: make one with `xcal federation init`."
            )
        return Coordinator(folder.resolve(), read_federation(folder / "federation.toml"))

    @property
    def ca(self) -> Path:
        return self.folder / "ca"

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def lead(self) -> Path:
        return self.folder / "lead"

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.ca / "rootCA.pem")

    def invitation(self, role: Role, name: str) -> Invitation:
        about = self.about
        own = role in ("server", "lead", "viewer")
        return Invitation(
            federation=about.name,
            role=role,
            name=name,
            organization=organization_of(about.organization if own else name),
            server=about.server,
            port=about.port,
            fingerprint=self.fingerprint,
        )

    def invitation_file(self, name: str) -> Path:
        return self.folder / "invitations" / f"{name}.toml"

    @property
    def members_file(self) -> Path:
        return self.folder / members.FILE

    def members(self) -> Members:
        """The list; that of a coordinator older than lists is read off what it approved."""
        found = members.known(self.folder, self.ca / "rootCA.pem")
        if found is not None:
            return found
        made = Members(self.about.name)
        for path in sorted((self.folder / "approved").glob("*.signed.zip")):
            name = path.name.removesuffix(".signed.zip")
            with _archive(path, f"{path} cannot be read: whose key was approved?") as archive:
                pem = _member(archive, f"{name}.crt")
                key = fingerprint_of_key(x509.load_pem_x509_certificate(pem).public_key())
            made = made.with_entry("approved", name, self.role_of(name) or "?", key)
        return made

    def keep(self, found: Members) -> None:
        """Sign the list and give it to the server, where that lies beside the coordinator."""
        data = found.signed(self.ca / "rootCA.key")
        for folder in (self.folder, self.server, self.lead):
            if folder.is_dir():
                write_bytes(folder / members.FILE, data)

    def role_of(self, name: str) -> Role | None:
        """What a name is invited for."""
        about = self.about
        if name == about.server:
            return "server"
        if name == about.lead:
            return "lead"
        if name in about.sites:
            return "site"
        return "viewer" if name in about.viewers else None


def init(source: Path, folder: Path) -> Coordinator:
    """Make the CA and the invitations, and the coordinator's own two parties: server and lead."""
    about = read_federation(source)
    require_nvflare()
    folder = _without_spaces(folder)
    check_unused(folder)
    own_folder(folder)
    write_bytes(folder / "federation.toml", source.read_bytes())
    profile = {
        "name": about.name,
        "scheme": "grpc",
        "connection_security": "mtls",  # FLARE's sample says tls, which is one-way
        "server": {
            "host": about.server,
            "fed_learn_port": about.port,
            "admin_port": about.port,
        },
    }
    write_json(folder / "profile.yaml", profile)  # JSON is YAML
    words = ["--profile", str(folder / "profile.yaml"), "-o", str(folder / "ca")]
    _nvflare(folder / "records", "cert", "init", *words)
    (folder / "ca" / "rootCA.key").chmod(0o600)
    (folder / "ca").chmod(0o700)
    made = Coordinator(folder, about)
    (folder / "invitations").mkdir()
    for site in about.sites:
        made.invitation("site", site).write(made.invitation_file(site))
    for viewer in about.viewers:
        made.invitation("viewer", viewer).write(made.invitation_file(viewer))
    for role, name, place in (
        ("server", about.server, made.server),
        ("lead", about.lead, made.lead),
    ):
        party = join(made.invitation(role, name), place)  # type: ignore[arg-type]
        accept(party, approve(made, party.request_file, key_fingerprint(party.request_file)))
        write_bytes(place / "federation.toml", source.read_bytes())
    return made


def approve(
    coordinator: Coordinator,
    request: Path,
    fingerprint: str,
    *,
    renew: bool = False,
    override: str | None = None,
) -> Path:
    """Sign a request that belongs to an invitation; returns the file to send back.

    `fingerprint`: what the party read out. A name that is a member gets a new key only by `renew`:
    with its old key's signature, or for a reason (`override`) that the list of members keeps; then
    its older keys are revoked.
    """
    wanted, found = _requested(request), key_fingerprint(request)
    if fingerprint.strip().lower() != found:
        raise UserError(f"{request} has the fingerprint {found}: it is not the site's request.")
    name = str(wanted.get("name"))
    role = coordinator.role_of(name)
    if role is None:
        raise UserError(f"{request} comes from {name!r}, whom this federation did not invite.")
    _, kind, kit = _CALLED[role]
    if wanted.get("kind") != kind or wanted.get("cert_type") not in (kit, None):
        raise UserError(f"{request} asks for another role than {name} was invited for: refused.")
    renewal = _check_origin(coordinator, request, name)
    if override is not None and (not renew or not override.strip()):
        raise UserError("--override goes with --renew and says why, in words.")
    listed = coordinator.members()
    if found in listed.revoked:
        raise UserError(f"The key {found} was revoked: {name} has to make another one.")
    ever, current = listed.keys(name), listed.current(name)
    event: members.Event = "approved"
    if ever and current != found:  # the same key again: its answer was lost on the way
        if not renew:
            raise UserError(
                f"{name} is a member already, with the key {ever[-1]}: a second key for it needs"
                " --renew and the old key's signature (`xcal federation join --renew`)."
            )
        event = "renewed"
        if current is None or renewal != current:
            if override is None:
                raise UserError(
                    f"{request} is not signed with {name}'s present key: have the party use"
                    " `xcal federation join --renew`, or, if that key is lost, say so with"
                    " --override REASON, which all sites will read."
                )
            event = "overridden"
    elif renew and not ever:
        raise UserError(f"{name} is no member yet: leave out --renew.")
    folder = coordinator.folder / "approved"
    folder.mkdir(exist_ok=True, mode=0o700)
    signed = folder / f"{name}.signed.zip"
    with tempfile.TemporaryDirectory(dir=coordinator.folder) as scratch:
        plain = Path(scratch) / request.name
        _copy_without(request, plain, STATEMENT)
        words = ["cert", "approve", str(plain), "--ca-dir", str(coordinator.ca)]
        words += ["--profile", str(coordinator.folder / "profile.yaml"), "--out", str(signed)]
        words += ["--valid-days", str(coordinator.about.certificate_days), "--force"]
        _nvflare(coordinator.folder / "records", *words)
    if current != found:
        if event == "overridden":
            for key in ever:
                if key not in listed.revoked:
                    listed = listed.with_entry("revoked", name, role, key, "replaced")
        listed = listed.with_entry(event, name, role, found, (override or "").strip())
    coordinator.keep(listed)
    with zipfile.ZipFile(signed, "a") as archive:
        archive.write(coordinator.members_file, members.FILE)
    return signed


def revoke(coordinator: Coordinator, name: str, reason: str) -> list[str]:
    """Revoke all keys of a name; returns them."""
    listed = coordinator.members()
    keys = [k for k in listed.keys(name) if k not in listed.revoked]
    if not keys:
        raise UserError(f"{name} holds no key of this federation that could be revoked.")
    if not reason.strip():
        raise UserError("Say why, with --reason: all sites will read it.")
    for key in keys:
        listed = listed.with_entry(
            "revoked", name, coordinator.role_of(name) or "?", key, reason.strip()
        )
    coordinator.keep(listed)
    return keys


def _check_origin(coordinator: Coordinator, request: Path, name: str) -> str | None:
    """Refuse a request made for another federation; returns the key that signed a renewal."""
    csr, new = _csr(request)
    otherwise = (
        f"{request} does not say for which federation it was made: have it made again with"
        " `xcal federation join`."
    )
    with _archive(request, otherwise) as archive:
        given = json.loads(_member(archive, STATEMENT))
        said, signature, old = given["statement"], given["signature"], given.get("old")
        of = said["root"]
    if of != coordinator.fingerprint or said.get("federation") != coordinator.about.name:
        raise UserError(f"{request} was made for another federation ({of}): refused.")
    content = canonical(said)
    sound = said.get("name") == name and said.get("csr") == hashlib.sha256(csr).hexdigest()
    if not sound or not signed_by(new.public_key(), content, signature):
        raise UserError(f"{request} was changed on its way: ask the site to send it again.")
    if not isinstance(old, dict):
        return None
    try:
        root = x509.load_pem_x509_certificate((coordinator.ca / "rootCA.pem").read_bytes())
        before = x509.load_pem_x509_certificate(str(old.get("certificate")).encode())
        before.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return None
    names = before.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    if not signed_by(before.public_key(), content, old.get("signature")):
        return None
    if [n.value for n in names] != [name]:
        return None
    return fingerprint_of_key(before.public_key())


def _copy_without(source: Path, target: Path, left_out: str) -> None:
    """FLARE's tools take archives of exactly the files they know."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name != left_out:
                new.writestr(name, _member(old, name))


def _requested(request: Path) -> dict[str, object]:
    key_fingerprint(request)  # refuses what is not a request
    otherwise = f"{request} is not a request: ask the site to send it again."
    with _archive(request, otherwise) as archive:
        found = json.loads(_member(archive, "request.json"))
        if not isinstance(found, dict):
            raise UserError(otherwise)
        return found


# --- every party ----------------------------------------------------------------------------------


def _without_spaces(folder: Path) -> Path:
    """Its whole path, refused where FLARE's tools would stumble over it."""
    whole = folder.resolve()
    if any(c.isspace() for c in str(whole)):
        raise UserError(f"{whole} contains a space, which FLARE cannot take.")
    return whole


def join(invitation: Invitation, folder: Path) -> Party:
    """Make a key and a request in a new folder; the key never leaves it."""
    require_nvflare()
    party = Party.create(_without_spaces(folder), invitation)
    _request(party)
    return party


def renew(party: Party) -> Party:
    """A new key and request for a party that has a kit; the old kit serves until `accept`."""
    party.require_kit()
    shutil.rmtree(party.request_folder, ignore_errors=True)
    _request(party, renewal=True)
    return party


def _request(party: Party, *, renewal: bool = False) -> None:
    about = party.about
    kind, asked, certified = _CALLED[about.role]
    person: dict[str, object] = {"name": about.name, "type": kind, "org": about.organization}
    if asked == "user":
        person["role"] = certified
    if about.role == "server":
        person |= {"fed_learn_port": about.port, "admin_port": about.port}
    definition = party.folder / "records" / "party.yaml"
    definition.parent.mkdir(exist_ok=True, mode=0o700)
    write_json(definition, {"name": about.federation, "participants": [person]})
    words = ["-p", str(definition), "--out", str(party.request_folder)]
    _nvflare(party.folder / "records", "cert", "request", *words)
    (key,) = party.request_folder.glob("*.key")
    key.chmod(0o600)
    csr, _ = _csr(party.request_file)
    said = {
        "federation": about.federation,
        "root": about.fingerprint,
        "name": about.name,
        "csr": hashlib.sha256(csr).hexdigest(),
    }
    given: dict[str, Any] = {"statement": said, "signature": sign(key, canonical(said))}
    if renewal:
        given["old"] = {
            "certificate": party.certificate.read_text(),
            "signature": sign(party.key, canonical(said)),
        }
    with zipfile.ZipFile(party.request_file, "a") as archive:
        archive.writestr(STATEMENT, json.dumps(given, indent=2))


def accept(party: Party, signed: Path) -> None:
    """Build the kit from the coordinator's answer, refuse another CA's, harden it."""
    if not signed.exists():
        raise UserError(f"There is no answer {signed}: check the path.")
    if not party.request_folder.exists():
        raise UserError(
            f"{party.folder} has no open request: make one with `xcal federation join --renew`."
        )
    with _archive(signed, f"{signed} is not a coordinator's answer.") as archive:
        root = _member(archive, "rootCA.pem")
        found = _fingerprint(root)
        listed = None
        if members.FILE in archive.namelist():
            listed = _member(archive, members.FILE, members.MAX_BYTES)
    if found != party.about.fingerprint:
        raise UserError(
            f"{signed} comes from another federation than the invitation: its fingerprint is"
            f" {found}, expected was {party.about.fingerprint}."
        )
    work = party.folder / "records" / "kit"
    shutil.rmtree(work, ignore_errors=True)
    plain = party.folder / "records" / signed.name
    _copy_without(signed, plain, members.FILE)
    if listed is not None:
        trusted = party.folder / "records" / "rootCA.pem"
        write_bytes(trusted, root)  # its fingerprint is the invitation's
        members.take(party.folder, listed, trusted, str(signed))
    words = ["--request-dir", str(party.request_folder)]
    words += ["--fingerprint", party.about.fingerprint, "-w", str(work)]
    _nvflare(party.folder / "records", "package", str(plain), *words)
    made = next(work.glob("*/prod_*/*/startup"), None)
    if made is None:
        raise UserError(f"FLARE made no kit from {signed}: ask the coordinator to approve again.")
    if party.kit.exists():  # a renewal: certificates are new, the owner's settings stay
        remove_scripts(made)
        aside = party.kit / "startup.old"
        shutil.rmtree(aside, ignore_errors=True)
        party.startup.rename(aside)
        made.rename(party.startup)
        shutil.rmtree(aside)
    else:
        made.parent.rename(party.kit)
        harden(party)
    party.kit.chmod(0o700)
    party.key.chmod(0o600)
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(party.request_folder)  # the key now lives in the kit alone
    write_start_script(party)


def write_start_script(party: Party) -> None:
    """`start.sh`: what a person, or a supervisor, runs. It names this installation's Python."""
    if party.about.role not in ("server", "site"):
        return
    path = party.folder / "start.sh"
    text = (
        "#!/bin/sh\n"
        "# Starts this party in the foreground; a supervisor restarts it when it ends.\n"
        f"exec '{sys.executable}' -m xcal federation start --foreground"
        ' "$(dirname "$(readlink -f "$0")")"\n'
    )
    write_bytes(path, text.encode())
    path.chmod(0o700)
