"""What can be refused before a private training begins, and what its plan is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from xcal.dp.calibration import ODOMETER_SHARE, Calibration, check_target
from xcal.dp.clipping import OpenPass
from xcal.dp.clipping.tape import Units
from xcal.dp.ledger.rows import Release
from xcal.dp.loader import check_loader
from xcal.dp.mechanism import Mechanism
from xcal.dp.pld import SIGMA_SLACK, delta_bound
from xcal.dp.refusals import Refused
from xcal.dp.sampling import UnitTable, ids_in_order, plain_ids
from xcal.dp.steps import check_parameters
from xcal.dp.wrappers import PrivateModule, PrivateOptimizer, check_criterion
from xcal.errors import UserError

FORMAT = 1  # of saved trainings
_MOST_STEPS = 10**6


def steps_within(
    rate: float, sigma: float, epsilon: float, delta: float
) -> tuple[Calibration, int]:
    """The most steps at this multiplier within (ε, δ), by privacy-loss distributions."""
    check_target(epsilon, delta)

    def fits(steps: int) -> bool:
        try:
            bound = delta_bound(rate, sigma * (1 - SIGMA_SLACK), steps, epsilon)
        except (ArithmeticError, ValueError):  # losses that no grid holds
            return False
        return bound <= delta * (1 - ODOMETER_SHARE)

    low, high = 0, 1
    while high <= _MOST_STEPS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise Refused(
            "option",
            f"A noise_multiplier of {sigma:g} allows no step within epsilon = {epsilon:g} at delta"
            f" = {delta:g}: raise it, or the target.",
        )
    order = 8.0
    mechanism = Mechanism(rate, sigma, (Release("gradient", sigma, 1.0),))
    return Calibration(sigma, order, low * mechanism.cost(order) * (1 + 1e-9), "pld"), low


_ONLY = {
    "batch_first": (True, "the first dimension is the batch"),
    "poisson_sampling": (True, "the accounting holds for Poisson sampling only"),
    "clipping": ("flat", "units are clipped by the norm of their whole gradient"),
    "grad_sample_mode": ("ghost", "four objects are returned, as in that mode"),
    "wrap_model": (True, "the network is wrapped"),
    "rand_on_empty": (False, "an empty draw has no rows"),
}


def check_options(options: dict[str, Any], clip: float, reduction: str) -> None:
    for name, value in options.items():
        if name not in _ONLY:
            raise Refused("option", f"make_private has no argument {name!r}: leave it out.")
        only, why = _ONLY[name]
        if value != only:
            raise Refused("option", f"{name} = {value!r} is not supported, {only!r} is: {why}.")
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf:
        raise Refused("option", f"max_grad_norm is {clip}: give one positive number.")
    if reduction not in ("mean", "sum"):
        raise Refused("option", f"loss_reduction is {reduction!r}: choose 'mean' or 'sum'.")


def check_parts(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Tensor],
    data_loader: DataLoader[Any],
    groups: Sequence[Any] | NDArray[Any] | Tensor | None,
    reduction: str,
) -> UnitTable:
    """All that can be refused before a plan is made; the units of the data set."""
    if isinstance(module, PrivateModule) or isinstance(optimizer, PrivateOptimizer):
        raise Refused("option", "Module or optimizer are private already: give the plain ones.")
    spread = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(module, spread):
        raise Refused(
            "network", f"A {type(module).__name__} cannot be made private: give its module."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Refused("option", "LBFGS asks for several gradients a step, and one is paid for.")
    if not any(p.requires_grad for p in module.parameters()):
        raise Refused("network", "The module has no parameter that requires a gradient.")
    check_loader(data_loader)
    check_criterion(criterion, reduction)
    try:
        OpenPass(module, 1, clip=1.0, units=Units(1))
    except UserError as error:
        raise Refused("network", str(error)) from None
    check_parameters(module, optimizer)
    return _units(groups, len(data_loader.dataset))  # type: ignore[arg-type]


def _units(groups: Sequence[Any] | NDArray[Any] | Tensor | None, records: int) -> UnitTable:
    """Every record a unit of its own, or all that share an id."""
    if groups is None:
        return UnitTable.records(records)
    try:
        ids = ids_in_order(groups)
        if len(ids) != records:
            raise Refused(
                "groups",
                f"groups has {len(ids)} ids, and the data set {records} items: give one id for"
                " each, in the data set's order.",
            )
        numbers: dict[Any, int] = {}
        return UnitTable.groups(
            np.array([numbers.setdefault(one, len(numbers)) for one in plain_ids(ids)])
        )
    except ValueError as problem:
        raise Refused("groups", f"groups {problem}.") from None


def load_saved(path: Path) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        known = saved["format"] == FORMAT
    except FileNotFoundError:
        raise Refused("resume", f"There is no saved training at {path}.") from None
    except Exception:  # whatever a damaged or foreign file makes torch raise
        raise Refused("resume", f"{path} is not a saved training, or is damaged.") from None
    if not known:
        raise Refused("resume", f"{path} was written by another version of xcal.")
    return saved
