"""A made-up batch through network and criterion, before anything is charged.

What the loop does between loader and network is not known here. So a batch of made-up rows is given
to both as a plain loop does it, `criterion(model(x), y)`, and only where both take it is it looked
at as a draw would be. Every draw is looked at all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from xcal.dp.account import Account
from xcal.dp.apart import copied, tensors
from xcal.dp.ledger.rows import RunTerms, Terms
from xcal.dp.ledger_in_memory import MemoryLedger
from xcal.dp.loader import drawing
from xcal.dp.mechanism import Mechanism
from xcal.dp.noise import NoiseKey, SeededNoise
from xcal.dp.refusals import Refused
from xcal.dp.sampling import UnitTable
from xcal.dp.steps import Draw, PrivateSteps, Records
from xcal.dp.wrappers import PrivateCriterion, PrivateModule

_UNIT_OF = (0, 0, 1, 2)  # each row's, where items share an id
_ROWS = len(_UNIT_OF)
_TOLD = ("network", "criterion", "reduced-loss", "other-rows")


def rehearse(
    module: nn.Module,
    criterion: Callable[..., Tensor],
    reduction: str,
    data_loader: DataLoader[Any],
    run: RunTerms,
    mechanism: Mechanism,
) -> None:
    """Refuse what the first draw would show of network and criterion, on copies of both.

    Of the data set only the shapes of its first item are used.
    """
    device = next(module.parameters()).device
    with drawing(0, [device] if device.type == "cuda" else []):
        batch = _made_up(data_loader, next(module.parameters()))
        copy = copied(module)
        if batch is None or not _fits(copy, criterion, *batch):
            return
        try:
            _draw(copy, deepcopy(criterion), reduction, batch, run, mechanism)
        except Refused as refusal:
            if refusal.code in _TOLD:
                raise
        except Exception:  # in a plain loop; who knows whether in this one
            return


def _made_up(loader: DataLoader[Any], like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Inputs and targets, where the loader gives two tensors of as many rows."""
    try:
        x, y = loader.collate_fn([loader.dataset[0]] * _ROWS)
        if not all(isinstance(t, Tensor) and t.dim() and len(t) == _ROWS for t in (x, y)):
            return None
    except Exception:  # another kind of batch
        return None
    inputs = torch.randn(x.shape).to(like) if x.is_floating_point() else torch.zeros_like(x)
    return inputs.to(like.device), torch.zeros_like(y, device=like.device)


def _fits(module: nn.Module, criterion: Callable[..., Tensor], x: Tensor, y: Tensor) -> bool:
    """Whether a plain loop with both would run, with targets of the outputs' shape."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            plain = PrivateCriterion(deepcopy(criterion), "none", None)  # type: ignore[arg-type]
            output = module(x)
            losses = plain.criterion(output, y)
    except Exception:
        return False
    # More numbers than went in: outputs and targets were spread over each other.
    most = max(t.numel() for t in (*tensors(output), y))
    spread = isinstance(losses, Tensor) and losses.numel() > most
    several = isinstance(losses, Tensor) and losses.dim() > 1 and not plain.torchs
    return not (spread or several)


def _draw(
    module: nn.Module,
    criterion: Callable[..., Tensor],
    reduction: str,
    batch: tuple[Tensor, Tensor],
    run: RunTerms,
    mechanism: Mechanism,
) -> None:
    """The loop's step, on an account of its own that nothing outlives."""
    by_group = run.unit == "group"
    account = Account(
        MemoryLedger(Terms("in memory", run.unit, None, None, simulated=True)),
        run,
        replayable=False,
    )
    noise = SeededNoise(0)
    charged = mechanism.charge(
        account, 0, 0, inputs=None, noise=noise, key=lambda b: NoiseKey("library", "try", 0, 0, b)
    )
    units = torch.tensor(_UNIT_OF if by_group else range(_ROWS))
    steps = PrivateSteps(
        module,
        account,
        mechanism,
        Records(UnitTable.records(_ROWS)),
        noise,
        by_group=by_group,
        per_epoch=1,
        divisor=1.0,
    )
    steps.begin(Draw(charged, list(range(_ROWS)), units, int(units.max()) + 1), batch)
    network = PrivateModule(module, steps)
    network.training = True  # its parts in the mode that they are in
    with torch.enable_grad():
        PrivateCriterion(criterion, reduction, steps)(network(batch[0]), batch[1]).backward()
