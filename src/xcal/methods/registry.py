"""Methods by name."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeGuard

from xcal.config import Experiment, nearest
from xcal.dp.accounting import budget_at
from xcal.dp.calibration import ODOMETER_SHARE, Plan
from xcal.dp.pld import SIGMA_SLACK, delta_bound
from xcal.errors import UserError
from xcal.methods.adap_dpfl import ADAP_DPFL
from xcal.methods.adaptive_clip import ADAPTIVE_CLIP
from xcal.methods.agp import AGP
from xcal.methods.agp_dp import AGP_DP
from xcal.methods.base import CentralMethod, LocalMethod, Method
from xcal.methods.dp_fedavg import DP_FEDAVG
from xcal.methods.fl import CENTRALIZED, FL
from xcal.methods.fl_dp import FL_DP
from xcal.methods.own import own_method
from xcal.methods.xcal import XCAL
from xcal.methods.xcal_paper import XCAL_PAPER
from xcal.methods.xcal_steered import XCAL_STEERED
from xcal.plugins import load_object

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        CENTRALIZED,
        FL,
        FL_DP,
        AGP,
        AGP_DP,
        ADAP_DPFL,
        ADAPTIVE_CLIP,
        XCAL_PAPER,
        XCAL_STEERED,
        XCAL,
        DP_FEDAVG,
    )
}


def sums_once(method: Method) -> TypeGuard[LocalMethod]:
    """Whether its step is one sum at a multiplier known beforehand, which discrete noise needs."""
    return bool(getattr(method, "sums_under_masks", False))


SUMMING = ", ".join(name for name, method in METHODS.items() if sums_once(method))


def check_discrete(experiment: Experiment, method: Method) -> None:
    """Refuse, in one sentence, discrete noise in a method that cannot use it."""
    if experiment.noise_kind == "discrete" and not sums_once(method):
        raise UserError(
            f"noise_kind = 'discrete' needs a multiplier that is fixed beforehand, and"
            f" {experiment.method} as it is set here is not of that kind: choose {SUMMING}, or"
            " noise_kind = 'gaussian'."
        )


def get_method(name: str) -> Method:
    """A method by its name, or one of the user's own by `package.module:name`."""
    if name in METHODS:
        return METHODS[name]
    if ":" in name:
        known = frozenset[str]().union(*(m.uses for m in METHODS.values()))
        return own_method(name, load_object(name, "method"), known)
    raise UserError(
        f"Unknown method {name!r}.{nearest(name, tuple(METHODS))}"
        f" Known: {', '.join(METHODS)}, or package.module:name."
    )


def method_of(experiment: Experiment) -> Method:
    """The experiment's method, in the variant that its other keys ask for."""
    method = get_method(experiment.method)
    choose = getattr(method, "variant", None)
    chosen: Method = method if choose is None else choose(experiment)
    return chosen


def name_today(experiment: Experiment) -> str:
    """The name that a method has today: `xcal` of the first edition is `xcal-steered`.

    Reads keys only: a method from elsewhere is not loaded to be named.
    """
    old = experiment.method == XCAL.name and getattr(experiment, "steering", "none") == "signal"
    return XCAL_STEERED.name if old else experiment.method


def checked_plan(
    method: Method, experiment: Experiment, units: int, own_rounds: int
) -> Plan | None:
    """A client's plan, held to what was asked for: a method from elsewhere plans for itself.

    Its budget must be what (ε, δ) buy, and its sizes those that are drawn from.
    """
    check_discrete(experiment, method)
    plan = method.plan(experiment, units, own_rounds)
    if method.private != (plan is not None):
        raise UserError(
            f"The method {experiment.method!r} calls itself {'' if method.private else 'not '}"
            f"private and has {'no' if plan is None else 'a'} plan: one of the two is wrong."
        )
    if plan is None:
        return None
    asked = (
        experiment.epsilon,
        experiment.delta,
        experiment.unit,
        units,
        experiment.expected_batch_size,
    )
    if (plan.epsilon, plan.delta, plan.unit, plan.units, plan.batch) != asked:
        raise UserError(
            f"The method {experiment.method!r} plans for another target or other sizes than the"
            " experiment asks for: its plan must carry epsilon, delta, unit, units and batch."
        )
    if not _keeps_its_promise(plan):
        raise UserError(
            f"The method {experiment.method!r} plans for more than epsilon = {plan.epsilon:g} and"
            f" delta = {plan.delta:g} allow."
        )
    return plan


def checked_server_plan(method: CentralMethod, experiment: Experiment, participants: int) -> Plan:
    """A trusted server's plan, held to what was asked for."""
    check_discrete(experiment, method)
    plan = method.server_plan(experiment, participants)
    asked = (experiment.epsilon, experiment.delta, "client", participants)
    if (plan.epsilon, plan.delta, plan.unit, plan.units) != asked or not _keeps_its_promise(plan):
        raise UserError(
            f"The method {experiment.method!r} plans for another target, or for more, than"
            f" epsilon = {experiment.epsilon:g} and delta = {experiment.delta:g} per client allow."
        )
    return plan


@lru_cache(maxsize=1024)
def _keeps_its_promise(plan: Plan) -> bool:
    if plan.accountant == "pld":
        sigma = plan.sigma_static * (1 - SIGMA_SLACK)
        allowed = plan.delta * (1 - ODOMETER_SHARE)
        try:
            return delta_bound(plan.sample_rate, sigma, plan.steps, plan.epsilon) <= allowed
        except ArithmeticError:  # beyond what can be computed, and so beyond what can be promised
            return False
    return plan.budget <= budget_at(plan.order, plan.epsilon, plan.delta) * (1 + 1e-9)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def plan_for(experiment: Experiment, units: int, own_rounds: int | None = None) -> Plan:
    """The plan of a method with a guarantee; without data, a unit that is not named is an image."""
    if experiment.unit is None:
        experiment = experiment.model_copy(update={"unit": "record"})
    method = method_of(experiment)
    if isinstance(method, CentralMethod):  # the units are the clients of a round
        return checked_server_plan(method, experiment, units)
    plan = checked_plan(method, experiment, units, own_rounds or experiment.rounds)
    if plan is None:
        raise UserError(
            f"The method {experiment.method!r} has no guarantee (epsilon is infinite), so there is"
            f" nothing to plan: choose {_listed([m.name for m in METHODS.values() if m.private])}."
        )
    return plan
