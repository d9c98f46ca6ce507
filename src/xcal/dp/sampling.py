"""The draws of a step: which units, and which of their images.

Nothing here makes randomness: uniforms are given, so that a real client's come from a
cryptographic source and a simulation's from a seed. Every unit and every image has its own place
in them: what one unit's uniforms decide never depends on who else is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Unit = Literal["record", "group"]


@dataclass(frozen=True)
class UnitTable:
    """Which images belong to which unit of privacy.

    Units are numbered from 0 to `n_units` - 1, groups in ascending order of their ids. Images of
    unit i are `images[starts[i]:starts[i + 1]]`, ascending.
    """

    images: NDArray[np.int64]
    starts: NDArray[np.int64]

    @staticmethod
    def records(n: int) -> UnitTable:
        """Every image a unit of its own."""
        return UnitTable(np.arange(n, dtype=np.int64), np.arange(n + 1, dtype=np.int64))

    @staticmethod
    def groups(group_ids: NDArray[np.int64]) -> UnitTable:
        """All images that share a group id are one unit."""
        order = np.argsort(group_ids, kind="stable").astype(np.int64)
        _, first = np.unique(group_ids[order], return_index=True)
        return UnitTable(order, np.append(first, len(order)).astype(np.int64))

    @staticmethod
    def of(unit: Unit, group_ids: NDArray[np.int64]) -> UnitTable:
        """The table of either unit, from the images' group ids."""
        if unit == "record":
            return UnitTable.records(len(group_ids))
        return UnitTable.groups(group_ids)

    @property
    def n_units(self) -> int:
        return len(self.starts) - 1

    @property
    def n_images(self) -> int:
        return len(self.images)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Images per unit."""
        return np.diff(self.starts)


def ids_in_order(groups: Any) -> list[Any]:
    """Groups as a user gives them, one for each item; a `ValueError` ends "groups …".

    A mapping would be read as its keys, a text as its letters, a set in any order.
    """
    if isinstance(groups, Tensor | np.ndarray):
        groups = groups.tolist()
    if isinstance(groups, Mapping | Set | str | bytes) or not isinstance(groups, Iterable):
        raise ValueError(
            f"is of type {type(groups).__name__}: give a list or an array with one id for each"
            " item, in the data set's order"
        )
    return list(groups)


def plain_ids(ids: Iterable[Any]) -> list[Any]:
    """Ids of groups as values that are equal where they are the same; a `ValueError` otherwise.

    Tensors and objects are told apart by where they lie in memory: taken as they are, everybody's
    every item would be a group of its own.
    """
    found = [_plain_id(one) for one in ids]
    if len({isinstance(one, str) for one in found}) > 1:
        raise ValueError(
            "holds numbers and text, so that 7 and '7' would be two people: give ids of one kind"
        )
    return found


def _plain_id(one: Any) -> Any:
    if isinstance(one, Tensor | np.ndarray | np.generic) and np.prod(one.shape) == 1:
        one = one.item()
    if isinstance(one, tuple) and one:
        return tuple(map(_plain_id, one))
    if isinstance(one, str):
        one = one.strip()
    if one is None or one == "" or (isinstance(one, float) and one != one):
        raise ValueError(
            "names nobody for some items (None, NaN or an empty string): whose they are must be"
            " known, or given an id of their own"
        )
    if not isinstance(one, str | int | float):
        raise ValueError(
            f"holds an id of type {type(one).__name__}: an id must be a number or a string"
        )
    return one


def poisson_draw(uniforms: NDArray[np.float64], rate: float) -> NDArray[np.int64]:
    """The units drawn: each independently with probability `rate`, ascending, never truncated.

    `uniforms` holds one value of [0, 1) per unit.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"the sampling rate must lie between 0 and 1, not {rate}")
    return np.flatnonzero(uniforms < rate).astype(np.int64)


def images_of(
    units_drawn: NDArray[np.int64],
    table: UnitTable,
    images_per_unit: int,
    image_uniforms: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """At most `images_per_unit` images of every drawn unit, at random without replacement.

    Returns the images' indices, ordered by unit and then by index, and for each image the
    *position* of its unit in `units_drawn` (not the unit's number), ready to sum over.

    `image_uniforms` holds one value per image of the whole set: a unit keeps its images with the
    smallest values. The choice within a unit thus depends on its own images' values alone,
    whatever other units hold or whether they are there. It may be left out where no unit has more
    than `images_per_unit` images, so nothing is to be chosen.
    """
    if images_per_unit < 1:
        raise ValueError(f"images_per_unit must be at least 1, not {images_per_unit}")
    sizes = table.sizes[units_drawn]
    position = np.repeat(np.arange(len(units_drawn), dtype=np.int64), sizes)
    # Place of each image within its unit: 0, 1, … restarting at every unit.
    within = np.arange(len(position)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    images = table.images[table.starts[units_drawn][position] + within]
    if sizes.max(initial=0) <= images_per_unit:
        return images, position
    if image_uniforms is None:
        raise ValueError("a drawn unit has more images than may be used: image_uniforms is needed")
    if len(image_uniforms) != table.n_images:
        raise ValueError(
            f"image_uniforms has {len(image_uniforms)} values for {table.n_images} images"
        )
    # Sorted by unit, then by uniform, an image's place within its unit is its rank.
    by_rank = np.lexsort((image_uniforms[images], position))
    kept = np.sort(by_rank[within < images_per_unit])
    return images[kept], position[kept]


def cap_groups(
    group_ids: NDArray[np.int64], cap: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Indices, ascending, of a random choice of at most `cap` images of every group.

    This is what makes a declared cap on images per person true of a record-level run.
    """
    if cap < 1:
        raise ValueError(f"the cap on images per group must be at least 1, not {cap}")
    table = UnitTable.groups(group_ids)
    chosen, _ = images_of(np.arange(table.n_units), table, cap, rng.random(len(group_ids)))
    return np.sort(chosen)


def filled_up(values: Tensor, rows: int) -> Tensor:
    """Exactly `rows` of them, in memory of their own: copies of the first stand behind the others.

    A copy is finite where the first is, so that nothing times it is nothing. In new memory also
    where none is missing: how numbers are rounded may depend on where they lie. With 0 `rows` they
    stay as they are.
    """
    if not rows:
        return values
    return torch.cat([values, values[:1].expand(rows - len(values), *values.shape[1:])])
