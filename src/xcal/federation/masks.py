"""Pairwise masks: whoever sums the sites' numbers learns the sum, and of a part of them nothing.

Two sites agree on a secret that the server relays but cannot read (X25519, signed by each site's
own key), and stretch it into one stream per attempt (HKDF, AES-256 in counter mode). One adds the
stream to what it sends, the other subtracts it, modulo 2^k. All that is public of an attempt goes
into its keys: sites that were told different things have masks that do not cancel, and their sum is
noise. What is below the primitives is `cryptography`'s (docs/guarantee.md §10).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from xcal.dp.distributed import DistributedGrid, Words
from xcal.durable import sync_folder
from xcal.errors import UserError
from xcal.federation.files import write_secret_once

KEY, SENT = "mask.key", "masks.sent"
_PROTOCOL = "xcal masks 1"


class MaskRefusal(UserError):
    """A site will not mask this, or a message is not what a site of this attempt sent."""


def _text(*fields: object) -> bytes:
    """Fields as bytes that no other fields have."""
    return json.dumps([_PROTOCOL, *fields], ensure_ascii=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Announcement:
    """A site's public key for one run, signed by the key that the others know the site by."""

    site: str
    key: bytes
    signature: bytes


@dataclass(frozen=True)
class Attempt:
    """All that is public of one sum: every site must have been told the same."""

    run: str
    round: int
    number: int
    sites: tuple[str, ...]  # ascending
    terms: str  # digest of what else determines it: weights, multiplier, clipping norm, ...

    @property
    def context(self) -> str:
        return hashlib.sha256(
            _text("attempt", self.run, self.round, self.number, self.sites, self.terms)
        ).hexdigest()


@dataclass(frozen=True)
class Masked:
    """What a site sends: its masked numbers, and who says so of which attempt."""

    site: str
    context: str
    numbers: bytes
    signature: bytes


@dataclass(frozen=True)
class Roster:
    """The sites of a run by name with the keys they sign with, and how many are assumed honest.

    A site takes it from its owner, not from the server: whoever can put a key in here can stand in
    for that site.
    """

    keys: Mapping[str, bytes]
    honest: int

    def __post_init__(self) -> None:
        sites = len(self.keys)
        if len(set(self.keys.values())) < sites:
            raise MaskRefusal("Two sites of the roster have one key: each needs its own.")
        if sites < 3 or not sites / 2 < self.honest < sites:
            raise MaskRefusal(
                f"honest = {self.honest} of {sites} sites: masks need at least 3 sites, of which"
                " more than half and not all are assumed honest."
            )

    @property
    def digest(self) -> str:
        known = sorted((name, key.hex()) for name, key in self.keys.items())
        return hashlib.sha256(_text("roster", known, self.honest)).hexdigest()

    def honest_of(self, sites: int) -> int:
        """How many of these are honest at least, if as many as assumed are among all.

        Those who are missing may all be honest ones.
        """
        return sites - (len(self.keys) - self.honest)

    def check(self, attempt: Attempt) -> int:
        """How many honest sites the attempt counts on; refuses one of too few sites or others."""
        sites = attempt.sites
        if list(sites) != sorted(set(sites)) or not set(sites) <= set(self.keys):
            raise MaskRefusal("An attempt names sites that are not of this run, or one twice.")
        if len(sites) < self.honest:
            raise MaskRefusal(
                f"An attempt of {len(sites)} sites has fewer than the {self.honest} honest ones"
                " that the run assumes: nothing is sent."
            )
        return self.honest_of(len(sites))

    def verify(self, site: str, signature: bytes, signed: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.keys[site]).verify(signature, signed)
        except (InvalidSignature, ValueError, LookupError):
            return False
        return True

    def knows(self, run: str, told: Announcement) -> bool:
        """Whether that site signed this key for this run, and with this very roster in mind."""
        return self.verify(told.site, told.signature, _announced(run, self, told.site, told.key))


