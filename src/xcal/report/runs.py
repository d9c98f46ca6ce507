"""A finished run, read back; the map that explains its model; all of its metrics."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.data import catalog
from xcal.data.images import ImageData, Images
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.experiments import read_pinned
from xcal.explain.any_network import OneFinding
from xcal.explain.choosing import (
    AUTO,
    CANDIDATES,
    CHOSEN_ON,
    MapChoice,
    kinds_for,
    make_maps,
    parts_of,
)
from xcal.explain.faithfulness import Agreement, agreement, randomisation_check
from xcal.explain.gradcam import enlarge_maps
from xcal.federation.evaluation import OnImages, explanation_metrics, predict
from xcal.federation.files import read_json, read_tensors, write_json
from xcal.federation.folder import RunFolder
from xcal.federation.outcome import (
    OnMeasure,
    map_for,
    measured_by_name,
    no_predictions,
    public_subset,
)
from xcal.federation.preflight import why_unexplained
from xcal.federation.setup import DATA_SEED, may_measure, validation_is_public
from xcal.methods.registry import name_today
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
        several = images.multi_label
        labels = images.labels[:, np.argsort(number)] if several else number[images.labels]
        return replace(images, labels=labels)

    train, validation, test = (relabeled(images) for _, images in data.splits())
    return replace(data, classes=classes, train=train, validation=validation, test=test)


REMEMBERED = "maps.json"
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, UserError)


def map_of_run(
    run: LoadedRun, wanted: str = AUTO, on_images: OnImages = lambda *_: None
) -> MapChoice:
    """The map asked for, or for `auto` the one of the highest ROAD on public validation images.

    What the run itself chose at its end holds. Another choice is written into the run's folder,
    where it may be, and read from there the next time. Only what was measured is remembered:
    agreement to measure may come later.
    """

    def choose() -> MapChoice:
        return map_for(
            run.experiment, run.model, lambda: load_data(run).validation, wanted, on_images
        )

    if wanted != AUTO or run.folder is None:
        return choose()
    path, model = run.folder / REMEMBERED, run.folder / "model.safetensors"
    # Another model or another list of maps asks for another choice.
    weights = hashlib.sha256(model.read_bytes()).hexdigest()
    of = {"model": weights, "candidates": list(CANDIDATES), "images": CHOSEN_ON}
    with contextlib.suppress(*UNUSABLE):
        kept = read_json(path)
        if kept["of"] == of:
            return _checked(kept["choice"])
    with contextlib.suppress(*UNUSABLE):
        # Of the kinds that there are today, and of the model that is still there.
        result = run.folder / "result.json"
        kept = read_json(result)["explanations"]["choice"]
        newer = model.stat().st_mtime_ns > result.stat().st_mtime_ns
        known = set(kept["road"]) == set(kinds_for(run.model))
        if known and not newer and validation_is_public(run.experiment):
            return _checked(kept)
    choice = choose()
    if choice.road:
        # In a folder that only may be read it is chosen anew the next time.
        with contextlib.suppress(OSError, UserError):
            write_json(path, {"of": of, "choice": choice.as_dict()})
    return choice


def _checked(kept: dict[str, Any]) -> MapChoice:
    choice = MapChoice(**kept)
    choice.sentence()  # fails where something is missing
    return choice


SANITY_IMAGES = 64
"""The sanity check makes every map again for each stage; so many images settle its mean."""
_OF_MANY_PASSES = 8
"""As many where a map takes tens of passes an image."""


def evaluate_run(
    run: LoadedRun,
    data: ImageData,
    *,
    explained: int | None = None,
    against: LoadedRun | None = None,
    maps_by: str | None = None,
    on_measure: OnMeasure = lambda *_: None,
) -> dict[str, Any]:
    """Metrics as plain values for a table or a JSON file; None for what is undefined.

    The classifier is measured on the whole test split; explanations on a fixed subset of it, of
    `explained` images, by default as many as the run itself explained at its end. So on the run's
    own data the numbers are those of its `result.json`. `maps_by` is a map's name; None: as the run
    itself has it (`maps`). `against` is another run, usually one without privacy, whose maps of the
    same images are compared with this one's.
    """
    if against is not None and against.experiment.pixels != run.experiment.pixels:
        raise UserError(
            f"The runs to compare see images of {run.experiment.pixels} and"
            f" {against.experiment.pixels} pixels: compare runs of one size."
        )
    wanted = run.experiment.road_test_images if explained is None else explained
    if run.multi_label or why_unexplained(run.model, run.experiment.pixels) is not None:
        wanted = 0
    subset = public_subset(data.test, wanted)
    found = no_predictions(len(run.classes), run.multi_label)
    if len(data.test):
        found = predict(run.model, data.test, on_images=partial(on_measure, "test images"))
    result: dict[str, Any] = {
        "method": name_today(run.experiment),
        "data": data.name,
        "split": "test",
        "classes": list(run.classes),
        "classification": measured_by_name(found, data),
        "explanations": None,
        "sanity_check": None,
        "agreement": None,
    }
    if subset is not None:
        choice = map_of_run(
            run, maps_by or run.experiment.map_method, partial(on_measure, "choosing a map")
        )
        result["explanations"] = explanation_metrics(
            run.model, subset, maps_by=choice.method, on_images=partial(on_measure, "explanations")
        )
        if choice.road:
            result["explanations"]["choice"] = choice.as_dict()
        result["sanity_check"] = _sanity_check(run, subset, choice.method)
        if against is not None:
            result["agreement"] = _agreement(run, against, subset, choice.method)
    return result


def _sanity_check(run: LoadedRun, images: Images, method: str) -> list[dict[str, float]]:
    """How alike maps still are to the trained network's, as more of its layers are scrambled."""
    wanted = _OF_MANY_PASSES if {"occlusion", "rise"} & {*parts_of(method)} else SANITY_IMAGES
    few = images.take(np.arange(min(len(images), wanted)))
    stages = randomisation_check(run.model, to_tensor(np.asarray(few.pixels)), method=method)
    return [{"scrambled": stage.share, **_means(stage.agreement)} for stage in stages]


def _agreement(run: LoadedRun, other: LoadedRun, images: Images, method: str) -> dict[str, Any]:
    """Each model explains the class it predicts itself: that is what a reader would be shown."""
    inputs = to_tensor(np.asarray(images.pixels))
    size = (inputs.shape[2], inputs.shape[3])

    def maps(model: LoadedRun) -> Tensor:
        # Enlarged, so that networks with maps of different sizes can be compared.
        return enlarge_maps(make_maps(model.model, inputs, method=method), size)

    return {"images": len(images), **_means(agreement(maps(run), maps(other)))}


def _means(found: Agreement) -> dict[str, Any]:
    return {
        "rank_correlation": float(found.rank_correlation.mean()),
        "overlap": float(found.overlap.mean()),
        "degenerate": found.degenerate,
    }
