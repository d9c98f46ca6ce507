"""From a target (ε, δ) and the shape of a training to the noise that spends it: a frozen Plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from xcal.errors import UserError
from xcal.privacy.accounting import (
    ORDERS,
    CostTable,
    budget_at,
    cost_profile,
    epsilon_at,
    geometric_table,
    joint_sigma,
)

SCORE_SENSITIVITY = 0.5  # Σ(u − ½) with u in [0, 1]: zeroing one unit moves it by at most ½
COUNT_SENSITIVITY = 0.5  # Σ(1[norm ≤ C] − ½): likewise
GRID_RATIO = 1.002  # neighbouring multipliers of the public grid differ by 0.2 %
GRID_REACH = 100.0  # the grid ends at 100 × the static σ
SUM_SLACK = 1e-9  # share of the budget kept free for the upward rounding of K additions
MAX_SIGMA = 1e5


@dataclass(frozen=True)
class Calibration:
    """The smallest constant multiplier whose `steps` steps stay within (ε, δ), and its order."""

    sigma: float
    order: float
    budget: float  # R at that order


@dataclass(frozen=True)
class Plan:
    """What one client will do with its budget, fixed before training and free of data.

    Every field is public. Multipliers are in units of the sensitivity of what they blur:
    `sigma_ref`, `sigma_min`, `sigma_max` of the clipped gradient sum (clipping norm 1),
    `sigma_signal` of the released score itself.
    """

    method: str
    unit: str
    epsilon: float
    delta: float
    units: int
    batch: int
    rounds: int
    local_epochs: int
    steps: int
    sample_rate: float
    order: float
    budget: float
    sigma_static: float
    sigma_ref: float
    sigma_min: float
    sigma_max: float
    sigma_signal: float | None
    signal_price: float
    epsilon_gradient: float | None = None  # xcal-paper: the two shares of ε and of δ
    epsilon_signal: float | None = None
    sigma_count: float | None = None  # quantile clipping: deviation of the noise on the count
    warnings: tuple[str, ...] = ()

    @property
    def steps_per_round(self) -> int:
        return self.steps // self.rounds if self.rounds else 0

    @property
    def sigma_joint_min(self) -> float:
        """Lowest multiplier of all that a first step may release together; what a floor is for."""
        lowest = min(self.sigma_min, self.sigma_ref)
        if self.epsilon_signal is not None:  # published: the signal's noise does not follow
            return joint_sigma(lowest, self.sigma_signal or math.inf)
        return lowest * self.sigma_static / self.sigma_ref

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "warnings": list(self.warnings)}

    def table(self) -> CostTable:
        """The public grid of effective multipliers and their costs at this plan's order."""
        return geometric_table(
            self.sample_rate,
            self.order,
            self.sigma_static / 8,
            self.sigma_static * GRID_REACH,
            GRID_RATIO,
        )

    def odometer(self, spent: float) -> float:
        """ε spent so far at the fixed order: 0 before the first step, never above the target."""
        if spent <= 0:
            return 0.0
        return min(self.epsilon, spent + math.log(1 / self.delta) / (self.order - 1))

    def epsilon_if_fixed(self, spent: float) -> float:
        """ε by the tight conversion at the plan's order: a claim only for plans fixed before."""
        return epsilon_at(self.order, spent, self.delta)


