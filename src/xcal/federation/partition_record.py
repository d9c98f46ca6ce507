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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict

from xcal.config import Experiment, to_toml
from xcal.data.images import Images
from xcal.dp.sampling import UnitTable
from xcal.federation.files import read_as, write_bytes, write_json
from xcal.federation.request_refusals import Refused

# What decides which images of a data set a client of an experiment has.
PARTITION_KEYS = (
    "data train_images clients partition concentration units_per_client keep_groups unit group_cap"
    " seed"
).split()

_FILE = "partition.json"


def _named(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys that say of which data set."""
    if "data" not in keys:
        raise ValueError("no data")
    return keys


@dataclass(frozen=True)
class PartitionRecord:
    """One client's images among those of all clients."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    partition_id: int
    num_partitions: int
    keys: Annotated[
        Mapping[str, Any], AfterValidator(_named)
    ]  # of the experiment; they only explain why the images differ
    units: int  # present, by the guarantee's unit
    images: str  # digest of the images' names
    # By the digest of its name, each image's unit; None: every image is one, or not written yet.
    members: Mapping[str, int] | None = None
    shared: bool = False  # some units stand at other clients as well
    # Digests of the whole sets, held-out images and all, that were charged for; None: not known.
    wholes: tuple[str, ...] | None = None

    @staticmethod
    def of(
        images: Images,
        experiment: Experiment,
        partition_id: int = 0,
        num_partitions: int = 1,
        *,
        shared: bool = False,
        whole: str | None = None,
    ) -> PartitionRecord:
        """`whole`: the digest of the set that they are training images of."""
        return PartitionRecord(
            partition_id,
            num_partitions,
            {k: getattr(experiment, k) for k in PARTITION_KEYS} | {"clients": num_partitions},
            UnitTable.of(experiment.privacy_unit, images.groups).n_units,
            hashlib.sha256("\n".join(sorted(images.ids.tolist())).encode()).hexdigest(),
            _members(images) if experiment.privacy_unit == "group" else None,
            shared,
            None if whole is None else (whole,),
        )

    def __str__(self) -> str:
        if self.num_partitions == 1:
            return f"all of {self.keys['data']!r}"
        return f"partition {self.partition_id} of {self.num_partitions} of {self.keys['data']!r}"

    def remember(self, site_dir: Path, *, charged: bool) -> None:
        """Write it down, durably; of a site that remembers one, only what is new to it.

        Call before a charge. `charged`: whether the ledger has paid for anything before.
        """
        known = recorded_partition(site_dir)
        if known is not None:
            before = known.wholes
        else:  # of what was charged before sets were written down, nobody knows
            before = None if charged else ()
        kept = self if known is None else known
        if known is not None and known.members is not None and self.members is not None:
            kept = replace(known, members=_with_new(known.members, self.members))
        wholes = None
        if before is not None and self.wholes is not None:
            wholes = (*before, *(whole for whole in self.wholes if whole not in before))
        kept = replace(kept, wholes=wholes)
        if kept != known:
            told = {name: value for name, value in vars(kept).items() if name != "shared"}
            write_json(site_dir / _FILE, told)

    def check_remembered(self, site_dir: Path) -> None:
        """Refuse these images where the site's ledger has paid for another partition."""
        known = recorded_partition(site_dir)
        if known is None:
            return
        if known.members is not None and self.members is not None:
            if _regrouped(known.members, self.members):
                raise Refused(
                    "data",
                    f"The ledger of the site {site_dir} was charged for {known} in {known.units}"
                    " groups, and the same images are now in others, so that what one of them has"
                    " paid would not be known: import the data set as it was, with the same"
                    " --group-column.",
                )
        if known.images == self.images:
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


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _members(images: Images) -> dict[str, int]:
    """By the digest of its name, the group of each image, numbered in the order of names."""
    numbers: dict[int, int] = {}
    pairs = sorted(zip(images.ids.tolist(), images.groups.tolist(), strict=True))
    return {_digest(name): numbers.setdefault(group, len(numbers)) for name, group in pairs}


def _regrouped(known: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether two of the images that stand in both were together and are not, or the reverse."""
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    return any(
        there.setdefault(known[name], now[name]) != now[name]
        or back.setdefault(now[name], known[name]) != known[name]
        for name in known.keys() & now.keys()
    )


def _with_new(known: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What was known, and the images that are new, each in its group."""
    numbers = {now[name]: known[name] for name in known.keys() & now.keys()}
    found, following = dict(known), max(known.values(), default=-1) + 1
    for name in sorted(now.keys() - known.keys()):
        if now[name] not in numbers:
            numbers[now[name]], following = following, following + 1
        found[name] = numbers[now[name]]
    return found


def _told(key: str, value: object) -> str:
    """A key as an experiment file has it."""
    return f"no {key}" if value is None else to_toml({key: value}).strip()


def recorded_partition(site_dir: Path) -> PartitionRecord | None:
    """What a site remembers; None where it was never charged, or before it wrote this down."""
    path = site_dir / _FILE
    if not path.exists():
        return None
    return read_as(PartitionRecord, path)


def copy_record(site_dir: Path, folder: Path) -> Path | None:
    """Put a copy of it where a ledger's copy lies; None where the site remembers none yet."""
    path = site_dir / _FILE
    if recorded_partition(site_dir) is None:
        return None
    write_bytes(folder / _FILE, path.read_bytes())
    return folder / _FILE


def check_never_else(site_dir: Path, whole: str) -> None:
    """Refuse where the site's ledger may have been charged for another set than this, by digest.

    Who is held out in this one may have been trained on in that.
    """
    known = recorded_partition(site_dir)
    if known is None or known.wholes != (whole,):
        raise Refused(
            "data",
            f"The ledger of the site {site_dir} was, or may have been, charged for another data"
            " set, or for this one as it was: nobody knows whether people who are held out now"
            " were trained on then. Restore the data set as it was, or send tables with noise"
            " (evaluation_epsilon).",
        )
