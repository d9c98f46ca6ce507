"""Maps made by covering: what a cell is worth is what the confidence loses without it.

Grad-CAM asks a network for the slope of an answer. These ask for the answer itself, with parts of
the image blurred: window by window (occlusion) or half of the image at random (as in RISE). That
takes tens of passes an image, in batches, and no gradient. Where average pooling and one linear
layer follow the feature map, covering its *cells* is arithmetic and takes no pass at all.

Maps are signed: below 0 where covering speaks for the class. All are on the grid of the feature
map that Grad-CAM explains. Nothing here looks at a label, and an image's map depends on that image
and the model alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.explain.gradcam import batches, forward_with_features, head_weight_of, in_pixels
from xcal.explain.inference import passes, predict_logits, undisturbed

Grid = tuple[int, int]
WINDOW = 2
"""Cells a side of what is covered at once: one cell alone hardly moves an answer."""
MASKS = 96
"""Random masks of an image, half of them the other half's complements."""

NO_CELLS = (
    "cell-occlusion needs a network that names a linear head_layer on the average of the explained"
    " map: choose occlusion."
)


def map_grid(model: nn.Module, images: Tensor) -> Grid:
    """Height and width of the network's feature map for such images."""
    with undisturbed(model), torch.no_grad():
        _, features = forward_with_features(model, images[:1])
    return features.shape[2], features.shape[3]


def occlusion_maps(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    grid: Grid | None = None,
    window: int = WINDOW,
    batch_size: int = 64,
) -> Tensor:
    """Maps (N, h, w): the mean fall of the class's confidence over the windows that cover a cell.

    Windows of `window` cells a side move by one cell and are covered by the blurred image; all lie
    inside it (Zeiler and Fergus 2014). A network that pools views of an image (`models/views.py`)
    sees each window in one of them, and neighboring windows in different ones: a cell's mean is
    over views as well, at no more passes than of one view. The model is left untouched.
    """
    h, w = grid or map_grid(model, images)
    windows = _windows(h, w, window).to(images.device)
    keep = 1 - in_pixels(windows, images).to(images)
    across = w - min(window, w) + 1
    numbers = torch.arange(len(windows))
    turns = numbers // across % 2 * 2 + numbers % across % 2
    return _per_cell(_drops(model, images, keep, classes, batch_size, turns), windows).to(images)


def rise_maps(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    grid: Grid | None = None,
    masks: int = MASKS,
    seed: int = 0,
    batch_size: int = 64,
) -> Tensor:
    """Maps (N, h, w): how the class's confidence goes with whether a cell is kept.

    As RISE (Petsiuk et al. 2018): random halves of the image are covered. Unlike it, what is
    covered is blurred and not black, masks come in pairs of complements, and a cell gets the slope
    of the confidence, so that chance in how often it was kept does not count. All images share the
    masks, which follow from the seed.
    """
    if masks < 2:
        raise UserError(f"There are to be {masks} random masks: choose 2 or more.")
    h, w = grid or map_grid(model, images)
    drawn = _random_halves(h, w, masks, seed)
    keep = in_pixels(drawn.to(images.device), images).to(images)
    # Complements in one view: what a cell is worth is told within it.
    turns = torch.arange(len(drawn)) // 2
    after = -_drops(model, images, keep, classes, batch_size, turns)
    centered = (drawn - drawn.mean(dim=0)).to(after)
    scale = centered.square().sum(dim=0).clamp(min=1e-12)
    moved = after - after.mean(dim=1, keepdim=True)
    return (torch.einsum("nm,mhw->nhw", moved, centered) / scale).to(images.dtype)


def cell_maps(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    batch_size: int = 64,
) -> Tensor:
    """Occlusion of the feature map's own cells, (N, h, w), without a pass for each window.

    Covered cells hold the mean of the map's cells. The head is linear on their average, so every
    class's logit after covering is known exactly. Unlike in Grad-CAM the other classes count: the
    map is of the confidence.
    """
    head_weight = head_weight_of(model)
    if head_weight is None:
        raise UserError(NO_CELLS)
    found = []
    for part, named in batches(images, classes, batch_size):
        with undisturbed(model), torch.no_grad():
            logits, features = forward_with_features(model, part)
        chosen = logits.argmax(dim=1) if named is None else named
        h, w = features.shape[2:]
        parts = torch.einsum("kc,nchw->nkhw", head_weight.double(), features.double()) / (h * w)
        parts = parts - parts.mean(dim=(2, 3), keepdim=True)
        windows = _windows(h, w, WINDOW).to(parts)
        lost = torch.einsum("nkhw,mhw->nmk", parts, windows)
        before = _of_class(logits, chosen)
        after = _of_class(logits.double()[:, None] - lost, chosen[:, None].expand(-1, len(windows)))
        found.append(_per_cell(before[:, None] - after, windows))
    return torch.cat(found).to(images.dtype)


