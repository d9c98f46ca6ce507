"""A finished run, read back: its experiment, its network with the trained weights, its classes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from xcal.config import Experiment
from xcal.data import catalog
from xcal.data.images import ImageData, Images
from xcal.errors import UserError
from xcal.experiments import read_pinned
from xcal.explain.one_finding import OneFinding
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.setup import DATA_SEED, may_measure
from xcal.models.model_registry import build_network


class LoadedRun(NamedTuple):
    """The model is in evaluation mode, on the CPU, and its weights are those of the last round."""

    experiment: Experiment
    model: nn.Module
    classes: tuple[str, ...]
    folder: Path | None = None
    multi_label: bool = False
    """Whether the classes are findings, each told by itself."""

    def one_finding(self, number: int) -> LoadedRun:
        """The same network asked for one finding: absent or there."""
        name = self.classes[number]
        return self._replace(
            model=OneFinding(self.model, number), classes=(f"no {name}", name), multi_label=False
        )

    def refuse_findings(self, what: str) -> None:
        """Raise where the run is of several findings, for what compares classes."""
        if self.multi_label:
            raise UserError(
                f"{what} compares classes of which one is right, and this run tells several"
                " findings at once: `xcal explain RUN IMAGES --finding NAME` shows one of them."
            )


def load_run(folder: Path) -> LoadedRun:
    """Rebuild the network of the finished run in `folder` and load its weights.

    Everything is read from the folder: a file of published weights that the run started from need
    not be there any more. Names and shapes must agree exactly, or it is a `UserError`.
    """
    RunFolder.find(folder)  # refuses what is no run
    # Not the folder's own `experiment`, which is for going on: it refuses a run of a version that
    # knew fewer keys. To read a model, the keys that are there are enough.
    experiment = read_pinned(folder / "experiment.toml")
    path = folder / "model.safetensors"
    found = read_tensors(path)
    if found is None:
        if path.exists():
            raise UserError(f"{path} cannot be read: it is damaged. Restore it from a backup.")
        raise UserError(
            f"The run in {folder} is not finished: continue it with `xcal run --resume {folder}`."
        )
    weights, about = found
    classes = about.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"{path} does not name its classes: it was not written by a run.")
    # The run's own weights replace all of the network's, so what it started from is not needed.
    model = build_network(experiment.model_copy(update={"weights": None}), len(classes))
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise UserError(
            f"The weights in {path} do not fit the network {experiment.network!r} as it is built"
            " now: use the version of the code that the run's card.md names."
        ) from None
    several = bool(about.get("multi_label", False))
    return LoadedRun(experiment, model.eval(), tuple(classes), folder, several)


def load_data(
    run: LoadedRun, name: str | None = None, *, beside: Sequence[LoadedRun] = ()
) -> ImageData:
    """The run's data set, or the one called `name`, at the run's size and with its classes.

    Another set may list the classes in another order: labels are renumbered into the run's.
    Refused are images that the sites of this run, or of one `beside` it, withhold.
    """
    experiment = run.experiment
    wanted = name or experiment.data
    withholding = [r.experiment for r in (run, *beside) if not may_measure(r.experiment)]
    if any(wanted == held.data for held in withholding):
        raise UserError(
            f"Sites of a real population withhold the images of {wanted}: nobody agreed that they"
            " be measured (public_validation); `xcal evaluate RUN DATA` measures on a public set."
        )
    # Training images of the drawn set are not looked at, and no split depends on another's size.
    fewer = {"train": 1} if wanted == "smear" else {}
    data = catalog.load(wanted, pixels=experiment.pixels, seed=DATA_SEED, **fewer)
    for held in withholding:
        _check_others(data, held)
    if name is not None and not len(data.test):
        raise UserError(f"The data set {wanted!r} has no test images: choose another.")
    if data.multi_label != run.multi_label:
        raise UserError(
            f"The data set {wanted!r} cannot judge this run: one of them is of several findings at"
            " once, the other of classes."
        )
    if data.classes == run.classes:
        return data
    missing = [c for c in run.classes if c not in data.classes]
    unknown = [c for c in data.classes if c not in run.classes]
    if missing or unknown:
        difference = (
            f"it has no class {missing[0]!r}" if missing else f"it has a class {unknown[0]!r}"
        )
        raise UserError(
            f"The data set {wanted!r} cannot judge this run: {difference}, and the run's classes"
            f" are {', '.join(run.classes)}."
        )
    return _renumbered(data, run.classes)


def _check_others(data: ImageData, held: Experiment) -> None:
    """Refuse a set whose test images are withheld ones, imported again under another name."""
    try:
        withheld = catalog.load(held.data, pixels=held.pixels, seed=DATA_SEED)
    except UserError:
        return  # not on this machine
    known = {d for _, images in withheld.splits() for d in _digests(images)}
    same = sum(digest in known for digest in _digests(data.test))
    if same:
        raise UserError(
            f"{same} test images of {data.name} are images of {held.data}, which sites of a real"
            " population withhold: nobody agreed that they be measured (public_validation)."
        )


def _digests(images: Images) -> list[bytes]:
    return [hashlib.sha256(image.tobytes()).digest() for image in images.pixels]


def _renumbered(data: ImageData, classes: tuple[str, ...]) -> ImageData:
    number = np.array([classes.index(name) for name in data.classes], dtype=np.int64)

    def relabeled(images: Images) -> Images:
        if images.multi_label:
            return replace(images, labels=images.labels[:, np.argsort(number)])
        return replace(images, labels=number[images.labels])

    return replace(
        data,
        classes=classes,
        train=relabeled(data.train),
        validation=relabeled(data.validation),
        test=relabeled(data.test),
    )
