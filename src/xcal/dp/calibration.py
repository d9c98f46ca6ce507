"""From a target (ε, δ) and the shape of a training to the noise that spends it: a frozen Plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

from scipy import special

from xcal.dp.accounting import (
    ORDERS,
    SCORE_SENSITIVITY,
    CostTable,
    best_epsilon,
    budget_at,
    cost_profile,
    epsilon_at,
    joint_factor,
    joint_sigma,
    multiplier_table,
    step_cost,
)
from xcal.dp.pld import ADD, DIRECTIONS, REMOVE, SIGMA_SLACK, Direction, delta_bound
from xcal.errors import UserError

WHOLE_ORDERS = tuple(a for a in ORDERS if a == int(a))
SUM_SLACK = 1e-9  # share of the budget kept free for the upward rounding of K additions
MAX_SIGMA = 1e5
# A fixed plan is made for 99 % of δ; its odometer has the rest. Then the smaller of the two may be
# read at any stopping time: what each of them leaves out adds up to δ (docs/guarantee.md §4).
ODOMETER_SHARE = 0.01
SIGMA_DIGITS = 6  # a fixed plan's multiplier, rounded up: no library's last digit decides it
PLD_TRIES = 16
PLD_CLOSE = 0.01  # δ is met to 1 %, σ to about 0.04 %


@dataclass(frozen=True)
class Calibration:
    """The smallest constant multiplier whose `steps` steps stay within (ε, δ), and its order."""

    sigma: float
    order: float
    budget: float  # R at that order; by PLD, the cost of all planned steps at it
    accountant: str = "renyi"


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
    # "renyi": a filter at one order, for multipliers chosen on the way. "pld": privacy-loss
    # distributions, for `steps` steps at `sample_rate` and `sigma_static`, fixed beforehand.
    accountant: str = "renyi"

    @property
    def sigma_joint_min(self) -> float:
        """Lowest multiplier of all that a first step may release together; what a floor is for."""
        lowest = min(self.sigma_min, self.sigma_ref)
        if self.epsilon_signal is not None:  # published: the signal's noise does not follow
            return joint_sigma(lowest, self.sigma_signal or math.inf)
        return lowest * self.sigma_static / self.sigma_ref

    @property
    def sigma_first(self) -> float:
        """Multiplier of all that a first step releases together: what the run's steps cost."""
        return self.sigma_static if self.epsilon_signal is None else self.sigma_joint_min

    @property
    def fixed(self) -> dict[str, Any]:
        """What a run reserves of a plan whose steps are all alike; nothing where they may move."""
        if self.accountant != "pld":
            return {}
        return {
            "accountant": self.accountant,
            "rate": self.sample_rate,
            "sigma": self.sigma_static,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "warnings": list(self.warnings)}

    def table(self) -> CostTable:
        """The public grid of effective multipliers and their costs at this plan's order."""
        return multiplier_table(self.sample_rate, self.order, self.sigma_static)

    def odometer(self, spent: float) -> float:
        """ε spent so far: 0 before the first step, never above the target.

        Σρ + ln((α−1)/α) − (ln δ + ln α)/(α−1) at the plan's fixed order holds at any stopping time
        that depends on releases only. A plan by PLD keeps a share of δ for it.
        """
        return odometer(self.order, spent, self.epsilon, self.delta, self.accountant)


def odometer(order: float, spent: float, epsilon: float, delta: float, accountant: str) -> float:
    """ε of Σρ at the order that was fixed before the first step (`Plan.odometer`)."""
    if spent <= 0:
        return 0.0
    own = delta if accountant == "renyi" else delta * ODOMETER_SHARE
    return min(epsilon, epsilon_at(order, spent, own))


