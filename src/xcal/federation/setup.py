"""What an experiment and its seed determine before the first round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xcal.config import Experiment
from xcal.data import catalog
from xcal.data.augment import check_views
from xcal.data.images import ImageData, Images
from xcal.data.partition import Partition, Shard, partition
from xcal.dp.calibration import Plan
from xcal.dp.ledger.rows import read_rows, terms_of
from xcal.dp.sampling import UnitTable, cap_groups
from xcal.errors import UserError
from xcal.federation.central import check_rule
from xcal.federation.files import read_table
from xcal.federation.ledgers_of import no_such_site
from xcal.federation.loggers import check_logger
from xcal.federation.masked import check_masked
from xcal.federation.partition_record import PartitionRecord
from xcal.federation.policy import site_file
from xcal.federation.preflight import check_device, check_findings, check_network, unmeasured
from xcal.federation.request_refusals import naming
from xcal.methods.base import Method
from xcal.methods.client_data import check_declared_units
from xcal.methods.loss import check_loss
from xcal.methods.registry import checked_plan, method_of
from xcal.presets import fitted

DATA_SEED = 0  # the data set is the same for every seed of an experiment
AGREE = (
    "at sites of a real population have somebody agree to it with public_validation = true and"
    " public_validation_by"
)


@dataclass(frozen=True)
class Federation:
    """Everything that the experiment and the seed determine before the first round."""

    experiment: Experiment
    method: Method
    data: ImageData
    parts: Partition | None  # None: the clients are elsewhere, and their data with them
    schedule: tuple[tuple[int, ...], ...]  # clients of each round
    plans: tuple[Plan | None, ...]
    server_plan: Plan | None = None  # where a trusted server adds the noise
    names: tuple[str, ...] = ()  # of the clients; numbers where they are simulated
    declared: tuple[int | None, ...] = ()  # units by the sites' own files; None: counted
    warnings: tuple[str, ...] = ()  # what the run will not be able to measure
    shared_groups: int = 0  # of the training images, that the set has in validation or test too
    explains: bool = True  # whether the network's answers can be explained

    @property
    def participants(self) -> int:
        """Clients a round, m."""
        return len(self.schedule[0])

    def own_rounds(self, client: int) -> tuple[int, ...]:
        return tuple(t for t, chosen in enumerate(self.schedule) if client in chosen)

    @property
    def dealt(self) -> bool:
        """Whether who has which images was drawn: one unit less then changes it for all."""
        many = self.parts is not None and len(self.parts.shards) > 1
        return many or self.experiment.train_images is not None

    def partition(self, client: int) -> PartitionRecord:
        """Which images a client of this process has, for its site to remember."""
        assert self.parts is not None
        return PartitionRecord.of(
            self.data.train.take(self.parts.shards[client].indices),
            self.experiment,
            client,
            len(self.parts.shards),
            shared=self.parts.shared_units,
            whole=self.data.digest,
        )

    def units(self, client: int) -> int:
        """The units of a client of this process: as declared, or counted."""
        assert self.parts is not None
        declared = self.declared[client] if self.declared else None
        return declared or _units(
            self.data.train, self.parts.shards[client], self.experiment.privacy_unit
        )

    def steps_of_round(self, client: int) -> int:
        if self.parts is None:
            return 0  # how many units a client elsewhere has, it tells with its first answer
        if self.experiment.trust == "masked":
            return 1
        return self.experiment.local_epochs * -(
            -self.units(client) // self.experiment.expected_batch_size
        )


def _units(images: Images, shard: Shard, unit: str) -> int:
    groups = images.groups[shard.indices]
    return UnitTable.of("group" if unit == "group" else "record", groups).n_units


def _declared(experiment: Experiment, clients: int) -> tuple[int | None, ...]:
    """The units that sites given by path declare; one with a ledger and no `site.toml` counts."""
    from xcal.federation.site_directory import SiteTable  # whose module builds on this one

    if experiment.sites is None:
        return (None,) * clients
    found: list[int | None] = []
    for client, site_dir in enumerate(experiment.sites):
        file = site_file(Path(site_dir))
        with _refusing(experiment, client, "site"):
            found.append(read_table(SiteTable, file, "site").units if file.exists() else None)
    return tuple(found)


@contextmanager
def _refusing(experiment: Experiment, client: int, code: str) -> Iterator[None]:
    """Within: what is refused for a client is written down at its site, where it has one."""
    from xcal.federation.site_directory import logged  # whose module builds on this one

    if experiment.sites is None:
        yield
        return
    with logged(Path(experiment.sites[client]), {"run": "a new run"}), naming(code):
        yield


def _fewer(images: Images, count: int | None) -> Images:
    """At most `count` images, chosen at random once for all seeds.

    Images and not groups: a few whole groups would leave few people, and classes almost bare.
    """
    if count is None or count >= len(images):
        return images
    chosen = np.random.default_rng(DATA_SEED).choice(len(images), count, replace=False)
    return images.take(np.sort(chosen))


def draw_schedule(
    clients: int, rounds: int, participants: int | None, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Who takes part in which round: drawn at the start, public, known to the clients."""
    if participants is None or participants == clients:
        return tuple(tuple(range(clients)) for _ in range(rounds))
    if participants > clients:
        raise UserError(
            f"participants ({participants}) exceeds clients ({clients}): choose at most {clients}."
        )
    generator = np.random.default_rng([seed, 7])
    return tuple(
        tuple(sorted(int(c) for c in generator.choice(clients, participants, replace=False)))
        for _ in range(rounds)
    )


