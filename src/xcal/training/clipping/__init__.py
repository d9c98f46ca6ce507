"""Sums of clipped per-unit gradients from one forward and one backward pass.

`engine.py` is what the rest of the project uses. During the forward pass `recorder.py` puts the
stand-ins of `layers.py` in the place of the few operations that hold trainable parameters; during
the backward pass these leave in a `book.Book` what is needed to know each unit's gradient norm
and, once the clipping factors are known, to form the weighted sum without a second backward pass.
`geometry.py` says in which norm units are clipped, `passes.py` looks whether a unit's numbers
depend on those drawn beside it, `convolution.py` is the arithmetic, `reference.py` the slow
definition that all of it must equal.
"""

from __future__ import annotations

from xcal.training.clipping.engine import ClippedSum, ClippingEngine, OpenPass, joined
from xcal.training.clipping.geometry import PLAIN, Bound, Geometry
from xcal.training.clipping.passes import kept_alike, rows_apart

__all__ = [
    "PLAIN",
    "Bound",
    "ClippedSum",
    "ClippingEngine",
    "Geometry",
    "OpenPass",
    "joined",
    "kept_alike",
    "rows_apart",
]
