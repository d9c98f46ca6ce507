"""Half precision in passes, single precision in what is clipped, double precision in norms.

Under `torch.autocast` products are rounded to bfloat16, as the user asked. What is measured and
added up is not: a layer's inputs and output gradients are taken to float32, which is exact, before
any gradient of a parameter is made of them, so that all that holds of clipping in float32 holds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from xcal.errors import UserError

_HALF = (torch.bfloat16, torch.float16)


def single(t: Tensor) -> Tensor:
    """The same numbers, in float32 if they were in half precision."""
    return t.float() if t.dtype in _HALF else t


def double(t: Tensor) -> Tensor:
    """The same numbers in float64; from a device that has none (Apple's), on the processor."""
    return t.to(device=exact_device(t.device), dtype=torch.float64)


def exact_device(device: torch.device) -> torch.device:
    """Where float64 numbers of a device are kept."""
    return torch.device("cpu") if device.type == "mps" else device


def autocast_type(device: torch.device) -> torch.dtype | None:
    """What products are rounded to here; None outside of `torch.autocast`.

    Refuses float16: its gradients vanish without a scaled loss, and clipping would undo the scale.
    """
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    found = torch.get_autocast_dtype(kind)
    if found == torch.float16:
        raise UserError(
            "the network is called under autocast in float16, in which small gradients vanish: "
            "use torch.autocast(…, dtype=torch.bfloat16)"
        )
    return found if found in _HALF else None


def in_half(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[None]:
    """`torch.autocast` to `half`; nothing where it is None."""
    return nullcontext() if half is None else torch.autocast(device.type, dtype=half)


def no_autocast(device: torch.device) -> torch.autocast:
    """For what is measured, whatever the loop around it does."""
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    return torch.autocast(kind, enabled=False)
