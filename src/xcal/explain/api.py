"""Maps, ROAD and the signal for any torch network: what `xcal.explain` offers to a script.

The functions beside this file ask a network for its `cam_layer`. Here the layer is an argument,
images and maps are tensors or arrays, and results come back as what the images were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xcal.errors import UserError
from xcal.explain.any_network import (
    AnyNetwork,
    Array,
    Layer,
    Reshape,
    as_classes,
    as_inputs,
    as_maps,
    at_layer,
    check_compares,
    like,
    prepared,
)
from xcal.explain.choosing import CANDIDATES, DEFAULT, MapChoice, make_maps
from xcal.explain.choosing import choose_map as _choose_map
from xcal.explain.gradcam import MapMethod, gradcam_maps
from xcal.explain.inference import predict_logits
from xcal.explain.occlusion import MASKS, WINDOW, occlusion_maps, rise_maps
from xcal.explain.road import RoadResult, RoadSettings
from xcal.explain.road import road as _road
from xcal.explain.signal import Fill, SignalSettings, judged, scores


@dataclass(frozen=True)
class Signal:
    """How well each image's explanation holds: `score` in [0, 1] and its three parts, (N,) each.

    All four are tensors where the images were, and arrays otherwise. NaN in the parts marks an
    image with a number that is not finite; its score is 0.
    """

    score: Array
    logit_drop: Array
    margin: Array
    concentration: Array


def gradcam(
    model: nn.Module,
    images: Array,
    layer: Layer | None = None,
    classes: Array | Sequence[int] | int | None = None,
    *,
    method: MapMethod = "gradcam",
    reshape: Reshape | None = None,
    batch_size: int = 64,
) -> Array:
    """Grad-CAM of each image: where the layer's features speak for a class.

    Computed in evaluation mode; the model comes back as it was: modes, gradients, hooks, and the
    random state.

    Args:
        model: any network that takes the images and gives logits (N, classes).
        images: (N, C, H, W), floating point, as the network takes them; tensor or array.
        layer: the layer whose output is explained, as a module of the network or by its dotted
            name; usually the last one before pooling. None: the network's own `cam_layer`.
        classes: the class of each image (N,), or one for all. None: the predicted ones.
        method: "gradcam", "gradcam++", "hirescam" or "layercam".
        reshape: for a layer that gives tokens: lays its output out as (N, channels, h, w), as
            `lambda t: t[:, 1:].transpose(1, 2).unflatten(2, (14, 14))` does for a ViT's.
        batch_size: images a forward pass.

    Returns:
        Maps (N, h, w), non-negative, of the layer's height and width; a tensor on the images'
        device where the images are one, else a float32 or float64 array.

    Raises:
        UserError: for a layer that is not the network's, or images that it does not take.

    Guarantee: none, ε = ∞. A map of a private image is as private as the image.
    """
    network, inputs = at_layer(model, layer, reshape), as_inputs(model, images)
    chosen = as_classes(network, inputs, classes)
    return like(images, gradcam_maps(network, inputs, chosen, method=method, batch_size=batch_size))


def occlusion(
    model: nn.Module,
    images: Array,
    layer: Layer | None = None,
    classes: Array | Sequence[int] | int | None = None,
    *,
    grid: tuple[int, int] | None = None,
    window: int = WINDOW,
    reshape: Reshape | None = None,
    batch_size: int = 64,
) -> Array:
    """Occlusion maps: what the confidence loses when a part of the image is blurred.

    A window of some cells moves over the image by one cell at a time; a cell gets the mean fall of
    the class's softmax confidence over the windows that cover it. One forward pass an image and
    window, in batches. The model comes back as it was.

    Args:
        model: any network that takes the images and gives two logits or more, (N, classes).
        images: (N, C, H, W), floating point, as the network takes them; tensor or array.
        layer: the layer whose height and width the maps get, by module or dotted name. None: the
            network's own `cam_layer`.
        classes: the class of each image (N,), or one for all. None: the predicted ones.
        grid: height and width of the maps in cells; no layer is needed then.
        window: cells a side of what is covered at once.
        reshape: as in `gradcam`, for a layer that gives tokens.
        batch_size: covered images a forward pass.

    Returns:
        Maps (N, h, w) in [-1, 1], below 0 where covering speaks for the class; a tensor on the
        images' device where the images are one, else an array.

    Raises:
        UserError: for a layer, grid or images that do not fit, or a network of one logit.

    Guarantee: none, ε = ∞. A map of a private image is as private as the image.
    """
    network, inputs, chosen = prepared(model, images, layer, classes, grid, reshape)
    found = occlusion_maps(network, inputs, chosen, grid=grid, window=window, batch_size=batch_size)
    return like(images, found)


def rise(
    model: nn.Module,
    images: Array,
    layer: Layer | None = None,
    classes: Array | Sequence[int] | int | None = None,
    *,
    grid: tuple[int, int] | None = None,
    masks: int = MASKS,
    seed: int = 0,
    reshape: Reshape | None = None,
    batch_size: int = 64,
) -> Array:
    """Maps by random masks, as in RISE: how the confidence goes with whether a cell is seen.

    Half of the image, in blocks of two cells, is blurred at random; a cell gets the slope of the
    class's softmax confidence. One forward pass an image and mask, in batches. The model comes back
    as it was.

    Args:
        model: any network that takes the images and gives two logits or more, (N, classes).
        images: (N, C, H, W), floating point, as the network takes them; tensor or array.
        layer: the layer whose height and width the maps get, by module or dotted name. None: the
            network's own `cam_layer`.
        classes: the class of each image (N,), or one for all. None: the predicted ones.
        grid: height and width of the maps in cells; no layer is needed then.
        masks: how many there are of each image; more are slower and steadier.
        seed: of the masks, which are the same for all images.
        reshape: as in `gradcam`, for a layer that gives tokens.
        batch_size: covered images a forward pass.

    Returns:
        Maps (N, h, w), signed; a tensor on the images' device where the images are one, else an
        array.

    Raises:
        UserError: for a layer, grid or images that do not fit, or a network of one logit.

    Guarantee: none, ε = ∞. A map of a private image is as private as the image.
    """
    network, inputs, chosen = prepared(model, images, layer, classes, grid, reshape)
    found = rise_maps(
        network, inputs, chosen, grid=grid, masks=masks, seed=seed, batch_size=batch_size
    )
    return like(images, found)


def maps(
    model: nn.Module,
    images: Array,
    method: str = DEFAULT,
    layer: Layer | None = None,
    classes: Array | Sequence[int] | int | None = None,
    *,
    reshape: Reshape | None = None,
    batch_size: int = 64,
) -> Array:
    """Maps of any kind by name.

    Args:
        model: any network that takes the images and gives logits (N, classes).
        images: (N, C, H, W), floating point, as the network takes them; tensor or array.
        method: "gradcam", "gradcam++", "hirescam", "layercam", "occlusion", "cell-occlusion" (of
            the layer's own cells, in closed form where a linear head reads their average), "rise";
            the controls "gradient-input" and "random"; or two joined by +, as
            "occlusion+gradcam", each divided by its root mean square and added.
        layer: the layer that is explained and whose grid the maps have, by module or dotted name.
            None: the network's own `cam_layer`.
        classes: the class of each image (N,), or one for all. None: the predicted ones.
        reshape: as in `gradcam`, for a layer that gives tokens.
        batch_size: images a forward pass.

    Returns:
        Maps (N, h, w), signed but for the Grad-CAM family; a tensor on the images' device where the
        images are one, else an array.

    Raises:
        UserError: for a name that is no map's, or a layer or images that do not fit.

    Guarantee: none, ε = ∞. A map of a private image is as private as the image.
    """
    network, inputs = at_layer(model, layer, reshape), as_inputs(model, images)
    chosen = as_classes(network, inputs, classes)
    return like(images, make_maps(network, inputs, chosen, method=method, batch_size=batch_size))


def choose_map(
    model: nn.Module,
    images: Array,
    layer: Layer | None = None,
    *,
    groups: Sequence[Any] | None = None,
    candidates: Sequence[str] = CANDIDATES,
    reshape: Reshape | None = None,
) -> MapChoice:
    """Which kind of map has the highest ROAD for this model on public images.

    Grad-CAM stays unless another kind is shown to be better: the 95 % interval of the paired
    difference of their ROAD lies above 0.

    Args:
        model: any network that takes the images and gives two logits or more, (N, classes).
        images: public images, (N, C, H, W), as the network takes them; tensor or array.
        layer: the layer that is explained, by module or dotted name. None: the network's own
            `cam_layer`.
        groups: whose each image is (N,): intervals count groups. None: each image by itself.
        candidates: names of maps as `maps` takes them.
        reshape: as in `gradcam`, for a layer that gives tokens.

    Returns:
        A `MapChoice`: `method` for `maps`, the mean ROAD of every kind, the gain with its interval;
        `sentence()` says it.

    Raises:
        UserError: for a layer or images that do not fit, or a network of one logit.

    Guarantee: none for these images, ε = ∞: give public ones. For the images that the model was
    trained on nothing is spent: the choice is post-processing of a released model.
    """
    network, inputs = at_layer(model, layer, reshape), as_inputs(model, images)
    if len(inputs):
        check_compares(predict_logits(network, inputs[:1]))
    return _choose_map(network, inputs, groups, candidates=candidates)


def road(
    model: nn.Module,
    images: Array,
    maps: Array,
    classes: Array | Sequence[int] | int | None = None,
    *,
    levels: Sequence[float] = RoadSettings.levels,
    noise: float = RoadSettings.noise,
    seed: int = RoadSettings.seed,
    batch_size: int = RoadSettings.batch_size,
) -> RoadResult:
    """ROAD (Rong et al. 2022): does removing what the maps call important change the answer?

    Pixels are removed most salient first and least salient first, and imputed from those that are
    left. `result.road` is the mean difference of the two changes of confidence, halved.

    Args:
        model: any network that takes the images and gives two logits or more, (N, classes).
        images: (N, C, H, W), floating point, as the network takes them; tensor or array.
        maps: one for each image, (N, h, w) or (N, 1, h, w), of any explanation; they are enlarged
            to the images.
        classes: the class that each map explains (N,), or one for all. None: the predicted ones.
        levels: percent of the pixels that are removed, each above 0 and below 100.
        noise: standard deviation of what is added to imputed values, in the units of the images.
        seed: of that noise and of the order among equally salient pixels.
        batch_size: images a forward pass.

    Returns:
        `road` in [-1/2, 1/2], 0 for a map that tells nothing; `scores` (N,), the curves `morf` and
        `lerf` (N, levels) as arrays; `summary()` as plain numbers.

    Raises:
        UserError: for maps that do not fit the images, or a network of one logit.

    Guarantee: none, ε = ∞. Numbers of private images are not for release.
    """
    network, inputs = AnyNetwork(model), as_inputs(model, images)
    settings = RoadSettings(tuple(levels), noise, seed, batch_size)
    if len(inputs):
        check_compares(predict_logits(network, inputs[:1]))
    return _road(
        network,
        inputs,
        as_maps(maps, inputs),
        settings,
        classes=as_classes(network, inputs, classes),
    )


def signal(
    model: nn.Module,
    images: Array,
    layer: Layer | None = None,
    *,
    maps: Array | None = None,
    q: float = SignalSettings.q,
    alpha: float = SignalSettings.alpha,
    beta: float = SignalSettings.beta,
    gamma: float = SignalSettings.gamma,
    fill: Fill = SignalSettings.fill,
    reshape: Reshape | None = None,
    batch_size: int = 64,
) -> Signal:
    """How well the explanation of each prediction holds, as the method `xcal` measures it.

    The most salient cells are covered: score = clip((α·drop + β·margin)·concentrationᵞ, 0, 1) of
    the fall of the predicted logit, the lead that another class then has, and the share of the map
    that was covered.

    Args:
        model: any network that takes the images and gives two logits or more, (N, classes).
        images: (N, C, H, W), floating point, as the network takes them; tensor or array.
        layer: the layer whose Grad-CAM is judged, by module or dotted name. None: the network's
            own `cam_layer`.
        maps: judge these instead, of the predicted classes, (N, h, w) or (N, 1, h, w) and
            non-negative; no layer is needed then.
        q: share of the cells that are covered, ties included, above 0 and at most 1.
        alpha: weight of the logit's fall.
        beta: weight of the margin.
        gamma: exponent of the concentration.
        fill: what covers a cell, in the units of the images: a number, one for each channel,
            "imagenet" (which is 0) or "image-mean".
        reshape: as in `gradcam`, for a layer that gives tokens.
        batch_size: images a forward pass.

    Returns:
        A `Signal` of tensors or arrays, as the images are.

    Raises:
        UserError: for a layer or maps that do not fit, or a network of one logit.

    Guarantee: none, ε = ∞; each image's numbers depend on that image and the model alone, and the
    score is in [0, 1], which is what a private sum of scores is built on.
    """
    settings = SignalSettings(q, alpha, beta, gamma, fill)
    inputs = as_inputs(model, images)
    network = AnyNetwork(model) if maps is not None else at_layer(model, layer, reshape)
    if not len(inputs):
        nothing = torch.zeros(0, dtype=torch.float64)
        return Signal(*(like(images, nothing) for _ in range(4)))
    logits = predict_logits(network, inputs, batch_size=batch_size)
    check_compares(logits)
    if maps is None:
        found = gradcam_maps(network, inputs, logits.argmax(dim=1), batch_size=batch_size)
    else:
        found = as_maps(maps, inputs)
        if bool((found < 0).any()):
            raise UserError("The maps hold negative numbers: give the part above 0, or magnitudes.")
    parts = judged(network, inputs, logits, found, settings)
    score = scores(parts, alpha, beta, gamma)
    return Signal(
        *(like(images, v) for v in (score, parts.logit_drop, parts.margin, parts.concentration))
    )