def _announced(run: str, roster: Roster, site: str, key: bytes) -> bytes:
    return _text("announcement", run, roster.digest, site, key.hex())


class MaskKeys:
    """A site's side of the masks of one run: its secret, its peers, and what it has sent.

    `folder` belongs to this run at this site. The secret is made at the first use and stays there,
    so that a site that was killed goes on.
    """

    def __init__(
        self, folder: Path, run: str, site: str, identity: Ed25519PrivateKey, roster: Roster
    ) -> None:
        if roster.keys.get(site) != identity.public_key().public_bytes_raw():
            raise MaskRefusal(f"The roster does not know the site {site!r} by its own key.")
        self._folder, self._run, self._site = folder, run, site
        self._identity, self.roster = identity, roster
        self._secret = _own_secret(folder / KEY)
        self._peers: dict[str, bytes] = {}
        self._sent = _read_sent(folder / SENT)

    def announce(self) -> Announcement:
        key = self._secret.public_key().public_bytes_raw()
        signed = _announced(self._run, self.roster, self._site, key)
        return Announcement(self._site, key, self._identity.sign(signed))

    def meet(self, announcements: Mapping[str, Announcement]) -> None:
        """Agree on a secret with every other site. Refuses keys that they did not sign."""
        others = {name for name in self.roster.keys if name != self._site}
        if not others <= set(announcements):
            raise MaskRefusal(f"No key came from {', '.join(sorted(others - set(announcements)))}.")
        found = {}
        for name in others:
            told = announcements[name]
            if told.site != name or not self.roster.knows(self._run, told):
                raise MaskRefusal(f"The key that came as {name!r}'s is not signed by it.")
            try:
                shared = self._secret.exchange(X25519PublicKey.from_public_bytes(told.key))
            except ValueError:
                raise MaskRefusal(f"The key that came as {name!r}'s is none.") from None
            found[name] = shared
        if len({announcements[name].key for name in others}) < len(others):
            raise MaskRefusal("Two sites announced one key: each needs its own.")
        own = announcements.get(self._site)
        if own is not None and own.key != self._secret.public_key().public_bytes_raw():
            raise MaskRefusal("The others were told another key of this site: start a new run.")
        self._peers = found

    def check(self, attempt: Attempt, grid: DistributedGrid) -> None:
        """Refuse what this site must not answer: before anything is charged or drawn."""
        honest = self.roster.check(attempt)
        if attempt.run != self._run or self._site not in attempt.sites:
            raise MaskRefusal("An attempt is of another run, or without this site.")
        if (grid.sites, grid.honest) != (len(attempt.sites), honest):
            raise MaskRefusal(
                f"An attempt of {len(attempt.sites)} sites counts on {honest} honest ones, and its"
                f" noise is made for {grid.honest} of {grid.sites}."
            )
        if set(attempt.sites) - {self._site} - set(self._peers):
            raise MaskRefusal("An attempt came before the sites' keys.")
        position = (attempt.round, attempt.number)
        known = self._sent.get(position)
        if any(position < other for other in self._sent) and known is None:
            raise MaskRefusal("An attempt lies before one that this site answered already.")
        if known is not None and known[0] != attempt.context:
            raise MaskRefusal("An attempt was answered already with other terms.")

    def mask(
        self,
        attempt: Attempt,
        grid: DistributedGrid,
        numbers: NDArray[np.int64],
        keep: Callable[[Masked], None] | None = None,
    ) -> Masked:
        """What this site sends; recorded durably before it is handed out.

        Guarantee: under one key there is never a second value. The same again (seeded noise, or a
        site that was killed before it sent) is the same message. `keep` keeps it, durably: a site
        that knew it had answered, and not what, could neither send it nor draw anew.
        """
        self.check(attempt, grid)
        total = grid.wrap(numbers)
        for peer in attempt.sites:
            if peer == self._site:
                continue
            stream = self._stream(attempt, grid, peer)
            total = total + stream if self._site < peer else total - stream
        packed = grid.pack(total & grid.mask)
        digest = hashlib.sha256(packed).hexdigest()
        position = (attempt.round, attempt.number)
        known = self._sent.get(position)
        if known is not None and known != (attempt.context, digest):
            raise MaskRefusal("An attempt was answered already with other numbers.")
        signed = _signed(attempt, self._site, packed)
        message = Masked(self._site, attempt.context, packed, self._identity.sign(signed))
        if keep is not None:
            keep(message)
        if known is None:
            _record(self._folder / SENT, position, attempt.context, digest)
            self._sent[position] = (attempt.context, digest)
        return message

    def _stream(self, attempt: Attempt, grid: DistributedGrid, peer: str) -> Words:
        pair = sorted((self._site, peer))
        info = _text("stream", self.roster.digest, pair, attempt.context, grid.size, grid.width)
        key = HKDF(hashes.SHA256(), 32, salt=None, info=info).derive(self._peers[peer])
        # A key serves one stream in its life: the counter may begin at 0.
        encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        return grid.unpack(encryptor.update(bytes(grid.size * grid.width)))

    def forget(self) -> None:
        """After the last round: who gets this site's files later cannot take masks off."""
        self._peers.clear()
        (self._folder / KEY).unlink(missing_ok=True)
        sync_folder(self._folder)


