"""Imported data sets on disk: decoded once, memory-mapped ever after.

One folder a set and size, `XCAL_HOME/data/NAME/PIXELSpx/`. It is written elsewhere and renamed
into place when whole, so what stands under its name is never half a set; checksums find what
was damaged later. Group ids are stored as numbers: whose images they are stays in the source.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from xcal.data.images import ImageData, Images
from xcal.data.listing import SPLITS
from xcal.errors import UserError

FORMAT = 1
"""Raised whenever decoding or the layout on disk changes, so that old caches are made anew."""

LISTINGS = {"blood-cells": (2, "took file numbers for pictures")}
"""Kinds whose sets are read otherwise than at first: the version, and what the ones before did.

Every other kind is at version 1. Only sets of the kinds named here need to be made anew.
"""

_ABOUT = "about.json"


@dataclass(frozen=True)
class SplitCounts:
    images: int
    groups: int
    largest_group: int
    per_class: tuple[int, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of an imported set without opening its images."""

    name: str
    pixels: int
    kind: str
    task: str
    classes: tuple[str, ...]
    group_name: str
    license: str
    splits: dict[str, SplitCounts]
    original_sizes: tuple[tuple[str, int], ...]
    """Width×height of the source images, commonest first, with how many there were."""
    skipped: tuple[tuple[str, str], ...]
    """Files that could not be used, with the reason."""
    notes: tuple[str, ...]
    source: str
    key: str
    """Hash of the source's content and of how it was read."""
    files: dict[str, dict[str, Any]] = field(repr=False)
    """Bytes and SHA-256 of every array file."""
    format: int = FORMAT
    listing: int = 1
    """The version of its kind in `LISTINGS`; sets from before there were any have none written."""
    ungrouped_images: int = 0
    """Images of which the source names no group, in a set that has groups."""
    one_image_per_person: bool = False
    """Declared by hand at the import."""


_INFO = TypeAdapter(DatasetInfo)


def listing_version(kind: str) -> int:
    return LISTINGS[kind][0] if kind in LISTINGS else 1


def count_split(
    labels: NDArray[np.int64], groups: NDArray[np.int64], n_classes: int
) -> SplitCounts:
    """How many images, groups and images per class there are."""
    per_group = np.unique(groups, return_counts=True)[1]
    return SplitCounts(
        images=len(labels),
        groups=len(per_group),
        largest_group=int(per_group.max(initial=0)),
        per_class=tuple(
            (labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=n_classes))
            .astype(int)
            .tolist()
        ),
    )


def data_root() -> Path:
    """Where xcal keeps what it made: `XCAL_HOME`, by default a folder by the XDG rules."""
    if given := os.environ.get("XCAL_HOME"):
        return Path(given).expanduser()
    if given := os.environ.get("XDG_DATA_HOME"):
        return Path(given) / "xcal"
    return Path.home() / ".local" / "share" / "xcal"


def check_name(name: str) -> str:
    """The name, if it can be a folder's and a configuration's; else a `UserError`."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name) or name == "smear":
        raise UserError(
            f"{name!r} cannot name a data set: use letters, digits, dots, dashes and underscores, "
            "and not 'smear'."
        )
    return name


def folder_of(name: str, pixels: int) -> Path:
    return data_root() / "data" / check_name(name) / f"{pixels}px"


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the set's lock: two imports of one name do not meet."""
    root = data_root() / "data"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{check_name(name)}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"Another import of {name!r} is under way; wait for it.") from error
        yield


@contextlib.contextmanager
def fresh_folder(name: str, pixels: int) -> Iterator[Path]:
    """An empty folder to write a set into; only a `commit` puts it in its place.

    What an interrupted import left behind is removed first, so an import always starts clean.
    """
    place = data_root() / "data" / f".{name}.{pixels}px.partial"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def commit(partial: Path, info: DatasetInfo) -> None:
    """Write the description, sync everything, and rename the folder into its place."""
    about = partial / _ABOUT
    about.write_text(json.dumps(asdict(info), indent=1, ensure_ascii=False), encoding="utf-8")
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    target = folder_of(info.name, info.pixels)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A folder cannot be replaced in one move: an old one is set aside, then let go.
    aside = target.parent / f".{target.name}.old"
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != _ABOUT
    }


def _sha256(path: Path) -> str:
    found = path.stat()
    return _sha256_of(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256_of(path: Path, _size: int, _changed: int) -> str:
    """Once a process for a file that has not changed: cells of a study open one set in turn."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sizes_of(name: str) -> list[int]:
    """The sizes at which a set was imported, ascending."""
    folder = data_root() / "data" / name
    found = [re.fullmatch(r"(\d+)px", p.name) for p in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def list_datasets() -> tuple[DatasetInfo, ...]:
    """All imported sets at all their sizes; damaged ones are left out."""
    found = []
    for name in known_names():
        for pixels in sizes_of(name):
            with contextlib.suppress(UserError):
                found.append(read_info(name, pixels))
    return tuple(found)


def read_info(name: str, pixels: int | None = None) -> DatasetInfo:
    """The description of an imported set; of several sizes the largest, unless one is named."""
    check_name(name)
    sizes = sizes_of(name)
    if not sizes:
        raise UserError(
            f"There is no data set called {name!r}; known here: "
            f"{', '.join(['smear', *known_names()])}."
        )
    if pixels is not None and pixels not in sizes:
        raise UserError(
            f"The data set {name!r} was imported at {', '.join(map(str, sizes))} pixels, not "
            f"{pixels}; import it again with --name {name} --pixels {pixels}."
        )
    folder = folder_of(name, sizes[-1] if pixels is None else pixels)
    try:
        raw = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise UserError(f"The data set {name!r} was made by another version; import it again.")
        if raw.get("listing", 1) < listing_version(raw["kind"]):
            raise UserError(
                f"The data set {name!r} was imported by an older version that "
                f"{LISTINGS[raw['kind']][1]}: import it again with xcal data import "
                f"{raw['source']} --name {name} --pixels {raw['pixels']}."
            )
        return _INFO.validate_python(raw)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(name, _ABOUT) from error


def known_names() -> list[str]:
    root = data_root() / "data"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [p.name for p in folders if not p.name.startswith(".") and sizes_of(p.name)]


def open_dataset(name: str, pixels: int | None = None) -> ImageData:
    """The set with its images memory-mapped, after every file was checked against its checksum."""
    info = read_info(name, pixels)
    folder = folder_of(name, info.pixels)
    for file, expected in info.files.items():
        path = folder / file
        whole = path.is_file() and path.stat().st_size == expected["bytes"]
        if not whole or _sha256(path) != expected["sha256"]:
            raise _damaged(name, file)
    train, validation, test = (_open_split(folder, split, info.pixels) for split in SPLITS)
    return ImageData(
        name,
        info.classes,
        info.group_name,
        info.license,
        train,
        validation,
        test,
        ungrouped_images=info.ungrouped_images,
        groups_declared=info.one_image_per_person,
    )


def _open_split(folder: Path, split: str, pixels: int) -> Images:
    labels, groups, ids = (
        np.load(folder / f"{split}.{name}.npy", allow_pickle=False)
        for name in ("labels", "groups", "ids")
    )
    shape = (len(labels), pixels, pixels, 3)
    if not len(labels):  # no file can be mapped that is empty
        return Images(np.empty(shape, np.uint8), labels, groups, ids)
    images = np.memmap(folder / f"{split}.pixels.u8", np.uint8, "r", shape=shape)
    return Images(images, labels, groups, ids)


def _damaged(name: str, file: str) -> UserError:
    return UserError(f"The data set {name!r} is damaged ({file}); import it again.")
