"""The qualitative figure: the same test images under every method and every ε.

Runs at one ε, beside runs without a guarantee: a row an image, a column a run. At several ε: a
block an image, whose rows are the methods with a guarantee and whose columns their ε, from strict
to loose; runs without a guarantee stand in a column of their own, ε = ∞. A nominal ε is named in
brackets.

One color scale serves all maps of the figure. Models differ in how large their logits are, and so
in how large their maps are, which says nothing of where they look; so a map is shown in multiples
of its own mean. A focused map is bright in few places, a diffuse one pale throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.choosing import AUTO, MapChoice, make_maps, title_of
from xcal.explain.inference import predict_logits
from xcal.explain.overlay import data_uri, overlay, picture
from xcal.federation.evaluation import OnImages
from xcal.federation.folder import RunFolder
from xcal.federation.preflight import why_unexplained
from xcal.federation.setup import DATA_SEED, may_measure
from xcal.methods.registry import METHODS, name_today
from xcal.plotting import FAINT, INK, RIGHT, WRONG, require, shortened, tile
from xcal.plotting import picture as drawn_picture
from xcal.report.drawing import scale
from xcal.report.run_figures import RunView
from xcal.report.runs import LoadedRun, load_data, load_run, map_of_run
from xcal.report.template import Panel, Tile
from xcal.report.words import epsilon_text, percent

_SIDE = 128  # pixels a tile
_WIDE = 1.45  # the shape a figure had best have: width by height


@dataclass(frozen=True)
class Entry:
    """One run of the figure; `epsilon` is None without a guarantee, whatever the nominal one."""

    method: str
    epsilon: float | None
    run: LoadedRun
    nominal: float | None = None


@dataclass(frozen=True)
class View:
    """What one model says of one image; `saliency` (h, w) is in multiples of the map's mean."""

    predicted: int
    confidence: float
    saliency: Tensor


def load_entries(folders: Sequence[Path]) -> list[Entry]:
    """The runs of a figure: finished, of one data set, one size, and no two for one setting."""
    entries: list[Entry] = []
    taken: dict[tuple[str, float | None, float | None], Path] = {}
    for folder in folders:
        run = load_run(folder)
        result = RunFolder.find(folder).result
        if result is None:
            raise UserError(
                f"The run in {folder} is not finished: continue it with `xcal run --resume"
                f" {folder}`."
            )
        entry = Entry(
            name_today(run.experiment), result["epsilon_target"], run, result.get("epsilon_nominal")
        )
        first = entries[0].run if entries else run
        for what in ("data", "pixels"):
            one, other = getattr(first.experiment, what), getattr(run.experiment, what)
            if one != other:
                raise UserError(
                    f"The runs {folders[0]} and {folder} differ in {what} ({one} and {other}): a"
                    " panel shows the same images throughout."
                )
        setting = (entry.method, entry.epsilon, entry.nominal)
        if setting in taken:
            raise UserError(
                f"{taken[setting]} and {folder} are both {entry.method} at ε ="
                f" {epsilon_text(entry.epsilon)}: give one of them."
            )
        taken[setting] = folder
        entries.append(entry)
    return entries


def choose_images(test: Images, count: int, classes: int) -> Images:
    """`count` test images, the same for all runs: of each class in turn, drawn once for all."""
    generator = np.random.default_rng([DATA_SEED, 13])
    by_class = [generator.permutation(np.flatnonzero(test.labels == k)) for k in range(classes)]
    deepest = max((len(members) for members in by_class), default=0)
    order = [
        int(members[depth])
        for depth in range(deepest)
        for members in by_class
        if depth < len(members)
    ]
    return test.take(np.array(order[:count], dtype=np.int64))


def save_panel(
    path: Path,
    folders: Sequence[Path],
    images: int = 4,
    maps: str = AUTO,
    on_images: OnImages = lambda *_: None,
) -> list[MapChoice]:
    """Draw the figure of these runs on `images` test images and write it as a PNG.

    Returned is which map each run's model was explained by.
    """
    require()
    entries = load_entries(folders)
    run = entries[0].run
    if run.multi_label:
        raise UserError(
            "A panel compares classes of which one is right, and this run tells several findings at"
            " once: `xcal explain RUN IMAGES --finding NAME` shows one of them."
        )
    seen = see([entry.run for entry in entries], images, maps, on_images)
    if seen is None:
        raise UserError("There are no test images to show: choose one image or more.")
    _Figure(entries, seen).save(path)
    return seen.choices


@dataclass(frozen=True)
class Seen:
    """The same test images under several runs' models."""

    images: Images
    colors: Tensor  # as they are: a figure shows images, not what the network makes of them
    choices: list[MapChoice]
    views: list[list[View]]
    peak: float


