"""Which partition of a data set a site's ledger pays for, remembered from the first charge on.

One data set spread over several sites anew, by another seed say, would move people from one ledger
to another: each would grant them its whole limit. So a site of a real population keeps to the
partition it was first charged for; and where its ledger is kept per group, to who is one
group: what studies have paid does not add up to what their patient has. The file stays at the site;
its digests are made of private names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcal.config import Experiment, to_toml
from xcal.data.images import Images
from xcal.dp.sampling import UnitTable
from xcal.errors import UserError
from xcal.federation.files import read_json, write_bytes, write_json
from xcal.federation.request_refusals import Refused

# What decides which images of a data set a client of an experiment has.
PARTITION_KEYS = (
    "data train_images clients partition concentration units_per_client keep_groups unit group_cap"
    " seed"
).split()

_FILE = "partition.json"


@dataclass(frozen=True)
class PartitionRecord:
    """One client's images among those of all clients."""

    partition_id: int
    num_partitions: int
    keys: Mapping[str, Any]  # of the experiment; they only explain why the images differ
    units: int  # present, by the guarantee's unit
    images: str  # digest of the images' names
    groups: str | None = None  # digest of which of them are one unit; None: each, or not written
    shared: bool = False  # some units stand at other clients as well

    @staticmethod
    def of(
        images: Images,
        experiment: Experiment,
        partition_id: int = 0,
        num_partitions: int = 1,
        *,
        shared: bool = False,
    ) -> PartitionRecord:
        return PartitionRecord(
            partition_id,
            num_partitions,
            {k: getattr(experiment, k) for k in PARTITION_KEYS} | {"clients": num_partitions},
            UnitTable.of(experiment.privacy_unit, images.groups).n_units,
            hashlib.sha256("\n".join(sorted(images.ids.tolist())).encode()).hexdigest(),
            _digest_of_groups(images) if experiment.privacy_unit == "group" else None,
            shared,
        )

    def __str__(self) -> str:
        if self.num_partitions == 1:
            return f"all of {self.keys['data']!r}"
        return f"partition {self.partition_id} of {self.num_partitions} of {self.keys['data']!r}"

    def remember(self, site_dir: Path) -> None:
        """Write it down, durably, unless the site remembers one already. Call before a charge."""
        if recorded_partition(site_dir) is None:
            kept = {name: value for name, value in vars(self).items() if name != "shared"}
            write_json(site_dir / _FILE, kept)

    def check_remembered(self, site_dir: Path) -> None:
        """Refuse these images where the site's ledger has paid for another partition."""
        known = recorded_partition(site_dir)
        if known is None:
            return
        if known.images == self.images:
            if None not in (known.groups, self.groups) and known.groups != self.groups:
                raise Refused(
                    "data",
                    f"The ledger of the site {site_dir} was charged for {known} in {known.units}"
                    f" groups, and the same images are now in {self.units} other ones, so that what"
                    " one of them has paid would not be known: import the data set as it was, with"
                    " the same --group-column.",
                )
            return
        if known.num_partitions == self.num_partitions == 1:
            return  # nobody's charges go elsewhere where one site has all there is
        differ = [k for k in PARTITION_KEYS if known.keys.get(k) != self.keys[k]]
        if known.num_partitions != self.num_partitions:
            differ = ["clients"]  # the others matter among as many only
        told = [
            ", ".join(_told(key, keys.get(key)) for key in differ)
            for keys in (known.keys, self.keys)
        ]
        if differ:
            then, now = (f"{p} with {t}" for p, t in zip((known, self), told, strict=True))
            what = f"go back to {told[0]}"
        elif known.partition_id != self.partition_id:
            then, now, what = str(known), str(self), "name the sites in their old order"
        else:
            then, now = f"{known} as it was", "what it is now that the data set changed"
            what = "restore the data set as it was imported"
        raise Refused(
            "data",
            f"The ledger of the site {site_dir} was charged for {then}, and this run has {now}:"
            f" people would move between ledgers, each of which grants its own limit; {what}, or"
            " give every site a data set of its own.",
        )


def _digest_of_groups(images: Images) -> str:
    """Which images are together, whatever number or order their groups have."""
    first: dict[int, str] = {}
    pairs = sorted(zip(images.ids.tolist(), images.groups.tolist(), strict=True))
    lines = (f"{name}\t{first.setdefault(group, name)}" for name, group in pairs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _told(key: str, value: object) -> str:
    """A key as an experiment file has it."""
    return f"no {key}" if value is None else to_toml({key: value}).strip()


def recorded_partition(site_dir: Path) -> PartitionRecord | None:
    """What a site remembers; None where it was never charged, or before it wrote this down."""
    path = site_dir / _FILE
    if not path.exists():
        return None
    try:
        found = PartitionRecord(**read_json(path))
        sound = isinstance(found.keys, dict) and "data" in found.keys
        sound &= all(isinstance(v, int) for v in (found.partition_id, found.num_partitions))
        sound &= isinstance(found.units, int) and isinstance(found.images, str)
        sound &= isinstance(found.groups, str | None)
    except (UserError, TypeError, ValueError):
        sound = False
    if not sound:
        raise UserError(f"{path} cannot be read: restore it from a backup.")
    return found


def copy_record(site_dir: Path, folder: Path) -> Path | None:
    """Put a copy of it where a ledger's copy lies; None where the site remembers none yet."""
    path = site_dir / _FILE
    if recorded_partition(site_dir) is None:
        return None
    write_bytes(folder / _FILE, path.read_bytes())
    return folder / _FILE
