"""What would keep a site from answering, told before a server asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from xcal.data import catalog
from xcal.data.image_store import sizes_of
from xcal.data.images import Images
from xcal.dp.ledger.analysis import lifetime_text, spending_text
from xcal.dp.ledger.head import check_clock
from xcal.dp.ledger.rows import Row, check_head, covers, read_rows, runs_of, terms_of, verify
from xcal.dp.sampling import UnitTable
from xcal.errors import UserError
from xcal.federation.exact_counts import counts_sent, sent_text
from xcal.federation.files import read_tensors
from xcal.federation.held_out import held_out
from xcal.federation.loaded_site import remembered_head
from xcal.federation.partition_record import check_never_else, recorded_partition
from xcal.federation.policy import looser_than_recommended, site_file
from xcal.federation.preflight import check_device
from xcal.federation.request_refusals import Refused
from xcal.federation.setup import check_groups_apart, check_groups_known
from xcal.federation.site_directory import SiteDirectory
from xcal.federation.site_identity import ROSTER, public_key, read_roster
from xcal.methods.client_data import TooManyUnits, check_declared_units

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """`problem`: it would not work or not be safe; `warning`: it works, look at it."""

    level: Level
    text: str


ok, warning, problem = (
    partial(Finding, "ok"),
    partial(Finding, "warning"),
    partial(Finding, "problem"),
)


def check_site(site_dir: SiteDirectory) -> list[Finding]:
    """All that can be known about a site on its own machine; nothing is charged or changed."""
    return [
        ok("site.toml and policy.toml: in order"),
        *_ledger(site_dir),
        *_memory(site_dir),
        *check_data(site_dir),
        *_policy(site_dir),
        *_exact(site_dir),
        *_roster(site_dir),
        *_modes(site_dir),
    ]


def _roster(site_dir: SiteDirectory) -> list[Finding]:
    """Whom it sums with under masks, if its owner wrote that down."""
    if not (site_dir.path / ROSTER).exists():
        return []
    try:
        roster = read_roster(site_dir.path)
        if roster.keys.get(site_dir.name) != public_key(site_dir.path):
            raise UserError(
                f"{site_dir.path / ROSTER} has not this site's own key: `xcal site key` prints it"
            )
    except UserError as error:
        return [problem(str(error))]
    others = f"{roster.honest} of {len(roster.keys)} sites are taken for honest"
    return [ok(f"{ROSTER}: {others}")]


def _ledger(site_dir: SiteDirectory) -> list[Finding]:
    try:
        found = verify(site_dir.ledger_path)
    except UserError as error:
        return [problem(str(error))]
    if not found.ok:
        return [problem(f"the ledger's row {found.row} {found.problem}")]
    rows = read_rows(site_dir.ledger_path)
    told = "; ".join(filter(None, (lifetime_text(rows), spending_text(rows))))
    rows_text = f"{found.rows} row{'s' * (found.rows != 1)}"
    checked = [ok(f"ledger: {rows_text}, all in order; {told}")]
    checked += _reserved(site_dir, rows)
    terms = terms_of(rows)
    if terms.population != site_dir.about.population:
        checked.append(
            problem(
                f"the ledger is of the population {terms.population!r}, the site of"
                f" {site_dir.about.population!r}"
            )
        )
    if not covers(site_dir.policy.unit, terms.unit):
        checked.append(
            problem(
                f"policy.toml asks for unit = {site_dir.policy.unit!r}, and the ledger is kept per"
                f" {terms.unit}: set it to {terms.unit!r}"
            )
        )
    if site_dir.about.simulated and not terms.simulated:
        checked.append(problem("the site is simulated, and its ledger protects a real population"))
    return checked


def _reserved(site_dir: SiteDirectory, rows: Sequence[Row]) -> list[Finding]:
    """What runs have reserved beyond what the policy allows by now: no further run is admitted."""
    found = []
    for name, letter in (("epsilon", "ε"), ("delta", "δ")):
        reserved = math.fsum(getattr(run, name) or 0.0 for run in runs_of(rows).values())
        total = getattr(site_dir.policy, f"{name}_total")
        if reserved > total * (1 + 1e-9):
            found.append(
                warning(
                    f"runs reserved {letter} = {reserved:.6g}, above the {name}_total = {total:g}"
                    " of policy.toml: no further run is admitted"
                )
            )
    return found


def _memory(site_dir: SiteDirectory) -> list[Finding]:
    """What the site wrote down itself: a request would be refused for it."""
    found = []
    try:
        check_clock(site_dir.ledger_path)
        remembered = remembered_head(site_dir.path)
        if (
            remembered is not None
            and not check_head(read_rows(site_dir.ledger_path), remembered).ok
        ):
            found.append(
                problem(
                    f"the ledger is older than what this site remembers of it"
                    f" ({remembered.count} rows): put the newest one back"
                )
            )
    except UserError as error:
        found.append(problem(str(error)))
    for reply in sorted((site_dir.path / "runs").glob("*/reply.safetensors")):
        if read_tensors(reply) is None:
            found.append(problem(f"{reply} is damaged: its run cannot go on without it"))
    return found


def data_at_hand(site_dir: SiteDirectory) -> bool:
    """Whether the site's data set is there at all: a site may be made before its images are."""
    name = site_dir.about.data or site_dir.trial().data
    return ":" in name or name == "smear" or bool(sizes_of(name))