def gradient_input_maps(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    batch_size: int = 64,
) -> Tensor:
    """Gradient × input, summed over channels and averaged over each cell, (N, h, w): a control."""
    size = map_grid(model, images)
    found = []
    with undisturbed(model), torch.inference_mode(False), torch.enable_grad():
        for given, named in batches(images, classes, batch_size):
            part = given.clone().requires_grad_(True)
            logits = model(part)
            chosen = logits.argmax(dim=1) if named is None else named
            (gradient,) = torch.autograd.grad(logits.gather(1, chosen[:, None]).sum(), part)
            product = (gradient * part.detach()).sum(dim=1, keepdim=True)
            found.append(F.adaptive_avg_pool2d(product, size).squeeze(1))
    return torch.cat(found)


def random_maps(model: nn.Module, images: Tensor, *_: object, **__: object) -> Tensor:
    """Maps (N, h, w) that know nothing, a control: each follows from its image's bytes alone."""
    grid = map_grid(model, images)
    sums = [zlib.crc32(np.ascontiguousarray(i).tobytes()) for i in images.detach().cpu().numpy()]
    drawn = [np.random.default_rng([0, one]).random(grid) for one in sums]
    return torch.from_numpy(np.array(drawn).reshape(-1, *grid)).to(images)


def blurred(images: Tensor) -> Tensor:
    """Gaussian blur whose standard deviation is a tenth of the image's shorter side."""
    channels, height, width = images.shape[1:]
    deviation = max(0.1 * min(height, width), 0.5)
    # Three deviations hold nearly all of the bell; reflection needs the radius inside the image.
    radius = min(math.ceil(3 * deviation), height - 1, width - 1)
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    bell = torch.exp(-((offsets / deviation) ** 2) / 2)
    bell = (bell / bell.sum()).expand(channels, 1, -1)
    padded = F.pad(images, (radius, radius, radius, radius), mode="reflect")
    rows = F.conv2d(padded, bell.unsqueeze(2), groups=channels)
    return F.conv2d(rows, bell.unsqueeze(3), groups=channels)


def _windows(h: int, w: int, side: int) -> Tensor:
    """Which cells each window covers, (windows, h, w) of 0 and 1."""
    if side < 1:
        raise UserError(f"A window of {side} cells covers nothing: choose 1 or more.")
    tall, wide = min(side, h), min(side, w)
    places = [(i, j) for i in range(h - tall + 1) for j in range(w - wide + 1)]
    found = torch.zeros(len(places), h, w)
    for number, (i, j) in enumerate(places):
        found[number, i : i + tall, j : j + wide] = 1
    return found


def _random_halves(h: int, w: int, count: int, seed: int) -> Tensor:
    """Masks (count, h, w) of 0 and 1 in blocks of two cells that begin anywhere."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(math.ceil(count / 2)):
        coarse = generator.random((h // 2 + 2, w // 2 + 2)) < 0.5
        down, right = generator.integers(2, size=2)
        fine = coarse.repeat(2, axis=0).repeat(2, axis=1)[down : down + h, right : right + w]
        found += [fine, ~fine]
    return torch.from_numpy(np.array(found[:count], dtype=np.float32))


def _drops(
    model: nn.Module,
    images: Tensor,
    keep: Tensor,
    classes: Tensor | None,
    batch_size: int,
    turns: Tensor,
) -> Tensor:
    """How far the class's confidence falls where only `keep` (M, 1, H, W) is seen, (N, M).

    Where the network pools views, mask m is looked at in view number `turns[m]`.
    """
    if not len(images):
        return torch.zeros(0, len(keep), dtype=torch.float64, device=images.device)
    if classes is None:
        classes = predict_logits(model, images, batch_size=batch_size).argmax(dim=1)
    backdrop = blurred(images)
    found = torch.zeros(len(images), len(keep), dtype=torch.float64, device=images.device)
    with undisturbed(model), torch.inference_mode():
        for ask, masks in _looks(model, turns):
            intact = torch.cat([ask(part) for part in passes(images, batch_size)])
            before = _of_class(intact, classes)
            # Pairs of image and mask, in whole batches whatever the number of masks.
            for pairs in torch.arange(len(images) * len(masks)).split(batch_size):
                i, m = pairs // len(masks), masks[pairs % len(masks)]
                seen = torch.where(keep[m] > 0, images[i], backdrop[i])
                said = torch.cat([ask(part) for part in passes(seen, batch_size)])
                found[i, m] = before[i] - _of_class(said, classes[i])
    return found.clone()  # not a tensor of inference mode


def _looks(model: nn.Module, turns: Tensor) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """What to ask, and for which masks: the network, or one of its views after the other."""
    views = len(getattr(model, "views", ()))
    if not views:
        yield model, torch.arange(len(turns))
        return
    for view in (turns % views).unique().tolist():
        yield partial(model, view=view), torch.nonzero(turns % views == view).flatten()


def _of_class(logits: Tensor, classes: Tensor) -> Tensor:
    """Softmax confidence of each row's class, in float64."""
    return logits.double().softmax(dim=-1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)


def _per_cell(drops: Tensor, windows: Tensor) -> Tensor:
    """The mean of the drops (N, M) of all windows (M, h, w) that cover a cell, (N, h, w)."""
    windows = windows.to(drops)
    return torch.einsum("nm,mhw->nhw", drops, windows) / windows.sum(dim=0)
