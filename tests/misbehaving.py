"""Methods and networks as a user might write them: each breaks the promise in one way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from support import Micro, micro
from xcal.dp.accounting import step_cost
from xcal.dp.calibration import plan_static
from xcal.dp.clipping import Bound
from xcal.dp.clipping.named import trainable
from xcal.dp.filter import BudgetExhausted
from xcal.methods.base import shape_of
from xcal.methods.context import StepContext, StepRecord
from xcal.methods.dp_fedavg import CentralNoise
from xcal.methods.fl_dp import StaticNoise
from xcal.methods.step_parts import clipped_sum, dp_step, gradient_release, release_gradient

# --- methods --------------------------------------------------------------------------------------


class _Own(StaticNoise):
    """Static noise but for its step."""

    def step(self, context: StepContext, step: int, experiment: Any, plan: Any, state: None) -> Any:
        self.one(context, step, plan)
        return None, StepRecord(context.round, step, plan.sigma_static, None, 0.0)

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        raise NotImplementedError


def _raw(context: StepContext) -> dict[str, Tensor]:
    batch = context.data.draw(
        context.rate, context.noise, context.key(0, f"mine {context.charges}")
    )
    return clipped_sum(context, batch).gradients


class NeverPays(_Own):
    """The published example of a plug-in: clips, adds no noise, charges nothing."""

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        with torch.no_grad():
            for name, value in _raw(context).items():
                trainable(context.model)[name].sub_(value, alpha=0.01)


class NeverPaysThroughTheOptimiser(_Own):
    def one(self, context: StepContext, step: int, plan: Any) -> None:
        context.optimizer.step(_raw(context))


class DrawsWithoutACharge(_Own):
    def one(self, context: StepContext, step: int, plan: Any) -> None:
        context.draw(step)


def _charge(context: StepContext, step: int, sigma: float) -> Any:
    releases = (gradient_release(Bound(context.clip), sigma),)
    return context.charge(step, releases, sigma, settings=())


class PaysAndTrainsPastIt(_Own):
    """An honest step, and then some more by hand."""

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        charged = _charge(context, step, plan.sigma_static)
        sums = clipped_sum(context, charged.draw(context.data))
        release_gradient(context, charged, sums)
        for name, parameter in trainable(context.model).items():
            parameter.data.sub_(sums.gradients[name], alpha=0.01)


class TrainsBeforeItReleases(_Own):
    """The same, before the optimizer's step."""

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        charged = _charge(context, step, plan.sigma_static)
        sums = clipped_sum(context, charged.draw(context.data))
        for name, parameter in trainable(context.model).items():
            parameter.data.sub_(sums.gradients[name], alpha=0.01)
        release_gradient(context, charged, sums)


class DrawsTwice(_Own):
    def one(self, context: StepContext, step: int, plan: Any) -> None:
        charged = _charge(context, step, plan.sigma_static)
        charged.draw(context.data)
        charged.draw(context.data)


class ReleasesTwice(_Own):
    def one(self, context: StepContext, step: int, plan: Any) -> None:
        charged = _charge(context, step, plan.sigma_static)
        sums = clipped_sum(context, charged.draw(context.data))
        release_gradient(context, charged, sums)
        release_gradient(context, charged, sums)


class LessNoise(_Own):
    def one(self, context: StepContext, step: int, plan: Any) -> None:
        charged = _charge(context, step, plan.sigma_static)
        sums = clipped_sum(context, charged.draw(context.data))
        release_gradient(context, charged, sums, noise=plan.sigma_static * context.clip / 2)


class ClipsLess(_Own):
    """Charged for C, clipped to 3C."""

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        charged = _charge(context, step, plan.sigma_static)
        sums = clipped_sum(context, charged.draw(context.data), Bound(3 * context.clip))
        release_gradient(context, charged, sums)


class PaysForAnotherStep(_Own):
    def one(self, context: StepContext, step: int, plan: Any) -> None:
        assert context.account is not None
        rate, sigma = context.rate, plan.sigma_static
        context.account.pay(
            context.round,
            step,
            rate=rate,
            sigma=sigma,
            cost=step_cost(rate, sigma, plan.order),
            releases=(gradient_release(Bound(context.clip), sigma),),
            inputs=None,
        )


class SometimesFree(_Own):
    """Honest for two steps."""

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        if step < 2:
            dp_step(context, step, sigma=plan.sigma_static)


class HaltsWithRawWeights(_Own):
    """Honest for two steps, then halts with somebody's gradient in the weights."""

    def one(self, context: StepContext, step: int, plan: Any) -> None:
        if step < 2:
            dp_step(context, step, sigma=plan.sigma_static)
            return
        with torch.no_grad():
            for name, value in _raw(context).items():
                trainable(context.model)[name].sub_(value, alpha=0.01)
        raise BudgetExhausted("as if")


@dataclass(frozen=True)
class FreeServer(CentralNoise):
    """A trusted server that adds no noise and charges nothing."""

    def server_step(
        self, context: Any, experiment: Any, plan: Any, updates: Any, state: None
    ) -> tuple[Any, None]:
        return {name: value / len(updates) for name, value in updates[0].items()}, None


@dataclass(frozen=True)
class LessServerNoise(CentralNoise):
    """Plans with a millionth of the noise that its ε takes."""

    def server_plan(self, experiment: Any, participants: int) -> Any:
        plan = super().server_plan(experiment, participants)
        return replace(plan, sigma_static=plan.sigma_static * 1e-6)


