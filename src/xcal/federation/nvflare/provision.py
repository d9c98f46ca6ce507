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
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from xcal.errors import UserError
from xcal.federation.files import write_bytes
from xcal.federation.nvflare.hardening import harden, remove_scripts
from xcal.federation.nvflare.parties import (
    FederationFile,
    Invitation,
    Party,
    Role,
    json_text,
    organization_of,
    read_federation,
)

VERSION = "2.9.0"
_PARTY_KIND = {"server": "server", "site": "client", "lead": "admin", "viewer": "admin"}
_PARTY_ROLE = {"lead": "lead", "viewer": "member"}


def require_nvflare() -> None:
    """One sentence where the extra is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise UserError(
            "NVIDIA FLARE is not installed: `pip install 'xcal-fl[nvflare]'`, then try again."
        )


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
    try:
        with zipfile.ZipFile(request) as archive:
            names = [n for n in archive.namelist() if n.endswith(".csr")]
            info = archive.getinfo(names[0])
            if info.file_size > 100_000:
                raise ValueError
            csr = x509.load_pem_x509_csr(archive.read(info))
    except FileNotFoundError:
        raise UserError(f"There is no request {request}: check the path.") from None
    except (OSError, ValueError, IndexError, zipfile.BadZipFile):
        raise UserError(f"{request} is not a request: ask the site to send it again.") from None
    public = csr.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(public).hexdigest()[:32]


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


def init(source: Path, folder: Path) -> Coordinator:
    """Make the CA and the invitations, and the coordinator's own two parties: server and lead."""
    about = read_federation(source)
    require_nvflare()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is in use already: choose another folder.")
    if any(c.isspace() for c in str(folder.resolve())):
        raise UserError(f"{folder.resolve()} contains a space, which FLARE cannot take.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    folder = folder.resolve()
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
    write_bytes(folder / "profile.yaml", json_text(profile).encode())  # JSON is YAML
    _nvflare(
        folder / "records",
        "cert",
        "init",
        "--profile",
        str(folder / "profile.yaml"),
        "-o",
        str(folder / "ca"),
    )
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
        accept(party, approve(made, party.request_file))
        write_bytes(place / "federation.toml", source.read_bytes())
    return made


def approve(coordinator: Coordinator, request: Path) -> Path:
    """Sign a request that belongs to an invitation; returns the file to send back."""
    about = coordinator.about
    wanted = _requested(request)
    invited = {
        about.server: ("server", "server"),
        about.lead: ("user", "lead"),
        **dict.fromkeys(about.sites, ("site", "client")),
        **dict.fromkeys(about.viewers, ("user", "member")),
    }
    name = wanted.get("name")
    if name not in invited:
        raise UserError(f"{request} comes from {name!r}, whom this federation did not invite.")
    kind, kit = invited[str(name)]
    if wanted.get("kind") != kind or wanted.get("cert_type") not in (kit, None):
        raise UserError(f"{request} asks for another role than {name} was invited for: refused.")
    folder = coordinator.folder / "approved"
    folder.mkdir(exist_ok=True, mode=0o700)
    signed = folder / f"{name}.signed.zip"
    words = ["cert", "approve", str(request.resolve()), "--ca-dir", str(coordinator.ca)]
    words += ["--profile", str(coordinator.folder / "profile.yaml"), "--out", str(signed)]
    words += ["--valid-days", str(about.certificate_days), "--force"]
    _nvflare(coordinator.folder / "records", *words)
    return signed


def _requested(request: Path) -> dict[str, object]:
    key_fingerprint(request)  # refuses what is no request
    try:
        with zipfile.ZipFile(request) as archive:
            info = archive.getinfo("request.json")
            found = json.loads(archive.read(info)) if info.file_size < 100_000 else None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{request} is not a request: ask the site to send it again.")
    return found


# --- every party ----------------------------------------------------------------------------------


def join(invitation: Invitation, folder: Path) -> Party:
    """Make a key and a request in a new folder; the key never leaves it."""
    require_nvflare()
    if any(c.isspace() for c in str(folder.resolve())):
        raise UserError(f"{folder.resolve()} contains a space, which FLARE cannot take.")
    party = Party.create(folder, invitation)
    party = Party(party.folder.resolve(), invitation)
    _request(party)
    return party


def renew(party: Party) -> Party:
    """A new key and request for a party that has a kit; the old kit serves until `accept`."""
    party.require_kit()
    shutil.rmtree(party.request_folder, ignore_errors=True)
    _request(party)
    return party


def _request(party: Party) -> None:
    about = party.about
    person: dict[str, object] = {
        "name": about.name,
        "type": _PARTY_KIND[about.role],
        "org": about.organization,
    }
    if about.role in _PARTY_ROLE:
        person["role"] = _PARTY_ROLE[about.role]
    if about.role == "server":
        person |= {"fed_learn_port": about.port, "admin_port": about.port}
    definition = party.folder / "records" / "party.yaml"
    definition.parent.mkdir(exist_ok=True, mode=0o700)
    write_bytes(
        definition, json_text({"name": about.federation, "participants": [person]}).encode()
    )
    _nvflare(
        party.folder / "records",
        "cert",
        "request",
        "-p",
        str(definition),
        "--out",
        str(party.request_folder),
    )
    for key in party.request_folder.glob("*.key"):
        key.chmod(0o600)


def accept(party: Party, signed: Path) -> None:
    """Build the kit from the coordinator's answer, refuse another CA's, harden it."""
    if not signed.exists():
        raise UserError(f"There is no answer {signed}: check the path.")
    if not party.request_folder.exists():
        raise UserError(
            f"{party.folder} has no open request: make one with `xcal federation join --renew`."
        )
    try:
        with zipfile.ZipFile(signed) as archive:
            root = archive.getinfo("rootCA.pem")
            found = _fingerprint(archive.read(root)) if root.file_size < 100_000 else ""
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        raise UserError(f"{signed} is not a coordinator's answer.") from None
    if found != party.about.fingerprint:
        raise UserError(
            f"{signed} comes from another federation than the invitation: its fingerprint is"
            f" {found}, expected was {party.about.fingerprint}."
        )
    work = party.folder / "records" / "kit"
    shutil.rmtree(work, ignore_errors=True)
    _nvflare(
        party.folder / "records",
        "package",
        str(signed.resolve()),
        "--request-dir",
        str(party.request_folder),
        "--fingerprint",
        party.about.fingerprint,
        "-w",
        str(work),
    )
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
