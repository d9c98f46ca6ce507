"""Which ledgers a path means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from xcal.config import read_toml
from xcal.errors import UserError


def no_such_site(site_dir: str, *, begun: bool) -> UserError:
    """A site named by a run is not there; most often the path is relative to another folder."""
    if Path(site_dir).is_absolute():
        return UserError(
            f"There is no site directory {site_dir}: put it back, or make one with `xcal site init`"
            " or `xcal ledger create`."
        )
    what = (
        "do this in the folder that the run was started in"
        if begun
        else "name its whole path, or make it with `xcal site init`"
    )
    return UserError(
        f"There is no site directory {site_dir} in {Path.cwd()}, and the path is relative: {what}."
    )


def find_ledgers(path: Path) -> Iterator[Path]:
    """The ledgers meant by a path: a ledger, a site, or a run's folder."""
    if path.is_file():
        yield path
        return
    if (path / "ledger.sqlite").exists():
        yield path / "ledger.sqlite"
        return
    found = sorted(
        (path / "clients").glob("*/ledger.sqlite"),
        key=lambda p: (len(p.parent.name), p.parent.name),
    )
    file = path / "experiment.toml"
    named = read_toml(file).get("sites") if file.exists() else None
    for site_dir in named or ():  # whose ledgers are not in the run's folder
        if not Path(site_dir).is_dir():
            raise no_such_site(site_dir, begun=True)
        found.append(Path(site_dir) / "ledger.sqlite")
    if (path / "server" / "ledger.sqlite").exists():  # of a trusted server; its unit is the client
        found.append(path / "server" / "ledger.sqlite")
    if not found:
        raise UserError(
            f"There is no ledger at {path}: give a ledger, a site directory or a run's folder."
        )
    yield from found
