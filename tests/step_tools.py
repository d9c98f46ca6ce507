"""What single steps are tried with: a client's tools, and charges without an account."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from support import micro, tiny
from xcal.dp.clipping import Bound, ClippingEngine
from xcal.dp.filter import RenyiFilter
from xcal.dp.mechanism import ChargedStep, Mechanism
from xcal.dp.noise import SeededNoise
from xcal.methods.client_data import LocalData
from xcal.methods.context import Optimizer, StepContext
from xcal.methods.step_parts import gradient_release


class FreeAccount:
    """An account that lets everything pass, for looking at sums."""

    filter = RenyiFilter(2.0, 1e300)

    def pay(self, *args: Any, **kwargs: Any) -> None:
        return None


def charged(
    context: StepContext, step: int, sigma: float, bound: Bound | None = None
) -> ChargedStep:
    """What a charge for one gradient would have given: for tests without an account."""
    bound = bound or Bound(context.clip)
    mechanism = Mechanism(context.rate, sigma, (gradient_release(bound, sigma),))
    return ChargedStep(mechanism, context.noise, partial(context.key, step))


def tiny_bench(model: nn.Module | None = None, **changes: Any) -> StepContext:
    """A client's tools for steps on the tiny data set, without an account unless one is given."""
    network = micro(3, seed=1) if model is None else model
    parts: dict[str, Any] = {
        "client": "0",
        "method": "test",
        "round": 0,
        "first_step": 0,
        "model": network,
        "engine": ClippingEngine(network),
        "data": LocalData(tiny().train, unit="record", images_per_unit=1),
        "noise": SeededNoise(3),
        "account": None,
        "optimizer": Optimizer(network, "sgd", 1.0, 0.0),
        "batch": 20,
        "clip": 1.0,
    }
    return StepContext(**parts | changes)
