"""What a masked round sums (`trust = "masked"`), the same for every site and for the server.

All of it follows from the weights that everyone was sent, the multiplier and the clipping norm: it
is known before anybody draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from xcal.config import Experiment
from xcal.dp.calibration import Plan, PlanShape, plan_fixed, plan_static
from xcal.dp.clipping import Bound
from xcal.dp.clipping.named import trainable
from xcal.dp.distributed import Part


@dataclass(frozen=True)
class SharedSum:
    """The parts of one sum, and what clipping allows one unit of its gradient."""

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
