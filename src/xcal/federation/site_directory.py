"""A site: the folder a hospital owns, with all that decides for it.

    site.toml        who it is, where its data are
    policy.toml      what it allows
    ledger.sqlite    what its population has paid
    refusals.jsonl   what it refused, and why
    partition.json   which part of a data set it was first charged for
    runs/            its answers, by run
    evaluation/      how models did on its own held-out images; heads of its own

The server never reads or writes any of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from xcal.config import Device, Experiment, read_toml, to_toml
from xcal.data import catalog
from xcal.data.images import ImageData, Images
from xcal.data.partition import Partition
from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Terms, read_rows, terms_of
from xcal.dp.noise import NoiseSource, SeededNoise
from xcal.dp.noise_ahead import SecureNoiseAhead
from xcal.dp.sampling import cap_groups
from xcal.errors import UserError
from xcal.experiments import make_experiment, read_pinned
from xcal.federation.files import own_folder, read_table, whole_lines, write_bytes
from xcal.federation.loaded_site import Held, LoadedSite
from xcal.federation.logbook import append_line, note, now
from xcal.federation.partition_record import PartitionRecord
from xcal.federation.policy import Policy, admit_method, read_policy, site_file
from xcal.federation.preflight import check_device
from xcal.federation.request_refusals import Refused
from xcal.federation.setup import (
    DATA_SEED,
    check_groups_apart,
    check_groups_known,
    load_parts,
    settled,
)
from xcal.first_edition import BEFORE_THE_KEY
from xcal.methods.client_data import LocalData
from xcal.models.model_registry import build_network


class SiteTable(BaseModel):
    """The keys of `site.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        description="the name this client goes by in federations"
    )
    population: str = Field(description="whose data these are, as the ledger says")
    data: str | None = Field(
        None, description="an imported data set whose training images are this client's"
    )
    experiment: str | None = Field(
        None, description="instead of data: an experiment file of whose partition it has a part"
    )
    shard: Annotated[int, Field(ge=0)] = Field(0, description="which part, from 0")
    units: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="number of units to plan, draw and weigh with, at least as many as there are;"
        " the rest draw nothing. Not given: they are counted, and their number becomes public",
    )
    weights: str | None = Field(None, description="published weights that the network starts from")
    device: Device = Field(
        "cpu", description="where this client computes: cpu, cuda, cuda:1 or mps"
    )
    threads: Annotated[int, Field(ge=0, le=256)] = Field(0, description="0 takes all cores")
    chunk: Annotated[int, Field(ge=1)] = Field(256, description="images processed at once")
    pass_rows: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None,
        description="images in every pass, filled up; 0: as many as are drawn, which lets a server"
        " use how numbers are rounded; by default 32, for a trial 0",
    )
    feature_cache_mb: Annotated[int, Field(ge=0)] = Field(
        512, description="memory for what a frozen backbone makes of its images"
    )
    group_cap: Annotated[int, Field(ge=1)] | None = Field(
        None, description="most images of one group that a record-level run uses"
    )
    message_log: bool = Field(
        False, description="write names and sizes of all fields sent to messages.jsonl"
    )
    evaluate: Literal["never", "last", "each"] = Field(
        "never",
        description="measure the final model, or the model of each round, on held-out images of"
        " data; the numbers stay here",
    )
    evaluate_on: Literal["test", "validation"] = Field(
        "test", description="the split of data that is held out: nobody in it may be trained on"
    )
    subgroup_table: str | None = Field(
        None, description="a CSV with a column of image paths, as imported, for subgroups"
    )
    subgroups: tuple[str, ...] = Field(
        (), description="columns of subgroup_table by which held-out images are measured apart"
    )
    subgroup_floor: Annotated[int, Field(ge=2)] = Field(
        10, description="fewest people (or images, where nobody says whose) of a subgroup shown"
    )
    personal: bool = Field(
        False,
        description="after the final model, train a head of this site's own; it is paid for with"
        " personal_epsilon and personal_delta of policy.toml and stays here",
    )
    personal_epochs: Annotated[int, Field(ge=1, le=1000)] = Field(
        5, description="how often such a head goes through the training images"
    )
    simulated: bool = Field(False, description="a trial: noise and draws come from seed")
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="of a simulated client's noise and draws"
    )


@dataclass(frozen=True)
class Owner:
    """What decides for a client beside the request.

    `policy` and `about` are None where there is nothing but a ledger: its limits decide alone.
    """

    site_dir: Path
    policy: Policy | None = None
    about: SiteTable | None = None

    @property
    def ledger_path(self) -> Path:
        return self.site_dir / "ledger.sqlite"


def read_owner(site_dir: Path) -> Owner:
    """Who decides at a site given by path; one sentence about what is wrong with its files.

    A folder with `site.toml` or `policy.toml` is held to its policy. One with neither, as `xcal
    ledger create` makes it, is held to its ledger.
    """
    if not any(f.exists() for f in (site_file(site_dir), site_dir / "policy.toml")):
        return Owner(site_dir)
    opened = SiteDirectory.open(site_dir)
    return Owner(site_dir, opened.policy, opened.about)


@dataclass(frozen=True)
class OwnImages:
    """A client's training images, how bright they are, and how many classes there are."""

    images: Images
    brightness: float
    classes: int
    whole: str  # digest of the set that they are of


# A process that answers many rounds reads its images once.
@lru_cache(maxsize=8)
def _own_images(name: str, pixels: int, unit: str, group_cap: int | None) -> OwnImages:
    data = catalog.load(name, pixels=pixels)
    check_groups_known(unit, data)
    check_groups_apart(unit, data)
    images = data.train
    if group_cap is not None:
        rng = np.random.default_rng(DATA_SEED)
        images = images.take(cap_groups(images.groups, group_cap, rng))
    return OwnImages(images, 1.0, len(data.classes), data.digest)


@lru_cache(maxsize=2)
def _parts(experiment: Experiment) -> tuple[ImageData, Partition]:
    _, data, parts = load_parts(experiment)
    return data, parts


# Which unit a trial's data set asks for is looked up once.
_settled = lru_cache(maxsize=8)(settled)


@dataclass(frozen=True)
class SiteDirectory:
    """A site as it stands on disk now."""

    path: Path
    about: SiteTable
    policy: Policy

    @staticmethod
    def open(path: Path) -> SiteDirectory:
        """Read site and policy; one sentence about what is wrong with either."""
        if not path.is_dir():
            raise UserError(f"There is no site directory {path}: make one with `xcal site init`.")
        about = read_table(SiteTable, site_file(path), "site")
        if (about.data is None) == (about.experiment is None):
            raise UserError(f"{site_file(path)} must name its data: data, or experiment.")
        if about.simulated != (about.seed is not None):
            raise UserError(
                f"{site_file(path)}: seed and simulated = true go together; a real client has"
                " neither."
            )
        if about.subgroups and about.subgroup_table is None:
            raise UserError(
                f"{site_file(path)}: subgroups needs subgroup_table, the CSV they are in."
            )
        return SiteDirectory(path, about, read_policy(path / "policy.toml"))

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def name(self) -> str:
        return self.about.client

    @property
    def owner(self) -> Owner:
        return Owner(self.path, self.policy, self.about)

    @property
    def threads(self) -> int:
        return self.about.threads

    def noise(self) -> NoiseSource:
        """The operating system's for a real client; a seed of the owner's for a simulated one."""
        if self.about.seed is None:
            return SecureNoiseAhead()
        return SeededNoise(self.about.seed, paired=self._paired)

    @property
    def _paired(self) -> bool:
        """Whether methods share noise: only in a trial, by the file that its owner keeps."""
        return self.about.simulated and self.about.experiment is not None and self.trial().paired

    def beside(self, path: str) -> Path:
        return self.path / Path(path).expanduser()

    def experiment(self, keys: dict[str, Any], initial_seed: int) -> Experiment:
        """A request's keys, completed by what only this client decides.

        A method's own keys are known to its code alone, which runs only where the owner named it.
        """
        admit_method(self.policy, str(keys.get("method", "")))
        about = self.about
        own: dict[str, Any] = {
            "data": about.data or "smear",
            "noise": "seeded" if about.simulated else "secure",
            "paired": self._paired,
            # How many units a cap leaves tells how many images people have: no server varies it.
            "group_cap": self.trial().group_cap if about.data is None else about.group_cap,
            "seed": initial_seed,  # of the network's first weights; noise has its own source
            "weights": None if about.weights is None else str(self.beside(about.weights)),
            "device": about.device,
            "threads": about.threads,
            "chunk": about.chunk,
            "pass_rows": about.pass_rows,
            "feature_cache_mb": about.feature_cache_mb,
        }
        made = make_experiment({**BEFORE_THE_KEY, **keys, **own}, "the request")
        if made.unit is None:
            raise UserError("The request does not say which unit it protects: refused.")
        return made

    def trial(self) -> Experiment:
        """The experiment of whose partition this client has a part, where it has no own data."""
        assert self.about.experiment is not None
        path = self.beside(self.about.experiment)
        values = read_toml(path)
        whole = {n for n, f in Experiment.model_fields.items() if f.default is not None}
        pinned = whole - set(BEFORE_THE_KEY) <= set(values)  # a run's own file: presets resolved
        return _settled(read_pinned(path) if pinned else make_experiment(values, str(path)))

    def whole_set(self, pixels: int | None) -> ImageData:
        """The set of which it has the training images, or a trial's, of which it has a part."""
        if self.about.data is not None:
            return catalog.load(self.about.data, pixels=pixels)
        return _parts(self.trial())[0]

    def images(self, experiment: Experiment) -> OwnImages:
        """This client's training images at what the request asks for."""
        if self.about.data is not None:
            capped = self.about.group_cap if experiment.unit == "record" else None
            unit = experiment.privacy_unit
            return _own_images(self.about.data, experiment.pixels, unit, capped)
        whole = self.trial()
        for key in ("pixels", "unit"):
            if getattr(whole, key) != getattr(experiment, key):
                raise UserError(f"The request's {key} is not that of this site's trial: refused.")
        data, parts = _parts(whole)
        check_groups_apart(whole.privacy_unit, data)
        if self.about.shard >= len(parts.shards):
            raise UserError(
                f"This site's trial has {len(parts.shards)} parts, none of number"
                f" {self.about.shard}: set shard in site.toml."
            )
        shard = parts.shards[self.about.shard]
        images = data.train.take(shard.indices)
        return OwnImages(images, shard.brightness, len(data.classes), data.digest)

    def partition(self, experiment: Experiment, own: OwnImages) -> PartitionRecord:
        """Which images of which data set these are: all of its own, or a part of a trial's."""
        if self.about.data is not None:
            return PartitionRecord.of(own.images, experiment, whole=own.whole)
        whole = self.trial()
        parts = _parts(whole)[1]
        return PartitionRecord.of(
            own.images,
            whole,
            self.about.shard,
            len(parts.shards),
            shared=parts.shared_units,
            whole=own.whole,
        )

    def hold(self, experiment: Experiment) -> Held:
        """This client's data and noise for a round of the experiment."""
        own = self.images(experiment)
        try:
            check_device(self.about.device)
            data = LocalData(
                own.images,
                unit=experiment.privacy_unit,
                images_per_unit=experiment.images_per_unit,
                views=experiment.views,
                augment=experiment.augment,
                brightness=own.brightness,
                device=self.about.device,
                declared_units=self.about.units,
            )
        except UserError as error:  # a code that says no more than that the owner must look
            raise Refused("site", str(error)) from error
        site = LoadedSite(
            client=self.about.client,
            site_dir=self.path,
            data=data,
            noise=self.noise(),
            dealt=self.about.data is None,
            partition=self.partition(experiment, own),
            build_model=lambda: build_network(experiment, own.classes).to(experiment.device),
        )
        return Held(site, own.classes, own.images.pixels.shape[1])

    def log_message(self, direction: str, kind: str, fields: dict[str, int]) -> None:
        """Names and sizes of what was sent or received, if the owner wants them."""
        if self.about.message_log:
            append_line(
                self.path / "messages.jsonl",
                {"time": now(), "direction": direction, "kind": kind, "fields": fields},
            )

    def refusals(self) -> list[dict[str, Any]]:
        """What this client refused, oldest first."""
        lines = whole_lines(self.path / "refusals.jsonl", strict=False)
        return [line for line in lines if {"time", "code", "detail"} <= line.keys()]


_LONGEST_DETAIL = 2000


def log_refusal(site_dir: Path, code: str, detail: str, **about: Any) -> None:
    """Write a refusal down where the owner finds it. Never fails: a full disk changes no answer."""
    # Part of it may be the server's words: no more of them than a person would read. The end of a
    # traceback says what it was.
    half = _LONGEST_DETAIL // 2
    long = len(detail) > _LONGEST_DETAIL
    told = f"{detail[:half]} … {detail[-half:]}" if long else detail
    append_line(site_dir / "refusals.jsonl", {"time": now(), "code": code, "detail": told, **about})
    note(site_dir, "refused", code=code, detail=told, **about)


@contextmanager
def logged(site_dir: Path, about: Mapping[str, Any]) -> Iterator[None]:
    """Within: what is refused or fails is written down at the site, with its detail."""
    try:
        yield
    except Refused as refusal:
        log_refusal(site_dir, refusal.code, str(refusal), **about)
        raise
    except Exception:
        log_refusal(site_dir, "internal", traceback.format_exc(), **about)
        raise


def create_site(path: Path, about: SiteTable, policy: Policy, *, unit: str) -> SiteDirectory:
    """Make a site: its two files, and a ledger that carries the policy's totals for life."""
    for name in ("site.toml", "home.toml", "policy.toml", "ledger.sqlite"):
        if (path / name).exists():
            raise UserError(f"{path / name} exists already: a site directory is never replaced.")
    terms = Terms(
        about.population,
        unit,
        policy.epsilon_total,
        policy.delta_total,
        simulated=about.simulated,
    )
    ledger.check_terms(terms)  # before a file is written that would be in the way next time
    own_folder(path)
    write_bytes(path / "policy.toml", commented(policy).encode())
    ledger.create(path / "ledger.sqlite", terms)
    write_bytes(path / "site.toml", commented(about).encode())  # last: now it is a site
    return SiteDirectory.open(path)


ONE_LEDGER = (
    "Charge these people's data here alone: any other ledger over them grants its own limit, and"
    " what they spend adds up."
)


def sites_of_the_same(site_dir: Path, population: str, data: str | None) -> list[str]:
    """Real sites beside this one that name its population or its data set, a sentence each."""
    found = []
    for other in sorted(site_dir.resolve().parent.iterdir()):
        if other == site_dir.resolve() or not (other / "ledger.sqlite").is_file():
            continue
        try:
            terms = terms_of(read_rows(other / "ledger.sqlite"))
            file = site_file(other)
            theirs = read_table(SiteTable, file, "site").data if file.exists() else None
        except UserError:
            continue  # whose it is cannot be said
        same = [f"population {population!r}"] * (terms.population == population)
        same += [f"data set {data!r}"] * (data is not None and theirs == data)
        if terms.of_real_people and same:
            found.append(
                f"Beware: {site_dir.parent / other.name} has the {' and the '.join(same)} too:"
                " whoever stands in both may be charged up to the sum of both limits."
            )
    return found


def commented(table: BaseModel) -> str:
    """A table as TOML, every key under its description."""
    lines = []
    for key, value in table.model_dump(mode="json").items():
        lines.append(f"# {type(table).model_fields[key].description}")
        lines.append(f"# {key} =" if value is None else to_toml({key: value}).strip())
    return "\n".join(lines) + "\n"
