"""One release of one Poisson batch: the charge for it and the release itself, from one object.

A `Mechanism` says what a unit may move by how much, which noise lies on it, and at which rate units
are drawn. Charging it gives a `ChargedStep`, and nothing else can draw that batch or release from
it: what is released is what was paid for, once, with the noise that was paid for or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from torch import Tensor

from xcal.dp.account import Account
from xcal.dp.accounting import CostTable, joint_sigma, step_cost
from xcal.dp.ledger.rows import Release
from xcal.dp.noise import NoiseKey, NoiseSource, release_scalar, release_tensors
from xcal.errors import UserError

Drawn = TypeVar("Drawn", covariant=True)


class UnchargedRelease(UserError):
    """A step of a private method drew, released or trained without a charge that covers it."""


def check_charged(name: str, sensitivity: float, moved: float) -> None:
    """Refuse what one unit may move by more than was charged for."""
    if not moved <= sensitivity:
        raise UnchargedRelease(
            f"A step was charged for {name!r} at a sensitivity of {sensitivity:g}, and one unit"
            f" may move it by {moved:g}."
        )


class Units(Protocol[Drawn]):
    """What units are drawn from."""

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Drawn:
        """Each unit independently with probability `rate`, never truncated."""
        ...


@lru_cache(maxsize=4096)
def _step_cost(rate: float, sigma: float, order: float) -> float:
    return step_cost(rate, sigma, order)


@dataclass(frozen=True)
class Mechanism:
    """A Poisson-subsampled Gaussian: `releases` of one batch, drawn at `rate`.

    `sigma` is the multiplier of all of them together, 1/σ² = Σ (sensitivity/noise)², checked here.
    `priced`: a grid of multipliers whose costs were computed beforehand; without one the cost is
    computed. Everything must be fixed before the draw.
    """

    rate: float
    sigma: float
    releases: tuple[Release, ...]
    priced: CostTable | None = None

    def __post_init__(self) -> None:
        names = [r.name for r in self.releases]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a mechanism releases something, and nothing twice: {names}")
        joint = joint_sigma(*(r.noise / r.sensitivity for r in self.releases))
        if not math.isclose(joint, self.sigma, rel_tol=1e-9):
            raise ValueError(f"its releases together have multiplier {joint}, not {self.sigma}")

    def cost(self, order: float) -> float:
        """Its Rényi cost at one order: an upper bound."""
        table = self.priced
        if table is None:
            return _step_cost(self.rate, self.sigma, order)
        k = table.at_least(self.sigma)
        if (table.rate, table.order, float(table.sigmas[k])) != (self.rate, order, self.sigma):
            raise ValueError("the mechanism is not one of those that its table has prices for")
        return float(table.costs[k])

    def charge(
        self,
        account: Account,
        round_number: int,
        step: int,
        *,
        inputs: str | None,
        noise: NoiseSource,
        key: Callable[[str], NoiseKey],
    ) -> ChargedStep:
        """Pay for it, durably; what comes back can draw and release it.

        Raises `BudgetExhausted`, with nothing written, where the budget does not cover it.
        """
        account.pay(
            round_number,
            step,
            rate=self.rate,
            sigma=self.sigma,
            cost=self.cost(account.filter.order),
            releases=self.releases,
            inputs=inputs,
        )
        return self._charged(noise, key)

    def _charged(self, noise: NoiseSource, key: Callable[[str], NoiseKey]) -> ChargedStep:
        return ChargedStep(self, noise, key)


@dataclass(frozen=True)
class ReleasedTensors:
    """Tensors that were charged for and carry their noise: anything may be made of them."""

    tensors: dict[str, Tensor]

    def then(self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> ReleasedTensors:
        """A function of them, which needs no further charge."""
        return ReleasedTensors(function(self.tensors))


class ChargedStep:
    """What one charge allows: one draw at the charged rate, and each of its releases once."""

    def __init__(
        self, mechanism: Mechanism, noise: NoiseSource, key: Callable[[str], NoiseKey]
    ) -> None:
        self.mechanism = mechanism
        self._noise, self._key = noise, key
        self._left = {r.name: r for r in mechanism.releases}
        self._drawn = False

    def draw(self, units: Units[Any]) -> Any:
        """The one batch that was paid for."""
        if self._drawn:
            raise UnchargedRelease("A step drew a second batch, and was charged for one.")
        self._drawn = True
        return units.draw(self.mechanism.rate, self._noise, self._key("draw"))

    def _take(self, name: str, sensitivity: float | None, noise: float | None) -> Release:
        release = self._left.pop(name, None)
        if release is None:
            raise UnchargedRelease(f"A step released {name!r} without, or beyond, its charge.")
        if sensitivity is not None:
            check_charged(name, release.sensitivity, sensitivity)
        if noise is None:
            return release
        if not noise >= release.noise:
            raise UnchargedRelease(
                f"A step was charged for noise of {release.noise:g} on {name!r} and would add"
                f" {noise:g}."
            )
        return Release(name, noise, release.sensitivity)

    def release_scalar(self, name: str, value: float) -> float:
        """One number with the noise that was charged for."""
        release = self._take(name, None, None)
        return release_scalar(value, release.noise, self._noise, self._key(name))

    def release_tensors(
        self,
        name: str,
        sums: dict[str, Tensor],
        *,
        sensitivity: float,
        noise: float | None = None,
    ) -> ReleasedTensors:
        """Sums that one unit moves by at most `sensitivity` in norm, with noise on all of it.

        `noise`: a deviation above the one charged for; more noise is a function of the release.
        """
        release = self._take(name, sensitivity, noise)
        return ReleasedTensors(release_tensors(sums, release.noise, self._noise, self._key(name)))
