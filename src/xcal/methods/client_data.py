"""A client's images, drawn by unit of privacy, and what a frozen backbone makes of them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.data.augment import VIEWS, Augment, View, check_views, choose_views, show
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.dp.clipping.precision import double
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.dp.sampling import UnitTable, filled_up, images_of, poisson_draw
from xcal.errors import UserError
from xcal.methods.feature_store import FeatureStore, StoredRows, in_fixed_passes
from xcal.models.backbone import Split

# Always the same neighbors: what the beginning makes of an image is then the same to the bit,
# whichever step asks first, also after a resume. Beside any neighbors it is where `rows` is given.
_BLOCK = 32


class Inputs:
    """Every image of a client in every view, made when it is asked for."""

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        views: tuple[View, ...],
        brightness: float,
        device: str,
        store: FeatureStore | None = None,
    ) -> None:
        self._pixels = pixels
        self._views = views
        self._brightness = brightness
        self._device = device
        self._store = store
        self._kept: _Kept | None = None
        self._ones: dict[str, Tensor] = {}  # by the backbone's digest

    def pictures(self, images: NDArray[np.int64], views: NDArray[np.int64]) -> Tensor:
        """The images of these numbers in these views, normalized."""
        pixels = np.asarray(self._pixels[images])
        shown = show(pixels, views, self._views) if views.any() else pixels
        return to_tensor(shown, self._brightness).to(self._device)

    def keep(self, split: Split | None, views: int, megabytes: int, rows: int = 0) -> bool:
        """Whether activations are kept from now on.

        They are where the network has a frozen backbone and all of them, of all the views that
        steps may ask for, fit into `megabytes`. They are made in passes of `rows` images each,
        the last one filled up; 0: of a block each, the last one as short as it is.
        """
        if split is None or not megabytes or not len(self._pixels):
            self._kept = None
            return False
        digest = split.digest()
        if self._kept is not None and self._kept.serves(digest, rows):
            self._kept.split = split  # the same weights in a network built anew
            return True
        one, count = self._first(split, digest), self._count(views)
        if self._store is not None and count == len(self._pixels):
            found = self._stored(self._store, split, digest, one)
            made = np.ones(1, dtype=bool)  # one block of all
            self._kept = _Kept(split, digest, found, made, count, stored=True)
            return True
        if not self.fits(split, views, megabytes):
            self._kept = None
            return False
        shape = (count, *one.shape[1:])
        made = np.zeros(math.ceil(count / (rows or _BLOCK)), dtype=bool)
        # Zeros of the operating system's: memory is taken only as blocks are filled.
        table = torch.from_numpy(np.zeros(shape, dtype=one.cpu().numpy().dtype))
        self._kept = _Kept(split, digest, table, made, rows)
        return True

    def _stored(self, store: FeatureStore, split: Split, digest: str, one: Tensor) -> StoredRows:
        def make(images: NDArray[np.int64]) -> Tensor:
            return in_fixed_passes(split.begin, self.pictures(images, np.zeros_like(images)))

        return store.rows(digest, np.asarray(self._pixels), self._brightness, one, make)

    def fits(self, split: Split, views: int, megabytes: int) -> bool:
        """Whether all that `split` makes, of all the views that steps may ask for, fits."""
        if not len(self._pixels):
            return False
        one = self._first(split, split.digest())
        return self._count(views) * one.numel() * one.element_size() <= megabytes * 2**20

    def _first(self, split: Split, digest: str) -> Tensor:
        """Zeros of the shape and type of what `split` makes of one image."""
        if digest not in self._ones:
            zero = np.zeros(1, np.int64)
            self._ones[digest] = torch.zeros_like(split.begin(self.pictures(zero, zero)))
        return self._ones[digest]

    def _count(self, views: int) -> int:
        return (len(self._views) if views > 1 else 1) * len(self._pixels)

    def fill(self, table: Tensor) -> None:
        """Take activations that were computed elsewhere: of every image, view after view."""
        assert self._kept is not None and isinstance(self._kept.table, Tensor)
        self._kept.table.copy_(table)
        self._kept.made[:] = True

    def activations(self, images: NDArray[np.int64], views: NDArray[np.int64]) -> Tensor:
        """What the frozen backbone makes of these images in these views; `keep` came before."""
        kept = self._kept
        assert kept is not None
        places = views * len(self._pixels) + images
        size = kept.rows or _BLOCK
        blocks = np.unique(places // size)
        for block in blocks[~kept.made[blocks]]:
            inside = np.arange(block * size, min((block + 1) * size, len(kept.table)))
            shown = self.pictures(inside % len(self._pixels), inside // len(self._pixels))
            made = kept.split.begin(filled_up(shown, kept.rows))[: len(inside)]
            assert isinstance(kept.table, Tensor)
            kept.table[inside[0] : inside[-1] + 1] = made.cpu()
            kept.made[block] = True
        return kept.table[torch.from_numpy(places)].to(self._device)


@dataclass
class _Kept:
    split: Split
    digest: str
    table: Tensor | StoredRows
    made: NDArray[np.bool_]
    rows: int
    stored: bool = False  # in passes of the store's own size, whatever was asked for

    def serves(self, digest: str, rows: int) -> bool:
        return self.digest == digest and (self.stored or self.rows == rows)


@dataclass(frozen=True)
class Rows:
    """Images of a draw, each in a view, that take no memory until they are asked for."""

    source: Inputs
    images: NDArray[np.int64]
    views: NDArray[np.int64]
    through_backbone: bool

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: Tensor) -> Rows:
        """Some rows, by number or by mark."""
        chosen = rows.cpu().numpy()
        return Rows(self.source, self.images[chosen], self.views[chosen], self.through_backbone)

    def pictures(self) -> Tensor:
        return self.source.pictures(self.images, self.views)

    def activations(self) -> Tensor:
        return self.source.activations(self.images, self.views)


@dataclass(frozen=True)
class Batch:
    """One Poisson draw. `units[i]` is the drawn unit that row i belongs to.

    A row is an image, or one of several views of it; the signal is taken from `plain` ones only.
    """

    inputs: Tensor | Rows  # as images, or to be made when needed: a draw may be large
    labels: Tensor
    units: Tensor
    n_units: int
    plain: Tensor | None = None  # which rows are unchanged images; None: all
    one_row_each: bool = False  # by what a unit is, and not by who was drawn

    @property
    def images(self) -> Tensor:
        """Every row as an image."""
        return self.inputs.pictures() if isinstance(self.inputs, Rows) else self.inputs

    def pictures(self, rows: Tensor) -> Tensor:
        """The marked rows as images."""
        if isinstance(self.inputs, Rows):
            return self.inputs.take(rows).pictures()
        return self.inputs[rows]

    def only(self, rows: Tensor) -> Batch:
        """The marked rows. The units keep their numbers."""
        inputs = self.inputs
        return Batch(
            inputs.take(rows) if isinstance(inputs, Rows) else inputs[rows],
            self.labels[rows],
            self.units[rows],
            self.n_units,
            None if self.plain is None else self.plain[rows],
            self.one_row_each,
        )

    def without(self, bad: Tensor) -> Batch:
        """The same draw, with the images of the units marked in `bad` taken out.

        The units keep their numbers: they are drawn, and contribute nothing.
        """
        return self.only(~bad[self.units])


class TooManyUnits(UserError):
    """A client has more units than it declared."""


def check_declared_units(present: int, declared: int, where: str = "site.toml") -> None:
    """Refuse a declaration that the data do not fit into; nothing is left out silently."""
    if present > declared:
        raise TooManyUnits(
            f"{where} declares units = {declared}, and the data hold {present}: declare at least as"
            " many, and allow for those to come."
        )


class LocalData:
    """A client's images, drawn by unit of privacy.

    `units` is the number of units n that rate, steps and weights are made of: public, and the same
    for neighbors. With `declared_units` it is that number, whatever the data hold: null units
    without images fill them up, are drawn like any other and contribute nothing, so that adding or
    removing a unit is a neighbor too. Without, units are counted, and only zero-out is.
    """

    def __init__(
        self,
        images: Images,
        *,
        unit: str,
        images_per_unit: int,
        brightness: float = 1.0,
        device: str = "cpu",
        views: int = 1,
        augment: Augment = "turns",
        declared_units: int | None = None,
        store: FeatureStore | None = None,
    ) -> None:
        check_views(views, augment)
        self.unit = unit
        self.declared = declared_units is not None
        self._images = images
        self._table = UnitTable.of("group" if unit == "group" else "record", images.groups)
        if declared_units is not None:
            check_declared_units(self._table.n_units, declared_units)
            null = np.full(declared_units - self._table.n_units, len(images), dtype=np.int64)
            self._table = UnitTable(self._table.images, np.append(self._table.starts, null))
        self._images_per_unit = images_per_unit
        self._brightness = brightness
        self._device = device
        self._augment = augment
        self._views = views
        self.inputs = Inputs(images.pixels, VIEWS[augment], brightness, device, store)
        self._maps = Inputs(images.pixels, (View(),), brightness, device, store)
        self._map_split: Split | None = None
        self._kept = False

    def cache_features(self, split: Split | None, megabytes: int, rows: int = 0) -> bool:
        """Whether draws come with what the network's frozen backbone makes of their images.

        It is computed once for each image and kept, where all of it fits into `megabytes`; in
        passes of `rows` images where that is given. Whether it fits follows the real number of
        images, and changes time and memory only: `is_cache_exact` has looked that numbers are the
        same to the bit with and without, and gives 0 megabytes where they are not.
        """
        self._kept = self.inputs.keep(split, self._views, megabytes, rows)
        return self._kept

    def cache_maps(self, split: Split | None, megabytes: int, rows: int = 0) -> None:
        """Keep the explained maps too, which `split` makes, where they fit: see `maps`."""
        self._map_split, self._map_rows = split, rows
        self._maps_kept = self._maps.keep(split, 1, megabytes, rows)

    @property
    def has_maps(self) -> bool:
        return self._map_split is not None

    def maps(self, rows: Rows) -> Tensor:
        """The explained maps of plain images, kept or made anew."""
        if self._maps_kept:
            return self._maps.activations(rows.images, np.zeros_like(rows.images))
        split, size = self._map_split, self._map_rows or _BLOCK
        assert split is not None
        made = [
            split.begin(filled_up(rows.take(some).pictures(), self._map_rows))[: len(some)]
            for some in torch.split(torch.arange(len(rows)), size)
        ]
        return torch.cat(made)

    def fits(self, split: Split, megabytes: int) -> bool:
        """Whether what this beginning makes of all images fits into `megabytes`."""
        return self.inputs.fits(split, self._views, megabytes)

    @property
    def units(self) -> int:
        """Declared, or counted where nothing is declared."""
        return self._table.n_units

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Batch:
        """Each unit, null or not, independently with probability `rate`, never truncated."""
        drawn = poisson_draw(noise.uniforms(key, self.units), rate)
        chosen = None
        if int(self._table.sizes.max(initial=0)) > self._images_per_unit:
            views = NoiseKey(key.client, key.method, key.round, key.step, "views")
            chosen = noise.uniforms(views, self._table.n_images)
        indices, unit_of = images_of(drawn, self._table, self._images_per_unit, chosen)
        shown = np.zeros((len(indices), 1), dtype=np.int64)
        if self._views > 1:
            # Every image of the set has uniforms of its own: its views depend on nobody else's.
            others = len(VIEWS[self._augment]) - 1
            source = NoiseKey(key.client, key.method, key.round, key.step, "augment")
            uniforms = noise.uniforms(source, self._table.n_images * others).reshape(-1, others)
            shown = choose_views(uniforms[indices], self._views)
        rows = Rows(self.inputs, np.repeat(indices, self._views), shown.reshape(-1), self._kept)
        plain = None if self._views == 1 else torch.from_numpy(rows.views == 0).to(self._device)
        return Batch(
            rows,
            torch.from_numpy(self._images.labels[rows.images]).to(self._device),
            torch.from_numpy(np.repeat(unit_of, self._views)).to(self._device),
            len(drawn),
            plain,
            one_row_each=self.unit == "record" and self._views == 1,
        )

    @property
    def multi_label(self) -> bool:
        """Whether an image may show several findings at once."""
        return self._images.multi_label

    def digest(self) -> str:
        """A fingerprint of all that a draw can return. It stays in the client's own ledger."""
        state = hashlib.sha256()
        for array in (self._images.pixels, self._images.labels, self._images.groups):
            state.update(np.ascontiguousarray(array).tobytes())
        settings = self._brightness, self._images_per_unit, self.units, self._views, self._augment
        state.update(repr(settings).encode())
        return state.hexdigest()


def mean_by_unit(values: Tensor, units: Tensor, n_units: int) -> NDArray[np.float64]:
    """The mean of an image's values over its unit; units without an image get 0."""
    where = units.cpu().numpy()
    sums = np.bincount(where, weights=double(values).cpu().numpy(), minlength=n_units)
    counts = np.bincount(where, minlength=n_units)
    result: NDArray[np.float64] = sums / np.maximum(counts, 1)
    return result
