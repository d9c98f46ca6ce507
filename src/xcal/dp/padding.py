"""Passes through a network that always have the same number of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def filled_up(values: Tensor, rows: int) -> Tensor:
    """Exactly `rows` of them, in memory of their own: copies of the first stand behind the others.

    A copy is finite where the first is, so that nothing times it is nothing. In new memory also
    where none is missing: how numbers are rounded may depend on where they lie. With 0 `rows` they
    stay as they are.
    """
    if not rows:
        return values
    return torch.cat([values, values[:1].expand(rows - len(values), *values.shape[1:])])
