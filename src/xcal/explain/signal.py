"""How well an explanation holds, as one number in [0, 1] per image.

The most salient cells of the Grad-CAM of the predicted class are covered. An image is well
explained if that takes the logit down, turns the decision, and if the cells covered held most of
the map. No gradient flows through any of it, and an image's numbers depend on that image and the
model alone: this is what bounds what one image can do to a released sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xcal.dp.clipping.precision import double
from xcal.dp.sampling import filled_up
from xcal.errors import UserError
from xcal.explain.gradcam import closed_form_maps, gradcam_maps, head_weight_of, in_pixels
from xcal.explain.inference import undisturbed

# Maps are compared on a grid of this many steps up to their maximum, so that rounding (another
# batch size, another path to the same map) rarely changes which cells are chosen.
MAP_LEVELS = 2**16

# What covers a cell, in the normalized space of the network's input: a constant, one per color
# channel, or a name. "imagenet" is the public ImageNet mean color, which normalization takes to
# 0; "image-mean" is each image's own mean color.
Fill = str | float | Sequence[float]


@dataclass(frozen=True)
class SignalSettings:
    """The signal's public constants.

    q: share of the cells to cover. alpha, beta, gamma: weight of the logit's fall, weight of the
    counterfactual margin, exponent of the concentration. positive_only: never cover a cell where
    the map is zero; False is the published rule, under which a sparse map covers the whole image.
    cover: pixels, as published, which takes a pass over the covered images; or cells of the map
    itself, which is arithmetic where average pooling and one linear layer follow it.
    """

    q: float = 0.2
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    fill: Fill = "imagenet"
    positive_only: bool = True
    # Not printed: digests of a step's settings stay those of older runs. A step's digest has it by
    # the experiment's keys.
    cover: str = field(default="pixels", repr=False)

    @staticmethod
    def of(keys: Any, *, positive_only: bool) -> SignalSettings:
        """From an experiment's keys of the same names."""
        names = ("q", "alpha", "beta", "gamma", "fill", "cover")
        return SignalSettings(**{n: getattr(keys, n) for n in names}, positive_only=positive_only)

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise UserError(
                f"The share q of covered cells is {self.q}: choose one above 0 and at most 1."
            )
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"The signal's {name} is {value}: choose a number of 0 or more.")
        if self.cover not in ("pixels", "cells"):
            raise UserError(f"The signal covers {self.cover!r}: choose pixels or cells.")
        if isinstance(self.fill, str) and self.fill not in ("imagenet", "image-mean"):
            raise UserError(
                f"The fill {self.fill!r} is unknown: choose imagenet, image-mean, or numbers."
            )


class Components(NamedTuple):
    """The three parts of the score, each (N,) in float64; NaN in all three marks an image with
    any number that is not finite."""

    logit_drop: Tensor
    margin: Tensor
    concentration: Tensor

    def only(self, rows: Tensor | slice) -> Components:
        """Those of some images."""
        return Components(*(values[rows] for values in self))

    @staticmethod
    def joined(parts: Sequence[Components], device: torch.device) -> Components:
        """One after the other; of no images where there are no parts."""
        nothing = Components(*[double(torch.zeros(0, device=device))] * 3)
        return Components(*(torch.cat(values) for values in zip(nothing, *parts, strict=True)))


def top_cells(maps: Tensor, q: float, *, positive_only: bool) -> Tensor:
    """The cells (N, H, W), bool, at or above the k-th largest value, k = ceil(q*H*W); ties are in.

    Values are first rounded to multiples of 2^-16 of their map's maximum. An all-zero map and a
    map with a non-finite value choose nothing. `positive_only` leaves out cells that round to 0.
    """
    n, height, width = maps.shape
    # Float64: the grid has more steps than a half-precision number can count.
    values = double(maps.detach().flatten(1))
    # Rounding first, for 0.55 * 100 is a little more than 55 in floating point.
    k = min(max(math.ceil(round(q * height * width, 9)), 1), height * width)
    peak = values.amax(dim=1, keepdim=True)
    usable = (peak > 0) & torch.isfinite(values).all(dim=1, keepdim=True)
    levels = torch.where(usable, values / peak * MAP_LEVELS, 0).round()
    cutoff = levels.topk(k, dim=1).values[:, -1:]
    chosen = (levels >= cutoff) & usable
    if positive_only:
        chosen &= levels > 0
    return chosen.view(n, height, width).to(maps.device)


