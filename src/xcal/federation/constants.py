"""Public constants for a head that reads columns: made of public images, kept in a weights file.

The images are the data set's validation images, which no guarantee covers: they are public, as
everywhere in this package, and at sites of a real population somebody must have agreed. Labels are
not looked at. Clients elsewhere get the file, like any published weights; the request's digest of
frozen parts refuses a client that has another one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from xcal.config import Experiment
from xcal.data import catalog
from xcal.data.image_store import data_root
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.federation.files import write_tensors
from xcal.federation.setup import AGREE, DATA_SEED, may_measure
from xcal.models.backbone import Split
from xcal.models.model_registry import build_network
from xcal.models.probe import CONSTANTS, TURN, constants_of, whitening
from xcal.models.views import OverViews
from xcal.models.weights import load_published, read_weights

MOST_IMAGES = 512
FEWEST_IMAGES = 16
"""Fewer images than this tell no deviation."""
_AT_ONCE = 32


def with_constants(experiment: Experiment) -> Experiment:
    """The experiment, its weights with the constants that its head needs.

    Nothing changes where the head needs none or the file brings them. Otherwise they are made once
    and kept beside the imported sets; the experiment then names that file.
    """
    if experiment.head_reads == "last" or experiment.weights is None:
        return experiment
    published = read_weights(Path(experiment.weights))
    if published.keys() >= set(CONSTANTS):
        return experiment
    images = public_images(experiment)
    state = hashlib.sha256(Path(experiment.weights).read_bytes())
    state.update(np.ascontiguousarray(images.pixels).tobytes())
    state.update(f"{experiment.network} {experiment.norm} {experiment.output_stride}".encode())
    state.update(experiment.head_reads.encode())
    if experiment.pool_views != "none":  # means over views vary less than what they are means of
        state.update(experiment.pool_views.encode())
    if experiment.whiten:
        state.update(f"whiten {experiment.whiten}".encode())
    name = f"{experiment.data.replace(':', '.')}-{experiment.pixels}px"
    path = data_root() / "weights" / f"{name}-{state.hexdigest()[:16]}.safetensors"
    if not path.exists():
        write_constants(experiment, images, path)
    return experiment.model_copy(update={"weights": str(path)})


def public_images(experiment: Experiment) -> Images:
    """The validation images that the constants are made of, evenly spread over the set's."""
    if not may_measure(experiment):
        raise UserError(
            f"head_reads = {experiment.head_reads!r} needs constants, which would be made of the"
            f" validation images of {experiment.data}: give weights that `xcal data constants` made"
            f" of a public set, or {AGREE}."
        )
    images = catalog.load(experiment.data, pixels=experiment.pixels, seed=DATA_SEED).validation
    if len(images) < FEWEST_IMAGES:
        raise UserError(
            f"{experiment.data} has {len(images)} public validation images, too few for the"
            " constants of a head that reads several stages: set head_reads to 'last', or give"
            " weights that `xcal data constants` made of another set."
        )
    count = min(len(images), MOST_IMAGES)
    return images.take(np.linspace(0, len(images) - 1, count).round().astype(np.int64))


def write_constants(experiment: Experiment, images: Images, path: Path) -> None:
    """The experiment's published weights and the constants over `images`, as one file."""
    if experiment.weights is None or experiment.head_reads == "last":
        raise UserError(
            "Constants are for a head that reads several stages of published weights: give weights"
            " and head_reads = 'stages:a-b'."
        )
    plain = {"weights": None, "pool_views": "none", "whiten": 0.0}
    network = build_network(experiment.model_copy(update=plain), 2).eval()
    neutral = {name: network.state_dict()[name] for name in CONSTANTS}
    published = {
        name: tensor.contiguous()
        for name, tensor in read_weights(Path(experiment.weights)).items()
        if name not in (*CONSTANTS, TURN)
    }
    load_published(network, {**published, **neutral})
    if experiment.pool_views != "none":
        network = OverViews(network, experiment.pool_views)
    # All but the head: from images to what it reads.
    reading = Split(tuple(network.segments()[:-1]), ())  # type: ignore[operator]
    pooled = torch.cat(
        [
            reading.begin(to_tensor(np.asarray(images.pixels[i : i + _AT_ONCE])))
            for i in range(0, len(images), _AT_ONCE)
        ]
    )
    constants = dict(zip(CONSTANTS, constants_of(pooled), strict=True))
    if experiment.whiten:
        constants[TURN] = whitening(pooled, experiment.whiten)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, {**published, **constants}, {"head_reads": experiment.head_reads})
