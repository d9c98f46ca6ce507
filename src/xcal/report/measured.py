"""All metrics of a run's model on a test split: its own, or another set's with the same classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from xcal.data.images import ImageData, Images
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.choosing import make_maps, parts_of
from xcal.explain.faithfulness import Agreement, agreement, randomisation_check
from xcal.explain.gradcam import enlarge_maps
from xcal.federation.evaluation import explanation_metrics, predict
from xcal.federation.outcome import OnMeasure, measured_by_name, no_predictions, public_subset
from xcal.federation.preflight import why_unexplained
from xcal.methods.registry import name_today
from xcal.report.mapping import map_of_run
from xcal.report.runs import LoadedRun

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
    itself has it (`maps`). `against` is another run, usually one
    without privacy, whose maps of the same images are compared with this one's.
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
