"""Passes of one size, in which nobody's numbers depend on who else was drawn, to the last bit.

A library chooses how it computes, and so how it rounds, by the shapes it is given. A server that
knows a machine can send weights that leave nothing but rounding; one more image in a draw then
turns everybody's gradients. In passes of a fixed number of rows all is computed in one way, and
what remains to be known is whether a row's numbers depend on its place or on its neighbors. That
is a property of the machine's libraries and not of any data: `is_batch_invariant` looks, before
a site trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from xcal.dp.clipping.named import trainable
from xcal.dp.clipping.recorder import RecordedPass, record
from xcal.dp.clipping.tape import Units
from xcal.explain.gradcam import closed_form_maps, gradcam_maps, head_weight_of
from xcal.explain.signal import SignalSettings, image_components
from xcal.models.backbone import split_backbone

_seen: dict[tuple[object, ...], bool] = {}


def is_batch_invariant(
    model: nn.Module,
    image: tuple[int, ...],
    rows: int,
    *,
    multi_label: bool = False,
    half: torch.dtype | None = None,
) -> int:
    """`rows`, if an image's numbers are then the same in every place and beside any others; else 1.

    Looked at to the bit, on made-up images (of shape `image`) and weights: in a training pass all
    that norms and sums are made of, its maps and the parts of its score, and the outputs of a pass
    for inference. Once in a process for a network's layers; its weights should be the first ones,
    not those of a server. The model is left as it is, and so is the random state.
    """
    look = partial(_apart, multi_label=multi_label, half=half)
    if rows <= 1 or _known(f"apart {multi_label} {half}", model, image, rows, look):
        return rows
    return 1


def is_cache_exact(model: nn.Module, image: tuple[int, ...], rows: int) -> bool:
    """Whether an image's numbers are the same where its frozen backbone's activations are kept.

    Whether they are may follow how many images a client has. Looked at as by `is_batch_invariant`.
    """
    return rows == 0 or _known("kept", model, image, rows, _kept_alike)


def _known(
    what: str,
    model: nn.Module,
    image: tuple[int, ...],
    rows: int,
    look: Callable[[nn.Module, tuple[int, ...], int], bool],
) -> bool:
    trained = tuple(trainable(model))
    device = next(model.parameters()).device
    question = (what, repr(model), trained, image, rows, str(device), torch.get_num_threads())
    if question not in _seen:
        # As the engine itself computes: TF32 would be another kernel.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            _seen[question] = look(model, image, rows)
    return _seen[question]


def _apart(
    model: nn.Module,
    image: tuple[int, ...],
    rows: int,
    *,
    multi_label: bool,
    half: torch.dtype | None,
) -> bool:
    source = torch.Generator().manual_seed(0)
    stranger = _stranger(model, source)
    first, others = (_images(model, image, rows, source) for _ in range(2))
    numbers = torch.arange(rows, device=first.device)
    labels = _labels(stranger, first)
    if multi_label:  # another loss: every finding but one
        labels = 1 - torch.nn.functional.one_hot(labels, int(labels.max()) + 1)
    seen = list(_numbers(stranger, first, labels, half))
    everybody, even = torch.ones_like(numbers, dtype=torch.bool), numbers % 2 == 0
    # All of them one place on, which ties every place to the next; then half of them elsewhere,
    # beside others.
    for places, stay in ((numbers.roll(1), everybody), (numbers.flip(0), even),
                         (numbers.roll(rows // 4), ~even)):  # fmt: skip
        moved = torch.where(stay.view(-1, *[1] * len(image)), first[places], others)
        again = _numbers(stranger, moved, labels[places], half)
        if not all(_equal(a[places][stay], b[stay]) for a, b in zip(seen, again, strict=True)):
            return False
    return True


def _kept_alike(model: nn.Module, image: tuple[int, ...], rows: int) -> bool:
    source = torch.Generator().manual_seed(1)
    stranger = _stranger(model, source)
    images = _images(model, image, rows, source)
    labels = _labels(stranger, images)
    seen = list(_training_numbers(stranger, images, labels))
    cam_layer = getattr(model, "cam_layer", None)
    for split in (split_backbone(stranger), split_backbone(stranger, seen=cam_layer)):
        if split is None:
            continue
        again = _training_numbers(stranger, split.begin(images), labels, split.forward_head)
        if not all(_equal(a, b) for a, b in zip(seen, again, strict=True)):
            return False
    return True


def _stranger(model: nn.Module, source: torch.Generator) -> nn.Module:
    """The network with other weights: received ones could be made to look well, or be zero."""
    stranger = deepcopy(model)
    with torch.no_grad():
        for value in stranger.parameters():
            drawn = torch.randn(2, *value.shape, generator=source).to(value.device, value.dtype)
            value.mul_(1 + 0.1 * drawn[0]).add_(0.01 * drawn[1])
    return stranger


def _images(model: nn.Module, image: tuple[int, ...], rows: int, source: torch.Generator) -> Tensor:
    parameter = next(model.parameters())
    return torch.randn(rows, *image, generator=source).to(parameter.device, parameter.dtype)


def _labels(model: nn.Module, images: Tensor) -> Tensor:
    """A label for every image: all classes in turn."""
    with torch.no_grad():
        classes = int(model(images).shape[1])
    return torch.arange(len(images), device=images.device).remainder(classes)


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, but for what is no number: two of those are alike."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0.0), other.nan_to_num(0.0)
    )


def _numbers(
    model: nn.Module, images: Tensor, labels: Tensor, half: torch.dtype | None
) -> Iterator[Tensor]:
    """Everything of a pass that clipping or the signal uses, image by image."""
    with torch.no_grad():
        yield model(images)
    cam_layer = getattr(model, "cam_layer", None)
    if cam_layer is None:
        yield from _training_numbers(model, images, labels, half=half)
        return
    seen = _recorded(model, images, labels, capture=cam_layer, half=half)
    assert seen.features is not None
    logits, features = seen.logits.detach(), seen.features.detach()
    yield logits
    yield features
    yield from seen.tape.by_image()
    yield seen.tape.squared_norms()
    head = head_weight_of(model)
    chosen = logits.argmax(dim=1)
    if head is None:
        yield gradcam_maps(model, images, chosen)
    else:
        yield closed_form_maps(features, head, chosen)
    parts = image_components(model, images, logits, features, SignalSettings(), rows=len(images))
    yield from (parts.logit_drop, parts.margin, parts.concentration)


def _training_numbers(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    forward: Callable[[Tensor], Tensor] | None = None,
    half: torch.dtype | None = None,
) -> Iterator[Tensor]:
    seen = _recorded(model, inputs, labels, forward=forward, half=half)
    yield seen.logits.detach()
    yield from seen.tape.by_image()
    yield seen.tape.squared_norms()


def _recorded(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    capture: str | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    half: torch.dtype | None = None,
) -> RecordedPass:
    count = len(inputs)
    everyone = Units(count, alike=True)
    ones = inputs.new_ones(count)
    return record(
        model, inputs, labels, ones, everyone, capture=capture, forward=forward, half=half
    )
