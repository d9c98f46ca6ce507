"""Presets: named layers of defaults beneath an experiment's own keys.

A preset looks at the keys that were given (the data set's public name, ε, whether there are
published weights) and fills in others. All were measured with one image as the unit of privacy and
say so (`unit = "record"`): another unit is another plan, for which nothing here was measured. What
it fills in is written into the run's `experiment.toml` key by key, so a run does not change when a
preset does. How the numbers were found, and what that means for privacy, is told in
`docs/recipes.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

Keys = dict[str, Any]

# --- the paper's settings -------------------------------------------------------------------------

# The published table of data sets; a set that it does not name gets the middle size.
_PAPER_PIXELS = {"blood-cells": 150, "chest-xray14": 128, "ham10000": 64, "isic": 64}


def _paper(given: Mapping[str, Any]) -> Keys:
    """The published settings, with a guarantee per image.

    The paper does not say whether it started from pretrained weights. Our reading: it did, since
    30 rounds of plain SGD at η = 10⁻³ move a network from scratch nowhere near its figures. So
    where `weights` is given, all of the network trains from there, with the published batch norm as
    fixed constants; without, it trains from scratch with group norm.
    """
    method = given.get("method", "xcal-paper")
    return {
        "method": method,
        "pixels": _PAPER_PIXELS.get(str(given.get("data")), 128),
        "network": "efficientnet_b0",
        "norm": "frozen" if given.get("weights") else "group",
        "train": "all",
        "clients": 3,
        "rounds": 30,
        "local_epochs": 1,
        "average": 1.0,
        "average_steps": 0.0,
        "unit": "record",
        "epsilon": 0.5,
        "delta": 1e-5,
        "expected_batch_size": 32,
        "lr": 1e-3,
        "max_grad_norm": 1.0,
        "optimizer": "sgd",
        "views": 1,
        "q": 0.2,
        "alpha": 1.0,
        "beta": 1.0,
        "gamma": 1.0,
        "rho": 0.1,
        "band": 0.2,
        # Our own method smooths a signal of much less noise: it keeps its own τ.
        **({"tau": 0.2} if method == "xcal-paper" else {}),
    }


# --- what was found -------------------------------------------------------------------------------

# Recipes were sought at ε = 0.05, 0.5 and 5; geometric means part them.
_BETWEEN = (0.16, 1.6)


def _place(given: Mapping[str, Any]) -> int:
    """Which of the three recipes serves this ε best."""
    epsilon = given.get("epsilon", 5.0)
    if not isinstance(epsilon, int | float):
        return 2
    return sum(epsilon >= bound for bound in _BETWEEN)


def _tight(given: Mapping[str, Any]) -> bool:
    return _place(given) < 2


# EfficientNet-B0 with ImageNet weights, three clients: the rate at each ε, for one view of an image
# and for the mean of several. How they were chosen is told in docs/recipes.md.
class _Found(NamedTuple):
    rates: tuple[float, float, float]
    pooled_rates: tuple[float, float, float]
    views: str  # cells and moles have no upright; chests do
    # From the second ε on: below, noise drowns the directions that whitening brings up.
    whitened: bool


_FOUND = {
    "blood-cells": _Found((0.003, 0.1, 0.5), (0.01, 0.05, 0.2), "mirrored-turns", True),
    "chest-xray14": _Found((0.003, 0.05, 0.2), (0.003, 0.02, 0.1), "shifts", False),
    "ham10000": _Found((0.003, 0.05, 1.0), (0.003, 0.05, 0.2), "mirrored-turns", True),
}
_LARGE = {"expected_batch_size": 1024, "rounds": 20, "max_grad_norm": 8.0}
_SHRUNK = 10.0
_OTHER = {"expected_batch_size": 256, "rounds": 20, "max_grad_norm": 8.0}
_READS = "stages:4-6"
_SCORED = 128  # drawn images a step that enter the signal: each costs two passes
_CLIENTS = 3


def _good(given: Mapping[str, Any]) -> Keys:
    """What learnt best under noise per image, by data set and ε; a sensible start for other data.

    With published weights only the head trains: of a large network every other number would get
    noise too. It reads the middle stages, standardized by public constants. Without weights, it is
    the small network from scratch. Batches shrink as clients grow in number, since each then holds
    less.
    """
    clients = given.get("clients", _CLIENTS)
    common = {
        "clients": clients,
        "unit": "record",
        "max_grad_norm": 1.0,
        "optimizer": "sgd",
        "average": 0.2,
    }
    if not given.get("weights"):
        lr = 1.5 if _tight(given) else 3.0
        return {**common, "network": "small", "rounds": 10, "expected_batch_size": 256, "lr": lr}
    data = str(given.get("data"))
    pooled = given.get("pool_views", "auto")
    if pooled == "auto":
        pooled = _views(given.get("method", "xcal"), data)
    if (found := _FOUND.get(data)) is not None:
        rates = found.rates if pooled == "none" else found.pooled_rates
        recipe = {**_LARGE, "lr": rates[_place(given)]}
    else:
        recipe = {**_OTHER, "lr": 0.05 if _tight(given) else 0.2}
    if isinstance(clients, int) and clients > _CLIENTS:
        recipe = {
            **recipe,
            "expected_batch_size": max(32, recipe["expected_batch_size"] * _CLIENTS // clients),
        }
    network = given.get("network") or "efficientnet_b0"
    return {
        **common,
        "network": network,
        "head_reads": _READS if network == "efficientnet_b0" else "last",
        "norm": "frozen",
        "output_stride": 32,
        "pixels": 128,
        "train": "head",
        "feature_cache_mb": 512,
        # Rounds cost next to nothing here, and ROAD many passes: the test images at the end tell.
        "road_images": 0,
        "road_test_images": 64,
        # Few steps are taken: only a signal in each of them comes to say anything before the end.
        "signal_every": 1,
        "signal_fraction": _scored_share(
            given.get("expected_batch_size", recipe["expected_batch_size"])
        ),
        **recipe,
    }


def _views(method: object, data: str) -> str:
    """The views that `xcal` pools; others leave an image as it is."""
    return _FOUND[data].views if method == "xcal" and data in _FOUND else "none"


def left_to_the_method(made: Mapping[str, Any]) -> Keys:
    """What keys that were left open come to: in `xcal`, what was measured to help.

    Views cost nothing where features of a frozen backbone are kept, and as many passes as there are
    where more trains: there they are for the user to ask for.
    """
    ours = made["method"] == "xcal" and made["steering"] == "none"
    head = ours and made["train"] == "head"
    found: Keys = {}
    if made["pool_views"] == "auto":
        found["pool_views"] = _views(made["method"], made["data"]) if head else "none"
    if made["whiten"] is None:
        reads = made["head_reads"] != "last" and made["weights"] is not None
        known = _FOUND.get(made["data"])
        helps = known is not None and known.whitened and made["epsilon"] >= _BETWEEN[0]
        found["whiten"] = _SHRUNK if head and reads and helps else 0.0
    if made["maps"] is None:
        found["maps"] = "auto" if ours else "gradcam"
    return found


def _scored_share(batch: Any) -> float:
    """The share of a batch that enters the signal; what is no batch is refused later."""
    usable = isinstance(batch, int | float) and batch > 0
    return min(1.0, _SCORED / batch) if usable else 1.0


def fitted(values: Mapping[str, Any], given: Container[str], units: int) -> Keys:
    """What changes of the preset `good` where the smallest client has so many units.

    Its batches were found on sets of thousands of images a client. Keys that were `given` stay.
    """
    if values.get("preset") != "good" or "expected_batch_size" in given:
        return {}
    batch = min(values["expected_batch_size"], max(1, units))
    if batch == values["expected_batch_size"]:
        return {}
    changes: Keys = {"expected_batch_size": batch}
    if "signal_fraction" not in given and values.get("weights"):
        changes["signal_fraction"] = _scored_share(batch)
    return changes


def _laptop(given: Mapping[str, Any]) -> Keys:
    """Small enough for studies on a laptop: at most 3,000 training images of 64 pixels, 10 rounds.

    EfficientNet-B0 where published weights are given, else the network from scratch.
    """
    network = given.get("network") or ("efficientnet_b0" if given.get("weights") else "small")
    common = {
        "network": network,
        "pixels": 64,
        "train_images": 3000,
        "clients": 3,
        "unit": "record",
        "rounds": 10,
        "expected_batch_size": 256,
        "max_grad_norm": 1.0,
        "optimizer": "sgd",
        "average": 0.2,
    }
    if network == "efficientnet_b0":
        return {
            **common,
            "norm": "frozen" if given.get("weights") else "group",
            "output_stride": 16,
            "train": "last:2" if given.get("weights") else "all",
            "lr": 0.1 if _tight(given) else 0.3,
        }
    return {**common, "lr": 1.5 if _tight(given) else 3.0}


PRESETS: dict[str, Callable[[Mapping[str, Any]], Keys]] = {
    "paper": _paper,
    "good": _good,
    "laptop": _laptop,
}
