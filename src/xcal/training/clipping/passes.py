"""Passes of one size, in which nobody's numbers depend on who else was drawn, to the last bit.

A library chooses how it computes, and so how it rounds, by the shapes it is given. A server that
knows a machine can send weights that leave nothing but rounding; one more image in a draw then
turns everybody's gradients. In passes of a fixed number of rows all is computed in one way, and
what remains to be known is whether a row's numbers depend on its place or on its neighbours. That
is a property of the machine's libraries and not of any data: `rows_apart` looks, before a home
trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from xcal.training.clipping.book import Units
from xcal.training.clipping.recorder import record

_seen: dict[tuple[object, ...], bool] = {}


def rows_apart(model: nn.Module, image: tuple[int, ...], rows: int) -> int:
    """`rows`, if an image's numbers are then the same in every place and beside any others; else 1.

    Looked at to the bit, on made-up images (of shape `image`) and weights: in a training pass all
    that norms and sums are made of, and the outputs of a pass for inference. Once in a process for
    a network's layers; its weights should be the first ones, not those of a server. The model is
    left as it is, and so is the random state.
    """
    if rows <= 1:
        return rows
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    device = next(model.parameters()).device
    question = (repr(model), trained, image, rows, str(device), torch.get_num_threads())
    if question not in _seen:
        _seen[question] = _apart(model, image, rows)
    return rows if _seen[question] else 1


def _apart(model: nn.Module, image: tuple[int, ...], rows: int) -> bool:
    source = torch.Generator().manual_seed(0)
    parameter = next(model.parameters())
    device, kind = parameter.device, parameter.dtype
    # Received weights could be made to look well, and a head may start at zero.
    stranger = deepcopy(model)
    with torch.no_grad():
        for value in stranger.parameters():
            drawn = torch.randn(2, *value.shape, generator=source).to(device, value.dtype)
            value.mul_(1 + 0.1 * drawn[0]).add_(0.01 * drawn[1])

    def images() -> Tensor:
        return torch.randn(rows, *image, generator=source).to(device, kind)

    first, others = images(), images()
    seen = list(_numbers(stranger, first))
    everyone = torch.arange(rows, device=device)
    shuffled = torch.randperm(rows, generator=source).to(device)
    for half, places in enumerate((everyone.roll(1), shuffled)):
        kept = places % 2 == half
        moved = torch.where(kept.view(-1, *[1] * len(image)), first[places], others)
        again = _numbers(stranger, moved, places)
        if not all(torch.equal(a[places][kept], b[kept]) for a, b in zip(seen, again, strict=True)):
            return False
    return True


def _numbers(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> Iterator[Tensor]:
    """Everything of a pass that clipping or the signal uses, image by image."""
    with torch.no_grad():
        logits = model(images)
    yield logits
    count, classes = logits.shape
    numbers = torch.arange(count, device=images.device) if labels is None else labels
    cam_layer = getattr(model, "cam_layer", None)
    ones = images.new_ones(count)
    seen = record(model, images, numbers % classes, ones, Units(count), capture=cam_layer)
    yield seen.logits
    if seen.features is not None:
        yield seen.features
    yield from seen.book.by_image()
    yield seen.book.squared_norms()
