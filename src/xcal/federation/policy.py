"""What a client allows: the server proposes, `policy.toml` decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xcal.config import Experiment, nearest
from xcal.dp.calibration import Plan
from xcal.dp.ledger.rows import RunTerms, covers, how_to_cover
from xcal.errors import UserError
from xcal.federation.exchange import ClientReport
from xcal.federation.files import read_table
from xcal.federation.request_refusals import Refused

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

LEAST_FLOOR = 5  # of exact counts of held-out people

# Without these an answer is none; everything else in a report is the owner's choice.
ALWAYS_REPORTED = ("client", "units", "halted", "noise", "add_remove")
REPORTABLE = (
    *(f.name for f in fields(ClientReport) if f.name not in ALWAYS_REPORTED),
    "trace",
)


class Policy(BaseModel):
    """A client's terms. The four limits have no default: the owner says them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon_total: Positive = Field(description="highest ε of all runs together")
    delta_total: Positive = Field(description="highest δ of all runs together")
    epsilon_run: Positive = Field(description="highest ε of one run")
    delta_run: Positive = Field(description="highest δ of one run")
    sigma_min: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.3, description="lowest noise multiplier of a step"
    )
    methods: tuple[str, ...] = Field(
        ("fl-dp", "xcal", "xcal-steered"), description="methods allowed"
    )
    networks: tuple[str, ...] = Field(
        ("small", "resnet18", "efficientnet_b0"), description="networks allowed"
    )
    unit: Literal["record", "group"] = Field(
        "record", description="what a run must protect: one image, or all of a person's"
    )
    max_message: Annotated[int, Field(ge=1024)] = Field(
        256 << 20, description="largest message in bytes"
    )
    max_steps: Annotated[int, Field(ge=1)] = Field(100_000, description="most steps of one run")
    max_batch: Annotated[int, Field(ge=1)] = Field(
        8192, description="most units that a step draws, on average"
    )
    report: tuple[str, ...] = Field(
        REPORTABLE, description="what may be told beside weights, units and whether it halted"
    )
    statistics_epsilon: NotNegative = Field(
        0.0, description="highest ε of one answer to how many units a class has; 0: never answered"
    )
    statistics_delta: NotNegative = Field(0.0, description="highest δ of one such answer")
    evaluation_epsilon: NotNegative = Field(
        0.0,
        description="ε at which the measurement of a run's final model on held-out units is sent;"
        " 0: it stays here",
    )
    evaluation_delta: NotNegative = Field(0.0, description="δ of sending it")
    evaluation_floor: Annotated[int, Field(ge=0)] = Field(
        0,
        description="instead of noise: exact counts of held-out people by true and predicted class"
        " are sent, each below this floor withheld; no guarantee covers these people. 0: never",
    )
    evaluation_tables: Annotated[int, Field(ge=1)] = Field(
        1,
        description="of how many runs such counts are sent in all: the difference of two tables"
        " tells of single people",
    )
    personal_epsilon: NotNegative = Field(
        0.0, description="ε of a head of this site's own per run, where site.toml says personal"
    )
    personal_delta: NotNegative = Field(0.0, description="δ of such a head")


def site_file(site_dir: Path) -> Path:
    """A site's `site.toml`; the first edition called it `home.toml`."""
    old, new = site_dir / "home.toml", site_dir / "site.toml"
    return old if old.exists() and not new.exists() else new


def read_policy(path: Path) -> Policy:
    policy = read_table(Policy, path, "policy")
    for name in policy.report:
        if name not in REPORTABLE:
            raise UserError(
                f"report in {path} names {name!r}, which is nothing a client reports."
                f"{nearest(name, REPORTABLE)}"
            )
    for run, total in (("epsilon_run", "epsilon_total"), ("delta_run", "delta_total")):
        if getattr(policy, run) > getattr(policy, total):
            raise UserError(f"{run} exceeds {total} in {path}: one run cannot have more than all.")
    for what in ("statistics", "evaluation", "personal"):
        epsilon, delta = getattr(policy, f"{what}_epsilon"), getattr(policy, f"{what}_delta")
        if (epsilon > 0) != (delta > 0):
            raise UserError(
                f"{what}_epsilon and {what}_delta in {path} go together: set both, or neither."
            )
    if 0 < policy.evaluation_floor < LEAST_FLOOR:
        raise UserError(
            f"evaluation_floor = {policy.evaluation_floor} in {path} would show counts of very few"
            f" people: {LEAST_FLOOR} is the least, and 0 sends none."
        )
    if policy.evaluation_floor and policy.evaluation_epsilon:
        raise UserError(
            f"evaluation_floor and evaluation_epsilon in {path} exclude each other, exact counts or"
            " tables with noise: set one of them."
        )
    return policy


def admit_method(policy: Policy, name: str) -> None:
    """Code named by a server runs only where the owner wrote that very name down."""
    if name not in policy.methods:
        raise Refused(
            "method-not-allowed",
            f"The run's method = {name!r} is none of methods in policy.toml"
            f" ({', '.join(policy.methods)}).",
        )