def require(condition: bool, sentence: str) -> None:
    """Raise the sentence as an error the user can act on, unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def check_target(epsilon: float, delta: float) -> None:
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        require(
            isinstance(value, Real) and not isinstance(value, bool),
            f"{name} must be a number, not {value!r}.",
        )
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
def calibrate(
    epsilon: float, delta: float, rate: float, steps: int, *, whole_orders: bool = False
) -> Calibration:
    """The smallest σ, over all orders, with which `steps` equal steps are (ε, δ)-DP.

    `whole_orders`: only at those is the discrete Gaussian's cost proved (docs/guarantee.md §10).

    Guarantee: at the returned order, `steps` charges of the filter's own cost sum to at most the
    returned budget, upward rounding included.
    """
    check_target(epsilon, delta)
    orders = WHOLE_ORDERS if whole_orders else ORDERS
    # Whole orders lie far apart where they are small: none of those is left out.
    coarse = (*orders[:62], *orders[62::8]) if whole_orders else orders[::8]
    sigma, order = _smallest_sigma(rate, steps, epsilon, delta, coarse, (0.05, 0.1), 1e-3)
    k = orders.index(order)
    near = orders[max(0, k - 9) : k + 10]
    sigma, order = _smallest_sigma(rate, steps, epsilon, delta, near, (sigma * 0.9, sigma), 1e-6)
    budget = budget_at(order, epsilon, delta)
    require(
        budget > 0,
        f"epsilon = {epsilon} leaves no budget at delta = {delta}: raise epsilon or delta.",
    )
    return Calibration(sigma, order, budget)


def _gaussian_log_delta(epsilon: float, rate: float, steps: int, sigma: float) -> float:
    """log δ by the central limit: K losses are one Gaussian's, of μ = q√(K(e^{1/σ²} − 1))."""
    mu = rate * math.sqrt(steps * math.expm1(min(1 / sigma**2, 600.0)))
    first = float(special.log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    return first + math.log(max(-math.expm1(second - first), 1e-300))


def _round_up(sigma: float) -> float:
    scale = 10.0 ** (SIGMA_DIGITS - 1 - math.floor(math.log10(sigma)))
    return math.ceil(sigma * scale) / scale


def _smallest_sigma_by_pld(epsilon: float, delta: float, rate: float, steps: int) -> float | None:
    """A σ at which PLD meets δ, and hardly more; None where floats do not reach that far.

    Secant steps of log δ in log σ within a bracket, from where the central limit has the target:
    a few evaluations of some 20 ms.
    """

    def excess(sigma: float, directions: Sequence[Direction]) -> float:
        found = delta_bound(rate, sigma * (1 - SIGMA_SLACK), steps, epsilon, directions)
        return math.log(found / delta)

    def guessed(x: float) -> float:
        return _gaussian_log_delta(epsilon, rate, steps, math.exp(x)) - math.log(delta)

    low, high = math.log(0.05), math.log(MAX_SIGMA)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if guessed(middle) > 0 else (low, middle)
    x, slope = high, min((guessed(high + 0.01) - guessed(high)) / 0.01, -1.0)
    aim, first, points = -PLD_CLOSE / 2, REMOVE, list[tuple[float, float]]()
    for _ in range(PLD_TRIES):
        sigma = _round_up(math.exp(x))
        if sigma > MAX_SIGMA:
            return None
        y = excess(sigma, (first,))
        if -PLD_CLOSE <= y <= 0:
            if excess(sigma, [d for d in DIRECTIONS if d is not first]) <= 0:
                return sigma
            first, points = ADD, []  # never seen: the other direction is the larger
            continue
        points.append((math.log(sigma), y))
        below = max((p for p, v in points if v > 0), default=-math.inf)
        above = min((p for p, v in points if v <= 0), default=math.inf)
        (a, fa), *others = sorted(points, key=lambda p: abs(p[1] - aim))
        if others and others[0][1] != fa:
            slope = min((fa - others[0][1]) / (a - others[0][0]), -1.0)
        x = a + min(max((aim - fa) / slope, -0.7), 0.7)
        if not below < x < above:
            x = (below + above) / 2 if math.isfinite(below + above) else x
    return None


@lru_cache(maxsize=1024)
def calibrate_fixed(epsilon: float, delta: float, rate: float, steps: int) -> Calibration:
    """The smallest σ known to us with which `steps` equal steps, fixed beforehand, are (ε, δ)-DP.

    By privacy-loss distributions; by `calibrate` where that needs less noise, or where δ is too
    small for PLD in floats. Guarantee: `delta_bound` at the returned σ is at most 99 % of δ, or the
    result is `calibrate`'s.
    """
    check_target(epsilon, delta)
    try:
        sigma = _smallest_sigma_by_pld(epsilon, delta * (1 - ODOMETER_SHARE), rate, steps)
    except (ArithmeticError, ValueError):  # targets beyond what a grid of floats holds
        sigma = None
    if sigma is None:
        return calibrate(epsilon, delta, rate, steps)
    if _epsilon_near(ORDERS[::4], rate, sigma, steps, delta)[0] <= epsilon:
        return calibrate(epsilon, delta, rate, steps)  # Rényi would do with less
    # The odometer's order: the best for all steps, at its own share of δ.
    order = _epsilon_near(ORDERS[::4], rate, sigma, steps, delta * ODOMETER_SHARE)[1]
    budget = steps * step_cost(rate, sigma, order) * (1 + SUM_SLACK)
    return Calibration(sigma, order, budget, "pld")


def _epsilon_near(
    orders: Sequence[float], rate: float, sigma: float, steps: int, delta: float
) -> tuple[float, float]:
    """ε by Rényi and its order: the best of these orders, then of all around it."""
    _, order = best_epsilon(orders, steps * cost_profile(rate, sigma, orders), delta)
    k = ORDERS.index(order)
    near = ORDERS[max(0, k - 4) : k + 5]
    return best_epsilon(near, steps * cost_profile(rate, sigma, near), delta)


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
    steps_per_round: int | None = None  # as many as the epochs take, if not given

    def __post_init__(self) -> None:
        check_target(self.epsilon, self.delta)
        check_shape(self.units, self.batch, self.rounds, self.local_epochs)

    @property
    def steps(self) -> int:
        if self.steps_per_round is not None:
            return self.rounds * self.steps_per_round
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


def plan_static(shape: PlanShape, method: str = "fl-dp", *, whole_orders: bool = False) -> Plan:
    """The constant multiplier that exactly spends the target under the Rényi filter.

    For methods that move the multiplier on the way, and the reference for them. `whole_orders`:
    for noise in whole numbers.
    """
    found = calibrate(
        shape.epsilon, shape.delta, shape.sample_rate, shape.steps, whole_orders=whole_orders
    )
    return _constant(shape, method, found)


def plan_fixed(shape: PlanShape, method: str = "fl-dp", accountant: str = "auto") -> Plan:
    """The least constant multiplier for a method that never departs from it.

    Only for methods each of whose steps has the plan's rate and, all its releases together, the
    plan's `sigma_static`, whatever was released before: the account refuses every other step.
    `accountant = "renyi"`: as `plan_static`, to compare with adaptive methods.
    """
    if accountant == "renyi":
        return plan_static(shape, method)
    return _constant(
        shape, method, calibrate_fixed(shape.epsilon, shape.delta, shape.sample_rate, shape.steps)
    )


def _constant(shape: PlanShape, method: str, static: Calibration) -> Plan:
    return _plan(
        shape,
        method,
        static.order,
        static.budget,
        accountant=static.accountant,
        sigma_static=static.sigma,
        sigma_ref=static.sigma,
        sigma_min=static.sigma,
        sigma_max=static.sigma,
        sigma_signal=None,
        signal_price=0.0,
    )


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

    The order and budget are those of the guarantee proved for a shared batch (method.md §3), the
    best order for K joint releases at the published σ_ref and σ_s.
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
