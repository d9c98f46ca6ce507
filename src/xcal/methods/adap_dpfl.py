"""`adap-dpfl` (Adap DP-FL, Fu et al. 2022), as far as it can be had with a guarantee.

Two things move from round to round: the clipping norm, with the norm of the gradients that this
client released in its previous round, and the noise, down by β whenever the loss on *public* images
has fallen three rounds in a row. Both are functions of releases and of public numbers, so the
filter covers them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xcal.config import Experiment, sent
from xcal.dp.accounting import CostTable, step_cost
from xcal.dp.calibration import Plan, plan_static
from xcal.dp.clipping import Bound
from xcal.dp.clipping.precision import double
from xcal.dp.filter import BudgetExhausted, Filter
from xcal.methods.base import LocalMethod, shape_of
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.step_parts import clipped_sum, gradient_release, release_gradient

FALLS = 3  # rounds of falling loss before the noise is lowered
REACH = 10.0  # the clipping norm stays within a factor of ten of the configured one


class AdapParameters(Experiment):
    """The keys of `adap-dpfl`."""

    clip_factor: float = sent(
        5.0,
        ge=0,
        allow_inf_nan=False,
        description="C over the norm of the gradients released last round; 0 keeps C",
    )
    sigma_decay: float = sent(
        0.999,
        ge=1e-6,
        le=1,
        description="β: noise after three rounds of falling loss on public images",
    )


@dataclass(frozen=True)
class AdapState:
    """What a client remembers: its norm C and what it released in the round so far."""

    round: int = -1
    clip: float = 0.0
    steps: int = 0
    squares: float = 0.0  # Σ over steps of ‖released mean gradient‖², noise's own share taken off
    doubt: float = 0.0  # Σ over steps of the variance of that estimate


def decays(losses: Sequence[float]) -> int:
    """How often the noise was lowered: once for each round that ends `FALLS` falls in a row."""
    falls = [later < earlier for earlier, later in itertools.pairwise(losses)]
    return sum(all(falls[k - FALLS : k]) for k in range(FALLS, len(falls) + 1))


def next_clip(state: AdapState, keys: AdapParameters) -> float:
    """C of the round that begins: α_c times the released gradients' root mean square norm.

    It stays where it was while the noise hides that norm (two deviations), and within `REACH` of
    the configured one.
    """
    first = keys.max_grad_norm
    if state.round < 0:
        return first
    if keys.clip_factor == 0 or state.steps == 0:
        return state.clip
    if state.squares <= 2 * math.sqrt(state.doubt):
        return state.clip
    wanted = keys.clip_factor * math.sqrt(state.squares / state.steps)
    return min(max(wanted, first / REACH), first * REACH)


@lru_cache(maxsize=4096)
def _cost(rate: float, sigma: float, order: float) -> float:
    return step_cost(rate, sigma, order)


def admissible_sigma(plan: Plan, wanted: float, budget: Filter) -> tuple[float, CostTable | None]:
    """What is wanted (β^k σ_0), or the smallest multiplier up to σ_0 that the filter still admits.

    With the grid it was taken from, if it was.
    """
    if budget.admits(_cost(plan.sample_rate, wanted, plan.order)):
        return wanted, None
    # Where not even the highest is admissible, nothing below it is either.
    if budget.admits(_cost(plan.sample_rate, plan.sigma_static, plan.order)):
        table = plan.table()
        k = table.cheapest_within(budget.left) or 0
        # One further on the grid too, since the filter's own sum is rounded upwards.
        for sigma, price in zip(table.sigmas[k : k + 2], table.costs[k : k + 2], strict=True):
            if wanted < sigma < plan.sigma_static and budget.admits(float(price)):
                return float(sigma), table
        return plan.sigma_static, None
    raise BudgetExhausted("no multiplier up to the first one is admissible")


@dataclass(frozen=True)
class AdaptiveNoise(LocalMethod):
    name: str = "adap-dpfl"
    title: str = "Adap DP-FL"
    parameters: type[Experiment] = AdapParameters
    needs_validation: bool = True  # the noise follows the loss on public images

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan:
        return plan_static(shape_of(experiment, units, own_rounds), self.name)

    def load_state(self, saved: dict[str, Any] | None) -> AdapState:
        return AdapState() if saved is None else AdapState(**saved)

    def step(
        self,
        context: StepContext,
        step: int,
        experiment: AdapParameters,
        plan: Plan,
        state: AdapState,
    ) -> tuple[AdapState, StepRecord]:
        """One DP-SGD step at this round's C and σ, which remembers the norm that it released."""
        assert context.account is not None
        if context.round != state.round:
            state = AdapState(context.round, next_clip(state, experiment))
        clip, bound = state.clip, Bound(state.clip)
        lowered = experiment.sigma_decay ** decays(context.validation_losses)
        sigma, priced = admissible_sigma(plan, plan.sigma_static * lowered, context.account.filter)
        charged = context.charge(
            step, (gradient_release(bound, sigma),), sigma, settings=(sigma, clip), priced=priced
        )
        batch = charged.draw(context.data)
        mean = release_gradient(context, charged, clipped_sum(context, batch, bound))
        # From here on only the release is looked at.
        scale = sigma * bound.sensitivity
        square = math.fsum(float(double(v).square().sum()) for v in mean.values())
        size = sum(v.numel() for v in mean.values())
        noise = (scale / context.batch) ** 2  # variance of one coordinate
        signal = max(square - size * noise, 0.0)
        state = AdapState(
            state.round,
            clip,
            state.steps + 1,
            state.squares + square - size * noise,
            state.doubt + 2 * size * noise**2 + 4 * noise * signal,
        )
        return state, StepRecord(context.round, step, sigma, None, context.share_spent, clip=clip)


ADAP_DPFL = AdaptiveNoise()
