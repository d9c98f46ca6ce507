"""What every method is to the rest of the house."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from torch import nn

from xcal.config import Experiment
from xcal.explain.signal import SignalSettings
from xcal.privacy.calibration import Plan, PlanShape
from xcal.training.central import ServerBench, Update
from xcal.training.local import Bench, StepRecord

# Keys that every method uses.
COMMON_KEYS = frozenset(
    "method data pixels train_images network norm output_stride head_reads train train_norm"
    " weights clients participants rounds local_epochs average partition concentration"
    " units_per_client keep_groups unit images_per_unit group_cap public_validation"
    " public_validation_by noise paired batch lr optimizer"
    " momentum validation_images road_images road_every road_test_images seed threads device"
    " workers aggregation trim quorum round_timeout views augment average_steps chunk pass_rows"
    " keep_mb preset".split()
)
PRIVATE_KEYS = frozenset({"epsilon", "delta", "accountant", "clip", "homes"})
SIGNAL_KEYS = frozenset({"q", "alpha", "beta", "gamma", "fill", "tau"})


class Method(Protocol):
    """A method: which step, which schedule, which guarantee.

    A state is whatever the method remembers between steps: a frozen dataclass of plain values that
    depend on releases only, or None. It lives in the client's home as JSON.
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

    def plan(self, experiment: Experiment, units: int, own_rounds: int) -> Plan | None:
        """The client's plan; None without a guarantee."""
        ...

    def load_state(self, saved: dict[str, Any] | None) -> Any:
        """A state from its saved form; the initial one from None."""
        ...

    def begin_round(self, state: Any) -> Any: ...

    def step(
        self, bench: Bench, step: int, experiment: Experiment, plan: Plan | None, state: Any
    ) -> tuple[Any, StepRecord]:
        """One step. Raises `BudgetExhausted` where the filter refuses it."""
        ...

    def epsilon_paper(self, experiment: Experiment, plan: Plan | None, state: Any) -> float | None:
        """ε by the paper's own accounting, where that exists."""
        ...


@runtime_checkable
class CentralMethod(Method, Protocol):
    """A method whose noise is added by a trusted server, for a whole client.

    Its clients send raw updates, so that it has no guarantee at record level against the server.
    """

    def server_plan(self, experiment: Experiment, participants: int) -> Plan:
        """The server's plan for rounds of `participants` clients; its unit is the client."""
        ...

    def load_server_state(self, saved: dict[str, Any] | None, experiment: Experiment) -> Any:
        """The server's state from its saved form; the initial one from None."""
        ...

    def server_step(
        self,
        bench: ServerBench,
        experiment: Experiment,
        plan: Plan,
        updates: Sequence[Update],
        state: Any,
    ) -> tuple[Update, Any]:
        """The released mean update. Raises `BudgetExhausted` where the filter refuses it."""
        ...


@runtime_checkable
class ChoosyMethod(Protocol):
    """A method that some networks do not suit: they are refused before anything is charged."""

    def check_network(self, network: nn.Module, experiment: Experiment) -> None:
        """Raises `UserError` where the method cannot work with this network."""
        ...


def clips_units(method: Method) -> bool:
    """Whether its step sums clipped unit gradients: then the network must be fit for it."""
    return "clip" in method.uses and not isinstance(method, CentralMethod)


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
        batch=experiment.batch,
        rounds=own_rounds,
        local_epochs=experiment.local_epochs,
        unit=experiment.privacy_unit,
    )


def signal_settings(experiment: Experiment, *, positive_only: bool) -> SignalSettings:
    return SignalSettings(
        q=experiment.q,
        alpha=experiment.alpha,
        beta=experiment.beta,
        gamma=experiment.gamma,
        fill=experiment.fill,
        positive_only=positive_only,
    )