def with_unit(experiment: Experiment, data: ImageData) -> Experiment:
    """The experiment with its unit: where none was given, group where the set names groups."""
    if experiment.unit is not None:
        return experiment
    if data.groups_known and experiment.group_cap is not None:
        raise UserError(
            "group_cap bounds the images of a group in a run per image, and the guarantee of this"
            f" one is per {data.group_name}, the default for {data.name}: leave group_cap out, or"
            " set unit = 'record'."
        )
    return experiment.model_copy(update={"unit": "group" if data.groups_known else "record"})


def settled(experiment: Experiment) -> Experiment:
    """`with_unit` where the data set is not at hand yet, for what pins an experiment."""
    return experiment if experiment.unit else with_unit(experiment, load_fewest(experiment))


def load_fewest(experiment: Experiment) -> ImageData:
    """The experiment's data set for what it is, with no more training images than must be."""
    return _load(experiment, 1)


def check_groups_known(unit: str, data: ImageData) -> None:
    """Refuse a promise per group where the data set does not say whose the images are."""
    if unit != "group" or data.groups_known:
        return
    why = "does not say which images belong to one person"
    if data.ungrouped_images:
        why = f"has {data.ungrouped_images} images that name no {data.group_name}"
    raise UserError(
        f"unit = 'group' protects all images of one person, and {data.name} {why}: import it with"
        " --group-column (or --one-image-per-person, if nobody has two), or set unit = 'record'."
    )


def check_groups_apart(unit: str, data: ImageData) -> None:
    """Refuse a promise per group where images of the same groups are measured as public ones."""
    if unit == "group" and data.shared_groups:
        raise UserError(
            f"unit = 'group' protects all images of one {data.group_name}, and"
            f" {data.shared_groups} {data.group_name}s of the training images of {data.name} also"
            f" stand in validation or test, which nothing protects: split by {data.group_name},"
            " import with --all-train, or set unit = 'record', whose statement names it."
        )


def may_measure(experiment: Experiment) -> bool:
    """Whether the set's validation and test images may be used: they leave no trace in a ledger.

    At sites of a real population somebody has to agree, by name.
    """
    if experiment.sites is None or experiment.public_validation:
        return True
    return not any(_is_real(Path(site_dir)) for site_dir in experiment.sites)


def validation_is_public(experiment: Experiment) -> bool:
    """Whether something may be fitted on or chosen by the set's validation images, and told.

    Published sets' are public; of a set of one's own somebody has to say so.
    """
    return bool(experiment.public_validation) or catalog.is_public(experiment.data)


