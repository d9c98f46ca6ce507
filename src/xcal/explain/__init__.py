"""Explanations and what is measured on them: stateless functions on tensors and arrays.

Most functions are for any torch network. Some share their names with the modules that they are
built on: those are imported here first, so that the names stay the functions' whoever imports from
the modules later.
"""

from __future__ import annotations

from xcal.explain.api import Signal, choose_map, gradcam, maps, occlusion, rise, road, signal
from xcal.explain.choosing import MapChoice
from xcal.explain.road import RoadResult

__all__ = [
    "MapChoice",
    "RoadResult",
    "Signal",
    "choose_map",
    "gradcam",
    "maps",
    "occlusion",
    "rise",
    "road",
    "signal",
]
