"""Explanations and what is measured on them: stateless functions on tensors and arrays.

`gradcam`, `road` and `signal` are for any torch network. They share their names with the modules
that they are built on: those are imported here first, so that the names stay the functions'
whoever imports from the modules later.
"""

from __future__ import annotations

from xcal.explain.api import Signal, gradcam, road, signal
from xcal.explain.road import RoadResult

__all__ = ["RoadResult", "Signal", "gradcam", "road", "signal"]
