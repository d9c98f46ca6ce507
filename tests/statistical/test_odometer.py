"""The odometer at stopping times: an adversary who watches the releases stops where it hurts most.

Claimed: E[(1 − e^{ε_τ − L_τ})₊] ≤ δ, L the privacy loss of what was released until τ, under either
of two neighbors. Measured at a δ large enough to be seen, with multipliers chosen on the way by
the same adversary. What a wrong odometer says is caught by the same measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from xcal.dp.accounting import step_costs
from xcal.dp.calibration import ODOMETER_SHARE, Plan, PlanShape, plan_fixed, plan_static

PATHS = 200_000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Stopped:
    """Where each path was stopped: its privacy loss, and Σρ at the plan's order."""

    loss: Floats
    spent: Floats

    def delta(self, odometer: Callable[[Floats], Floats]) -> tuple[float, float]:
        """The mean of (1 − e^{ε − L})₊, and its standard error."""
        values = np.maximum(0.0, -np.expm1(odometer(self.spent) - self.loss))
        return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def attack(
    plan: Plan,
    odometer: Callable[[Floats], Floats],
    multipliers: tuple[float, float],
    margin: float,
    *,
    remove: bool,
    seed: int = 0,
) -> Stopped:
    """Stop once the loss stands `margin` above the reading; more noise while it is going well."""
    rng = np.random.default_rng(seed)
    rate, sigmas = plan.sample_rate, np.array(multipliers)
    costs = step_costs(rate, sigmas, plan.order)
    loss, spent = np.zeros(PATHS), np.zeros(PATHS)
    going = np.ones(PATHS, dtype=bool)
    for _ in range(plan.steps):
        chosen = (loss - spent > 0.5).astype(int)  # by what was released before
        sigma = sigmas[chosen]
        x = rng.normal(size=PATHS) * sigma + (rng.random(PATHS) < rate if remove else 0.0)
        null = math.log1p(-rate) if rate < 1 else -math.inf
        step = np.logaddexp(null, math.log(rate) + (2 * x - 1) / (2 * sigma**2))
        loss = np.where(going, loss + (step if remove else -step), loss)
        spent = np.where(going, spent + costs[chosen], spent)
        going &= loss <= odometer(spent) + margin
    return Stopped(loss, spent)


def reading(plan: Plan) -> Callable[[Floats], Floats]:
    """The plan's own odometer, for many paths at once."""

    def read(spent: Floats) -> Floats:
        values, places = np.unique(spent, return_inverse=True)
        return np.array([plan.odometer(float(v)) for v in values])[places]

    return read


def adaptive(rate: int, order: float, delta: float, steps: int) -> Plan:
    """A plan of one order whose target is so far off that its cap never speaks."""
    plan = plan_static(PlanShape(5.0, delta, units=rate, batch=1, rounds=1))
    return replace(plan, order=order, delta=delta, steps=steps, epsilon=1e9)


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize(
    ("units", "order", "delta", "steps", "multipliers", "margin", "reached"),
    [
        (1, 4.0, 0.05, 60, (3.0, 6.0), 0.2, 0.8),
        (1, 3.0, 0.02, 60, (2.0, 4.0), 0.2, 0.85),
        (1, 2.0, 0.05, 40, (1.0, 2.0), 0.5, 0.85),
        (5, 2.0, 0.05, 40, (0.7, 1.5), 0.5, 0.0),
        (5, 4.0, 0.05, 40, (0.7, 1.5), 0.2, 0.0),
    ],
)
def test_it_holds_where_an_adversary_stops(
    units: int,
    order: float,
    delta: float,
    steps: int,
    multipliers: tuple[float, float],
    margin: float,
    reached: float,
    remove: bool,
) -> None:
    plan = adaptive(units, order, delta, steps)
    stopped = attack(plan, reading(plan), multipliers, margin, remove=remove)
    found, error = stopped.delta(reading(plan))
    assert found <= delta + 3 * error
    assert found >= reached * delta  # the adversary is no straw man: hardly any room is left


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("less", [0.1, 0.2])
def test_a_reading_that_is_too_low_is_caught(less: float, remove: bool) -> None:
    plan = adaptive(1, 3.0, 0.02, 60)

    def wrong(spent: Floats) -> Floats:
        return reading(plan)(spent) - less

    found, error = attack(plan, wrong, (2.0, 4.0), 0.3, remove=remove).delta(wrong)
    assert found > plan.delta + 3 * error


def fixed() -> Plan:
    return plan_fixed(PlanShape(1.0, 0.05, units=5, batch=5, rounds=40, unit="client"))


def test_a_fixed_plan_may_cap_its_odometer_since_it_keeps_a_share_of_delta_for_it() -> None:
    plan = fixed()
    assert plan.accountant == "pld"
    assert plan.odometer(plan.budget) == plan.epsilon
    sigmas = (plan.sigma_static, plan.sigma_static)
    for margin in (0.1, 0.3, 0.6):
        stopped = attack(plan, reading(plan), sigmas, margin, remove=True)
        found, error = stopped.delta(reading(plan))
        assert found <= plan.delta + 3 * error


def test_without_the_share_the_smaller_of_two_readings_is_too_low() -> None:
    """Either bound leaves out δ somewhere else: an adversary collects more than δ from both."""
    plan = replace(fixed(), accountant="renyi", order=4.0)  # all of δ for the odometer
    sigmas = (plan.sigma_static, plan.sigma_static)
    stopped = attack(plan, reading(plan), sigmas, 0.3, remove=True)
    found, error = stopped.delta(reading(plan))
    assert found > plan.delta + 3 * error
    assert 0 < ODOMETER_SHARE < 1
