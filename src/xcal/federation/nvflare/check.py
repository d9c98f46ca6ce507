"""What is wrong with a party, told before it starts.

A site whose certificate the server does not know would wait without a word; a kit loosened by hand
would run and say nothing. Each finding is one sentence with what to do.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import socket
import ssl
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from xcal.errors import UserError, how_to_install
from xcal.federation.nvflare import process
from xcal.federation.nvflare.hardening import looser_than_ours
from xcal.federation.nvflare.members import known
from xcal.federation.nvflare.parties import Party
from xcal.federation.nvflare.provision import VERSION, fingerprint_of
from xcal.federation.site_check import Finding, check_site, ok, problem, warning
from xcal.federation.site_directory import SiteDirectory

SOON = datetime.timedelta(days=30)


def check_party(party: Party, *, now: datetime.datetime | None = None) -> list[Finding]:
    """All that can be known about a party on its own machine, in the order it matters."""
    moment = now or datetime.datetime.now(datetime.UTC)
    party.require_kit()
    found = _installation()
    found += _key(party)
    certificates = _certificates(party, moment)
    found += certificates
    found += _members(party, moment)
    found += [problem(text) for text in looser_than_ours(party)] or [
        ok("The kit allows exactly our classes, no code, no shell, no log streaming.")
    ]
    if party.about.role == "site":
        found += _site_dir(party)
    sound = not any(f.level == "problem" for f in certificates)
    found += _server_port(party) if party.about.role == "server" else _reach(party, sound)
    return found


def _installation() -> list[Finding]:
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        return [problem(f"FLARE is not installed: {how_to_install('nvflare')}.")]
    if version != VERSION:
        return [warning(f"FLARE is {version}; this was tested with {VERSION}.")]
    return [ok(f"FLARE {version} is installed.")]


def _key(party: Party) -> list[Finding]:
    mode = stat.S_IMODE(party.key.stat().st_mode)
    if mode & 0o077:
        return [problem(f"{party.key} can be read by others (mode {mode:o}): chmod 600 it.")]
    try:
        key = serialization.load_pem_private_key(party.key.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(party.certificate.read_bytes())
    except (OSError, ValueError, TypeError):
        return [problem(f"Key or certificate in {party.startup} cannot be read.")]
    if key.public_key() != certificate.public_key():
        return [problem(f"{party.certificate} belongs to another key than {party.key.name}.")]
    return [ok("The private key is readable by its owner only and fits.")]


def _certificates(party: Party, now: datetime.datetime) -> list[Finding]:
    try:
        own = x509.load_pem_x509_certificate(party.certificate.read_bytes())
        root = x509.load_pem_x509_certificate(party.root.read_bytes())
    except (OSError, ValueError):
        return [problem(f"A certificate in {party.startup} cannot be read.")]
    if fingerprint_of(party.root) != party.about.fingerprint:
        return [problem(f"{party.root} is not the root certificate of the invitation.")]
    try:
        own.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        return [
            problem(
                f"{party.certificate} was signed by another CA than {party.root.name}: the server"
                " would not answer. Bring the answer of the right coordinator."
            )
        ]
    for name, certificate in (("certificate", own), ("root certificate", root)):
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < begins:
            return [
                problem(
                    f"The {name} is valid from {begins:%Y-%m-%d %H:%M} UTC and this machine's clock"
                    f" says {now:%Y-%m-%d %H:%M}: set the clock."
                )
            ]
        if now > ends:
            return [
                problem(
                    f"The {name} expired on {ends:%Y-%m-%d} (the clock says {now:%Y-%m-%d}): renew"
                    " it with `xcal federation join --renew`."
                )
            ]
        if ends - now < SOON:
            return [
                warning(
                    f"The {name} expires on {ends:%Y-%m-%d}: renew it with"
                    " `xcal federation join --renew`."
                )
            ]
    return [ok(f"The certificate is valid until {own.not_valid_after_utc:%Y-%m-%d}.")]


def _site_dir(party: Party) -> list[Finding]:
    try:
        site_dir = SiteDirectory.open(party.site_dir)
    except UserError as error:
        return [problem(str(error))]
    found = check_site(site_dir)
    # A simulated site answers by the number of the local engine's client that it stands for.
    if not site_dir.about.simulated and site_dir.about.client != party.about.name:
        found.append(
            problem(
                f"{party.site_dir / 'site.toml'} says client ="
                f" {site_dir.about.client!r}: the server asks for"
                f" {party.about.name!r}, so every request would be refused."
            )
        )
    return found


def _server_port(party: Party) -> list[Finding]:
    """Whether the server can listen: the port is free, or this very server holds it."""
    if process.processes(party):
        return [ok("The server is running.")]
    port = party.about.port
    if not process.port_is_free(party):
        return [problem(f"Port {port} is in use by another process: free it.")]
    return [ok(f"Port {port} is free.")]


def _members(party: Party, now: datetime.datetime) -> list[Finding]:
    """Whether this party's own key still counts, and what happened to others' of late."""
    try:
        listed = known(party.folder, party.root)
        own = process.own_key(party)
    except (UserError, OSError, ValueError) as error:
        return [problem(str(error))]
    if listed is None:
        return [
            warning(
                "There is no list of members, so no revoked key is refused: have the coordinator"
                " approve somebody, and take the list with `xcal federation members`."
            )
        ]
    found = []
    if own in listed.revoked:
        found.append(problem(f"The own key {own} was revoked: ask the coordinator."))
    for entry in listed.entries:
        if entry.event in ("approved", "renewed"):
            continue
        if now - datetime.datetime.fromisoformat(entry.time) < SOON:
            found.append(warning(entry.text()))
    return found or [ok(f"The list of members has {len(listed.entries)} entries.")]


def _reach(party: Party, certificates_sound: bool) -> list[Finding]:
    """Name, port, and whether the server and this party accept each other's certificate."""
    host, port = party.about.server, party.about.port
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        return [problem(f"The server's name {host} is not known here: check DNS.")]
    if not certificates_sound:
        return []
    try:
        handshake(host, port, party.root, party.certificate, party.key)
    except ConnectionRefusedError:
        return [warning(f"Nobody listens on {host}:{port} yet: is the server started?")]
    except TimeoutError:
        return [problem(f"{host}:{port} does not answer: does a firewall stand between?")]
    except ssl.SSLCertVerificationError:
        return [problem(f"The server at {host}:{port} has no certificate of this federation.")]
    except (ssl.SSLError, OSError):
        return [problem(f"The server at {host}:{port} does not accept this certificate.")]
    return [ok(f"The server at {host}:{port} accepts this certificate.")]


def handshake(
    host: str,
    port: int,
    root: Path,
    certificate: Path | None,
    key: Path | None,
    *,
    newest: ssl.TLSVersion | None = None,
    patience: float = 5.0,
) -> str:
    """A TLS handshake as FLARE makes it; returns the protocol, raises what went wrong.

    Under TLS 1.3 a server tells that it refuses a client's certificate only after the handshake:
    so one waits for the first bytes of HTTP/2, which a server sends to those it accepts.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(root)
    context.set_alpn_protocols(["h2"])
    if newest is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = newest
        context.set_ciphers("ALL:@SECLEVEL=0")  # so that it is the server who refuses
    if certificate is not None and key is not None:
        context.load_cert_chain(certificate, key)
    with (
        socket.create_connection((host, port), timeout=patience) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        secure.settimeout(patience)
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        if not secure.recv(9):
            raise ssl.SSLError("the server closed the connection")
        return secure.version() or "?"
