"""Faithfulness beside ROAD: insertion and deletion, agreement of two models, a sanity check."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor, nn

from xcal.dp.clipping.precision import double
from xcal.errors import UserError
from xcal.explain.choosing import DEFAULT, make_maps
from xcal.explain.inference import predict_logits
from xcal.explain.occlusion import blurred
from xcal.explain.road import removal_order, saliency_for_ranking
from xcal.explain.signal import Fill, fill_values, top_cells

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class InsertionDeletion:
    """Areas under the confidence curves of N images (Petsiuk et al. 2018).

    `deletion_auc` (N,): pixels are covered, most salient first; lower is better. `insertion_auc`
    (N,): they are restored to a blurred image in the same order; higher is better. Both lie in
    [0, 1]. The curves (N, steps + 1) run from no pixel to all. Maps that rank nothing go in
    random order; images with a non-finite confidence have areas of 0; both are counted.
    """

    deletion_auc: FloatArray
    insertion_auc: FloatArray
    deletion_curve: FloatArray
    insertion_curve: FloatArray
    constant_maps: int
    broken_maps: int
    broken_images: int


def insertion_deletion(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    *,
    steps: int = 20,
    fill: Fill = "imagenet",
    base: Fill | None = None,
    on_images: Callable[[int], None] = lambda *_: None,
) -> InsertionDeletion:
    """Insertion and deletion for the class predicted on the intact image; model left untouched.

    `fill` covers what is deleted. Insertion starts from the blurred image, or from `base`: maps
    made by covering with a blur should be judged by something else.
    """
    if steps < 1:
        raise UserError(f"Insertion and deletion are to take {steps} steps: choose 1 or more.")
    n, _, height, width = images.shape
    deletion, insertion = np.zeros((2, n, steps + 1))
    saliency, constant, broken = saliency_for_ranking(maps, (height, width))
    predicted = predict_logits(model, images, batch_size=32).argmax(dim=1) if n else torch.zeros(0)
    for index in range(n):
        image = images[index : index + 1]
        generator = np.random.default_rng([0, index])
        place = np.empty(height * width, dtype=np.int64)
        place[removal_order(saliency[index], generator)] = np.arange(height * width)
        ranks = torch.from_numpy(place.reshape(height, width)).to(images.device)
        counts = torch.linspace(0, height * width, steps + 1).round().to(images.device)
        touched = (ranks < counts[:, None, None]).unsqueeze(1)
        stages = torch.cat(
            [
                torch.where(touched, fill_values(image, fill), image),
                torch.where(
                    touched, image, blurred(image) if base is None else fill_values(image, base)
                ),
            ]
        )
        logits = double(predict_logits(model, stages, batch_size=32))
        confidence = logits.softmax(dim=1)[:, predicted[index]].cpu().numpy()
        deletion[index], insertion[index] = np.split(confidence, 2)
        on_images(index + 1)
    finite = np.isfinite(deletion) & np.isfinite(insertion)
    sound = finite.all(axis=1, keepdims=True)
    deletion, insertion = (np.where(sound, curve, 0) for curve in (deletion, insertion))
    return InsertionDeletion(
        deletion_auc=_area(deletion),
        insertion_auc=_area(insertion),
        deletion_curve=deletion,
        insertion_curve=insertion,
        constant_maps=constant,
        broken_maps=broken,
        broken_images=int((~sound).sum()),
    )


@dataclass(frozen=True)
class Agreement:
    """How alike two sets of N maps are.

    `rank_correlation` (N,) in [-1, 1] is Spearman's; `overlap` (N,) in [0, 1] is the
    intersection over union of the top cells. Where either map is constant or not finite it
    singles nothing out: both are 0, and the pair is counted in `degenerate`.
    """

    rank_correlation: FloatArray
    overlap: FloatArray
    degenerate: int


def agreement(first: Tensor, second: Tensor) -> Agreement:
    """Agreement of maps (N, H, W), image by image; compared are the top fifth of the cells."""
    if first.shape != second.shape:
        raise UserError(
            f"The maps to compare have the shapes {tuple(first.shape)} and "
            f"{tuple(second.shape)}: enlarge both to the images first."
        )
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    usable = _orders_something(first) & _orders_something(second)
    first, second = (torch.where(usable[:, None, None], maps, 0) for maps in (first, second))
    correlation = rank_correlation(first.flatten(1).numpy(), second.flatten(1).numpy())
    chosen = [top_cells(maps, 0.2, positive_only=True).flatten(1) for maps in (first, second)]
    common = (chosen[0] & chosen[1]).sum(dim=1).double()
    union = (chosen[0] | chosen[1]).sum(dim=1)
    overlap = common / union.clamp(min=1)
    return Agreement(correlation, overlap.numpy(), int((~usable).sum()))


@dataclass(frozen=True)
class RandomisationStage:
    """One step of the sanity check: what share of the layers, from the output down, was
    scrambled, and how alike the maps still are to those of the trained network."""

    share: float
    agreement: Agreement


def randomisation_check(
    model: nn.Module,
    images: Tensor,
    *,
    stages: int = 4,
    seed: int = 0,
    method: str = DEFAULT,
) -> list[RandomisationStage]:
    """Do the maps depend on what the network learned? (Adebayo et al. 2018)

    In a copy of the model the weights are scrambled layer by layer from the output down, each
    tensor's entries in random order, so that their scale stays and what was learned goes. Maps
    of the class predicted by the trained network that stay alike to the end explain the image,
    not the network. The model itself is left untouched.
    """
    if stages < 1:
        raise UserError(f"The sanity check is to take {stages} stages: choose 1 or more.")
    classes = predict_logits(model, images).argmax(dim=1)
    trained = make_maps(model, images, classes, method=method)
    scrambled = copy.deepcopy(model)
    layers = [m for m in scrambled.modules() if list(m.parameters(recurse=False))][::-1]
    if not layers:
        raise UserError("The network has no weights: the sanity check has nothing to scramble.")
    generator = torch.Generator().manual_seed(seed)
    result, done = [], 0
    for stage in range(1, stages + 1):
        upto = math.ceil(len(layers) * stage / stages)
        for layer in layers[done:upto]:
            for parameter in layer.parameters(recurse=False):
                _scramble(parameter, generator)
        done = upto
        maps = make_maps(scrambled, images, classes, method=method)
        result.append(RandomisationStage(done / len(layers), agreement(trained, maps)))
    return result


def _area(curves: FloatArray) -> FloatArray:
    """Areas (N,) under curves (N, steps + 1) over the unit interval, by trapezia."""
    area: FloatArray = (curves[:, 1:] + curves[:, :-1]).mean(axis=1) / 2
    return area


def _scramble(parameter: Tensor, generator: torch.Generator) -> None:
    order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
    with torch.no_grad():
        parameter.copy_(parameter.flatten()[order].view_as(parameter))


def _orders_something(maps: Tensor) -> Tensor:
    """Whether a map is finite and not constant, (N,)."""
    if maps.shape[0] == 0:
        return torch.zeros(0, dtype=torch.bool)
    rows = maps.flatten(1)
    return torch.isfinite(rows).all(dim=1) & (rows.amax(dim=1) > rows.amin(dim=1))


def rank_correlation(first: FloatArray, second: FloatArray) -> FloatArray:
    """Spearman's correlation (N,) of the rows of two (N, M) arrays, in [-1, 1].

    A row that is constant, in either array, orders nothing and gets 0.
    """
    a, b = (_centered_ranks(rows) for rows in (first, second))
    scale = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    products = (a * b).sum(axis=1)
    correlation: FloatArray = np.divide(products, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.clip(correlation, -1, 1)


def _centered_ranks(rows: FloatArray) -> FloatArray:
    if rows.size == 0:
        return np.zeros(rows.shape)
    # Mid-ranks sum to the same in every row, so that their mean is exact.
    ranks: FloatArray = rankdata(rows, axis=1) - (rows.shape[1] + 1) / 2
    return ranks
