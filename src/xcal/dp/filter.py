"""The privacy filter: admit a step or refuse it.

One Rényi order, fixed before training. For adaptively chosen costs this is what is proved
(Feldman and Zrnic 2021); a filter that looks for "some order that still has room" is not. Where
every step is the planned one, whatever was released before, it is enough to count them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


class BudgetExhausted(Exception):
    """A filter refused a step.

    Raised before anything is drawn or charged; only the published rule's own filter speaks after
    its signal was released and paid for, and then hands over the state it has come to.
    """

    def __init__(self, message: str, state: object = None) -> None:
        super().__init__(message)
        self.state = state


def add_up(total: float, cost: float) -> float:
    """total + cost, rounded so that it is never below the exact sum."""
    result = total + cost
    # One rounding error of a float addition is at most half a unit in the last place.
    return result if cost == 0 or math.isinf(result) else math.nextafter(result, math.inf)


@dataclass(frozen=True)
class RenyiFilter:
    """Total cost Σρ at one fixed order, never let above the budget R.

    Guarantee: for any adaptive choice of the costs, the admitted steps together are (ε, δ)-DP for
    every (ε, δ) with R = `budget_at(order, ε, δ)`. State in, state out: charging returns a new one.
    """

    order: float
    budget: float
    spent: float = 0.0

    def __post_init__(self) -> None:
        if not (self.order > 1 and self.budget > 0 and self.spent >= 0):
            raise ValueError("a filter needs order > 1, a positive budget and spent >= 0")

    @property
    def left(self) -> float:
        return max(0.0, self.budget - self.spent)

    @property
    def share_spent(self) -> float:
        """Σρ/R, from 0 to 1."""
        return min(1.0, self.spent / self.budget)

    def admits(self, cost: float) -> bool:
        return cost >= 0 and add_up(self.spent, cost) <= self.budget

    def after(self, cost: float) -> RenyiFilter:
        """The filter after one more step; raises `BudgetExhausted` where it is not admitted."""
        if not self.admits(cost):
            raise BudgetExhausted("the privacy budget does not cover another step")
        return replace(self, spent=add_up(self.spent, cost))


@dataclass(frozen=True)
class StepFilter:
    """At most `steps` steps, all of them as planned: the account refuses any other.

    Guarantee: that of the plan by privacy-loss distributions, wherever the run stops. Σρ at one
    order is kept for the odometer and for a lifetime's rule; it decides nothing here.
    """

    order: float
    budget: float  # Σρ of all planned steps
    steps: int
    paid: int = 0
    spent: float = 0.0

    @property
    def left(self) -> float:
        return max(0.0, self.budget - self.spent)

    @property
    def share_spent(self) -> float:
        """Steps paid for, of those planned."""
        return min(1.0, self.paid / self.steps)

    def admits(self, cost: float) -> bool:
        return cost >= 0 and self.paid < self.steps

    def after(self, cost: float) -> StepFilter:
        """The filter after one more step; raises `BudgetExhausted` where it is not admitted."""
        if not self.admits(cost):
            raise BudgetExhausted("all planned steps are paid for")
        return replace(self, paid=self.paid + 1, spent=add_up(self.spent, cost))


Filter = RenyiFilter | StepFilter
