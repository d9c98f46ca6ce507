"""After a run: what was spent on what, what is left, and what a static plan would have cost.

A view on a ledger, as an auditor has it: rows in, numbers out; nothing is drawn, charged or
trained. What is left of a budget is usable only through the filter that left it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from xcal.dp.accounting import budget_at, epsilon_rdp, step_cost, step_costs
from xcal.dp.calibration import calibrate, odometer
from xcal.dp.ledger.rows import Charge, Row, RunTerms, charges_of, runs_of, terms_of
from xcal.dp.pld import epsilon_pld
from xcal.errors import UserError

HOW_SHARED = (
    "a joint release is one Gaussian of precision 1/σ_eff² = Σ (sensitivity/noise)²; each mechanism"
    " is given the part of the step's ρ that it has of this sum. `alone` is what its releases would"
    " have cost without the others, from draws of their own"
)


@dataclass(frozen=True)
class Mechanism:
    """One kind of release over a run: gradient, signal, count, update."""

    name: str
    releases: int
    cost: float  # its part of Σρ; the parts sum to it
    share: float  # of Σρ
    alone: float  # Σρ of its releases had nothing else been released


@dataclass(frozen=True)
class StaticPlan:
    """The constant multiplier for the run's own target, rate and planned steps.

    By the run's own accountant: the one that a run by PLD reserved, else the Rényi filter's.
    """

    sigma: float
    step_cost: float  # at the run's order
    steps: int  # as many as the run made
    epsilon_rdp: float  # of these steps, by the tight conversion at the best order
    epsilon_pld: float | None  # the same by privacy-loss distributions; None where not asked for


@dataclass(frozen=True)
class Analysis:
    """One run in one ledger. `budget = None`: a method without a guarantee, Σρ = ∞."""

    run: str
    method: str
    unit: str
    epsilon: float | None
    delta: float | None
    order: float | None
    budget: float | None
    spent: float | None
    left: float | None
    planned: int
    charges: int
    rounds: int
    halted: bool
    mechanisms: tuple[Mechanism, ...] = ()
    sigma_last: float | None = None
    more_at_last: int | None = None
    static: StaticPlan | None = None
    more_at_static: int | None = None
    accountant: str = "renyi"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def by_mechanism(charges: Sequence[Charge], order: float) -> tuple[Mechanism, ...]:
    """Σρ split over the kinds of release, as `HOW_SHARED` says."""
    parts: dict[str, list[float]] = {}
    alone: dict[str, dict[float, list[float]]] = {}
    for charge in charges:
        precision = {r.name: (r.sensitivity / r.noise) ** 2 for r in charge.releases}
        total = math.fsum(precision.values())
        for name, own in precision.items():
            parts.setdefault(name, []).append(charge.cost * own / total)
            alone.setdefault(name, {}).setdefault(charge.rate, []).append(1 / math.sqrt(own))
    spent = math.fsum(c.cost for c in charges)
    found = []
    for name, costs in parts.items():
        cost = math.fsum(costs)
        single = math.fsum(_total(rate, sigmas, order) for rate, sigmas in alone[name].items())
        found.append(Mechanism(name, len(costs), cost, cost / spent if spent else 0.0, single))
    return tuple(found)


def _total(rate: float, sigmas: Sequence[float], order: float) -> float:
    """Σρ of steps at these multipliers; equal ones are costed once."""
    values, counts = np.unique(np.array(sigmas), return_counts=True)
    return float((step_costs(rate, values, order) * counts).sum())


@lru_cache(maxsize=64)
def _static(run: RunTerms, rate: float, made: int, pld: bool) -> StaticPlan:
    assert run.epsilon is not None and run.delta is not None and run.order is not None
    whole = run.whole_orders  # noise in whole numbers
    sigma = run.sigma
    if sigma is None:
        found = calibrate(run.epsilon, run.delta, rate, run.steps, whole_orders=whole)
        sigma = found.sigma
    return StaticPlan(
        sigma,
        step_cost(rate, sigma, run.order),
        made,
        epsilon_rdp(rate, sigma, made, run.delta, whole_orders=whole),
        epsilon_pld(rate, sigma, made, run.delta) if pld and not whole else None,
    )


def _affordable(left: float, cost: float) -> int:
    """How many steps of this cost the filter would still admit, upward rounding included."""
    return max(0, math.floor(left / cost * (1 - 1e-12))) if cost > 0 else 0


def analyse_run(rows: Sequence[Row], run: RunTerms, *, pld: bool = True) -> Analysis:
    """What one run of a ledger spent, on what, and what it left."""
    charges = charges_of(rows, run.run)
    own = [r for r in rows if r.body.get("run") == run.run]
    halted = any(r.kind == "halt" for r in own)
    rounds = len({r.body["round"] for r in own if r.kind in ("charge", "unbounded")})
    base = Analysis(
        run.run,
        run.method,
        run.unit,
        run.epsilon,
        run.delta,
        run.order,
        run.budget,
        None,
        None,
        run.steps,
        len(charges),
        rounds,
        halted,
        accountant=run.accountant,
    )
    if run.budget is None or run.order is None or run.epsilon is None or run.delta is None:
        return base
    spent = math.fsum(c.cost for c in charges)
    left = max(0.0, run.budget - spent)
    values = {**_shallow(base), "spent": spent, "left": left}
    if charges:
        last = charges[-1]
        static = _static(run, last.rate, len(charges), pld)
        more = [
            _affordable(left, step_cost(last.rate, last.sigma, run.order)),
            _affordable(left, static.step_cost),
        ]
        if run.accountant == "pld":  # steps are counted
            more = [run.steps - len(charges)] * 2
        values |= {
            "mechanisms": by_mechanism(charges, run.order),
            "sigma_last": last.sigma,
            "more_at_last": more[0],
            "static": static,
            "more_at_static": more[1],
        }
    return Analysis(**values)


def _shallow(analysis: Analysis) -> dict[str, Any]:
    return {name: getattr(analysis, name) for name in analysis.__dataclass_fields__}


def lifetime(rows: Sequence[Row]) -> dict[str, Any]:
    """What the population's own rule says of all runs together."""
    terms = terms_of(rows)
    found: dict[str, Any] = {
        "population": terms.population,
        "unit": terms.unit,
        "epsilon": terms.epsilon,
        "delta": terms.delta,
        "rule": terms.rule,
        "order": terms.order,
    }
    if terms.epsilon is None or terms.delta is None:
        return found
    if terms.rule == "renyi" and terms.order is not None:
        spent = math.fsum(r.body["lifetime_cost"] for r in rows if r.kind == "charge")
        budget = budget_at(terms.order, terms.epsilon, terms.delta)
        return found | {
            "budget": budget,
            "spent": spent,
            "left": max(0.0, budget - spent),
            "epsilon_spent": odometer(terms.order, spent, terms.epsilon, terms.delta, "renyi"),
        }
    runs = runs_of(rows).values()
    epsilon = math.fsum(r.epsilon or 0.0 for r in runs)
    delta = math.fsum(r.delta or 0.0 for r in runs)
    return found | {
        "epsilon_reserved": epsilon,
        "delta_reserved": delta,
        "epsilon_left": max(0.0, terms.epsilon - epsilon),
        "delta_left": max(0.0, terms.delta - delta),
    }


