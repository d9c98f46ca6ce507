"""Every private method in every option that changes what a step computes, releases or remembers."""

from __future__ import annotations

from typing import Any

import pytest

from support import TINY
from xcal.methods.registry import METHODS

BASE: dict[str, Any] = {
    **TINY,
    "data": "tainted:data",
    "unit": "record",
    "clients": 2,
    "rounds": 2,
    "batch": 25,
    "noise": "secure",  # no digest of the data in the ledger, and other draws in every run
    "pass_rows": 0,
    "validation_images": 9,
    "road_images": 0,
    "road_test_images": 0,
}

# Options that change what a step computes, releases, remembers or reports; by method.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fl-dp": [
        {},
        {"unit": "group", "images_per_unit": 2, "batch": 8},
        {"views": 3, "optimizer": "adam", "average_steps": 0.5},
        {"views": 2, "augment": "shifts", "optimizer": "momentum", "group_cap": 2},
    ],
    "agp-dp": [{}],
    "adaptive-clip": [{}, {"count_noise": 30.0, "unit": "group", "batch": 8}],
    "xcal": [{}, {"steering": "signal", "signal_every": 1}],
    "adap-dpfl": [{"rounds": 3, "sigma_decay": 0.9}],
    "xcal-paper": [{}, {"rho": 0.0}],
    "xcal-steered": [
        {"signal_every": 1},
        {"signal_every": 1, "signal_fraction": 0.5, "reference": "absolute", "tau": 0.5},
        {"signal_every": 1, "geometry": "importance", "clipping": "quantile"},
        {"signal_every": 1, "fill": "image-mean", "views": 2, "unit": "group", "batch": 8},
        {"signal_source": "noise"},
        {"signal_source": "constant"},
        {"signal_source": "decay"},
    ],
}
DISCRETE: dict[str, Any] = {"noise_kind": "discrete"}
CASES = [
    pytest.param(name, options, id=f"{name}-{number}")
    for name, method in METHODS.items()
    if method.private
    for number, options in enumerate(
        # a new method needs its line above
        [*OPTIONS[name], *([DISCRETE] if "noise_kind" in method.uses else [])]
    )
]