@dataclass(frozen=True)
class NoPlan(StaticNoise):
    """Says that it is private, and plans nothing."""

    def plan(self, experiment: Any, units: int, own_rounds: int) -> Any:
        return None


@dataclass(frozen=True)
class LargerBudget(StaticNoise):
    """Ten times the budget that its ε buys."""

    def plan(self, experiment: Any, units: int, own_rounds: int) -> Any:
        plan = plan_static(shape_of(experiment, units, own_rounds))
        return replace(plan, budget=10 * plan.budget)


@dataclass(frozen=True)
class LessPlannedNoise(StaticNoise):
    """Half of the noise that its ε takes, fixed beforehand."""

    def plan(self, experiment: Any, units: int, own_rounds: int) -> Any:
        plan = super().plan(experiment, units, own_rounds)
        return replace(plan, sigma_static=plan.sigma_static / 2)


@dataclass(frozen=True)
class LargerEpsilon(StaticNoise):
    """Plans for ten times the ε that it was asked for."""

    def plan(self, experiment: Any, units: int, own_rounds: int) -> Any:
        more = experiment.model_copy(update={"epsilon": 10 * experiment.epsilon})
        return super().plan(more, units, own_rounds)


never_pays = NeverPays("mine")
never_pays_through_the_optimiser = NeverPaysThroughTheOptimiser("mine")
draws_without_a_charge = DrawsWithoutACharge("mine")
pays_and_trains_past_it = PaysAndTrainsPastIt("mine")
trains_before_it_releases = TrainsBeforeItReleases("mine")
draws_twice = DrawsTwice("mine")
releases_twice = ReleasesTwice("mine")
less_noise = LessNoise("mine")
clips_less = ClipsLess("mine")
pays_for_another_step = PaysForAnotherStep("mine")
sometimes_free = SometimesFree("mine")
halts_with_raw_weights = HaltsWithRawWeights("mine")
free_server = FreeServer(name="mine")
less_server_noise = LessServerNoise(name="mine")
no_plan = NoPlan("mine")
larger_budget = LargerBudget("mine")
less_planned_noise = LessPlannedNoise("mine")
larger_epsilon = LargerEpsilon("mine")

STEPS = (
    "never_pays",
    "never_pays_through_the_optimiser",
    "draws_without_a_charge",
    "pays_and_trains_past_it",
    "trains_before_it_releases",
    "draws_twice",
    "releases_twice",
    "less_noise",
    "clips_less",
    "pays_for_another_step",
    "sometimes_free",
    "halts_with_raw_weights",
)
PLANS = ("less_server_noise", "no_plan", "larger_budget", "less_planned_noise", "larger_epsilon")


# --- networks -------------------------------------------------------------------------------------


class RunningMean(Micro):
    """A running buffer: one image moves what the next step computes."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("mean", torch.zeros(1, 8, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        features = self.act(self.norm(self.conv(images)))
        shown = features - self.mean
        with torch.no_grad():
            self.mean.mul_(0.99).add_(features.mean(dim=(0, 2, 3), keepdim=True), alpha=0.01)
        return self.head(shown.mean(dim=(2, 3)))


class Attribute(Micro):
    """The same in a plain attribute."""

    last: Tensor | float = 0.0

    def forward(self, images: Tensor) -> Tensor:
        answers = super().forward(images) + self.last
        self.last = 1e-3 * images.detach().mean()
        return answers


_SEEN: list[float] = [0.0]


class Elsewhere(Micro):
    """The same outside the network, where nobody looks: it shows in the answers."""

    def forward(self, images: Tensor) -> Tensor:
        answers = super().forward(images) + 0.1 * _SEEN[0]
        _SEEN[0] = float(images.detach().mean())
        return answers


class Later(Micro):
    """Begins to remember after it was looked at."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        _CALLS[0] += 1
        if _CALLS[0] > 40:
            with torch.no_grad():
                self.mean.copy_(images.detach().mean())
        return super().forward(images) + self.mean


_CALLS = [0]


class Mixing(Micro):
    def forward(self, images: Tensor) -> Tensor:
        answers = super().forward(images)
        return answers - answers.mean(dim=0, keepdim=True)


class MixingMany(Micro):
    """Only what is larger than a small trial."""

    def forward(self, images: Tensor) -> Tensor:
        answers = super().forward(images)
        return answers - answers.mean(dim=0, keepdim=True) if len(images) > 4 else answers


class Random(Micro):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 0.01 * torch.randn(len(images), 1)


def _network(kind: type[Micro]) -> Any:
    def build(classes: int, *, seed: int = 0) -> nn.Module:
        network = kind(classes)
        network.load_state_dict(micro(classes, seed=seed).state_dict(), strict=False)
        return network

    return build


running_mean = _network(RunningMean)
attribute = _network(Attribute)
elsewhere = _network(Elsewhere)
later = _network(Later)
mixing = _network(Mixing)
mixing_many = _network(MixingMany)
random = _network(Random)

NETWORKS = ("mixing_many", "running_mean", "attribute", "elsewhere", "mixing", "random")


def headless(classes: int, *, seed: int) -> nn.Module:
    """In which no linear layer on the map's average is named: cells cannot be taken out of it."""
    network = micro(classes, seed=seed)
    network.head_layer = None  # type: ignore[assignment]
    return network


def frozen_map(classes: int, *, seed: int) -> nn.Module:
    """Whose map is frozen, and in which more than a linear head reads it."""
    network = micro(classes, seed=seed)
    network.conv.requires_grad_(False)
    network.norm.requires_grad_(False)
    network.head_layer = None  # type: ignore[assignment]
    return network