def _is_real(site_dir: Path) -> bool:
    """Whether a site's ledger protects a real population; one that cannot be read may."""
    try:
        terms = terms_of(read_rows(site_dir / "ledger.sqlite"))
    except UserError:
        return True
    return terms.of_real_people


def without_public_splits(data: ImageData) -> ImageData:
    nobody = np.arange(0)
    return replace(data, validation=data.validation.take(nobody), test=data.test.take(nobody))


def _load(experiment: Experiment, count: int | None) -> ImageData:
    # Drawn images need not be drawn to be left out.
    options = {"train": count} if experiment.data == "smear" and count is not None else {}
    return catalog.load(experiment.data, pixels=experiment.pixels, seed=DATA_SEED, **options)


def load_parts(experiment: Experiment) -> tuple[Experiment, ImageData, Partition]:
    """The experiment with its unit, its data set as it uses it, and how training images spread."""
    method = method_of(experiment)
    data = _load(experiment, experiment.train_images)
    experiment = with_unit(experiment, data)
    check_groups_known(experiment.privacy_unit, data)
    train = _fewer(data.train, experiment.train_images)
    if experiment.unit == "record" and experiment.group_cap is not None:
        rng = np.random.default_rng(DATA_SEED)
        train = train.take(cap_groups(train.groups, experiment.group_cap, rng))
    data = replace(data, train=train)
    clients = 1 if method.pooled else experiment.clients
    if method.pooled:
        parts = Partition((Shard(np.arange(len(train)), 1.0),), False, False)
    else:
        parts = partition(
            train,
            clients,
            kind=experiment.partition,
            concentration=experiment.concentration,
            seed=experiment.seed,
            units_per_client=experiment.units_per_client,
            keep_groups=experiment.keep_groups,
            unit=experiment.privacy_unit,
        )
    return experiment, data, parts


def prepare(experiment: Experiment, *, new: bool = True) -> Federation:
    """Data, partition, schedule and plans: every refusal that can come, comes here.

    `new`: the run has not begun, so sites given by path are asked whether they would admit it.
    """
    method = method_of(experiment)
    check_masked(experiment, method)
    check_logger(experiment.log)
    check_views(experiment.views, experiment.augment)
    check_device(experiment.device)
    if experiment.paired and experiment.noise_source != "seeded":
        raise UserError(
            "paired = true lets methods share their noise, which only a simulation may: leave it"
            " out, or set noise = 'seeded' and no sites."
        )
    for site_dir in experiment.sites or ():
        if not Path(site_dir).is_dir():
            raise no_such_site(site_dir, begun=not new)
    experiment, data, parts = load_parts(experiment)
    check_findings(method, data.multi_label)
    shared_groups = data.shared_groups  # also where no such image may be measured
    if new:  # one that began before this was asked goes on
        check_groups_apart(experiment.privacy_unit, data)
    withheld = not may_measure(experiment)
    if withheld:
        data = without_public_splits(data)
    check_groups_apart(experiment.privacy_unit, data)
    train, clients = data.train, len(parts.shards)
    schedule = draw_schedule(
        clients,
        experiment.rounds,
        None if method.pooled else experiment.participants,
        experiment.seed,
    )
    if experiment.sites is not None:
        if len(experiment.sites) != clients:
            raise UserError(
                f"sites names {len(experiment.sites)} folders for {clients} clients: name one each."
            )
        if len({Path(h).resolve() for h in experiment.sites}) < clients:
            raise UserError(
                "sites names one folder twice: every client needs a site directory of its own."
            )
    declared = _declared(experiment, clients)
    counted = [_units(train, shard, experiment.privacy_unit) for shard in parts.shards]
    if new and experiment.preset is not None:
        fewest = min(known or own for known, own in zip(declared, counted, strict=True))
        experiment = experiment.model_copy(
            update=fitted(dict(experiment), experiment.model_fields_set, fewest)
        )
    plans: list[Plan | None] = []
    for client, (units, declaration) in enumerate(zip(counted, declared, strict=True)):
        if declaration is not None:
            assert experiment.sites is not None
            with _refusing(experiment, client, "site"):
                check_declared_units(units, declaration, f"{experiment.sites[client]}/site.toml")
            units = declaration
        own = sum(client in chosen for chosen in schedule)
        with _refusing(experiment, client, "plan-refused"):
            if experiment.expected_batch_size > units:
                raise UserError(
                    f"expected_batch_size ({experiment.expected_batch_size}) exceeds the {units}"
                    f" units of client {client}: choose a smaller one, fewer clients or more data."
                )
            plans.append(checked_plan(method, experiment, units, own) if own else None)
    if getattr(method, "needs_validation", False) and not (
        experiment.validation_images and len(data.validation)
    ):
        raise UserError(
            f"{method.name} follows the loss on public validation images, and there are none: set"
            " validation_images, or choose a data set that has some"
            + (f", and {AGREE}." if withheld else ".")
        )
    server_plan = check_rule(experiment, method, len(schedule[0]))
    if experiment.only_local is not None and experiment.sites is not None:
        raise UserError(
            "Sites train with cross-entropy in single precision: leave out"
            f" {experiment.only_local}, or leave out sites."
        )
    check_loss(experiment, len(data.classes), data.multi_label)
    unexplained = check_network(experiment, len(data.classes), train.pixels.shape[1])
    federation = Federation(
        experiment,
        method,
        data,
        parts,
        schedule,
        tuple(plans),
        server_plan,
        tuple(str(client) for client in range(clients)),
        declared,
        warnings=unmeasured(experiment, data, unexplained, withheld=withheld),
        shared_groups=shared_groups,
        explains=unexplained is None and not data.multi_label,
    )
    if new:
        ask_sites(federation, "a new run")
    return federation


