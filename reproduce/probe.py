"""The scale `probe`: whole sets at 128 pixels, where models learn and a run takes seconds.

A linear head on the middle stages of EfficientNet-B0 is all that trains. What was found to help
(docs/recipes.md) is given to every method alike: the mean of an image's views, and whitened
channels where they help. What is left between methods is the method. `plain` cells have neither.
Every cell pins every key that its method uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reproduce.scales import COMMON, SCALES, WITHOUT_EPSILON, PinnedScale
from xcal.studies.grid import PROBE

PLAIN = "plain"
"""The variant without what helps: one view of an image, standardized channels."""
RECIPE = "recipe"
RATES_FILE = Path(__file__).with_name("rates.json")
# Cells and moles have no upright; chests do. Whitening drowns in noise at ε = 0.05.
VIEWS = {"blood-cells": "mirrored-turns", "ham10000": "mirrored-turns", "chest-xray14": "shifts"}
WHITENED = ("blood-cells", "ham10000")
SHRUNK = 10.0
WHITENED_FROM = 0.16
# The rates that every method chooses from, by ε; None: without noise and clipping.
RATES: Mapping[float | None, tuple[float, ...]] = {
    0.05: (0.003, 0.01, 0.03),
    0.5: (0.02, 0.05, 0.1),
    5.0: (0.1, 0.2, 0.5),
    50.0: (0.2, 0.5, 1.0),
    None: (0.01, 0.03, 0.1, 0.3),
}
# Maps by occlusion, with ROAD, take ten times as long as the training: not of every seed.
ROAD_SEEDS = {"ham10000": 5}  # of other sets three
ROAD_SEEDS_BESIDE = {"clients": 2, "ablation": 1}  # in cells that the main tables do not have
RATE_SEEDS = {"fl-dp": 3, "fl": 3}  # of all other methods one
# At N clients each has as many fewer images, and draws as many fewer.
BATCH, CLIENTS, LEAST_BATCH = 1024, 3, 32
# With whole groups as units a client has few: it draws nearly all of them.
GROUP_BATCH = {"blood-cells": 64, "ham10000": 1024, "chest-xray14": 256}


@cache
def _rates() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RATES_FILE.read_text()) if RATES_FILE.exists() else {}
    return found


def chosen_rate(method: str, data: str, epsilon: float | None, plain: bool = False) -> float:
    """The rate that validation images chose; in the middle where they did not yet.

    One for all methods with the same recipe: a choice for each of them by its few validation images
    is mostly chance, and would be taken for what the method does.
    """
    by_epsilon = _rates().get(PLAIN if plain else RECIPE, {}).get(data, {})
    nearest = min((e for e in RATES if e is not None), key=lambda e: abs(e - (epsilon or 0.5)))
    own = None if method in WITHOUT_EPSILON else epsilon
    middle = RATES.get(own, RATES[nearest])[1]
    return float(by_epsilon.get("none" if own is None else f"{own:g}", middle))


def whitening(data: str, epsilon: float | None) -> float:
    """How far the public covariance is shrunk that channels are whitened by; 0: they are not."""
    helps = data in WHITENED and (epsilon is None or epsilon >= WHITENED_FROM)
    return SHRUNK if helps else 0.0


@dataclass(frozen=True)
class ProbeScale(PinnedScale):
    def values(
        self, method: str, data: str, network: str, epsilon: float | None, seed: int
    ) -> dict[str, Any]:
        return {
            **super().values(method, data, network, epsilon, seed),
            "pool_views": VIEWS.get(data, "none"),
            "whiten": whitening(data, epsilon),
            "maps": "occlusion" if method == "xcal" else "gradcam",
            "lr": chosen_rate(method, data, epsilon),
        }

    def explains(self, data: str, seed: int) -> int:
        return self.explained if seed < ROAD_SEEDS.get(data, 3) else 0

    def explains_beside(self, study: str, data: str, seed: int) -> int:
        return self.explained if seed < ROAD_SEEDS_BESIDE[study] else 0

    def at_clients(self, values: Mapping[str, Any], count: int) -> dict[str, Any]:
        batch = max(LEAST_BATCH, BATCH * CLIENTS // count)
        return {**values, "clients": count, "expected_batch_size": min(batch, BATCH)}

    def with_groups(self, values: Mapping[str, Any]) -> dict[str, Any]:
        batch = GROUP_BATCH.get(str(values["data"]), 64)
        lr = values["lr"] * (batch / BATCH) ** 0.5
        whole = {"unit": "group", "expected_batch_size": batch, "lr": lr, "images_per_unit": 4}
        return {**values, **whole}

    def covers(self, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        plain = without_recipe(values)  # pixels of one view: of eight they would take hours
        return {
            f"{PLAIN}, cover = {what}": {**plain, "cover": what} for what in ("cells", "pixels")
        }

    def also(self, method: str, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {PLAIN: without_recipe(values)} if method in ("fl", "fl-dp") else {}


def without_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same cell as `good` was before: one view of an image, standardized channels."""
    own = None if values["method"] in WITHOUT_EPSILON else values["epsilon"]
    rate = chosen_rate(str(values["method"]), str(values["data"]), own, plain=True)
    return {**values, "pool_views": "none", "whiten": 0.0, "maps": "gradcam", "lr": rate}


PROBE_SCALE = ProbeScale(
    name="probe",
    data=("blood-cells", "ham10000", "chest-xray14"),
    networks=(PROBE,),
    epsilons=(0.5, 5.0, 0.05, 50.0),
    seeds={PROBE: 5},
    common={
        **COMMON,
        "accountant": "auto",
        "shares": "plan",
        "rounds": 20,
        "expected_batch_size": BATCH,
        "max_grad_norm": 8.0,
        "average": 0.2,
        "validation_images": 2000,
        "road_images": 0,
        # Few steps are taken: only a signal in each comes to say anything before the end.
        "signal_every": 1,
        "signal_fraction": 0.125,
        "cover": "cells",
        "chunk": 4096,  # rows of kept features: a whole draw in one pass
    },
    by_network={
        PROBE: {
            "network": "efficientnet_b0",
            "pixels": 128,
            "norm": "frozen",
            "output_stride": 32,
            "head_reads": "stages:4-6",
            "train": "head",
            "weights": "imagenet",
        }
    },
    by_epsilon={},
    plain={PROBE: {}},
    explained=32,
    methods=(
        "fl-dp",
        "xcal",
        "xcal-paper",
        "xcal-steered",
        "fl",
        "agp",
        "agp-dp",
        "adaptive-clip",
        "adap-dpfl",
        "centralized",
    ),
    beside_static=("fl", "fl-dp", "xcal-paper", "xcal"),
    client_epsilons=(0.5,),
)
SCALES[PROBE_SCALE.name] = PROBE_SCALE
