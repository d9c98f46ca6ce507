"""Whether a client takes part in a run: its policy and its ledger, asked before any charge.

And whether a training loop of somebody's own may go on, in whatever federation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xcal.config import Experiment
from xcal.dp.calibration import Plan
from xcal.dp.engine import PolicyCheck
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import RunTerms
from xcal.federation.partition_record import PARTITION_KEYS, PartitionRecord
from xcal.federation.policy import (
    admit_experiment,
    admit_method,
    admit_plan,
    admit_target,
    read_policy,
    site_file,
)
from xcal.federation.request_refusals import Refused, naming
from xcal.federation.rounds import run_terms
from xcal.federation.site_directory import Owner, SiteDirectory, logged, read_owner
from xcal.methods.base import Method


def check_population(owner: Owner, ledger: Ledger) -> None:
    """Refuse a ledger of other people than the owner's."""
    terms = ledger.terms
    if owner.about is not None and terms.population != owner.about.population:
        raise Refused(
            "ledger",
            f"The ledger is that of the population {terms.population!r}, and site.toml says"
            f" {owner.about.population!r}: put the right ledger back.",
        )


def admit_run(
    owner: Owner,
    ledger: Ledger,
    run: RunTerms,
    plan: Plan | None,
    units: int,
    experiment: Experiment,
    partition: PartitionRecord | None,
) -> None:
    """Refuse a run that the owner's policy or ledger does not allow. `plan`: by these units."""
    terms = ledger.terms
    check_population(owner, ledger)
    if run.epsilon is None and terms.epsilon is not None:
        raise Refused(
            "no-guarantee",
            f"The method {run.method!r} has no guarantee, and the ledger {ledger.path} carries a"
            " limit: choose a method with one, or run without this site.",
        )
    if owner.policy is not None:
        admit_plan(owner.policy, run.run, plan, ledger.runs.values())
    if terms.of_real_people and partition is not None:
        partition.check_remembered(owner.site_dir)
        check_not_counted(ledger, partition)
    if run.run in ledger.runs:
        return  # under way: what it asked for was admitted when it was entered
    if terms.of_real_people:
        _check_for_people(owner, experiment, partition)
    admit_new(ledger, run, plan, units)


def admit_new(ledger: Ledger, run: RunTerms, plan: Plan | None, units: int) -> None:
    """Refuse a run that begins, by the ledger's own rules and the number of its units."""
    if ledger.terms.of_real_people and plan is not None:
        check_delta(plan.delta, units)
    ledger.check(run)
    if plan is not None:
        ledger.check_step(plan.sample_rate, plan.sigma_first)


def _check_for_people(
    owner: Owner, experiment: Experiment, partition: PartitionRecord | None
) -> None:
    """Refuse what a simulation may do and a site of a real population may not."""
    if partition is not None and partition.shared:
        raise Refused(
            "data",
            f"With units_per_client = {experiment.units_per_client} some units of"
            f" {experiment.data!r} stand at several sites, and would pay at each of them: leave it"
            " out, or lower it until every unit has one site.",
        )
    # An owner may allow it in site.toml; whoever starts a run may not.
    if experiment.rows == 0 and (owner.about is None or owner.about.pass_rows != 0):
        raise Refused(
            "experiment-invalid",
            f"With pass_rows = 0 how an image is rounded depends on who else was drawn, which the"
            f" guarantee of the site {owner.site_dir} does not cover: leave it out.",
        )


def check_not_counted(ledger: Ledger, partition: PartitionRecord) -> None:
    """Refuse to train on images among which may be some of people who were counted exactly."""
    if any((told["data"],) != partition.wholes for told in ledger.exact.values()):
        raise Refused(
            "data",
            f"Exact counts of held-out people have left the site of {ledger.path}, and its data set"
            " is no longer as it was then, or is read at another size: who was counted may now be"
            " trained on. Restore it as it was; newer people need a site of their own.",
        )


def check_delta(delta: float, units: int) -> None:
    """Refuse a δ under which a mechanism may publish somebody's data whole."""
    if delta * units >= 1:
        raise Refused(
            "delta-too-large",
            f"delta = {delta:g} is not below 1/{units}, 1 divided by the units: at such a delta one"
            " whole unit may be published; lower delta.",
        )