def ask_sites(federation: Federation, run: str) -> None:
    """Refuse a run that one of its sites would refuse, before any of them is charged."""
    from xcal.federation.admission import ask_site  # whose modules build on this one

    experiment = federation.experiment
    for client, site_dir in enumerate(experiment.sites or ()):
        if federation.parts is not None and federation.own_rounds(client):
            ask_site(
                Path(site_dir),
                run,
                experiment,
                federation.method,
                federation.plans[client],
                federation.units(client),
                federation.partition(client),
            )


def prepare_remote(experiment: Experiment, names: Sequence[str]) -> Federation:
    """What a server knows beforehand of a federation whose clients are elsewhere, by name.

    Of its own data set it uses the classes and the public validation and test images; each client
    makes its plan from the units it declares, and the server the same one from its first answer.
    """
    method = method_of(experiment)
    check_masked(experiment, method)
    check_logger(experiment.log)
    if method.pooled or experiment.sites is not None:
        raise UserError(
            "The clients of this federation hold their own data and sites: leave out sites, and"
            " choose another method than centralized."
        )
    if experiment.only_local is not None:
        raise UserError(
            "Clients elsewhere train with cross-entropy in single precision: leave out"
            f" {experiment.only_local}."
        )
    if experiment.group_cap is not None:
        raise UserError(
            "group_cap is each client's own choice where it holds its own data: leave it out, and"
            " have it set in site.toml."
        )
    if len(set(names)) != len(names) or len(names) != experiment.clients:
        raise UserError(
            f"clients = {experiment.clients}, and {len(set(names))} different ones are known"
            f" ({', '.join(names)}): they must agree."
        )
    data = load_fewest(experiment)
    check_findings(method, data.multi_label)
    experiment = with_unit(experiment, data)
    withheld = not validation_is_public(experiment)
    if withheld:
        data = without_public_splits(data)
    schedule = draw_schedule(
        len(names), experiment.rounds, experiment.participants, experiment.seed
    )
    server_plan = check_rule(experiment, method, len(schedule[0]))
    unexplained = check_network(experiment, len(data.classes), experiment.pixels)
    return Federation(
        experiment,
        method,
        data,
        None,
        schedule,
        (),
        server_plan,
        tuple(names),
        warnings=unmeasured(experiment, data, unexplained, withheld=withheld),
        explains=unexplained is None and not data.multi_label,
    )