def mask_images(images: Tensor, cells: Tensor, fill: Fill) -> Tensor:
    """Copies of `images` (N, C, H, W) whose `cells` (N, h, w) are covered by the fill.

    Each pixel belongs to the cell that nearest-neighbor enlargement gives it.
    """
    return torch.where(in_pixels(cells, images), fill_values(images, fill), images)


def components(logits: Tensor, maps: Tensor, cells: Tensor, masked_logits: Tensor) -> Components:
    """Logit drop, counterfactual margin and concentration, for the class predicted by `logits`.

    Each image is judged alone. One with a non-finite logit or map value gets NaN throughout.
    """
    if logits.shape[1] < 2:
        raise UserError("The signal compares classes: the network needs two logits or more.")
    logits, masked_logits, maps = (double(t.detach()) for t in (logits, masked_logits, maps))
    predicted = logits.argmax(dim=1, keepdim=True)
    before = logits.gather(1, predicted).squeeze(1)
    after = masked_logits.gather(1, predicted).squeeze(1)
    best_other = masked_logits.scatter(1, predicted, -math.inf).amax(dim=1)
    total = maps.sum(dim=(1, 2))
    inside = (maps * cells.to(maps.device)).sum(dim=(1, 2))
    finite = (
        torch.isfinite(logits).all(dim=1)
        & torch.isfinite(masked_logits).all(dim=1)
        & torch.isfinite(maps).flatten(1).all(dim=1)
    )
    return Components(
        logit_drop=torch.where(finite, (before - after).clamp(min=0), math.nan),
        margin=torch.where(finite, (best_other - after).clamp(min=0), math.nan),
        concentration=torch.where(
            finite, torch.where(total > 0, inside / total, 0).clamp(0, 1), math.nan
        ),
    )


def scores(parts: Components, alpha: float, beta: float, gamma: float) -> Tensor:
    """The score (N,) of each image: clip((alpha*drop + beta*margin) * concentration^gamma, 0, 1).

    Always in [0, 1]. Exactly 0 for an image with a non-finite number and for an all-zero map,
    also where gamma is 0.
    """
    value = (alpha * parts.logit_drop + beta * parts.margin) * parts.concentration**gamma
    # 0^0 is 1, but where nothing was covered there is nothing to score.
    usable = torch.isfinite(value) & torch.isfinite(parts.concentration) & (parts.concentration > 0)
    return torch.where(usable, value, 0).clamp(0, 1)


def batch_score(parts: Components, alpha: float, beta: float, gamma: float) -> float:
    """The published batch score: the same formula on the batch's mean components, in [0, 1].

    The divisor is the number of images drawn. A non-finite image adds 0 to each mean; an empty
    batch scores 0. Whatever one image holds, the clip bounds its effect by 1.
    """
    stacked = torch.stack([*parts])
    if stacked.shape[1] == 0:
        return 0.0
    usable = torch.isfinite(stacked).all(dim=0)
    means = Components(*torch.where(usable, stacked, 0).mean(dim=1))
    return float(scores(means, alpha, beta, gamma))


# More at once is slower: layers of 256 images outgrow what an allocator reuses.
_AT_ONCE = 64


def image_components(
    model: nn.Module,
    images: Tensor,
    logits: Tensor,
    features: Tensor,
    settings: SignalSettings,
    *,
    rows: int = 0,
) -> Components:
    """The components of each image, from the logits and features of a forward pass already made.

    Costs one inference pass over the covered images, in evaluation mode; a network without a
    closed form pays a forward and a short backward pass for its maps as well. The model is left
    untouched: parameters, modes, gradients, hooks, random state.

    With `rows` every pass takes exactly so many images, filled up: how an image's numbers are
    rounded does not depend on how many others there are.
    """
    size = rows or max(len(images), 1)
    found = []
    for start in range(0, len(images), size):
        here = slice(start, start + size)
        whole = [filled_up(values[here], rows) for values in (images, logits, features)]
        count = len(images[here])
        found.append(_of_images(model, whole[0], whole[1], whole[2], settings).only(slice(count)))
    return Components.joined(found, images.device)


NO_CELLS = (
    "cover = 'cells' takes cells out of the map that the head reads, and this network names no"
    " linear head_layer on the average of its cam_layer: leave cover out."
)