def see(
    runs: Sequence[LoadedRun], count: int, maps: str, on_images: OnImages = lambda *_: None
) -> Seen | None:
    """What each run's model says of `count` test images; None where there are no such images."""
    first, *others = runs
    images = choose_images(load_data(first, beside=others).test, count, len(first.classes))
    if not len(images):
        return None
    choices = [map_of_run(run, maps, on_images) for run in runs]
    pairs = zip(runs, choices, strict=True)
    views = [image_views(run, images, choice.method) for run, choice in pairs]
    colors = to_tensor(np.asarray(images.pixels), mean=(0, 0, 0), std=(1, 1, 1))
    return Seen(images, colors, choices, views, shared_peak(views))


def image_views(run: LoadedRun, images: Images, method: str) -> list[View]:
    inputs = to_tensor(np.asarray(images.pixels))
    confidence = predict_logits(run.model, inputs).double().softmax(dim=1).nan_to_num(0.0)
    predicted = confidence.argmax(dim=1)
    maps = make_maps(run.model, inputs, predicted, method=method)
    return [
        View(int(k), float(row[k]), in_multiples_of_mean(saliency))
        for k, row, saliency in zip(predicted, confidence, maps, strict=True)
    ]


@dataclass(frozen=True)
class Layout:
    """Which run stands where in a block: `cells` maps (row, column) to the run's number."""

    methods: tuple[str, ...]  # of the rows; methods without a guarantee have none of their own
    epsilons: tuple[float | None, ...]  # of the columns
    cells: Mapping[tuple[int, int], int]

    @property
    def rows(self) -> int:
        return 1 + max(row for row, _ in self.cells)


def arrange(entries: Sequence[Entry]) -> Layout:
    """Methods in the order they are always named, ε ascending, runs without a guarantee last."""
    known = list(METHODS)

    def rank(method: str) -> tuple[int, str]:
        return (known.index(method) if method in known else len(known), method)

    private = sorted({e.method for e in entries if e.epsilon is not None}, key=rank)
    plain = sorted(
        {(e.method, e.nominal) for e in entries if e.epsilon is None},
        key=lambda pair: (rank(pair[0]), pair[1] or 0.0),
    )
    finite = sorted({e.epsilon for e in entries if e.epsilon is not None})
    epsilons: list[float | None] = [*finite, *([None] if plain else [])]
    cells = {}
    for number, entry in enumerate(entries):
        if entry.epsilon is None:
            row = plain.index((entry.method, entry.nominal))
        else:
            row = private.index(entry.method)
        cells[row, epsilons.index(entry.epsilon)] = number
    return Layout(tuple(private), tuple(epsilons), cells)


def in_multiples_of_mean(saliency: Tensor) -> Tensor:
    """What is above 0, divided by its mean; all 0 where nothing is, or not all is finite."""
    values = saliency.detach().double().clamp(min=0)
    mean = float(values.mean())
    return values / mean if math.isfinite(mean) and mean > 0 else torch.zeros_like(values)


def shared_peak(views: Sequence[Sequence[View]]) -> float:
    """The value that gets the top color: three maps in four stay at or below it.

    Not the highest of all: a single map of one bright cell would leave all others without color.
    """
    peaks = [float(view.saliency.max()) for row in views for view in row]
    usable = [peak for peak in peaks if peak > 0]
    return float(np.quantile(usable, 0.75, method="higher")) if usable else 0.0