def _signed(attempt: Attempt, site: str, packed: bytes) -> bytes:
    return _text("message", attempt.context, site, hashlib.sha256(packed).hexdigest())


def masked_sum(
    roster: Roster, attempt: Attempt, grid: DistributedGrid, messages: Mapping[str, Masked]
) -> Words:
    """The sum of all sites' numbers modulo 2^k: the masks cancel where nobody is missing."""
    roster.check(attempt)
    missing = [name for name in attempt.sites if name not in messages]
    if missing:
        raise MaskRefusal(f"Nothing came from {', '.join(missing)}: the attempt is void.")
    total = np.zeros(grid.size, dtype=np.uint64)
    for name in attempt.sites:
        message = messages[name]
        signed = _signed(attempt, name, message.numbers)
        if (message.site, message.context) != (name, attempt.context) or not roster.verify(
            name, message.signature, signed
        ):
            raise MaskRefusal(f"What came as {name!r}'s answer is not what it sent.")
        try:
            total = total + grid.unpack(message.numbers)
        except ValueError:
            raise MaskRefusal(f"What {name!r} sent are not the numbers asked for.") from None
    return total & grid.mask


def _own_secret(path: Path) -> X25519PrivateKey:
    """Made at the first use, for its owner's eyes; whole and on the disk, or not there."""
    try:
        if not path.exists():
            write_secret_once(path, X25519PrivateKey.generate().private_bytes_raw())
        return X25519PrivateKey.from_private_bytes(path.read_bytes())
    except (OSError, ValueError):
        raise MaskRefusal(f"{path} cannot be used: restore it, or start a new run.") from None


Position = tuple[int, int]  # round and number of the attempt


def _read_sent(path: Path) -> dict[Position, tuple[str, str]]:
    """What was sent by position. A line without its end was never sent: it is recorded first."""
    try:
        lines = path.read_text().split("\n") if path.exists() else [""]
        found = {}
        for line in lines[:-1]:
            where, number, context, digest = line.split()
            found[int(where), int(number)] = (context, digest)
        if lines[-1]:  # cut off: what comes next begins a line of its own
            with open(path, "r+b") as file:
                file.truncate(len("\n".join(lines[:-1]).encode()) + (len(lines) > 1))
        return found
    except (OSError, ValueError):
        raise MaskRefusal(f"{path} cannot be used: restore it, or start a new run.") from None


def _record(path: Path, position: Position, context: str, digest: str) -> None:
    try:
        new = not path.exists()
        with open(path, "a") as file:
            file.write(f"{position[0]} {position[1]} {context} {digest}\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(path.parent)
    except OSError:
        raise MaskRefusal(f"{path} could not be written: nothing was sent.") from None
