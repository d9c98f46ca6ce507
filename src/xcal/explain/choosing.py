"""Every kind of map by name, and which of them explains a model best.

A map is made after training, of a released model: it costs no ε, and neither does a choice among
maps as long as the images that it is made on are public. Which kind is best differs from model to
model, so `choose_map` measures: ROAD of each kind on the same public images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.explain.gradcam import MapMethod, gradcam_maps, head_weight_of
from xcal.explain.inference import predict_logits
from xcal.explain.interval import mean_interval
from xcal.explain.occlusion import (
    NO_CELLS,
    cell_maps,
    gradient_input_maps,
    occlusion_maps,
    random_maps,
    rise_maps,
)
from xcal.explain.road import road

AUTO = "auto"
DEFAULT = "gradcam"
"""What is used where nothing may be chosen, and what another map has to be shown better than."""
MAPS: Mapping[str, str] = {
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "occlusion": "occlusion",
    "cell-occlusion": "occlusion of feature cells",
    "rise": "random masks (RISE)",
    "gradient-input": "gradient × input",
    "random": "random numbers",
}
"""All kinds by name; two joined by + are added. The last two are controls."""
CANDIDATES = (
    "gradcam",
    "gradcam++",
    "hirescam",
    "layercam",
    "cell-occlusion",
    "occlusion",
    "occlusion+gradcam",
    "rise",
)
"""What `auto` chooses among, the cheaper first."""
CHOSEN_ON = 48
"""Public images that a choice is made on, at most."""
FEWEST, FINALISTS = 12, 2
"""Images at least that every kind is tried on, and how many kinds are tried on all."""

_MAKERS: Mapping[str, Callable[..., Tensor]] = {
    **{name: partial(gradcam_maps, method=name) for name in get_args(MapMethod)},
    "occlusion": occlusion_maps,
    "cell-occlusion": cell_maps,
    "rise": rise_maps,
    "gradient-input": gradient_input_maps,
    "random": random_maps,
}
_NAME = "|".join(re.escape(name) for name in sorted(MAPS, key=len, reverse=True))


def parts_of(method: str) -> list[str]:
    """The kinds that a name is of: one, or two joined by +."""
    match = re.fullmatch(rf"({_NAME})(?:\+({_NAME}))?", method)
    if match is None:
        known = ", ".join(MAPS)
        raise UserError(
            f"There is no explanation map called {method!r}: choose one of {known}, two of them"
            f" joined by +, or {AUTO}."
        )
    return [name for name in match.groups() if name]


def title_of(method: str) -> str:
    """A map's name for people."""
    return " + ".join(MAPS[name] for name in parts_of(method))


def make_maps(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    method: str = DEFAULT,
    batch_size: int = 64,
) -> Tensor:
    """Maps (N, h, w) of `classes` (N,), by default of the predicted ones; the model is untouched.

    Those of the Grad-CAM family are non-negative, the others signed. Two kinds are added after each
    was divided by its root mean square, image by image.
    """
    kinds = parts_of(method)
    if classes is None and len(images):
        classes = predict_logits(model, images, batch_size=batch_size).argmax(dim=1)
    made = [_MAKERS[kind](model, images, classes, batch_size=batch_size) for kind in kinds]
    return made[0] if len(made) == 1 else added(made)


def added(kinds: Sequence[Tensor]) -> Tensor:
    """Maps (N, h, w) of several kinds, each divided by its root mean square, image by image."""
    return torch.stack([_scaled(maps.double()) for maps in kinds]).sum(dim=0).to(kinds[0].dtype)


def _scaled(maps: Tensor) -> Tensor:
    """Each map by its root mean square; one that is all zero stays so."""
    size = maps.square().mean(dim=(1, 2), keepdim=True).sqrt()
    return maps / torch.where(size > 0, size, 1)