class _Figure:
    """The drawing: a block an image, and below them the one color scale of all maps."""

    def __init__(self, entries: Sequence[Entry], seen: Seen) -> None:
        self.entries, self.seen, self.images = entries, seen, seen.images
        named = " or ".join(
            title_of(name) for name in dict.fromkeys(c.method for c in seen.choices)
        )
        self.maps = f"{named[:1].upper()}{named[1:]} of the predicted class"
        self.classes = entries[0].run.classes
        self.layout = arrange(entries)

    def save(self, path: Path) -> None:
        if len([e for e in self.layout.epsilons if e is not None]) <= 1:
            self._save_rows(path)
        else:
            self._save_blocks(path)

    def _save_rows(self, path: Path) -> None:
        """A row an image, a column a run: those without a guarantee first."""
        order = sorted(self.layout.cells, key=lambda cell: (-cell[1], cell[0]))
        runs = [self.layout.cells[cell] for cell in order]
        high = 1.4 * len(self.images)
        size = {"width": 1.15 * _SIDE * (1 + len(runs)), "height": _SIDE * (high + 0.8)}
        with drawn_picture(path, **size) as drawn:
            body, foot = drawn.subfigures(2, 1, height_ratios=(high + 0.3, 0.5))
            grid = body.subplots(len(self.images), 1 + len(runs), squeeze=False)
            body.subplots_adjust(left=0.02, right=0.98, bottom=0.08, top=0.92, wspace=0.1)
            for axes, run in zip(grid[0, 1:], runs, strict=True):
                entry = self.entries[run]
                shown = f"{entry.method}\nε = {epsilon_text(entry.epsilon, entry.nominal)}"
                axes.set_title(shown, color=FAINT, fontsize=9)
            for number, (first, *others) in enumerate(grid):
                self._image(first, number)
                for axes, run in zip(others, runs, strict=True):
                    self._map(axes, run, number)
            self._foot(foot)

    def _save_blocks(self, path: Path) -> None:
        count, columns = len(self.images), 1.6 + len(self.layout.epsilons)
        across = _blocks_across(count, columns / self.layout.rows)
        down = count // across
        high = 1.4 * down * self.layout.rows
        size = {"width": 1.15 * _SIDE * across * columns, "height": _SIDE * (high + 0.5)}
        with drawn_picture(path, **size) as drawn:
            body, foot = drawn.subfigures(2, 1, height_ratios=(high, 0.5))
            for number, block in enumerate(body.subfigures(down, across, squeeze=False).flat):
                self._block(block, number)
            self._foot(foot)

    def _foot(self, foot: Any) -> None:
        foot.text(0.02, 0.85, self.maps, color=FAINT)
        scale(foot.add_axes((0.02, 0.45, 0.5, 0.15)), f"{self.seen.peak:.1f} × the map's mean")
        foot.text(0.6, 0.45, "right answer", color=RIGHT)
        foot.text(0.6, 0.15, "wrong answer", color=WRONG)

    def _image(self, axes: Any, number: int) -> None:
        truth = self.classes[int(self.images.labels[number])]
        _tile(axes, picture(self.seen.colors[number], side=_SIDE), truth, "true class", INK)

    def _block(self, block: Any, number: int) -> None:
        """One test image under all runs."""
        ratios = (1, 0.6, *(1 for _ in self.layout.epsilons))  # between them methods' names
        rows = block.subplots(self.layout.rows, len(ratios), squeeze=False, width_ratios=ratios)
        block.subplots_adjust(left=0.02, right=0.98, bottom=0.15, top=0.9, wspace=0.1, hspace=0.35)
        for axes in rows.flat:
            axes.axis("off")
            axes.set_box_aspect(1)
        rows[0, 0].set_title("image", color=FAINT, fontsize=9)
        self._image(rows[0, 0], number)
        for axes, epsilon in zip(rows[0, 2:], self.layout.epsilons, strict=True):
            axes.set_title(f"ε = {epsilon_text(epsilon)}", color=FAINT, fontsize=9)
        for axes, method in zip(rows[:, 1], self.layout.methods, strict=False):
            axes.text(1, 0.5, method, ha="right", va="center")
        for (row, column), axes in np.ndenumerate(rows[:, 2:]):
            self._cell(axes, row, column, number)

    def _cell(self, axes: Any, row: int, column: int, number: int) -> None:
        found = self.layout.cells.get((row, column))
        guaranteed = self.layout.epsilons[column] is not None
        if found is None:
            if guaranteed and row < len(self.layout.methods):
                axes.text(0.5, 0.5, "no run", color=FAINT, ha="center", va="center")
            return
        beside = ""
        if not guaranteed:  # it belongs to no row, so it says itself what it is
            entry = self.entries[found]
            nominal = "" if entry.nominal is None else f" ({entry.nominal:g})"
            beside = f" · {entry.method}{nominal}"
        self._map(axes, found, number, beside)

    def _map(self, axes: Any, run: int, number: int, beside: str = "") -> None:
        view = self.seen.views[run][number]
        second = f"{percent(view.confidence)}{beside}"
        shown = overlay(self.seen.colors[number], view.saliency, side=_SIDE, peak=self.seen.peak)
        right = view.predicted == int(self.images.labels[number])
        _tile(axes, shown, self.classes[view.predicted], second, RIGHT if right else WRONG)


def _tile(axes: Any, shown: Any, first: str, second: str, color: str) -> None:
    axes.axis("on")
    tile(axes, shown, f"{shortened(first, 20)}\n{shortened(second, 24)}", color=color)


def _blocks_across(count: int, block: float) -> int:
    """How many blocks side by side bring the figure nearest to the shape it had best have."""
    # An unfilled last row looks unfinished: rather a less handsome shape.
    whole = [n for n in range(1, count + 1) if count % n == 0]
    return min(whole, key=lambda across: abs(math.log(across**2 * block / count / _WIDE)))


# --- on a report's page ---------------------------------------------------------------------------


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
    if (found := see([run for _, run in like], count, maps)) is None:
        return None
    images, colors, peak = found.images, found.colors, found.peak
    side = max(128, images.pixels.shape[1])
    rows = []
    for i in range(len(images)):
        truth = first.classes[int(images.labels[i])]
        row = [Tile(data_uri(picture(colors[i], side=side)), f"Test image of {truth}", truth, "")]
        for (view, _), seen in zip(like, found.views, strict=True):
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
    told = [
        f"{view.name}: {c.sentence()}" for (view, _), c in zip(like, found.choices, strict=True)
    ]
    return Panel("", tuple(rows), choices=tuple(told))


def _shown(run: LoadedRun) -> tuple[object, ...]:
    return run.experiment.data, run.experiment.pixels, run.classes
