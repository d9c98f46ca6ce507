"""A client's images, drawn by unit of privacy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.data.augment import VIEWS, Augment, check_views, choose_views
from xcal.data.images import Images
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.dp.sampling import UnitTable, images_of, poisson_draw
from xcal.errors import UserError
from xcal.methods.feature_cache import Inputs, Rows
from xcal.models.backbone import Split


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
        self.inputs = Inputs(images.pixels, VIEWS[augment], brightness, device)
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
    sums = np.bincount(where, weights=values.double().cpu().numpy(), minlength=n_units)
    counts = np.bincount(where, minlength=n_units)
    result: NDArray[np.float64] = sums / np.maximum(counts, 1)
    return result
