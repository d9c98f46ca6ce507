"""Who is a member: every key that was approved, renewed or revoked, in one list signed by the CA.

The list only grows. It lies with the coordinator, goes to a party with its certificate and to all
sites with every round, so a second key for a known name is seen by everybody. Server and sites
refuse who comes with a key that it calls revoked (`main.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from xcal.errors import UserError
from xcal.federation.files import write_bytes

FILE = "members.json"
MAX_BYTES = 4 << 20
Event = Literal["approved", "renewed", "overridden", "revoked"]


def fingerprint_of_key(public_key: Any) -> str:
    """The first 128 bits of a public key's SHA-256, as people read them to each other."""
    der = public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()[:32]


def sign(key_file: Path, content: bytes) -> str:
    key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    return base64.b64encode(
        cast(rsa.RSAPrivateKey, key).sign(content, padding.PKCS1v15(), hashes.SHA256())
    ).decode()


def signed_by(public_key: Any, content: bytes, signature: object) -> bool:
    try:
        given = base64.b64decode(str(signature), validate=True)
        public_key.verify(given, content, padding.PKCS1v15(), hashes.SHA256())
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Entry:
    """One thing that happened to one name."""

    time: str
    event: Event
    name: str
    role: str
    key: str  # the key's fingerprint
    reason: str = ""

    def text(self) -> str:
        what = {
            "approved": f"{self.name} ({self.role}) joined with the key {self.key}",
            "renewed": f"{self.name} has a new key, {self.key}, signed by its old one",
            "overridden": f"{self.name} was given the new key {self.key} without its old one's"
            " signature",
            "revoked": f"{self.name}'s key {self.key} was revoked",
        }[self.event]
        return f"{self.time[:16].replace('T', ' ')} UTC: {what}" + (
            f" ({self.reason})." if self.reason else "."
        )


@dataclass(frozen=True)
class Members:
    """The list, as it is known somewhere."""

    federation: str
    entries: tuple[Entry, ...] = ()

    def with_entry(self, event: Event, name: str, role: str, key: str, reason: str = "") -> Members:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Members(self.federation, (*self.entries, Entry(now, event, name, role, key, reason)))

    def keys(self, name: str) -> list[str]:
        """All keys that a name was ever given, the newest last."""
        return [e.key for e in self.entries if e.name == name and e.event != "revoked"]

    def current(self, name: str) -> str | None:
        """The key that a name holds now; None for one that is no member."""
        keys = [k for k in self.keys(name) if k not in self.revoked]
        return keys[-1] if keys else None

    @property
    def revoked(self) -> frozenset[str]:
        return frozenset(e.key for e in self.entries if e.event == "revoked")

    def shut_out(self) -> frozenset[str]:
        """Names of which every key was revoked."""
        names = {e.name for e in self.entries}
        return frozenset(n for n in names if self.current(n) is None)

    def follows(self, older: Members) -> bool:
        """Whether this list is the older one, or the older one and more."""
        return (
            self.federation == older.federation
            and self.entries[: len(older.entries)] == older.entries
        )

    # --- files and messages -----------------------------------------------------------------------

    def signed(self, ca_key: Path) -> bytes:
        values = {"federation": self.federation, "entries": [asdict(e) for e in self.entries]}
        return json.dumps(
            {"list": values, "signature": sign(ca_key, canonical(values))}, indent=1
        ).encode()

    @staticmethod
    def read(data: bytes, root: Path, where: str) -> Members:
        """A list that this federation's CA signed. Raises `UserError`."""
        problem = UserError(f"{where} is no list of members signed by this federation's CA.")
        if len(data) > MAX_BYTES:
            raise problem
        try:
            found = json.loads(data)
            values, signature = found["list"], found["signature"]
            public_key = x509.load_pem_x509_certificate(root.read_bytes()).public_key()
            if not signed_by(public_key, canonical(values), signature):
                raise problem
            names = {f.name for f in fields(Entry)}
            entries = tuple(Entry(**{k: str(e[k]) for k in names}) for e in values["entries"])  # type: ignore[arg-type]
            if any(e.event not in get_args(Event) for e in entries):
                raise problem
            return Members(str(values["federation"]), entries)
        except (OSError, ValueError, KeyError, TypeError):
            raise problem from None


def known(folder: Path, root: Path) -> Members | None:
    """The list that lies in a folder; None where there never was one."""
    path = folder / FILE
    return Members.read(path.read_bytes(), root, str(path)) if path.exists() else None


def take(folder: Path, data: bytes, root: Path, where: str) -> list[Entry]:
    """Keep a list that continues the one a party has; returns what is new in it."""
    found, before = Members.read(data, root, where), known(folder, root)
    if before is not None and not found.follows(before):
        if before.follows(found):
            return []  # an older one: nothing is forgotten
        raise UserError(f"{where} does not continue the list of members in {folder}: not taken.")
    new = found.entries[0 if before is None else len(before.entries) :]
    if new or before is None:
        write_bytes(folder / FILE, data)
    return list(new)


def texts(entries: Iterable[Entry]) -> list[str]:
    return [entry.text() for entry in entries]
