"""The definition that the engine must equal: one unit at a time, by plain autograd.

Slow, and used by tests only. Works for any network whatever its layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xcal.dp.clipping.geometry import PLAIN, Geometry
from xcal.dp.clipping.losses import Loss, per_sample


def unit_gradients(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    units: Tensor | None = None,
    loss: Loss | None = None,
) -> list[dict[str, Tensor]]:
    """Every unit's gradient of the mean loss of its images, zeros for an empty unit."""
    units = torch.arange(len(images)) if units is None else units
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for unit in range(int(units.max()) + 1 if len(units) else 0):
        own = torch.nonzero(units == unit).squeeze(1)
        if not len(own):
            found.append({name: torch.zeros_like(p) for name, p in named.items()})
            continue
        output = model(images[own])
        losses, _ = per_sample(loss, getattr(output, "logits", output), labels[own])
        gradients = torch.autograd.grad(losses.mean(), list(named.values()), allow_unused=True)
        found.append(
            {
                name: torch.zeros_like(p) if gradient is None else gradient.detach()
                for (name, p), gradient in zip(named.items(), gradients, strict=True)
            }
        )
    return found


def norm(gradient: dict[str, Tensor]) -> float:
    """The Euclidean norm over all parameters together, in float64."""
    return float(sum(float(part.double().square().sum()) for part in gradient.values()) ** 0.5)


def one_at_a_time(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    clip: float,
    geometry: Geometry = PLAIN,
    units: Tensor | None = None,
    loss: Loss | None = None,
) -> dict[str, Tensor]:
    """The sum of all units' scaled gradients, each brought down to norm `clip` if longer."""
    total = {
        n: torch.zeros_like(p).detach() for n, p in model.named_parameters() if p.requires_grad
    }
    for own in unit_gradients(model, images, labels, units, loss):
        gradient = geometry.scaled(own)
        length = norm(gradient)
        factor = min(1.0, clip / length) if length > 0 else 1.0
        for name, part in gradient.items():
            total[name] += factor * part
    return total
