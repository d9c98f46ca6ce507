"""Where the models of several runs look, as pictures on a report's page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xcal.data.normalize import to_tensor
from xcal.explain.choosing import AUTO
from xcal.explain.overlay import data_uri, overlay, picture
from xcal.federation.preflight import why_unexplained
from xcal.federation.setup import may_measure
from xcal.report.mapping import map_of_run
from xcal.report.panel import choose_images, image_views, percent, shared_peak
from xcal.report.run_figures import RunView
from xcal.report.runs import LoadedRun, load_data, load_run
from xcal.report.template import Panel, Tile


def panel_of(runs: Sequence[RunView], count: int = 4, maps: str = AUTO) -> Panel | None:
    """One row an image: the image, every run's map over it, on one scale; how maps were made.

    Of the runs whose networks say where they looked, those that are of the first one's images.
    None where there are none to show.
    """
    loaded = [(view, load_run(view.path)) for view in runs]
    able = [(v, r) for v, r in loaded if why_unexplained(r.model, r.experiment.pixels) is None]
    if not able or able[0][1].multi_label:
        return None
    first = able[0][1]
    like = [(v, r) for v, r in able if _shown(r) == _shown(first)]
    # Images of a real population are shown only where somebody agreed to it, in every run.
    if not all(may_measure(run.experiment) for _, run in like):
        return None
    images = choose_images(load_data(first).test, count, len(first.classes))
    if not len(images):
        return None
    choices = [map_of_run(run, maps) for _, run in like]
    views = [
        image_views(run, images, choice.method)
        for (_, run), choice in zip(like, choices, strict=True)
    ]
    peak = shared_peak(views)
    colors = to_tensor(np.asarray(images.pixels), mean=(0, 0, 0), std=(1, 1, 1))
    side = max(128, images.pixels.shape[1])
    rows = []
    for i in range(len(images)):
        truth = first.classes[int(images.labels[i])]
        row = [Tile(data_uri(picture(colors[i], side=side)), f"Test image of {truth}", truth, "")]
        for (view, _), seen in zip(like, views, strict=True):
            said = first.classes[seen[i].predicted]
            row.append(
                Tile(
                    data_uri(overlay(colors[i], seen[i].saliency, side=side, peak=peak)),
                    f"The same image under {view.name}, its map laid over it; it answers {said}",
                    f"{view.name}: {said}, {percent(seen[i].confidence)}",
                    "right" if said == truth else "wrong",
                )
            )
        rows.append(tuple(row))
    told = [f"{view.name}: {c.sentence()}" for (view, _), c in zip(like, choices, strict=True)]
    return Panel("", tuple(rows), choices=tuple(told))


def _shown(run: LoadedRun) -> tuple[object, ...]:
    return run.experiment.data, run.experiment.pixels, run.classes
