"""What can be known of a run before its first step: what keeps it from ending, and what it will not
be able to measure.

The first is refused; the second is told beforehand, recorded, and null in the result.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from xcal.config import Experiment
from xcal.data.images import ImageData
from xcal.dp.batch_invariance import check_independence
from xcal.dp.clipping import ClippingEngine
from xcal.errors import UserError, first_line
from xcal.explain.choosing import check_map
from xcal.explain.gradcam import gradcam_maps, head_weight_of
from xcal.explain.signal import NO_CELLS
from xcal.methods.base import SIGNAL_KEYS, ChecksNetwork, Method, clips_units
from xcal.methods.registry import method_of
from xcal.models.model_registry import build_network
from xcal.plugins import own_code

MOST_TRIED = 64  # images in one pass of a trial
# What torch raises where shapes do not fit.
_UNFIT = (RuntimeError, ValueError, IndexError, TypeError)

SHAPING = (
    "network",
    "norm",
    "output_stride",
    "train",
    "train_norm",
    "head_reads",
    "whiten",
    "weights",
    "pool_views",
)
"""The keys that `build_network` reads but for the seed: first weights mix no images."""
# Networks of this package that were tried in this process: why their answers cannot be explained.
_SEEN: dict[tuple[object, ...], str | None] = {}


def check_device(device: str) -> None:
    """Refuse a device that torch does not see on this machine."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device = {device!r} was asked for, but torch sees no GPU: use 'cpu'.")
    if number and int(number) >= torch.cuda.device_count():
        raise UserError(
            f"device = {device!r} was asked for, and torch sees {torch.cuda.device_count()} GPUs,"
            " counted from 0: use one of them."
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            f"device = {device!r} was asked for, but torch sees no Apple GPU: use 'cpu'."
        )


NO_ROAD = (
    "ROAD and the other measures of maps compare classes of which one is right, and these images"
    " may show several findings: no map is measured; `xcal explain --finding` draws them."
)


def check_findings(method: Method, multi_label: bool) -> None:
    """Refuse a method whose signal compares classes, of images that show several at once."""
    if multi_label and method.uses >= SIGNAL_KEYS:
        raise UserError(
            f"{method.name} takes its signal from one class against the others, and images of this"
            " data set may show several findings at once: choose a method without a signal, such"
            " as fl-dp or adaptive-clip."
        )


@lru_cache(maxsize=16)
def check_network(experiment: Experiment, classes: int, side: int) -> str | None:
    """Refuse a network that the experiment cannot be trained with; looked at once.

    Returned is why its answers cannot be explained, where that does not keep it from training; None
    where they can.
    """
    if ":" not in experiment.network:
        return _look_at_network(experiment, classes, side)
    with own_code("network", experiment.network, "a trial on made-up images"):
        return _look_at_network(experiment, classes, side)


def _look_at_network(experiment: Experiment, classes: int, side: int) -> str | None:
    network, method = build_network(experiment, classes), method_of(experiment)
    check_map(network, experiment.map_method)
    own, clips = ":" in experiment.network, clips_units(method)
    shape = None if own else (*(getattr(experiment, key) for key in SHAPING), classes, side, clips)
    if shape not in _SEEN:
        _check_answers(experiment, network, classes, side)
        if clips:
            try:
                ClippingEngine(network)
            except UserError as error:
                raise UserError(
                    f"The network {experiment.network!r} does not suit {method.name}: {error}."
                ) from error
            # Some mix only what is larger than a small trial.
            rows = min(experiment.expected_batch_size, MOST_TRIED) if own else 3
            check_independence(network, side, rows)
        unexplained = why_unexplained(network, side)
        if shape is not None:
            _SEEN[shape] = unexplained
    else:
        unexplained = _SEEN[shape]
    if isinstance(method, ChecksNetwork):
        method.check_network(network, experiment)
    if unexplained is not None and method.uses >= SIGNAL_KEYS:
        raise UserError(
            f"{method.name} takes its signal from maps, and the network {experiment.network!r}"
            f" gives none: {unexplained}"
        )
    covers = getattr(experiment, "cover", "pixels") == "cells" and method.uses >= SIGNAL_KEYS
    if covers and head_weight_of(network) is None:
        raise UserError(NO_CELLS)
    return unexplained


def _made_up(count: int, side: int) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def _check_answers(experiment: Experiment, network: nn.Module, classes: int, side: int) -> None:
    """Refuse a network that cannot take the images, or answers something else."""
    what = f"The network {experiment.network!r}"
    for count, training in ((1, False), (3, True), (1, True)):  # last as it trains
        network.train(training)
        try:
            with torch.no_grad():
                answers = network(_made_up(count, side))
        except _UNFIT as error:
            raise UserError(
                f"{what} cannot take {count} image{'s' if count > 1 else ''} of {side}×{side}"
                f" pixels ({first_line(error)}): choose another number of pixels or another"
                " network."
            ) from None
        if not isinstance(answers, torch.Tensor) or not answers.is_floating_point():
            kind = answers.dtype if isinstance(answers, torch.Tensor) else type(answers).__name__
            raise UserError(
                f"{what} answers with {kind}: it must give a tensor of real numbers (logits)."
            )
        shape = tuple(answers.shape)
        if shape != (count, classes):
            raise UserError(
                f"{what} answers {count} images with the shape {shape}: it must give one number for"
                f" each of the {classes} classes."
            )


def why_unexplained(network: nn.Module, side: int) -> str | None:
    """Why no map can be made of the network's answers to such images; None where it can."""
    try:
        gradcam_maps(network, _made_up(2, side))
    except UserError as error:
        return str(error)
    except _UNFIT:
        return "its cam_layer and head_layer do not fit together."
    return None


def unmeasured(
    experiment: Experiment, data: ImageData, unexplained: str | None, *, withheld: bool = False
) -> tuple[str, ...]:
    """What the run will not be able to measure, a sentence each.

    `withheld`: the set's validation and test images may not be used.
    """
    found = []
    if withheld:
        found.append(
            f"Nobody agreed that validation and test images of {data.name}, of a real population,"
            " be measured, so neither rounds nor the model are: set public_validation = true and"
            " public_validation_by = 'who agreed' if they may be."
        )
    elif experiment.validation_images and not len(data.validation):
        found.append("There are no validation images: no round is measured.")
    if not len(data.test):
        if not withheld:
            found.append("There are no test images: the model is not measured at the end.")
    else:
        counts = data.test.per_class(len(data.classes))
        absent = [name for name, count in zip(data.classes, counts, strict=True) if not count]
        if data.multi_label:
            found += (
                [
                    f"No test image shows {', '.join(map(repr, absent))}: there is no sensitivity"
                    " and no AUROC of it, and means are over the others."
                ]
                if absent
                else []
            )
        elif len(absent) == len(data.classes) - 1:
            found.append("All test images are of one class: there is no AUROC.")
        elif absent:
            found.append(
                f"No test image is of the class {', '.join(map(repr, absent))}: it has no"
                " sensitivity and no AUROC, and means are over the others."
            )
    if data.multi_label and (experiment.road_images or experiment.road_test_images != 0):
        found.append(NO_ROAD)
    elif unexplained is not None and (experiment.road_images or experiment.road_test_images != 0):
        found.append(f"No answer of the network can be explained, so no map is: {unexplained}")
    return tuple(found)
