"""Tables that a site tells the lead beside training: charged to its ledger, then drawn, then sent.

Two of them exist: how many units each class has, and how a final model did on held-out units. A
unit moves a table by a vector of norm 1 at most (the mean over its images), so one Gaussian of its
own, without a draw, pays for each. The same question again gets the stored answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from xcal.dp.account import Account
from xcal.dp.accounting import joint_sigma
from xcal.dp.calibration import calibrate_fixed
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Release, RunTerms
from xcal.dp.mechanism import Mechanism
from xcal.dp.noise import NoiseKey
from xcal.dp.sampling import UnitTable
from xcal.experiments import make_experiment
from xcal.federation.admission import check_delta, check_not_counted, check_population
from xcal.federation.files import read_json, write_json
from xcal.federation.loaded_site import remember_head, remembered_head
from xcal.federation.messages import Disclosure, StatisticsRequest
from xcal.federation.partition_record import PartitionRecord
from xcal.federation.policy import admit_target, admit_totals
from xcal.federation.request_refusals import Refused, naming
from xcal.federation.site_directory import SiteDirectory

Sums = Mapping[str, NDArray[np.float64]]
CLASSES = "classes"
STATISTICS = "statistics"  # the method of a run that is no training but such a question
PERSONAL = "personal"
COUNTS = "counts"  # of held-out people, exact
NORM = 1.0  # how far one unit may move a table


def unit_sums(values: NDArray[np.float64], table: UnitTable) -> NDArray[np.float64]:
    """Σ over units of the mean over the unit's rows: rows of norm 1 make a unit move it by 1."""
    means = np.add.reduceat(values[table.images], table.starts[:-1], axis=0)
    total: NDArray[np.float64] = (means / table.sizes[:, None]).sum(axis=0)
    return total