def lifetime_text(rows: Sequence[Row]) -> str:
    """What is left of the population's limit, ε and δ alike, in words."""
    life = lifetime(rows)
    if life["epsilon"] is None:
        return "no limit"
    limit = f"({life['epsilon']:g}, {life['delta']:g})"
    if "budget" in life:
        share = 100 * life["spent"] / life["budget"]
        return (
            f"limit {limit}, spent ε = {life['epsilon_spent']:.4g} ({share:.2f} % of its Rényi"
            f" budget at order {life['order']:g})"
        )
    return (
        f"limit {limit}, reserved ε = {life['epsilon_reserved']:.6g} and δ ="
        f" {life['delta_reserved']:.6g}, left ε = {life['epsilon_left']:.6g} and δ ="
        f" {life['delta_left']:.6g}"
    )


def spending(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every run's target, and what of it was spent: ε by the odometer, and the share of its Σρ.

    None: a method without a guarantee. The share says little about ε, which does not start at 0.
    `honest`, only where noise is shared under masks: on how many sites it counts.
    """
    found = []
    for run in runs_of(rows).values():
        charges = charges_of(rows, run.run)
        spent = math.fsum(c.cost for c in charges)
        epsilon = share = None
        if (
            run.budget is not None
            and run.order is not None
            and run.epsilon is not None
            and run.delta is not None
        ):
            share = spent / run.budget
            epsilon = odometer(run.order, spent, run.epsilon, run.delta, run.accountant)
        found.append(
            {
                "run": run.run,
                "method": run.method,
                "unit": run.unit,
                "epsilon": run.epsilon,
                "delta": run.delta,
                "epsilon_spent": epsilon,
                "share": share,
                "charges": len(charges),
                **({} if run.honest is None else {"honest": run.honest}),
            }
        )
    return found


def spent_text(epsilon: float | None, share: float | None) -> str:
    """What was spent, as ε with the share of Σρ beside it; each may be unknown."""
    if epsilon is None:
        return "–" if share is None else f"{100 * share:.1f} % of Σρ"
    return f"ε = {epsilon:.3g}" + ("" if share is None else f" ({100 * share:.1f} % of Σρ)")


def spending_text(rows: Sequence[Row]) -> str:
    """The runs in words: what each has spent of its target."""
    return "; ".join(
        f"{one['run']}: {spent_text(one['epsilon_spent'], one['share'])} of"
        f" {one['epsilon']:g} spent"
        if one["epsilon"] is not None
        else f"{one['run']}: ε = ∞"
        for one in spending(rows)
    )


def runs_that_fit(limit: float, run: float) -> int:
    """How many runs of this ε (or δ) a lifetime limit of that kind has room for."""
    return int(limit / run * (1 + 1e-9))


def analyse(rows: Sequence[Row], run: str | None = None, *, pld: bool = True) -> list[Analysis]:
    """Every run of a ledger, or the one named."""
    runs = runs_of(rows)
    if run is not None and run not in runs:
        raise UserError(f"The ledger has no run {run!r}: it has {', '.join(runs) or 'none'}.")
    chosen = runs.values() if run is None else (runs[run],)
    return [analyse_run(rows, terms, pld=pld) for terms in chosen]
