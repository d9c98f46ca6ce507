"""What would keep a client home from answering, told before a server asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xcal.data import catalog
from xcal.data.images import Images
from xcal.dp.ledger.head import check_clock
from xcal.dp.ledger.rows import check_head, read_rows, terms_of, verify
from xcal.dp.sampling import UnitTable
from xcal.errors import UserError
from xcal.federation.files import read_tensors
from xcal.federation.home import ClientHome
from xcal.federation.policy import looser_than_recommended
from xcal.federation.setup import check_groups_apart, check_groups_known
from xcal.federation.site import remembered_head
from xcal.methods.client_data import TooManyUnits, check_declared_units

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """`problem`: it would not work or not be safe; `warning`: it works, look at it."""

    level: Level
    text: str


def check_home(home: ClientHome) -> list[Finding]:
    """All that can be known about a home on its own machine; nothing is charged or changed."""
    return [
        Finding("ok", "home.toml and policy.toml: in order"),
        *_ledger(home),
        *_memory(home),
        *_data(home, home.policy.unit),
        *_policy(home),
        *_modes(home),
    ]


def _ledger(home: ClientHome) -> list[Finding]:
    try:
        found = verify(home.ledger_path)
    except UserError as error:
        return [Finding("problem", str(error))]
    if not found.ok:
        return [Finding("problem", f"the ledger's row {found.row} {found.problem}")]
    checked = [Finding("ok", f"ledger: {found.rows} rows, all in order")]
    terms = terms_of(read_rows(home.ledger_path))
    if terms.population != home.about.population:
        checked.append(
            Finding(
                "problem",
                f"the ledger is of the population {terms.population!r}, the home of"
                f" {home.about.population!r}",
            )
        )
    if home.about.simulated and not terms.simulated:
        checked.append(
            Finding("problem", "the home is simulated, and its ledger protects a real population")
        )
    return checked


def _memory(home: ClientHome) -> list[Finding]:
    """What the home wrote down itself: a request would be refused for it."""
    found = []
    try:
        check_clock(home.ledger_path)
        remembered = remembered_head(home.path)
        if remembered is not None and not check_head(read_rows(home.ledger_path), remembered).ok:
            found.append(
                Finding(
                    "problem",
                    f"the ledger is older than what this home remembers of it"
                    f" ({remembered.count} rows): put the newest one back",
                )
            )
    except UserError as error:
        found.append(Finding("problem", str(error)))
    for reply in sorted((home.path / "runs").glob("*/reply.safetensors")):
        if read_tensors(reply) is None:
            found.append(Finding("problem", f"{reply} is damaged: its run cannot go on without it"))
    return found


def _declaration(home: ClientHome, images: Images, unit: str) -> Finding:
    told, declared = f"data: {len(images)} training images", home.about.units
    if declared is None:
        return Finding("ok", f"{told} (their number of units becomes public: units declares one)")
    sizes = UnitTable.groups(images.groups).sizes
    kept = sizes if home.about.group_cap is None else sizes.clip(max=home.about.group_cap)
    try:
        check_declared_units(len(sizes) if unit == "group" else int(kept.sum()), declared)
    except TooManyUnits as error:
        return Finding("problem", str(error))
    return Finding("ok", f"{told} (that there are up to {declared} units becomes public)")


def _data(home: ClientHome, unit: str) -> list[Finding]:
    found = []
    try:
        if home.about.data is not None:
            data = catalog.load(home.about.data)
            check_groups_known(home.policy.unit, data)
            check_groups_apart(home.policy.unit, data)
            if data.shared_groups:
                told = f"{data.shared_groups} {data.group_name}s have training images here and"
                found.append(Finding("warning", f"{told} others in validation or test of the set"))
            images = data.train
        else:
            images = home.images(home.trial()).images
        found.append(_declaration(home, images, unit))
    except UserError as error:
        found.append(Finding("problem", f"the data cannot be had: {error}"))
    weights = home.about.weights
    if weights is not None and not (home.path / Path(weights).expanduser()).is_file():
        found.append(Finding("problem", f"there is no weights file {weights}"))
    return found


def _policy(home: ClientHome) -> list[Finding]:
    return [
        Finding("warning", f"policy looser than recommended: {advice}")
        for advice in looser_than_recommended(home.policy)
    ] or [Finding("ok", "policy: no looser than recommended")]


def _modes(home: ClientHome) -> list[Finding]:
    return [
        Finding("warning", f"{name} can be written by others on this machine: chmod go-w it.")
        for name in ("home.toml", "policy.toml")
        if (home.path / name).stat().st_mode & 0o022
    ]