def admit_experiment(policy: Policy, experiment: Experiment) -> None:
    """Refuse what the policy does not allow, as far as the request alone shows it."""
    admit_method(policy, experiment.method)
    if experiment.network not in policy.networks:
        raise Refused(
            "network-not-allowed",
            f"The run's network = {experiment.network!r} is none of networks in policy.toml"
            f" ({', '.join(policy.networks)}).",
        )
    admit_target(policy, experiment.privacy_unit, experiment.epsilon, experiment.delta)


def admit_target(policy: Policy, unit: str, epsilon: float, delta: float) -> None:
    """Refuse a run that protects another unit, or asks for more than one run may have."""
    if not covers(policy.unit, unit):
        raise Refused(
            "unit-not-allowed",
            f"The run protects a {unit}, and unit = {policy.unit!r} in policy.toml asks"
            f" for a {policy.unit}: {how_to_cover(policy.unit)}.",
        )
    for name, asked, allowed in (
        ("epsilon", epsilon, policy.epsilon_run),
        ("delta", delta, policy.delta_run),
    ):
        if asked > allowed:
            raise Refused(
                f"{name}-run",
                f"The run asks for {name} = {asked:g}, and {name}_run = {allowed:g} in policy.toml"
                f" is the most for one run: lower the run's {name}.",
            )


def admit_totals(
    policy: Policy, run: str, epsilon: float, delta: float, runs: Iterable[RunTerms]
) -> None:
    """Refuse what would take all runs together past the policy's totals."""
    others = [r for r in runs if r.run != run]
    for name, own, rest, allowed in (
        ("epsilon", epsilon, [r.epsilon or 0.0 for r in others], policy.epsilon_total),
        ("delta", delta, [r.delta or 0.0 for r in others], policy.delta_total),
    ):
        if own + sum(rest) > allowed * (1 + 1e-12):
            left = allowed - sum(rest)
            what = f"lower the run's {name} to {left:.6g}"
            raise Refused(
                f"{name}-total",
                f"The run asks for {name} = {own:g}, and earlier runs reserved {sum(rest):g} of"
                f" {name}_total = {allowed:g} in policy.toml:"
                f" {what if left > allowed * 1e-9 else 'nothing is left of it'}.",
            )


def admit_plan(policy: Policy, run: str, plan: Plan | None, runs: Iterable[RunTerms]) -> None:
    """Refuse a run whose plan goes beyond the policy. `runs`: what the ledger holds already."""
    if plan is None:
        return  # a ledger with a limit refuses it; one without was made for such runs
    admit_totals(policy, run, plan.epsilon, plan.delta, runs)
    if plan.batch > policy.max_batch:
        raise Refused(
            "batch-too-large",
            f"A step draws batch = {plan.batch} units on average, and max_batch ="
            f" {policy.max_batch} in policy.toml is the most: lower the run's batch.",
        )
    if plan.steps > policy.max_steps:
        raise Refused(
            "too-many-steps",
            f"The run plans {plan.steps} steps, and max_steps = {policy.max_steps} in policy.toml"
            " is the most for one run: lower its rounds or local_epochs, or raise its batch.",
        )
    lowest = plan.sigma_joint_min
    if lowest < policy.sigma_min:
        raise Refused(
            "sigma-too-low",
            f"The run's noise multiplier goes down to {lowest:.3g}, and sigma_min ="
            f" {policy.sigma_min:g} in policy.toml is the lowest: lower the run's epsilon, rounds"
            " or batch.",
        )


def filtered(policy: Policy, report: dict[str, Any]) -> dict[str, Any]:
    """A report with what the owner does not released replaced by None."""
    return {
        name: value if name in ALWAYS_REPORTED or name in policy.report else None
        for name, value in report.items()
    }


def looser_than_recommended(policy: Policy) -> list[str]:
    """What an owner should think about again, a sentence each."""
    found = []
    if policy.epsilon_total > 10:
        found.append(f"epsilon_total = {policy.epsilon_total:g} promises little: 10 is much.")
    if policy.delta_total > 1e-3:
        found.append(f"delta_total = {policy.delta_total:g} is high: stay below 1/units.")
    if policy.sigma_min < 0.3:
        found.append(f"sigma_min = {policy.sigma_min:g} lets single steps through almost bare.")
    if policy.evaluation_floor:
        found.append(
            f"evaluation_floor = {policy.evaluation_floor} sends exact counts of held-out people,"
            " whom no guarantee then covers (ε = ∞): evaluation_epsilon sends them with noise."
        )
        if policy.evaluation_tables > 1:
            found.append(
                f"evaluation_tables = {policy.evaluation_tables}: the difference of two exact"
                " tables tells of the few people whom two models answer differently."
            )
    for name in (*policy.methods, *policy.networks):
        if ":" in name:
            found.append(f"{name!r} is code of your own: be sure what it does.")
    return found
