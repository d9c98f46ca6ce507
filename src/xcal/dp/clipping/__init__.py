"""Sums of clipped per-unit gradients from one forward and one backward pass.

`clipping_engine.py` is what the rest of the project uses. During the forward pass `recorder.py`
puts the stand-ins of `layer_rules.py` in the place of the few operations that hold trainable
parameters; during the backward pass these leave in a `tape.Tape` what is needed to know each unit's
gradient norm and, once the clipping factors are known, to form the weighted sum without a second
backward pass. `geometry.py` says in which norm units are clipped, `convolution.py` is the
arithmetic (`volumes.py`: of volumes and of transposed convolutions), `reference.py` the slow
definition that all of it must equal. Parameters that a network adds or multiplies by itself are
followed by `plain.py`; what has no rule may go one sample at a time (`fallback.py`);
`rule_check.py` looks whether all this fits a network; `losses.py` are the losses.
"""

from __future__ import annotations

from xcal.dp.clipping.clipping_engine import (
    ClippedSum,
    ClippingEngine,
    MixedRows,
    OpenPass,
    check_supported,
    joined,
)
from xcal.dp.clipping.geometry import PLAIN, Bound, Geometry

__all__ = [
    "PLAIN",
    "Bound",
    "ClippedSum",
    "ClippingEngine",
    "Geometry",
    "MixedRows",
    "OpenPass",
    "check_supported",
    "joined",
]
