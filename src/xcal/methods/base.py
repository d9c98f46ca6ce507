"""What every method is to the rest of the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import nn

from xcal.config import Experiment, Positive, Share, Weight, sent
from xcal.dp.calibration import Plan, PlanShape, plan_fixed, plan_static
from xcal.dp.clipping import Bound
from xcal.dp.clipping.named import trainable
from xcal.dp.distributed import Part
from xcal.methods.context import StepContext, StepRecord

if TYPE_CHECKING:
    from xcal.methods.dp_fedavg import ServerContext, Update

# What only methods use whose step is one sum at a multiplier known beforehand.
MASKED_KEYS = frozenset({"trust", "honest", "noise_kind"})
# What only a guarantee uses.
PRIVATE_KEYS = MASKED_KEYS | {"epsilon", "delta", "accountant", "max_grad_norm", "sites"}
# Keys that every method uses.
COMMON_KEYS = frozenset(Experiment.model_fields) - PRIVATE_KEYS


@dataclass(frozen=True)
class SharedSum:
    """What a masked round sums (`trust = "masked"`), and what one unit of its gradient may be.

    The same for every site and for the server: all of it follows from the weights that everyone was
    sent, the multiplier and the clipping norm, and is known before anybody draws.
    """

    parts: tuple[Part, ...]
    bound: Bound


def gradient_sum(model: nn.Module, sigma: float, bound: Bound, *others: Part) -> SharedSum:
    """The clipped gradients in the scaled space, where one deviation fits every coordinate."""
    size = sum(p.numel() for p in trainable(model).values())
    return SharedSum((Part("gradient", size, bound.sensitivity, sigma), *others), bound)


def plan_constant(experiment: Experiment, shape: PlanShape, method: str) -> Plan:
    """The plan of a method whose multiplier never moves; discrete noise needs a whole order."""
    if experiment.discrete:
        return plan_static(shape, method, whole_orders=True)
    return plan_fixed(shape, method, experiment.accountant)


class Method(Protocol):
    """A method: which step, which schedule, which guarantee.

    A state is whatever the method remembers between steps: a frozen dataclass of plain values that
    depend on releases only, or None. It lives in the client's folder as JSON. `LocalMethod` has
    what most methods share.
    """

    @property
    def name(self) -> str: ...

    @property
    def private(self) -> bool:
        """Whether it has a finite (ε, δ) for the configured unit."""
        ...

    @property
    def pooled(self) -> bool:
        """Whether all data stand at one client."""
        ...

    @property
    def uses(self) -> frozenset[str]:
        """The experiment's keys that make a difference to it."""
        ...

    def plan(self, experiment: Any, units: int, own_rounds: int) -> Plan | None:
        """The client's plan; None without a guarantee."""
        ...

    def load_state(self, saved: dict[str, Any] | None) -> Any:
        """A state from its saved form; the initial one from None."""
        ...

    def begin_round(self, state: Any) -> Any: ...

    def step(
        self, context: StepContext, step: int, experiment: Any, plan: Any, state: Any
    ) -> tuple[Any, StepRecord]:
        """One step. Raises `BudgetExhausted` where the filter refuses it."""
        ...

    def epsilon_paper(self, experiment: Any, plan: Plan | None, state: Any) -> float | None:
        """ε by the paper's own accounting, where that exists."""
        ...


class LocalMethod:
    """What methods share whose guarantee, if any, is made at the client."""

    private = True
    pooled = False
    parameters: type[Experiment] = Experiment
    """The common keys and the method's own, each with type, default and help."""
    ignores: frozenset[str] = frozenset()
    sums_under_masks = False
    """Whether its step is one sum at a multiplier known beforehand: then sites may share its noise
    (`trust = "masked"`), and it may be discrete (`noise_kind`)."""

    @property
    def uses(self) -> frozenset[str]:
        none = frozenset[str]() if self.sums_under_masks else MASKED_KEYS
        return frozenset(self.parameters.model_fields) - self.ignores - none

    def load_state(self, saved: dict[str, Any] | None) -> Any:
        return None

    def begin_round(self, state: Any) -> Any:
        return state

    def epsilon_paper(self, experiment: Any, plan: Plan | None, state: Any) -> float | None:
        return None

    def shared_sum(self, experiment: Any, model: nn.Module, sigma: float, clip: float) -> SharedSum:
        """What a masked round sums; `model` has the weights that everyone was sent."""
        return gradient_sum(model, sigma, Bound(clip))

    def following_clip(self, experiment: Any, clip: float, sums: Mapping[str, float]) -> float:
        """C of the next masked round, from what was summed beside the gradient, over n·B."""
        return clip


