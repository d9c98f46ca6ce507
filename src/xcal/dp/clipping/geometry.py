"""Scaled geometry: where the noise goes, at no cost in privacy.

Blocks of parameters carry positive weights d, one set for all units of a step. A unit is clipped by
the norm of its *scaled* gradient Dg, the scaled sum is released with noise of one deviation on
every coordinate, and what comes out is multiplied by D⁻¹. In the scaled space one unit still moves
the sum by at most C, so this is the same Gaussian mechanism as ever; in the parameters' own space
block j sees noise σC/d_j. The weights must be known before the step's data are drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xcal.dp.clipping.named import trainable

# Weights lie within 1/64 … 64: beyond that a block is all noise, or clipping leaves nothing else.
LARGEST_WEIGHT = 64.0


@dataclass(frozen=True)
class Geometry:
    """Weights d by parameter name: one number, or one for each entry along its first axis.

    The first axis of a convolution, a linear layer or a norm is that of its output channels.
    `inputs` are weights along the second axis of a linear layer's matrix: of the features that it
    reads. Parameters that are not named have weight 1. Weights are finite, positive and bounded by
    a public constant; anything else is a `ValueError`.
    """

    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    inputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (*self.weights.items(), *self.inputs.items()):
            for d in values:
                if not (math.isfinite(d) and 1 / LARGEST_WEIGHT <= d <= LARGEST_WEIGHT):
                    raise ValueError(
                        f"the weight {d} of {name!r} is not between 1/{LARGEST_WEIGHT:g} and"
                        f" {LARGEST_WEIGHT:g}"
                    )

    def check(self, model: nn.Module) -> None:
        """Raise unless every weight belongs to a parameter that trains, and fits its axis."""
        if not self.weights and not self.inputs:
            return
        named = trainable(model)
        for name in (*self.weights, *self.inputs):
            if name not in named:
                raise ValueError(f"{name!r} has weights but is not a parameter that trains")
        for name, values in self.weights.items():
            if len(values) not in (1, len(named[name])):
                raise ValueError(f"{name!r} has {len(values)} weights for {len(named[name])} rows")
        for name, values in self.inputs.items():
            module, _, own = name.rpartition(".")
            if own != "weight" or type(model.get_submodule(module)) is not nn.Linear:
                raise ValueError(f"{name!r} has weights of inputs but is no linear layer's matrix")
            if len(values) != named[name].shape[1]:
                raise ValueError(f"{name!r} has {len(values)} weights of inputs")

    def one_weight(self, name: str) -> float:
        """The weight of the whole parameter; 1 where its channels have weights of their own."""
        values = self.weights.get(name, (1.0,))
        return values[0] if len(values) == 1 else 1.0

    def channel_weights(self, name: str, like: Tensor) -> Tensor | None:
        """The weights of its channels, in the type and place of `like`; None where they share."""
        values = self.weights.get(name, (1.0,))
        if len(values) == 1:
            return None
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def input_weights(self, name: str, like: Tensor) -> Tensor | None:
        """The weights of its inputs, in the type and place of `like`; None where there are none."""
        if name not in self.inputs:
            return None
        return torch.tensor(self.inputs[name], dtype=like.dtype, device=like.device)

    def scaled(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Dg, by parameter."""
        return {name: part * self._of(name, part) for name, part in gradient.items()}

    def undo(self, released: dict[str, Tensor]) -> dict[str, Tensor]:
        """D⁻¹ of what was released in the scaled space, in place: post-processing."""
        for name, part in released.items():
            if name in self.weights or name in self.inputs:
                part.div_(self._of(name, part))
        return released

    def _of(self, name: str, part: Tensor) -> Tensor:
        """The parameter's weights, in a shape that multiplies it."""
        values = torch.tensor(self.weights.get(name, (1.0,)), dtype=part.dtype, device=part.device)
        if not part.dim():
            return values[0]
        values = values.view(-1, *[1] * (part.dim() - 1))
        of_inputs = self.input_weights(name, part)
        return values if of_inputs is None else values * of_inputs

    def digest(self) -> str:
        """A fingerprint of every weight, to the bit."""
        text = repr([(name, values) for name, values in sorted(self.weights.items())])
        if self.inputs:
            text += repr(sorted(self.inputs.items()))
        return hashlib.sha256(text.encode()).hexdigest()


PLAIN = Geometry()


@dataclass(frozen=True)
class Bound:
    """What clipping allows one unit: norm at most C, in the scaled space.

    It is handed to the object that clips and comes back with the sum, so that noise is scaled by
    what was really kept.
    """

    norm: float
    geometry: Geometry = PLAIN

    @property
    def sensitivity(self) -> float:
        """How far one unit moves the scaled sum at most."""
        return self.norm
