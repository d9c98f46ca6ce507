"""What would keep a client home from answering, told before a server asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xcal.data import catalog
from xcal.data.images import Images
from xcal.data.store import sizes_of
from xcal.dp.ledger.head import check_clock
from xcal.dp.ledger.rows import check_head, covers, read_rows, terms_of, verify
from xcal.dp.sampling import UnitTable
from xcal.errors import UserError
from xcal.federation.files import read_tensors
from xcal.federation.home import ClientHome
from xcal.federation.partition_record import recorded_partition
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
        *check_data(home),
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
    if not covers(home.policy.unit, terms.unit):
        checked.append(
            Finding(
                "problem",
                f"policy.toml asks for unit = {home.policy.unit!r}, and the ledger is kept per"
                f" {terms.unit}: set it to {terms.unit!r}",
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


def data_at_hand(home: ClientHome) -> bool:
    """Whether the home's data set is there at all: a home may be made before its images are."""
    name = home.about.data or home.trial().data
    return ":" in name or name == "smear" or bool(sizes_of(name))


def _units(home: ClientHome, images: Images) -> int:
    """How many there are to declare."""
    sizes = UnitTable.groups(images.groups).sizes
    kept = sizes if home.about.group_cap is None else sizes.clip(max=home.about.group_cap)
    return len(sizes) if home.policy.unit == "group" else int(kept.sum())


def _declaration(home: ClientHome, images: Images) -> Finding:
    told, declared = f"data: {len(images)} training images", home.about.units
    known = recorded_partition(home.path)
    units = _units(home, images)
    if known is not None and known.num_partitions > 1:  # among the homes of `xcal run`
        told, units = f"data: {known}, {known.units} units", known.units
    if declared is None:
        return Finding("ok", f"{told} (their number of units becomes public: units declares one)")
    try:
        check_declared_units(units, declared)
    except TooManyUnits as error:
        return Finding("problem", str(error))
    return Finding("ok", f"{told} (that there are up to {declared} units becomes public)")


def check_data(home: ClientHome) -> list[Finding]:
    """Whether the home's images are there, and what it says of them fits them."""
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
            trial = home.trial()
            if not covers(home.policy.unit, trial.privacy_unit):
                text = f"the policy's unit is {home.policy.unit}, its trial's {trial.unit}"
                return [Finding("problem", f"{text}: no request can be both")]
            images = home.images(trial).images
        found.append(_declaration(home, images))
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