def require(condition: bool, sentence: str) -> None:
    """Raise the sentence as an error the user can act on, unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def check_target(epsilon: float, delta: float) -> None:
    require(
        math.isfinite(epsilon) and epsilon > 0,
        f"epsilon must be a positive number, not {epsilon}: choose for example 0.5 or 5.",
    )
    require(
        0 < delta < 1, f"delta must lie strictly between 0 and 1, not {delta}: choose 1e-5, say."
    )


def check_shape(units: int, batch: int, rounds: int, local_epochs: int) -> None:
    require(
        units >= 1, f"units must be at least 1, not {units}: give the declared number of units."
    )
    require(batch >= 1, f"batch must be at least 1, not {batch}.")
    require(
        batch <= units,
        f"batch ({batch}) exceeds the number of units ({units}): choose at most {units}.",
    )
    require(rounds >= 1, f"rounds must be at least 1, not {rounds}.")
    require(local_epochs >= 1, f"local_epochs must be at least 1, not {local_epochs}.")


def _feasible(
    rate: float, sigma: float, steps: int, epsilon: float, delta: float, orders: Sequence[float]
) -> tuple[bool, float]:
    """Whether some order admits all steps, and the order with the most room."""
    costs = cost_profile(rate, sigma, orders)
    room = [
        budget_at(a, epsilon, delta) * (1 - SUM_SLACK) - steps * float(c)
        for a, c in zip(orders, costs, strict=True)
    ]
    positive = [
        r if budget_at(a, epsilon, delta) > 0 else -math.inf
        for a, r in zip(orders, room, strict=True)
    ]
    k = max(range(len(orders)), key=positive.__getitem__)
    return positive[k] >= 0, orders[k]


def _smallest_sigma(
    rate: float,
    steps: int,
    epsilon: float,
    delta: float,
    orders: Sequence[float],
    bracket: tuple[float, float],
    tolerance: float,
) -> tuple[float, float]:
    low, high = bracket
    best: tuple[bool, float] = (False, orders[0])
    while high <= MAX_SIGMA:
        best = _feasible(rate, high, steps, epsilon, delta, orders)
        if best[0]:
            break
        low, high = high, high * 2
    require(
        best[0],
        f"no noise reaches epsilon = {epsilon}, delta = {delta} over {steps} steps:"
        " raise epsilon or delta, or plan fewer steps.",
    )
    order = best[1]
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        fits, candidate = _feasible(rate, middle, steps, epsilon, delta, orders)
        if fits:
            high, order = middle, candidate
        else:
            low = middle
    return high, order


@lru_cache(maxsize=256)
def calibrate(epsilon: float, delta: float, rate: float, steps: int) -> Calibration:
    """The smallest σ, over all orders, with which `steps` equal steps are (ε, δ)-DP.

    Guarantee: at the returned order, `steps` charges of the filter's own cost sum to at most the
    returned budget, upward rounding included.
    """
    check_target(epsilon, delta)
    coarse = ORDERS[::8]
    sigma, order = _smallest_sigma(rate, steps, epsilon, delta, coarse, (0.05, 0.1), 1e-3)
    k = ORDERS.index(order)
    near = ORDERS[max(0, k - 9) : k + 10]
    sigma, order = _smallest_sigma(rate, steps, epsilon, delta, near, (sigma * 0.9, sigma), 1e-6)
    budget = budget_at(order, epsilon, delta)
    require(
        budget > 0,
        f"epsilon = {epsilon} leaves no budget at delta = {delta}: raise epsilon or delta.",
    )
    return Calibration(sigma, order, budget)


@dataclass(frozen=True)
class PlanShape:
    """What a plan is made for: the target and the public sizes of one client's training."""

    epsilon: float
    delta: float
    units: int
    batch: int
    rounds: int
    local_epochs: int = 1
    unit: str = "record"

    def __post_init__(self) -> None:
        check_target(self.epsilon, self.delta)
        check_shape(self.units, self.batch, self.rounds, self.local_epochs)

    @property
    def steps(self) -> int:
        return self.rounds * self.local_epochs * math.ceil(self.units / self.batch)

    @property
    def sample_rate(self) -> float:
        return self.batch / self.units

    @property
    def warnings(self) -> tuple[str, ...]:
        if self.delta >= 1 / self.units:
            return (
                f"delta = {self.delta:g} is not below 1/units = {1 / self.units:g}: such a delta"
                " would allow one unit to be published outright.",
            )
        return ()


def _plan(shape: PlanShape, method: str, order: float, budget: float, **fields: Any) -> Plan:
    return Plan(
        method=method,
        unit=shape.unit,
        epsilon=shape.epsilon,
        delta=shape.delta,
        units=shape.units,
        batch=shape.batch,
        rounds=shape.rounds,
        local_epochs=shape.local_epochs,
        steps=shape.steps,
        sample_rate=shape.sample_rate,
        order=order,
        budget=budget,
        warnings=shape.warnings,
        **fields,
    )


def plan_static(shape: PlanShape, method: str = "fl-dp") -> Plan:
    """The constant multiplier that exactly spends the target."""
    static = calibrate(shape.epsilon, shape.delta, shape.sample_rate, shape.steps)
    return _plan(
        shape,
        method,
        static.order,
        static.budget,
        sigma_static=static.sigma,
        sigma_ref=static.sigma,
        sigma_min=static.sigma,
        sigma_max=static.sigma,
        sigma_signal=None,
        signal_price=0.0,
    )


