"""`smear`: synthetic blood smears, drawn from a seed.

Four classes of white blood cell that differ by the shape of the nucleus only, as the textbook
tells them apart: eosinophil (two lobes), lymphocyte (one round one), monocyte (kidney-shaped),
neutrophil (three to five lobes). Stain, light, cell size, granules and the red cells around are
drawn alike for all classes, so color alone does not give the class away. The mask of the nucleus
is the ground truth for explanations.

Pixels are computed by additions, multiplications, divisions and square roots only, which every
machine rounds alike: a seed gives the same images everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcal.data.images import ImageData, Images
from xcal.errors import UserError

CLASSES = ("eosinophil", "lymphocyte", "monocyte", "neutrophil")
_EOSINOPHIL, _LYMPHOCYTE, _MONOCYTE, _NEUTROPHIL = range(4)

_MOST_LOBES = 5
_RED_CELLS = 18
_PLATELETS = 3
# Images drawn at once: small enough that the working arrays stay in the processor's cache.
_CHUNK = 32

# Colors are fractions of the light that passes, per channel (red, green, blue).
_LIGHT = (0.93, 0.91, 0.90)
_RED_CELL = (0.92, 0.77, 0.77)
_CYTOPLASM = (0.83, 0.80, 0.90)
_GRANULE = (0.80, 0.56, 0.66)
_NUCLEUS = (0.30, 0.12, 0.50)
_PLATELET = (0.62, 0.48, 0.72)

# float32 throughout; numpy's stubs lose the width in mixed arithmetic.
Array = NDArray[np.floating[Any]]

Watcher = Callable[[int, int], None]  # images drawn, of so many
_watcher: ContextVar[Watcher] = ContextVar("watcher", default=lambda *_: None)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Within: images that are drawn are told of, since that takes some seconds."""
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


def smear(
    *,
    pixels: int = 64,
    train: int = 4500,
    validation: int = 600,
    test: int = 900,
    seed: int = 0,
    images_per_patient: int = 6,
) -> ImageData:
    """Draw the data set.

    Every class has the same number of images in a split (give or take one). Images come from
    synthetic patients, `images_per_patient` each (the last of a split may have fewer): a patient's
    images share stain and light and mix the classes. No patient stands in two splits. The same
    arguments give the same bytes; a split does not depend on the size of the others.
    """
    if not 16 <= pixels <= 1024:
        raise UserError(f"smear: pixels is {pixels}, but must lie between 16 and 1024.")
    if min(train, validation, test) < 0 or train < 1:
        raise UserError("smear: train must be at least 1, validation and test at least 0.")
    if images_per_patient < 1:
        raise UserError("smear: images_per_patient must be at least 1.")
    if seed < 0:
        raise UserError(f"smear: seed is {seed}, but must not be negative.")
    splits: list[Images] = []
    first_patient = 0
    total = train + validation + test
    for number, (split, size) in enumerate(
        (("train", train), ("validation", validation), ("test", test))
    ):
        # Keyed by the split's number, not spawned in turn: sizes of other splits change nothing.
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
        done = (sum(map(len, splits)), total)
        splits.append(_split(rng, split, size, pixels, images_per_patient, first_patient, done))
        first_patient += -(-size // images_per_patient)
    return ImageData(
        name="smear",
        classes=CLASSES,
        group_name="patient",
        license="synthetic; no person stands behind it",
        train=splits[0],
        validation=splits[1],
        test=splits[2],
    )


@dataclass(frozen=True)
class _Patient:
    """What the images of one patient share; arrays over images, not patients."""

    light: Array  # (N, 3) color of the lamp and camera
    stain: Array  # (N, 1) depth of the stain
    tint: Array  # (N, 3) hue of the stain

    def at(self, chunk: slice) -> _Patient:
        return _Patient(self.light[chunk], self.stain[chunk], self.tint[chunk])


def _split(
    rng: np.random.Generator,
    split: str,
    size: int,
    pixels: int,
    images_per_patient: int,
    first_patient: int,
    done: tuple[int, int],
) -> Images:
    patient_of = np.arange(size) // images_per_patient
    patients = int(patient_of[-1]) + 1 if size else 0
    labels = rng.permutation(np.arange(size) % len(CLASSES)).astype(np.int64)
    light = _uniform(rng, (patients, 1), 0.92, 1.05) * _uniform(rng, (patients, 3), 0.96, 1.04)
    shared = _Patient(
        light=light[patient_of],
        stain=_uniform(rng, (patients, 1), 0.88, 1.10)[patient_of],
        tint=_uniform(rng, (patients, 3), 0.92, 1.08)[patient_of],
    )
    picture = np.empty((size, pixels, pixels, 3), np.uint8)
    masks = np.empty((size, pixels, pixels), np.bool_)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, size))
        picture[chunk], masks[chunk] = _draw(rng, labels[chunk], shared.at(chunk), pixels)
        _watcher.get()(done[0] + chunk.stop, done[1])
    return Images(
        pixels=picture,
        labels=labels,
        groups=(first_patient + patient_of).astype(np.int64),
        ids=np.array([f"smear-{split}-{i:06d}" for i in range(size)], dtype=np.str_),
        masks=masks,
    )