def one_hot(numbers: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    return np.eye(size, dtype=np.float64)[numbers]


def own_name(run: str, what: str) -> str:
    """What a site charges beside a run's rounds: a name that no message can ask for."""
    return f"{run}+{what}"


def is_own(name: str) -> bool:
    """Whether only the site got what was charged under this name: a head of its own."""
    return name.endswith(own_name("", PERSONAL))


@contextmanager
def held_ledger(site: SiteDirectory) -> Iterator[Ledger]:
    """The site's ledger, for this process alone; refused if the site remembers a newer one."""
    with naming("ledger"), Ledger(site.ledger_path) as ledger:
        remembered = remembered_head(site.path)
        if remembered is not None:
            ledger.check_holds(remembered, "this site")
        yield ledger


def answer_statistics(site: SiteDirectory, asked: StatisticsRequest) -> Disclosure:
    """Units by class, with noise; refused unless the policy allows it. Charged before the draw."""
    policy = site.policy
    if asked.client != site.name:
        raise Refused("wrong-client", f"The question is for {asked.client!r}.")
    if asked.epsilon > policy.statistics_epsilon or asked.delta > policy.statistics_delta:
        raise Refused(
            "statistics-not-allowed",
            f"The lead asks for counts by class at ({asked.epsilon:g}, {asked.delta:g}), and"
            f" statistics_epsilon = {policy.statistics_epsilon:g} and statistics_delta ="
            f" {policy.statistics_delta:g} in policy.toml are the most for one answer.",
        )
    with naming("data"):
        if site.about.data is None:
            experiment = site.trial()
        else:
            keys = {"data": site.about.data, "pixels": asked.pixels, "unit": asked.unit}
            experiment = make_experiment({**keys, "group_cap": site.about.group_cap})
        own = site.images(experiment)
        if own.classes != asked.classes:
            raise Refused(
                "data", f"The lead knows {asked.classes} classes, and there are {own.classes} here."
            )
        if own.images.multi_label:
            raise Refused("data", "Counts by class are for sets of one class an image.")
        units = UnitTable.of(experiment.privacy_unit, own.images.groups)

    def sums() -> Sums:
        return {CLASSES: unit_sums(one_hot(own.images.labels, own.classes), units)}

    return disclose(
        site,
        asked.run,
        STATISTICS,
        unit=asked.unit,
        target=(asked.epsilon, asked.delta),
        units=site.about.units or units.n_units,
        tables=(CLASSES,),
        sums=sums,
        partition=site.partition(experiment, own),
    )


def disclose(
    site: SiteDirectory,
    run: str,
    what: str,
    *,
    unit: str,
    target: tuple[float, float],
    units: int,
    tables: tuple[str, ...],
    sums: Callable[[], Sums],
    partition: PartitionRecord | None = None,
    about: str = "",
) -> Disclosure:
    """Charge for `tables`, then compute and release them; or what was released under that name.

    `about`: what the question was about; the same name for something else is refused.

    Guarantee: (ε, δ)-DP for one unit under zero-out, reserved in the ledger as a run of its own.
    """
    kept = site.path / "runs" / run / f"{what}.json"
    with held_ledger(site) as ledger:
        if kept.exists():
            return _stored(kept, run, (unit, *target, about))
        epsilon, delta = target
        made = calibrate_fixed(epsilon, delta, 1.0, 1)
        by_count = made.accountant == "pld"
        name = run if what == STATISTICS else own_name(run, what)
        noise = site.noise()
        terms = RunTerms(
            run=name,
            method=what,
            unit=unit,
            epsilon=epsilon,
            delta=delta,
            order=made.order,
            budget=made.budget,
            steps=1,
            noise=noise.name,
            accountant=made.accountant,
            rate=1.0 if by_count else None,
            sigma=made.sigma if by_count else None,
        )
        check_population(site.owner, ledger)
        admit_target(site.policy, unit, epsilon, delta)
        admit_totals(site.policy, name, epsilon, delta, ledger.runs.values())
        if own_name(run, COUNTS) in ledger.exact:
            raise Refused(
                "round-other-weights", f"Of {run!r} exact counts were sent: of each run one table."
            )
        if ledger.terms.of_real_people:
            check_delta(delta, units)
            if partition is not None:
                partition.check_remembered(site.path)
                check_not_counted(ledger, partition)
        if ledger.charges(name):
            raise Refused(
                "ledger",
                f"The answer {name!r} was paid for and is lost: it must be asked for under a new"
                " name, which is charged again.",
            )
        ledger.check_step(1.0, made.sigma)
        account = Account(ledger, terms, replayable=False, floor=site.policy.sigma_min)
        kept.parent.mkdir(parents=True, exist_ok=True)
        if ledger.terms.of_real_people and partition is not None:
            partition.remember(site.path, charged=bool(ledger.runs))
        deviation = made.sigma * NORM * math.sqrt(len(tables))
        mechanism = Mechanism(
            1.0,
            joint_sigma(*(deviation / NORM for _ in tables)),
            tuple(Release(table, deviation, NORM) for table in tables),
        )
        try:
            charged = mechanism.charge(
                account,
                0,
                0,
                inputs=None,
                noise=noise,
                key=lambda block: NoiseKey(site.name, f"{what} {run}", 0, 0, block),
            )
        except BudgetExhausted as error:
            raise Refused("epsilon-total", f"{error}: nothing was released.") from None
        remember_head(site.path, ledger.head)
        found = sums()
        released = {
            table: charged.release_tensors(
                table, {table: torch.from_numpy(found[table]).reshape(-1)}, sensitivity=NORM
            ).tensors[table]
            for table in tables
        }
        disclosure = Disclosure(
            site.name,
            run,
            {table: tuple(values.tolist()) for table, values in released.items()},
            deviation,
            epsilon,
            delta,
        )
        write_json(kept, {"asked": [unit, epsilon, delta, about], "answer": disclosure.values()})
        return disclosure


def _stored(kept: Path, run: str, asked: tuple[object, ...]) -> Disclosure:
    found = read_json(kept)
    if found["asked"] != list(asked):
        raise Refused(
            "round-other-weights",
            f"{run!r} was answered already, for another question: ask under a new name.",
        )
    told = found["answer"]
    tables = {name: tuple(values) for name, values in told["tables"].items()}
    return Disclosure(**{**told, "tables": tables})


def label_shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The classes' shares by noisy counts: what is below 0 is nothing."""
    kept = np.maximum(counts, 0.0)
    shares: NDArray[np.float64] = kept / max(float(kept.sum()), 1e-9)
    return shares
