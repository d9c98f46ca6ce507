"""A site's own held-out images: who they are of, and that nobody of them was trained on."""

from __future__ import annotations

import csv
import posixpath
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xcal.data.images import RECORD_GROUPS, ImageData, Images
from xcal.data.listing import find_column, read_table
from xcal.data.source_files import FolderFiles
from xcal.data.table import PATH_COLUMNS
from xcal.errors import UserError
from xcal.federation.site_directory import SiteDirectory

UNKNOWN = "not said"
PEOPLE = ("patient", "person")  # names of groups that are people


@dataclass(frozen=True)
class HeldOut:
    """Images that no round trains on, with what the site knows of them."""

    images: Images
    classes: tuple[str, ...]
    who: str  # what a group is: "patient", or "image" where nobody says whose they are
    apart: bool  # whether that its people are not trained on is known, and not only assumed
    subgroups: dict[str, NDArray[np.str_]]  # by column, one value an image
    data: ImageData  # the set that they are of
    people: bool = False  # whether a group is known to be a person


def held_out(site: SiteDirectory, pixels: int | None) -> HeldOut:
    """The split that site.toml names. Raises `UserError` where its people are trained on."""
    data = site.whole_set(pixels)
    images = data.test if site.about.evaluate_on == "test" else data.validation
    if not len(images):
        raise UserError(
            f"{data.name} has no {site.about.evaluate_on} images to hold out: import it with a"
            " split column, or set evaluate_on."
        )
    if data.multi_label:
        raise UserError(
            f"{data.name} tells several findings at once, which pages on held-out images do not"
            " show yet: leave out evaluate."
        )
    known = data.group_name != RECORD_GROUPS
    # Numbers of groups mean the same group in every split of one set, and of no other.
    shared = np.intersect1d(data.train.groups, images.groups) if known else np.arange(0)
    same = np.intersect1d(data.train.ids, images.ids)
    if len(shared) or len(same):
        raise UserError(
            f"{len(shared) or len(same)} {data.group_name}s of the {site.about.evaluate_on} images"
            f" of {data.name} are also trained on: numbers on them would flatter the model. Split"
            f" by {data.group_name}."
        )
    return HeldOut(
        images,
        data.classes,
        data.group_name if known else "image",
        data.groups_known,
        _subgroups(site, images),
        data,
        data.groups_known and (data.group_name in PEOPLE or data.groups_declared),
    )


def _subgroups(site: SiteDirectory, images: Images) -> dict[str, NDArray[np.str_]]:
    about = site.about
    if about.subgroup_table is None or not about.subgroups:
        return {}
    path = site.beside(about.subgroup_table)
    if not path.is_file():
        raise UserError(f"There is no table {path}: set subgroup_table in site.toml.")
    rows = _rows(path)
    image = find_column(rows[0], PATH_COLUMNS)
    if image is None:
        raise UserError(f"{path} has no column that names images, such as {PATH_COLUMNS[0]!r}.")
    place = {posixpath.normpath(row[image].replace("\\", "/")): row for row in rows}
    found = [place.get(posixpath.normpath(name)) for name in images.ids.tolist()]
    if not any(found):
        raise UserError(f"{path} names none of the held-out images: give the table they came with.")
    columns = {}
    for wanted in about.subgroups:
        column = find_column(rows[0], (wanted,))
        if column is None:
            raise UserError(f"{path} has no column {wanted!r}: it has {', '.join(rows[0])}.")
        columns[column] = np.array([(row or {}).get(column) or UNKNOWN for row in found])
    return columns


def _rows(path: Path) -> list[dict[str, str]]:
    class One(FolderFiles):
        """The table alone: what else lies beside it is nobody's business here."""

        def __init__(self) -> None:
            self._root = path.parent
            self.sizes = {path.name: path.stat().st_size}

    try:
        return read_table(One(), path.name)
    except (csv.Error, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