@dataclass(frozen=True)
class MapChoice:
    """Which map was chosen, and why.

    `road` has the mean ROAD of every kind that was tried, on `images` public images (on the first
    quarter of them for kinds that were behind there). `gain` is how
    much `method` is above the default and `interval` its 95 % interval, paired by image and counted
    by groups. Nothing was tried where `road` is empty, and `why` says why.
    """

    method: str
    road: Mapping[str, float]
    images: int = 0
    gain: float | None = None
    interval: tuple[float, float] | None = None
    why: str = ""

    def sentence(self) -> str:
        """What to tell whoever sees the maps."""
        named = title_of(self.method)
        if not self.road:
            return f"Maps by {named}, {self.why}"
        measured = f"ROAD {self.road[self.method]:+.3f} on {self.images} public validation images"
        if self.method == DEFAULT:
            found = f"no other of {len(self.road)} kinds was shown to be better"
        else:
            assert self.gain is not None and self.interval is not None
            low, high = self.interval
            found = f"{self.gain:.3f} [{low:.3f}, {high:.3f}] above {title_of(DEFAULT)}"
        return f"Maps by {named}: {measured}, {found}. Choosing and explaining cost no ε."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {**asdict(self), "road": dict(self.road)}


def not_chosen(why: str) -> MapChoice:
    """The default, where nothing may be measured."""
    return MapChoice(DEFAULT, {}, why=f"the fixed default; none was chosen: {why}")


def asked_for(method: str) -> MapChoice:
    """A map that somebody named."""
    parts_of(method)
    return MapChoice(method, {}, why="as asked for.")


def check_map(model: nn.Module, method: str) -> None:
    """Refuse a name that is no map's, or that of a map which the network cannot have."""
    if method != AUTO and "cell-occlusion" in parts_of(method) and head_weight_of(model) is None:
        raise UserError(NO_CELLS)


def choose_map(
    model: nn.Module,
    images: Tensor,
    groups: ArrayLike | None = None,
    *,
    candidates: Sequence[str] = CANDIDATES,
    on_images: Callable[[int, int], None] = lambda *_: None,
) -> MapChoice:
    """The kind of the highest ROAD on these images, which must be public.

    All kinds are tried on the first quarter of the images, the best few and the default on all. A
    kind replaces the default only where it is shown to be better: the 95 % interval of the paired
    difference lies above 0. The best of several is flattered by that very choice, so its ROAD on
    other images is what counts.
    """
    tried = kinds_for(model, candidates)
    if not len(images):
        return not_chosen("there are no public validation images.")
    of = range(len(images)) if groups is None else groups
    classes = predict_logits(model, images).argmax(dim=1)
    first = max(len(images) // 4, min(len(images), FEWEST))
    total = len(tried) * first + min(len(tried), FINALISTS + 1) * (len(images) - first)
    done = 0

    def measured(name: str, part: slice) -> NDArray[np.float64]:
        nonlocal done
        shown = images[part]
        maps = make_maps(model, shown, classes[part], method=name)
        found = road(
            model,
            shown,
            maps,
            classes=classes[part],
            on_images=lambda n, before=done: on_images(before + n, total),  # type: ignore[misc]
        )
        done += len(shown)
        return found.scores

    scores = {name: measured(name, slice(first)) for name in tried}
    means = {name: float(values.mean()) for name, values in scores.items()}
    best_first = sorted(tried, key=lambda name: (name != DEFAULT, -means[name]))
    finalists = best_first[: FINALISTS + 1]
    if first < len(images):
        for name in finalists:
            scores[name] = np.concatenate([scores[name], measured(name, slice(first, None))])
            means[name] = float(scores[name].mean())
    best = max(finalists, key=lambda name: means[name])
    between = mean_interval(scores[best] - scores[DEFAULT], of)
    if best == DEFAULT or between is None or between[0] <= 0:
        return MapChoice(DEFAULT, means, len(images))
    gain = means[best] - means[DEFAULT]
    return MapChoice(best, means, len(images), gain, (between[0], between[1]))


def kinds_for(model: nn.Module, candidates: Sequence[str] = CANDIDATES) -> list[str]:
    """Those that the network has, each once, the default first: a linear head has cells, and one
    map by two names.
    """
    names = [DEFAULT, *(c for c in candidates if c != DEFAULT)]
    linear = head_weight_of(model) is not None
    return [name for name in names if ("hirescam" if linear else "cell-occlusion") not in name]