def _draw(
    rng: np.random.Generator, labels: NDArray[np.int64], patient: _Patient, pixels: int
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Pictures and nucleus masks of one chunk of images.

    Lengths are in widths of the image; x and y run from -0.5 to 0.5. `_shade` turns a signed
    distance (negative inside) into how much of a pixel is covered.
    """
    n = len(labels)
    axis = ((np.arange(pixels, dtype=np.float32) + np.float32(0.5)) / pixels) - np.float32(0.5)
    y, x = axis[None, :, None], axis[None, None, :]
    blur = _column(_uniform(rng, n, 0.010, 0.022))

    # The white cell: where it lies, how large it is, and its own turned coordinates.
    center_x, center_y = _uniform(rng, n, -0.06, 0.06), _uniform(rng, n, -0.06, 0.06)
    radius = _uniform(rng, n, 0.36, 0.43)
    dx, dy = x - _column(center_x), y - _column(center_y)
    turn = _directions(rng, n)
    u = (dx * _column(turn[0]) + dy * _column(turn[1])) / _column(radius)
    v = (dy * _column(turn[0]) - dx * _column(turn[1])) / _column(radius)
    bend = _uniform(rng, (4, n), -0.12, 0.12)
    u, v = (
        u + _column(bend[0]) * v * v + _column(bend[1]) * u * v,
        v + _column(bend[2]) * u * u + _column(bend[3]) * u * v,
    )
    cell = _shade((np.sqrt(u * u + v * v * _column(_uniform(rng, n, 0.85, 1.2))) - 1), radius, blur)
    distance = _nucleus(rng, labels, u, v)
    nucleus = _shade(distance, radius, blur)

    # Thickness of each stained layer, 0 to about 1.
    red = _red_cells(rng, pixels, center_x, center_y, radius, blur) * (1 - 0.9 * cell)
    platelets = _platelets(rng, pixels, n, blur) * (1 - cell)
    grains = _texture(rng, n, pixels, 28)
    granules = np.clip(grains * 2 - 0.8, 0, 1) * _column(_uniform(rng, n, 0.1, 0.5)) * cell
    chromatin = 0.82 + 0.24 * (_texture(rng, n, pixels, 11) - 0.5)
    plasma = cell * _column(_uniform(rng, n, 0.55, 1.0))
    shadow = 1 + 0.12 * (_texture(rng, n, pixels, 3) - 0.5)
    slope = _directions(rng, n) * _uniform(rng, n, 0.0, 0.25)
    lamp = (1 + _column(slope[0]) * x + _column(slope[1]) * y) * (1 - 0.25 * (x * x + y * y))
    lamp = lamp * shadow

    layers = (
        (_RED_CELL, red),
        (_PLATELET, platelets),
        (_CYTOPLASM, plasma * (1 - nucleus)),
        (_GRANULE, granules * (1 - nucleus)),
        (_NUCLEUS, nucleus * chromatin),
    )
    picture = np.empty((n, pixels, pixels, 3), np.uint8)
    for channel in range(3):
        tint = patient.stain[:, 0] * patient.tint[:, channel]
        passes = lamp * (_LIGHT[channel] * _column(patient.light[:, channel]))
        for color, thickness in layers:
            kept = thickness * _column(tint * (color[channel] - 1))
            kept += 1
            passes *= kept
        passes += np.float32(0.014) * rng.standard_normal(passes.shape, dtype=np.float32)
        picture[..., channel] = np.clip(passes * 255 + np.float32(0.5), 0, 255)
    return picture, distance < 0


def _nucleus(rng: np.random.Generator, labels: NDArray[np.int64], u: Array, v: Array) -> Array:
    """Signed distance to the nucleus, in radii of its cell.

    Every nucleus is a chain of round lobes on an arc, joined by strands. One lobe is a
    lymphocyte's; lobes that overlap melt into a monocyte's kidney; two lobes apart are an
    eosinophil's, three to five a neutrophil's. Radii are such that the classes cover like areas.
    """
    n = len(labels)

    def by_kind(*values: Any) -> NDArray[Any]:
        """A value for each image, of those for the four kinds in the order of `CLASSES`."""
        return np.select([labels == kind for kind in range(3)], values[:3], default=values[3])

    count = by_kind(2, 1, 5, rng.integers(3, 6, n))
    by_class = np.array([0.390, 0.560, 0.300, 0.0], np.float32)[labels]
    by_lobes = np.array([0, 0, 0, 0.315, 0.275, 0.245], np.float32)[count]
    lobe = np.where(labels == _NEUTROPHIL, by_lobes, by_class) * _uniform(rng, n, 0.92, 1.08)
    # Half the angle that the arc spans, and the arc's radius.
    two, kidney, lobes = (_uniform(rng, n, *b) for b in ((1.15, 1.55), (1.25, 1.7), (1.5, 2.3)))
    half_span = by_kind(two, np.zeros(n), kidney, lobes)
    bounds = ((0.44, 0.52), (0.0, 0.2), (0.38, 0.46), (0.46, 0.54))
    arc = by_kind(*(_uniform(rng, n, *between) for between in bounds))
    strand = _column(np.where(labels == _MONOCYTE, 0.2, 0.085).astype(np.float32))
    melt = _column(np.where(labels == _MONOCYTE, 0.15, 0.08).astype(np.float32))
    # The kidney's weight lies off the arc's center; lobes are centered as they are.
    shift = np.where(labels == _MONOCYTE, 0.12, np.where(labels == _EOSINOPHIL, 0.1, 0.0))
    # Lobes that stand apart are no two alike.
    uneven = np.where((labels == _MONOCYTE) | (labels == _LYMPHOCYTE), 0.25, 1.0)

    distance = np.full(u.shape, 9, np.float32)
    before_x: Array = np.zeros(n)
    before_y: Array = np.zeros(n)
    for number in range(_MOST_LOBES):
        along = np.where(count > 1, 2 * number / np.maximum(count - 1, 1) - 1, 0)
        angle = half_span * along + uneven * _uniform(rng, n, -0.15, 0.15)
        reach = arc * (1 + uneven * _uniform(rng, n, -0.15, 0.15))
        at_x, at_y = reach * np.cos(angle) - shift, reach * np.sin(angle)
        size = lobe * (1 + uneven * _uniform(rng, n, -0.15, 0.15))
        longer = 1 + uneven * _uniform(rng, n, 0.0, 0.3)
        turn = _directions(rng, n)
        # Only the images that have so many lobes.
        those = np.flatnonzero(number < count)
        u_those, v_those, wide = u[those], v[those], melt[those]
        du, dv = u_those - _column(at_x[those]), v_those - _column(at_y[those])
        a = (du * _column(turn[0, those]) + dv * _column(turn[1, those])) / _column(longer[those])
        b = (dv * _column(turn[0, those]) - du * _column(turn[1, those])) * _column(longer[those])
        nearest = _melt(distance[those], np.sqrt(a * a + b * b) - _column(size[those]), wide)
        if number:
            line = _to_line(
                u_those, v_those, before_x[those], before_y[those], at_x[those], at_y[those]
            )
            nearest = _melt(nearest, line - strand[those], wide)
        distance[those] = nearest
        before_x, before_y = at_x, at_y
    return distance


def _melt(a: Array, b: Array, width: Array) -> Array:
    """The smaller of two distances, rounded where they are closer than `width`."""
    near = np.maximum(width - np.abs(a - b), 0) / width
    joined: Array = np.minimum(a, b) - near * near * width * np.float32(0.25)
    return joined


def _to_line(u: Array, v: Array, x0: Array, y0: Array, x1: Array, y1: Array) -> Array:
    """Distance to the segment between two points, one segment an image."""
    along_x, along_y = _column(x1 - x0), _column(y1 - y0)
    px, py = u - _column(x0), v - _column(y0)
    part = (px * along_x + py * along_y) / (along_x * along_x + along_y * along_y + 1e-6)
    part = np.clip(part, 0, 1)
    distance: Array = np.sqrt((px - part * along_x) ** 2 + (py - part * along_y) ** 2)
    return distance


def _red_cells(
    rng: np.random.Generator,
    pixels: int,
    center_x: Array,
    center_y: Array,
    radius: Array,
    blur: Array,
) -> Array:
    """Thickness of the red cells: discs, paler in the middle, that may overlap each other."""
    n = len(radius)
    canvas = _Canvas(n, pixels, reach=0.25)
    crowd = _uniform(rng, n, 0.4, 1.0)
    own_size = _uniform(rng, n, 0.15, 0.19)
    for _ in range(_RED_CELLS):
        at_x, at_y = _uniform(rng, n, -0.6, 0.6), _uniform(rng, n, -0.6, 0.6)
        size = own_size * _uniform(rng, n, 0.9, 1.1)
        # Smears push red cells aside: those that would lie under the white cell are left out.
        apart = np.sqrt((at_x - center_x) ** 2 + (at_y - center_y) ** 2)
        there = (rng.random(n) < crowd) & (apart > radius + 0.6 * size)
        turn = _directions(rng, n)
        flat = _uniform(rng, n, 1.0, 1.35)
        pallor = _uniform(rng, n, 0.45, 0.8)
        those = np.flatnonzero(there)
        cos, sin = _column(turn[0, those]), _column(turn[1, those])
        dx, dy = canvas.around(those, at_x[those], at_y[those])
        a = dx * cos + dy * sin
        b = (dy * cos - dx * sin) * _column(flat[those])
        square = (a * a + b * b) / _column(size[those] * size[those])
        disc = _shade(np.sqrt(square) - 1, size[those], blur[those])
        canvas.add(disc * (1 - _column(pallor[those]) * np.clip(1 - square * 1.9, 0, 1)))
    return canvas.picture()


def _platelets(rng: np.random.Generator, pixels: int, n: int, blur: Array) -> Array:
    """Thickness of the platelets: a few small dots of the nucleus's own stain."""
    canvas = _Canvas(n, pixels, reach=0.06)
    for _ in range(_PLATELETS):
        at_x, at_y = _uniform(rng, n, -0.5, 0.5), _uniform(rng, n, -0.5, 0.5)
        size = _uniform(rng, n, 0.015, 0.035)
        those = np.flatnonzero(rng.random(n) < 0.4)
        dx, dy = canvas.around(those, at_x[those], at_y[those])
        away = np.sqrt(dx * dx + dy * dy) / _column(size[those]) - 1
        canvas.add(_shade(away, size[those], blur[those]))
    return canvas.picture()


class _Canvas:
    """One layer an image, to which small things are added, each in a window of its own.

    `reach` is how far from its center a thing may extend; computing windows of that size instead
    of whole images is what makes drawing fast.
    """

    def __init__(self, n: int, pixels: int, reach: float) -> None:
        self._pixels = pixels
        self._half = int(np.ceil(reach * pixels)) + 1
        # Room for windows around centers up to 0.1 outside the image.
        self._margin = 2 * self._half + int(np.ceil(0.1 * pixels)) + 1
        side = pixels + 2 * self._margin
        self._layers = np.zeros((n, side, side), np.float32)
        self._offsets = np.arange(-self._half, self._half + 1)

    def around(self, images: NDArray[np.intp], at_x: Array, at_y: Array) -> tuple[Array, Array]:
        """Set windows of these images at these centers; their pixels' x and y from there."""
        self._image = images[:, None, None]
        column = np.floor((at_x + 0.5) * self._pixels).astype(np.intp)[:, None] + self._offsets
        row = np.floor((at_y + 0.5) * self._pixels).astype(np.intp)[:, None] + self._offsets
        self._columns = (column + self._margin)[:, None, :]
        self._rows = (row + self._margin)[:, :, None]
        dx = (column.astype(np.float32) + np.float32(0.5)) / self._pixels - np.float32(0.5)
        dy = (row.astype(np.float32) + np.float32(0.5)) / self._pixels - np.float32(0.5)
        return (dx - at_x[:, None])[:, None, :], (dy - at_y[:, None])[:, :, None]

    def add(self, windows: Array) -> None:
        self._layers[self._image, self._rows, self._columns] += windows

    def picture(self) -> Array:
        inner = slice(self._margin, self._margin + self._pixels)
        return self._layers[:, inner, inner]


def _shade(distance: Array, scale: Array, blur: Array) -> Array:
    """Cover, 1 inside and 0 outside, of a signed distance given in units of `scale`."""
    part = np.clip(np.float32(0.5) - distance * _column(scale) / (2 * blur), 0, 1)
    cover: Array = part * part * (3 - 2 * part)
    return cover


def _texture(rng: np.random.Generator, n: int, pixels: int, cells: int) -> Array:
    """Smooth noise between 0 and 1: random values on a coarse grid, interpolated."""
    values = rng.random((n, cells + 1, cells + 1), dtype=np.float32)
    place = np.arange(pixels, dtype=np.float32) * np.float32(cells / pixels)
    low = place.astype(np.intp)
    part = place - low
    part = part * part * (3 - 2 * part)
    rows = values[:, low] + (values[:, low + 1] - values[:, low]) * part[None, :, None]
    noise: Array = rows[:, :, low] + (rows[:, :, low + 1] - rows[:, :, low]) * part[None, None, :]
    return noise


def _uniform(
    rng: np.random.Generator, shape: int | tuple[int, ...], low: float, high: float
) -> Array:
    return rng.uniform(low, high, shape).astype(np.float32)


def _directions(rng: np.random.Generator, n: int) -> Array:
    """Random unit vectors, shape (2, n)."""
    angle = rng.uniform(0, 2 * np.pi, n)
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def _column(values: NDArray[Any]) -> Array:
    """One value an image, shaped to meet its rows and columns."""
    return np.asarray(values, np.float32)[:, None, None]
