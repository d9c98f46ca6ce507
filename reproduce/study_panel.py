"""The qualitative figure of a study: the same test images under every method and ε.

Cells keep small maps of a few test images, so the figure needs no models; the images themselves
come from the data set on this machine, and where it is not there, no picture is made up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reproduce.analysis import series_of
from reproduce.declared import declare
from reproduce.store import Results, unpack
from xcal.data import catalog
from xcal.data.image_store import known_names
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.overlay import data_uri, overlay, picture
from xcal.federation.setup import DATA_SEED
from xcal.report.panel import in_multiples_of_mean
from xcal.report.template import Tile
from xcal.report.words import epsilon_text

TOP = 4.0  # multiples of a map's mean that get the top color


@dataclass(frozen=True)
class StudyPanel:
    """Rows of tiles for one data set and network, or the reason why there are none."""

    title: str
    rows: tuple[tuple[Tile, ...], ...]
    note: str = ""
    absent: str = ""  # the data set, where it was never imported here


def absent_note(panels: Sequence[StudyPanel]) -> str:
    """One sentence for all sets that were never imported here, and how to have their pictures."""
    names = list(dict.fromkeys(p.absent for p in panels if p.absent))
    if not names:
        return ""
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"The images of {listed} are not on this machine, so no maps are drawn over them: import"
        f" {'it' if len(names) == 1 else 'each'} with `xcal data import FOLDER --name NAME --pixels"
        " PIXELS` and make the report again."
    )


def study_panels(results: Results, scale: str) -> list[StudyPanel]:
    """One panel a data set and network: the first seed of every method and ε that has maps."""
    series = series_of(results.of_grid(declare("panel", scale)))
    places = dict.fromkeys((s.place.data, s.place.network) for s in series)
    panels = []
    for data, network in places:
        cells = [
            (s.method, s.place.epsilon, s.cells[0])
            for s in series
            if (s.place.data, s.place.network) == (data, network)
            and 0 in s.cells
            and s.cells[0].values.get("maps")
        ]
        if not cells:
            continue
        title = f"{data}, {network}"
        test = results.test_set(cells[0][2].values["test_set"])
        pixels = int(cells[0][2].keys["pixels"])
        if data not in ("smear", *known_names()) and ":" not in data:
            panels.append(StudyPanel(title, (), absent=data))
            continue
        try:
            images = catalog.load(data, pixels=pixels, seed=DATA_SEED).test
        except UserError as error:
            panels.append(StudyPanel(title, (), f"The images are not on this machine: {error}"))
            continue
        if not np.array_equal(images.labels, test.labels):
            note = "The images on this machine are not those that were measured."
            panels.append(StudyPanel(title, (), note))
            continue
        chosen = [entry["image"] for entry in cells[0][2].values["maps"]]
        shown = to_tensor(np.asarray(images.pixels[chosen]), mean=(0, 0, 0), std=(1, 1, 1))
        side = max(128, pixels)
        rows = []
        for i, colors in enumerate(shown):
            truth = test.classes[int(test.labels[chosen[i]])]
            alt = f"Test image of {truth}"
            row = [Tile(data_uri(picture(colors, side=side)), alt, truth, "")]
            for method, epsilon, cell in cells:
                entry = cell.values["maps"][i]
                saliency = torch.from_numpy(
                    unpack(entry["map"]).reshape(entry["shape"]).astype(np.float64)
                )
                said = test.classes[entry["predicted"]]
                name = f"{method}, ε {epsilon_text(epsilon)}"
                drawn = overlay(colors, in_multiples_of_mean(saliency), side=side, peak=TOP)
                row.append(
                    Tile(
                        data_uri(drawn),
                        f"The same image under {name}, its map over it; it answers {said}",
                        f"{name}: {said}, {100 * entry['confidence']:.0f} %",
                        "right" if said == truth else "wrong",
                    )
                )
            rows.append(tuple(row))
        panels.append(StudyPanel(title, tuple(rows)))
    return panels