def check_same_data(owner: Owner, experiment: Experiment, shard: int) -> None:
    """Refuse a site whose own data are not those that the experiment would train for it."""
    about = owner.about
    if about is None:
        return
    where = site_file(owner.site_dir)
    if about.data is not None:
        if about.data != experiment.data:
            raise Refused(
                "data",
                f"{where} says its data are {about.data!r}, and the experiment spreads"
                f" {experiment.data!r} over its clients: what others' images cost is not charged"
                " to this site.",
            )
        capped = experiment.group_cap
        if about.group_cap is not None and experiment.unit == "record":
            if capped is None or capped > about.group_cap:
                raise Refused(
                    "data",
                    f"{where} allows at most {about.group_cap} images of a group: set group_cap ="
                    f" {about.group_cap}.",
                )
        return
    trial = SiteDirectory.open(owner.site_dir).trial()
    keys = ("pixels", *PARTITION_KEYS)
    other = [key for key in keys if getattr(trial, key) != getattr(experiment, key)]
    if other or about.shard != shard:
        what = other[0] if other else "shard"
        raise Refused(
            "data",
            f"{where} has part {about.shard} of another experiment's data than part {shard} of this"
            f" one's ({what} differs): name the site that has it.",
        )


def ask_site(
    site_dir: Path,
    name: str,
    experiment: Experiment,
    method: Method,
    plan: Plan | None,
    units: int,
    partition: PartitionRecord,
) -> None:
    """Refuse, in one sentence, a run that this site would refuse; nothing is charged."""
    with logged(site_dir, {"run": name}), naming("site"):
        owner = read_owner(site_dir)
    with to_the_user(owner), logged(site_dir, {"run": name}), naming("ledger"):
        check_same_data(owner, experiment, partition.partition_id)
        if owner.policy is not None:
            admit_experiment(owner.policy, experiment)
        with Ledger(owner.ledger_path) as book:
            run = run_terms(
                name, experiment.privacy_unit, experiment.noise_source, method, plan, experiment
            )
            admit_run(owner, book, run, plan, units, experiment, partition)


@contextmanager
def to_the_user(owner: Owner) -> Iterator[None]:
    """Within: a refusal says which site refuses, where server and clients are one user."""
    try:
        yield
    except Refused as refusal:
        if owner.policy is None:
            raise  # its ledger's own sentence, which names it
        detail = str(refusal)
        raise Refused(
            refusal.code, f"The site {owner.site_dir} refuses: {detail[:1].lower()}{detail[1:]}"
        ) from refusal


def policy(path: str | os.PathLike[str]) -> PolicyCheck:
    """What a site allows, for `xcal.PrivacyEngine(ledger=…, policy=…)`.

    A training is asked about before its first charge, and again in every round: its ε and δ, those
    of all runs in the ledger together, its unit, steps, batch and noise. `methods` in the file must
    name `dp-sgd`, which every loop of one's own is; what the loop trains is the owner's to look at,
    so `networks` does not apply. A refusal is written into the site's refusal log.

    Args:
        path: the site's folder, or its `policy.toml`.

    Returns:
        What `xcal.PrivacyEngine` takes as `policy`.

    Raises:
        UserError: where the file is missing or not a policy. The engine's `make_private` then
            raises `xcal.federation.request_refusals.Refused`, with its code, for what is not
            allowed.

    Guarantee: a training beyond what the file allows is refused before its first charge.

    Example:
        >>> import tempfile, xcal
        >>> site = Path(tempfile.mkdtemp())
        >>> _ = xcal.Ledger.create(site, population="ward-7", unit="record", epsilon=8, delta=1e-3)
        >>> _ = (site / "policy.toml").write_text(
        ...     "epsilon_total = 8.0\\ndelta_total = 1e-3\\nepsilon_run = 2.0\\ndelta_run = 1e-4\\n"
        ...     "methods = ['dp-sgd']"
        ... )
        >>> engine = xcal.PrivacyEngine(ledger=site, policy=xcal.policy(site))
    """
    given = Path(path)
    file = given / "policy.toml" if given.is_dir() else given
    allowed = read_policy(file)

    def check(ledger: Ledger, run: RunTerms, plan: Plan) -> None:
        with logged(file.parent, {"run": run.run}), naming("ledger"):
            admit_method(allowed, plan.method)
            admit_target(allowed, plan.unit, plan.epsilon, plan.delta)
            admit_plan(allowed, run.run, plan, ledger.runs.values())
            if run.run not in ledger.runs:  # else the ledger admitted it when it was entered
                admit_new(ledger, run, plan, plan.units)

    return check