def cell_components(
    features: Tensor, logits: Tensor, head_weight: Tensor, settings: SignalSettings
) -> Components:
    """The components of each image where cells of its feature map (N, C, H, W) are covered.

    Average pooling and one linear layer follow the map, so a cell gives W·A/(HW) to the logits, and
    covering takes exactly that away: no pass is needed. A covered cell holds 0, which is the public
    mean where the map is standardized, or with the fill image-mean the mean of the image's cells.
    """
    with torch.no_grad():
        cells_of_map = features.shape[2] * features.shape[3]
        given = torch.cat([_given(some, head_weight) for some in features.split(_IN_CACHE)])
        given = double(given) / cells_of_map
        predicted = logits.argmax(dim=1)
        maps = given[torch.arange(len(given)), predicted].relu()
        cells = top_cells(maps, settings.q, positive_only=settings.positive_only)
        if settings.fill == "image-mean":
            given = given - given.mean(dim=(2, 3), keepdim=True)
        lost = (given * cells[:, None].to(given.device)).sum(dim=(2, 3))
        return components(logits, maps, cells, double(logits) - lost)


# Maps of so many images stay in a processor's cache: a third of the time, to the same bits.
_IN_CACHE = 8


def _given(features: Tensor, head_weight: Tensor) -> Tensor:
    """What each cell of the maps gives to each logit, (N, classes, H, W).

    Not by a product of matrices: see `gradcam._weighed`.
    """
    return torch.stack(
        [(weight[None, :, None, None] * features).sum(dim=1) for weight in head_weight], dim=1
    )


def _of_images(
    model: nn.Module, images: Tensor, logits: Tensor, features: Tensor, settings: SignalSettings
) -> Components:
    head_weight = head_weight_of(model)
    if settings.cover == "cells":
        if head_weight is None:
            raise UserError(NO_CELLS)
        broken = ~_all_finite(images)
        features = torch.where(broken[:, None, None, None], math.nan, features)
        return cell_components(features, logits, head_weight, settings)
    with torch.no_grad():
        predicted = logits.argmax(dim=1)
        if head_weight is None:
            maps = gradcam_maps(model, images, predicted)
        else:
            maps = closed_form_maps(features.detach(), head_weight, predicted)
        return judged(model, images, logits, maps, settings)


def judged(
    model: nn.Module, images: Tensor, logits: Tensor, maps: Tensor, settings: SignalSettings
) -> Components:
    """The components of each image for `maps` (N, h, w) of the classes that `logits` predict."""
    with torch.no_grad():
        # A network could swallow a broken pixel (a clamp, a maximum); the image stays broken.
        maps = torch.where(_all_finite(images)[:, None, None], maps, math.nan)
        cells = top_cells(maps, settings.q, positive_only=settings.positive_only)
        with undisturbed(model):
            # In slices: a large batch of covered images need not fit into memory at once.
            masked_logits = torch.cat(
                [
                    model(mask_images(some, where, settings.fill))
                    for some, where in zip(
                        torch.split(images, _AT_ONCE), torch.split(cells, _AT_ONCE), strict=True
                    )
                ]
            )
        return components(logits, maps, cells, masked_logits)


def _all_finite(images: Tensor) -> Tensor:
    """Whether all of an image's pixels are finite, (N,)."""
    # A finite sum proves it at a fraction of the cost of looking at every pixel; a sum that is
    # not finite may only have overflowed.
    sums_finite = torch.isfinite(images.flatten(1).sum(dim=1))
    if bool(sums_finite.all()):
        return sums_finite
    return torch.isfinite(images).flatten(1).all(dim=1)


def fill_values(images: Tensor, fill: Fill) -> Tensor:
    """The fill as a tensor that broadcasts over the images."""
    if isinstance(fill, str):
        if fill == "image-mean":
            return images.mean(dim=(2, 3), keepdim=True)
        if fill != "imagenet":
            raise UserError(
                f"The fill {fill!r} is unknown: choose imagenet, image-mean, or numbers."
            )
        fill = 0.0
    values = torch.as_tensor(fill, dtype=images.dtype, device=images.device).reshape(1, -1, 1, 1)
    if values.shape[1] not in (1, images.shape[1]):
        raise UserError(
            f"The fill has {values.shape[1]} numbers and the images have {images.shape[1]} "
            "channels: give one number, or one per channel."
        )
    return values
