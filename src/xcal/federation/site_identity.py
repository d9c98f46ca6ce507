"""Who a site is to others: the key it signs with, and the roster of those it sums with.

`roster.toml` is its owner's word, and never comes from a server: how many of the sites are assumed
honest, and each one's public key as `xcal site key` prints it.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict

from xcal.errors import UserError
from xcal.federation.files import read_table, write_secret_once
from xcal.federation.masks import MaskKeys, MaskRefusal, Roster

KEY, ROSTER = "certificate.key", "roster.toml"


def site_key(site_dir: Path) -> Ed25519PrivateKey:
    """The site's key, made at its first use; its owner alone can read it."""
    path = site_dir / KEY
    try:
        if not path.exists():
            made = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            write_secret_once(path, made)
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path} can be read by others: chmod 600 it.")
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"{path} cannot be used: put the site's key back, or move it away."
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is no Ed25519 key: put the site's key back, or move it away.")
    return key


def public_key(site_dir: Path) -> bytes:
    """What others know the site by."""
    return site_key(site_dir).public_key().public_bytes_raw()


class RosterTable(BaseModel):
    """The keys of `roster.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    honest: int
    keys: dict[str, str]


def read_roster(site_dir: Path) -> Roster:
    """Whom the owner sums with, and how many of them it takes for honest."""
    path = site_dir / ROSTER
    if not path.exists():
        raise MaskRefusal(
            f"{path} is missing: without it this site takes part in no masked sum (docs/deploy.md)."
        )
    table = read_table(RosterTable, path, "roster")
    try:
        return Roster({name: bytes.fromhex(key) for name, key in table.keys.items()}, table.honest)
    except ValueError:
        raise MaskRefusal(f"A key in {path} is none: `xcal site key` prints them.") from None


def roster_text(roster: Roster) -> str:
    """`roster.toml`."""
    rows = "".join(f'"{name}" = "{key.hex()}"\n' for name, key in sorted(roster.keys.items()))
    return f"honest = {roster.honest}\n\n[keys]\n{rows}"


def mask_keys(site_dir: Path, folder: Path, run: str, client: str) -> MaskKeys:
    """The site's side of a run's masks, as its own files have it; `folder`: the run's, there."""
    return MaskKeys(folder, run, client, site_key(site_dir), read_roster(site_dir))
