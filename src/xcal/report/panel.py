"""The qualitative figure: the same test images under every method and every ε.

One block an image. In a block the rows are the methods with a guarantee and the columns their ε,
from strict to loose; runs without a guarantee stand in a column of their own, ε = ∞, and name
their nominal ε, if they have one, in brackets.

One color scale serves all maps of the figure. Models differ in how large their logits are, and so
in how large their maps are, which says nothing of where they look; so a map is shown in multiples
of its own mean. A focused map is bright in few places, a diffuse one pale throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.choosing import AUTO, MapChoice, make_maps, title_of
from xcal.explain.inference import predict_logits
from xcal.explain.overlay import color_bar, overlay, picture
from xcal.federation.evaluation import OnImages
from xcal.federation.folder import RunFolder
from xcal.federation.setup import DATA_SEED
from xcal.methods.registry import METHODS, name_today
from xcal.report.drawing import percent
from xcal.report.mapping import map_of_run
from xcal.report.runs import LoadedRun, load_data, load_run
from xcal.report.sheet import FAINT, INK, RIGHT, WRONG, Sheet, text_width

_MARGIN = 28
_GAP = 12  # between tiles
_BLOCK_GAP = 52  # between blocks side by side
_BLOCK_DROP = 20  # between blocks one below the other, which captions part already
_CAPTION = 48  # two lines below a tile
_HEAD = 30  # one line above a block
_LETTERS = 15
_SMALL = 13
_SCALE_WIDTH = 560  # what the line below the blocks takes, beside how maps were made
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
    """The runs of a figure: finished, of one data set, one size, and no two for one place."""
    entries: list[Entry] = []
    places: dict[tuple[str, float | None, float | None], Path] = {}
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
        place = (entry.method, entry.epsilon, entry.nominal)
        if place in places:
            shown = "∞" if entry.epsilon is None else f"{entry.epsilon:g}"
            raise UserError(
                f"{places[place]} and {folder} are both {entry.method} at ε = {shown}: give one of"
                " them."
            )
        places[place] = folder
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
    entries = load_entries(folders)
    run = entries[0].run
    run.refuse_findings("A panel")
    data = load_data(run, beside=[entry.run for entry in entries[1:]])
    shown = choose_images(data.test, images, len(run.classes))
    if not len(shown):
        raise UserError("There are no test images to show: choose one image or more.")
    choices = [map_of_run(entry.run, maps, on_images) for entry in entries]
    views = [
        image_views(entry.run, shown, choice.method)
        for entry, choice in zip(entries, choices, strict=True)
    ]
    _Figure(entries, views, shown, [c.method for c in choices]).draw().save(path)
    return choices


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
    """The drawing itself: sizes are worked out once, then block after block is drawn."""

    def __init__(
        self,
        entries: Sequence[Entry],
        views: Sequence[Sequence[View]],
        images: Images,
        methods: Sequence[str],
    ) -> None:
        self.entries, self.views, self.images = entries, views, images
        named = " or ".join(title_of(name) for name in dict.fromkeys(methods))
        self.maps = f"{named[:1].upper()}{named[1:]} of the predicted class   "
        self.classes = entries[0].run.classes
        self.layout = arrange(entries)
        self.peak = shared_peak(views)
        # Colors as they are: the figure shows images, not what the network makes of them.
        self.colors = to_tensor(np.asarray(images.pixels), mean=(0, 0, 0), std=(1, 1, 1))
        pixels = images.pixels.shape[1]
        self.side = pixels * max(1, 128 // pixels) if pixels <= 128 else 144
        self.step = self.side + _GAP
        names = max((text_width(m, _LETTERS) for m in self.layout.methods), default=0.0)
        self.label = math.ceil(names) + 24 if self.layout.methods else 8

    def draw(self) -> Sheet:
        count = len(self.images)
        block = (
            self.step + self.label + self.step * len(self.layout.epsilons) - _GAP,
            _HEAD + self.layout.rows * (self.side + _CAPTION),
        )
        across = _blocks_across(count, block)
        down = math.ceil(count / across)
        width = 2 * _MARGIN + across * block[0] + (across - 1) * _BLOCK_GAP
        height = 2 * _MARGIN + down * (block[1] + _BLOCK_DROP) + 14
        scale = math.ceil(text_width(self.maps, _SMALL)) + _SCALE_WIDTH
        sheet = Sheet(max(width, 2 * _MARGIN + scale), height)
        for number in range(count):
            row, column = divmod(number, across)
            left = _MARGIN + column * (block[0] + _BLOCK_GAP)
            self._block(sheet, number, left, _MARGIN + row * (block[1] + _BLOCK_DROP))
        self._scale(sheet, height - _MARGIN)
        return sheet

    def _block(self, sheet: Sheet, number: int, left: int, top: int) -> None:
        """One test image under all runs."""
        body, start = top + _HEAD, left + self.step + self.label
        truth = self.classes[int(self.images.labels[number])]
        middle = left + self.side / 2
        sheet.text((middle, top + 16), "image", _LETTERS, fill=FAINT, anchor="middle")
        sheet.paste(picture(self.colors[number], side=self.side), (left, body))
        self._caption(sheet, (left, body), truth, "true class", INK)
        for k, epsilon in enumerate(self.layout.epsilons):
            shown = "ε = ∞" if epsilon is None else f"ε = {epsilon:g}"
            middle = start + k * self.step + self.side / 2
            sheet.text((middle, top + 16), shown, _LETTERS, fill=FAINT, anchor="middle")
        for r in range(self.layout.rows):
            y = body + r * (self.side + _CAPTION)
            if r < len(self.layout.methods):
                method = self.layout.methods[r]
                sheet.text((start - 12, y + self.side / 2 + 5), method, _LETTERS, anchor="right")
            for k in range(len(self.layout.epsilons)):
                self._cell(sheet, (start + k * self.step, y), (r, k), number)

    def _cell(
        self, sheet: Sheet, corner: tuple[int, int], place: tuple[int, int], number: int
    ) -> None:
        found = self.layout.cells.get(place)
        guaranteed = self.layout.epsilons[place[1]] is not None
        if found is None:
            if guaranteed and place[0] < len(self.layout.methods):
                middle = (corner[0] + self.side / 2, corner[1] + self.side / 2 + 4)
                sheet.box(corner, (self.side, self.side))
                sheet.text(middle, "no run", _SMALL, fill=FAINT, anchor="middle")
            return
        view = self.views[found][number]
        tile = overlay(self.colors[number], view.saliency, side=self.side, peak=self.peak)
        sheet.paste(tile, corner)
        right = view.predicted == int(self.images.labels[number])
        second = percent(view.confidence)
        if not guaranteed:  # it belongs to no row, so it says itself what it is
            entry = self.entries[found]
            nominal = "" if entry.nominal is None else f" ({entry.nominal:g})"
            second += f" · {entry.method}{nominal}"
        name = self.classes[view.predicted]
        self._caption(sheet, corner, name, second, RIGHT if right else WRONG)

    def _caption(
        self, sheet: Sheet, corner: tuple[int, int], first: str, second: str, color: str
    ) -> None:
        x, y = corner[0], corner[1] + self.side
        sheet.text((x, y + 17), first, _LETTERS, fill=color, longest=self.side)
        sheet.text((x, y + 34), second, _SMALL, fill=FAINT, longest=self.side)

    def _scale(self, sheet: Sheet, y: int) -> None:
        """The one color scale of all maps, with its ends, and what the letters' colors say."""
        x = float(_MARGIN)
        for text in (self.maps, "0 "):
            sheet.text((x, y), text, _SMALL, fill=FAINT)
            x += text_width(text, _SMALL)
        sheet.paste(color_bar(160, 12), (round(x), y - 11))
        x += 168
        top = f"{self.peak:.1f} times the map's mean, or more      "
        sheet.text((x, y), top, _SMALL, fill=FAINT)
        x += text_width(top, _SMALL)
        for text, color in (("answer: ", FAINT), ("right ", RIGHT), (" wrong", WRONG)):
            sheet.text((x, y), text, _SMALL, fill=color)
            x += text_width(text, _SMALL)


def _blocks_across(count: int, block: tuple[int, int]) -> int:
    """How many blocks side by side bring the figure nearest to the shape it had best have."""

    def distance(across: int) -> float:
        shape = across * block[0] / (math.ceil(count / across) * block[1])
        return abs(math.log(shape / _WIDE))

    # An unfilled last row looks unfinished: rather a less handsome shape.
    whole = [n for n in range(1, count + 1) if count % n == 0]
    return min(whole, key=distance)