def joint_factor(kappa: float | None = None, kappa_b: float | None = None) -> float:
    """σ_t/σ_eff of a step that also releases a signal priced by κ or a count priced by κ_b.

    With σ_s = κ·Δ_u·σ_t and σ_b = κ_b·σ_t, 1/σ_eff² = 1/σ_t² + Δ_u²/σ_s² + 1/(2σ_b)² gives
    √(1 + 1/κ² + 1/(2κ_b)²). None: not released.
    """
    signal = 0.0 if kappa is None else 1 / kappa**2
    count = 0.0 if kappa_b is None else (COUNT_SENSITIVITY / kappa_b) ** 2
    return math.sqrt(1 + signal + count)


def signal_factor(kappa: float) -> float:
    """σ_t/σ_eff of a step that carries a signal priced by κ and nothing else."""
    return joint_factor(kappa)


def plan_xcal(
    shape: PlanShape,
    *,
    kappa: float,
    w: float,
    signal: bool = True,
    kappa_b: float | None = None,
) -> Plan:
    """Our method: the signal rides on the gradient's batch, and moves shares of what is left.

    `sigma_ref`, `sigma_min`, `sigma_max` are the first step's multipliers at m = 1, 1 + w, 1 − w.
    `kappa_b`: the count of units within the clipping norm is released too.
    """
    require(kappa_b is None or kappa_b > 0, f"kappa_b must be positive, not {kappa_b}: try 5.")
    require(kappa > 0, f"kappa must be positive, not {kappa}: 5 is the default.")
    require(0 <= w < 1, f"w must lie in [0, 1), not {w}: 0.5 is the default.")
    static = calibrate(shape.epsilon, shape.delta, shape.sample_rate, shape.steps)
    factor = joint_factor(kappa if signal else None, kappa_b)
    plan = _plan(
        shape,
        "xcal",
        static.order,
        static.budget,
        sigma_static=static.sigma,
        sigma_ref=static.sigma * factor,
        sigma_min=static.sigma * factor,
        sigma_max=static.sigma * factor,
        sigma_signal=kappa * SCORE_SENSITIVITY * static.sigma * factor if signal else None,
        sigma_count=None if kappa_b is None else kappa_b * static.sigma * factor,
        signal_price=factor - 1,
    )
    table = plan.table()
    share = static.budget / shape.steps

    def sigma_at(m: float) -> float:
        k = table.cheapest_within(share * m)
        return float(table.sigmas[len(table.sigmas) - 1 if k is None else k]) * factor

    return Plan(
        **{
            **asdict(plan),
            "warnings": plan.warnings,
            "sigma_min": min(sigma_at(1 + w), plan.sigma_ref),
            "sigma_max": max(sigma_at(1 - w), plan.sigma_ref),
        }
    )


def plan_paper(shape: PlanShape, *, rho: float, band: float) -> Plan:
    """The published split: σ_ref for ((1−ρ)ε, δ/2), σ_s for (ρε, δ/2), each over all K steps.

    The order and budget are those of the guarantee proved for a shared batch (METHOD §3), the best
    order for K joint releases at the published σ_ref and σ_s.
    """
    require(0 <= rho < 1, f"rho must lie in [0, 1), not {rho}: the paper uses 0.1.")
    require(0 <= band <= 1, f"band must lie in [0, 1], not {band}: the paper uses 0.2.")
    require(band < 1, "band = 1 would allow a step without noise: choose a value below 1.")
    static = calibrate(shape.epsilon, shape.delta, shape.sample_rate, shape.steps)
    delta_share = shape.delta if rho == 0 else shape.delta / 2
    gradient = calibrate(
        (1 - rho) * shape.epsilon, delta_share, shape.sample_rate, shape.steps
    ).sigma
    signal = None
    joint = gradient
    if rho > 0:
        signal = calibrate(rho * shape.epsilon, delta_share, shape.sample_rate, shape.steps).sigma
        joint = 1 / math.sqrt(1 / gradient**2 + 1 / signal**2)
    costs = shape.steps * cost_profile(shape.sample_rate, joint)
    order = min(
        (epsilon_at(a, float(c), shape.delta), a) for a, c in zip(ORDERS, costs, strict=True)
    )[1]
    budget = budget_at(order, shape.epsilon, shape.delta)
    if budget <= 0:  # the joint release passes the target so far that its best order has no room
        order, budget = static.order, static.budget
    return _plan(
        shape,
        "xcal-paper",
        order,
        budget,
        sigma_static=static.sigma,
        sigma_ref=gradient,
        sigma_min=(1 - band) * gradient,
        sigma_max=(1 + band) * gradient,
        sigma_signal=signal,
        signal_price=gradient / static.sigma - 1,
        epsilon_gradient=(1 - rho) * shape.epsilon,
        epsilon_signal=rho * shape.epsilon,
    )