@runtime_checkable
class CentralMethod(Method, Protocol):
    """A method whose noise is added by a trusted server, for a whole client.

    Its clients send raw updates, so that it has no guarantee at record level against the server.
    """

    def server_plan(self, experiment: Any, participants: int) -> Plan:
        """The server's plan for rounds of `participants` clients; its unit is the client."""
        ...

    def load_server_state(self, saved: dict[str, Any] | None, experiment: Any) -> Any:
        """The server's state from its saved form; the initial one from None."""
        ...

    def server_step(
        self,
        context: ServerContext,
        experiment: Any,
        plan: Plan,
        updates: Sequence[Update],
        state: Any,
    ) -> tuple[Update, Any]:
        """The released mean update. Raises `BudgetExhausted` where the filter refuses it."""
        ...


@runtime_checkable
class ChecksNetwork(Protocol):
    """A method that some networks do not suit: they are refused before anything is charged."""

    def check_network(self, network: nn.Module, experiment: Any) -> None:
        """Raises `UserError` where the method cannot work with this network."""
        ...


class SignalParameters(Experiment):
    """The keys of the explanation signal, the paper's equation for one image's score."""

    q: float = sent(0.2, ge=1e-6, le=1, description="share of cells masked")
    alpha: Weight = sent(1.0, description="weight of the logit change")
    beta: Weight = sent(1.0, description="weight of the margin")
    gamma: Weight = sent(1.0, description="exponent of concentration")
    fill: Literal["imagenet", "image-mean"] = sent("imagenet", description="what masks cells")
    cover: Literal["pixels", "cells"] = sent(
        "pixels",
        description="what is masked: pixels of the image, at a pass through the network, or cells"
        " of the map that a linear head reads, which is arithmetic",
    )
    tau: float | None = sent(
        None, ge=1e-6, le=1, description="smoothing of the signal (xcal-paper 0.2, xcal 0.05)"
    )


SIGNAL_KEYS = frozenset(SignalParameters.model_fields) - frozenset(Experiment.model_fields)


class BandParameters(Experiment):
    """The paper's band of noise multipliers around the static one."""

    rho: float = sent(0.1, ge=0, lt=1, description="the signal's share of ε")
    band: Share = sent(0.2, description="half-width b of the band")


class SparedParameters(Experiment):
    """Channels of the CAM layer that get less noise than others, or none."""

    protected: Share = sent(
        0.2, description="share r of the CAM layer's channels, the most important, to be spared"
    )


class QuantileParameters(Experiment):
    """A clipping norm that follows a quantile of the norms."""

    quantile: float = sent(
        0.5, gt=0, lt=1, description="share γ of the norms that the clipping norm should not cut"
    )
    clip_rate: float = sent(
        0.2, gt=0, le=2, description="how fast the clipping norm follows: C ← C·exp(−η(b̃ − γ))"
    )
    kappa_b: Positive = sent(5.0, description="price of the count: 1/(8κ²) more noise")


def clips_units(method: Method) -> bool:
    """Whether its step sums clipped unit gradients: then the network must be fit for it."""
    return "max_grad_norm" in method.uses and not isinstance(method, CentralMethod)


def nominal_epsilon(method: Method, experiment: Experiment) -> float | None:
    """The ε that a client's noise is chosen for, whether or not it is a guarantee."""
    at_client = "epsilon" in method.uses and not isinstance(method, CentralMethod)
    return experiment.epsilon if at_client else None


def save_state(state: Any) -> dict[str, Any] | None:
    return None if state is None else asdict(state)


def shape_of(experiment: Experiment, units: int, own_rounds: int) -> PlanShape:
    return PlanShape(
        epsilon=experiment.epsilon,
        delta=experiment.delta,
        units=units,
        batch=experiment.expected_batch_size,
        rounds=own_rounds,
        local_epochs=experiment.local_epochs,
        unit=experiment.privacy_unit,
        steps_per_round=1 if experiment.trust == "masked" else None,
    )