def _units(site_dir: SiteDirectory, images: Images) -> int:
    """How many there are to declare."""
    sizes = UnitTable.groups(images.groups).sizes
    kept = sizes if site_dir.about.group_cap is None else sizes.clip(max=site_dir.about.group_cap)
    return len(sizes) if site_dir.policy.unit == "group" else int(kept.sum())


def _declaration(site_dir: SiteDirectory, images: Images) -> Finding:
    told, declared = f"data: {len(images)} training images", site_dir.about.units
    known = recorded_partition(site_dir.path)
    units = _units(site_dir, images)
    if known is not None and known.num_partitions > 1:  # among the sites of `xcal run`
        told, units = f"data: {known}, {known.units} units", known.units
    if declared is None:
        return ok(f"{told} (their number of units becomes public: units declares one)")
    try:
        check_declared_units(units, declared)
    except TooManyUnits as error:
        return problem(str(error))
    return ok(f"{told} (that there are up to {declared} units becomes public)")


def _held_out(site_dir: SiteDirectory) -> list[Finding]:
    """Whether what it holds out can be measured, and a head of its own be paid for."""
    about, policy, found = site_dir.about, site_dir.policy, []
    sends = policy.evaluation_epsilon or policy.evaluation_floor
    if about.evaluate != "never" or about.personal or sends:
        held = held_out(site_dir, None)
        text = f"held out: {len(held.images)} {about.evaluate_on} images"
        known = f"of {len(np.unique(held.images.groups))} {held.who}s, none of whom is trained on"
        unknown = "; whose they are is not said, so that their people may be trained on"
        found.append(
            Finding(
                "ok" if held.apart else "warning", text + (f" {known}" if held.apart else unknown)
            )
        )
        if policy.evaluation_floor and not held.people:
            told = "evaluation_floor in policy.toml needs data that say of every image which person"
            what = f" (a {held.who} is none)" if held.apart else ""
            found.append(problem(f"{told} it shows{what}: import with --group-column"))
        elif policy.evaluation_floor and recorded_partition(site_dir.path) is not None:
            try:
                check_never_else(site_dir.path, held.data.digest)
            except Refused as refusal:
                text = f"no exact counts would be sent: {refusal}".rstrip(".")
                found.append(problem(text))
    if about.personal and not policy.personal_epsilon:
        found.append(problem("personal in site.toml needs personal_epsilon in policy.toml"))
    return found


def check_data(site_dir: SiteDirectory) -> list[Finding]:
    """Whether the site's images are there, and what it says of them fits them."""
    found = []
    try:
        if site_dir.about.data is not None:
            data = catalog.load(site_dir.about.data)
            check_groups_known(site_dir.policy.unit, data)
            check_groups_apart(site_dir.policy.unit, data)
            if data.shared_groups:
                told = f"{data.shared_groups} {data.group_name}s have training images here and"
                found.append(warning(f"{told} others in validation or test of the set"))
            images = data.train
        else:
            trial = site_dir.trial()
            if not covers(site_dir.policy.unit, trial.privacy_unit):
                text = f"the policy's unit is {site_dir.policy.unit}, its trial's {trial.unit}"
                return [problem(f"{text}: no request can be both")]
            images = site_dir.images(trial).images
        found.append(_declaration(site_dir, images))
        found += _held_out(site_dir)
    except UserError as error:
        found.append(problem(f"the data cannot be had: {error}"))
    try:
        check_device(site_dir.about.device)
    except UserError as error:
        found.append(problem(str(error)))
    weights = site_dir.about.weights
    if weights is not None and not (site_dir.path / Path(weights).expanduser()).is_file():
        found.append(problem(f"there is no weights file {weights}"))
    return found


def _policy(site_dir: SiteDirectory) -> list[Finding]:
    return [
        warning(f"policy looser than recommended: {advice}")
        for advice in looser_than_recommended(site_dir.policy)
    ] or [ok("policy: no looser than recommended")]


def _exact(site_dir: SiteDirectory) -> list[Finding]:
    """What left of held-out people without noise; and whether a further run's counts would."""
    policy = site_dir.policy
    try:
        sent = counts_sent(site_dir.path)
    except UserError:
        return []  # what is wrong with the ledger is told of the ledger
    found = [warning(sent_text(sent))] if sent else []
    if policy.evaluation_floor and len(sent) >= policy.evaluation_tables:
        told = f"evaluation_tables = {policy.evaluation_tables} in policy.toml is used up"
        found.append(ok(f"{told}: no further run's counts are sent"))
    return found


def _modes(site_dir: SiteDirectory) -> list[Finding]:
    return [
        warning(f"{name} can be written by others on this machine: chmod go-w it.")
        for name in (site_file(site_dir.path).name, "policy.toml")
        if (site_dir.path / name).stat().st_mode & 0o022
    ]
