"""`xcal data import`: recognize what was downloaded, decode it once, keep it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from xcal.data import image_store as store
from xcal.data.decode import OnlyDicom, is_dicom, strict_decoding
from xcal.data.folders import (
    blood_cells,
    blood_cells_as_shipped,
    class_folders,
    is_blood_cells,
)
from xcal.data.image_store import DatasetInfo, SplitCounts
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import SPLITS, ColumnChoice, Listing, Record, assign_splits, tables
from xcal.data.published import chest_xray, find_diagnoses, find_entries, isic, medmnist
from xcal.data.source_files import BadFile, Files, FolderFiles, open_files
from xcal.data.table import find_labeled_table, labeled_table
from xcal.errors import UserError

Kind = Literal[
    "auto",
    "blood-cells",
    "blood-cells-as-shipped",
    "chest-xray14",
    "isic",
    "medmnist",
    "csv",
    "folders",
    "dicom",
]
Progress = Callable[[int, int], None]
"""Called with the number of images done and the number of all images."""

_SHOWN = 20


class BadFilesError(UserError):
    """Files that cannot be used; `files` holds all of them, the text the first ones."""

    def __init__(self, files: Sequence[tuple[str, str]]) -> None:
        self.files = tuple(files)
        lines = [f"  {name} {reason}" for name, reason in self.files[:_SHOWN]]
        if len(self.files) > _SHOWN:
            lines.append(f"  … and {len(self.files) - _SHOWN} more")
        count = f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}"
        super().__init__(
            f"{count} cannot be used; mend them, take them out (of the table, too), or import"
            " without them by --skip-bad:\n" + "\n".join(lines)
        )


@dataclass(frozen=True)
class ImportSummary:
    """What came of an import."""

    info: DatasetInfo
    already_there: bool
    """The same content was imported before in the same way; nothing had to be decoded."""


def import_dataset(
    path: str | Path,
    name: str | None = None,
    kind: Kind = "auto",
    pixels: int = 128,
    task: str | None = None,
    skip_bad: bool = False,
    replace: bool = False,
    progress: Progress = lambda *_: None,
    *,
    path_column: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    one_image_per_person: bool = False,
    all_train: bool = False,
) -> ImportSummary:
    """Read the data set at `path` and keep it as `name` at `pixels` a side.

    `path_column`, `label_column` and `group_column` say which columns of a CSV hold the image, its
    class and whose it is, where their names do not. `one_image_per_person` declares that no two
    images show one person, where the set itself names nobody. With `all_train` no images are held
    back for validation and test.

    After it returns, `load(name)` opens the set. If it raises, nothing has changed. If the process
    dies, half a set is never taken for a whole one; at worst, in the instant of a replacement,
    neither the old nor the new one is in its place and the import is to be repeated.
    Files that cannot be used end it with a `BadFilesError` that names them all, or are left out
    with `skip_bad`. Another set of the same name and size is kept unless `replace`.
    """
    path = Path(path)
    if not 8 <= pixels <= 1024:
        raise UserError(f"pixels is {pixels}, but must lie between 8 and 1024.")
    if kind not in get_args(Kind):
        raise UserError(f"kind is {kind!r}, but must be one of {', '.join(get_args(Kind))}.")
    if not path.exists():
        raise UserError(f"{path} does not exist; give a folder, a zip, a CSV or an .npz file.")
    files: Files | None = None
    if path.suffix.lower() != ".npz":
        files = FolderFiles(path.parent) if _is_table(path) else open_files(path)
    try:
        with strict_decoding():
            columns = ColumnChoice(path_column, label_column, group_column)
            listing = recognize(path, files, kind, task, columns)
            if one_image_per_person:
                listing = _one_each(listing)
            name = store.check_name(name or listing.default_name)
            asked = (columns, one_image_per_person, all_train)
            key = _key(path, files, listing, pixels, skip_bad, asked)
            with store.exclusive(name):
                if (before := _standing(name, pixels)) is not None:
                    # An older version may not have seen whose the images are.
                    ungrouped = 0 if one_image_per_person else listing.unnamed
                    now = (key, listing.group_name, ungrouped)
                    if (before.key, before.group_name, before.ungrouped_images) == now:
                        return ImportSummary(before, already_there=True)
                    if not replace:
                        raise UserError(
                            f"{name!r} at {pixels} pixels already holds other images, or the same"
                            f" read in another way (from {before.source}); choose another --name,"
                            " or --replace it."
                        )
                info = _decode_all(path, listing, name, pixels, key, skip_bad, progress, asked)
                return ImportSummary(info, already_there=False)
    finally:
        if files is not None:
            files.close()


_Asked = tuple[ColumnChoice, bool, bool]
"""How the user wants it read: columns, one image per person, all for training."""
_UNASKED: _Asked = (ColumnChoice(), False, False)


def _one_each(listing: Listing) -> Listing:
    """The listing with every image a person of its own, as declared by hand."""
    groups = Counter(record.group for record in listing.records)
    several = sum(count > 1 for count in groups.values())
    if several:
        raise UserError(
            f"{several} {listing.group_name}s of this data set have several images, so it cannot be"
            " imported with --one-image-per-person: leave the option out."
        )
    if listing.repeating:
        raise UserError(
            f"The column {listing.repeating[0]!r} looks as if it said whose an image is, and names"
            " somebody more than once, so the set cannot be imported with --one-image-per-person:"
            f" import it with --group-column {listing.repeating[0]!r}, or take the column out if it"
            " names nobody."
        )
    return replace(listing, group_name="person")


def recognize(
    path: Path, files: Files | None, kind: Kind, task: str | None, columns: ColumnChoice
) -> Listing:
    """Find out which layout it is (`auto`), and read all but the images."""
    plain_name = _plain(path.stem if path.is_file() else path.resolve().name)
    by_hand = columns != ColumnChoice()
    if by_hand and (files is None or kind.startswith(("medmnist", "blood-cells"))):
        raise UserError("This layout has no table: leave out the options that name columns.")
    if kind == "folders" and columns.label:
        raise UserError("Folders name the classes, no table does: leave out --label-column.")
    if kind == "auto" and columns.label:
        kind = "csv"  # who names this column has a table of his own
    if files is None:
        if kind not in ("auto", "medmnist"):
            raise UserError(f"{path} is an .npz file, which kind {kind!r} does not read.")
        return medmnist(path, task)
    if kind == "medmnist":
        raise UserError(f"{path} is not an .npz file, which kind 'medmnist' reads.")
    # A table that the user points at is the one to read, whatever else lies beside it.
    given = path.name if _is_table(path) else None
    if kind == "dicom":
        files = OnlyDicom(files)
        if not any(is_dicom(files, name) for name in files.sizes):
            raise UserError(f"{path} holds no DICOM file, by ending or by first bytes.")
        table = given or find_labeled_table(files, columns)
        if table is not None:
            return labeled_table(files, table, plain_name, columns)
        return class_folders(files, plain_name, columns)

    def is_it(table: str | None) -> bool:
        return kind == "auto" and table is not None and given in (None, table)

    if kind == "chest-xray14" or is_it(find_entries(files)):
        return chest_xray(files, task, columns)
    if kind == "isic" or is_it(find_diagnoses(files)):
        return isic(files, task, columns)
    if task is not None:
        raise UserError(f"This data set has no task {task!r}; leave --task out.")
    if kind == "blood-cells-as-shipped":
        return blood_cells_as_shipped(files)
    looks_like_cells = kind == "auto" and given is None and not by_hand and is_blood_cells(files)
    if kind == "blood-cells" or looks_like_cells:
        return blood_cells(files)
    if kind in ("auto", "csv"):
        table = given or find_labeled_table(files, columns)
        if table is not None:
            return labeled_table(files, table, plain_name, columns)
        if kind == "csv":
            there = tables(files)
            raise UserError(
                f"{path} holds no CSV: put one with the columns path and label beside the images."
                if not there
                else f"No CSV in {path} has columns for path and label: give the CSV itself"
                f" ({there[0]}), and name them with --path-column and --label-column."
            )
    return class_folders(files, plain_name, columns)


def _is_table(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in (".csv", ".tsv")


def _plain(text: str) -> str:
    kept = "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-")
    return kept or "images"


def _key(
    path: Path,
    files: Files | None,
    listing: Listing,
    pixels: int,
    skip_bad: bool,
    asked: _Asked,
) -> str:
    """Hash of the content and of all that decides what is made of it."""
    if files is None:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        content = files.fingerprint()
    how: tuple[object, ...] = (store.FORMAT, listing.kind, listing.task, pixels, skip_bad, content)
    if (version := store.listing_version(listing.kind)) > 1:
        how += (version,)  # only then: the keys of all other sets stay as they were
    if asked != _UNASKED:
        how += (asked,)
    return hashlib.sha256(repr(how).encode()).hexdigest()


def _standing(name: str, pixels: int) -> DatasetInfo | None:
    """The set that already has this name and size, if it is whole."""
    if pixels not in store.sizes_of(name):
        return None
    try:
        store.open_dataset(name, pixels)
        return store.read_info(name, pixels)
    except UserError:
        return None  # damaged or of another version: to be made anew


def _decode_all(
    path: Path,
    listing: Listing,
    name: str,
    pixels: int,
    key: str,
    skip_bad: bool,
    progress: Progress,
    asked: _Asked,
) -> DatasetInfo:
    _, one_image_per_person, all_train = asked
    notes = list(listing.notes)
    records = assign_splits(
        listing.records,
        len(listing.classes),
        notes,
        all_train=all_train,
        group_name=listing.group_name,
    )
    ungrouped = 0 if one_image_per_person else listing.unnamed
    if ungrouped:
        notes.append(
            f"{ungrouped:,} of {len(records):,} images name no {listing.group_name} (nothing, NA,"
            " unknown or the like): as long as they do not, unit = 'group' is refused."
        )
    bad = list(listing.missing)
    sizes: Counter[tuple[int, int]] = Counter()
    done = 0
    twins = _Twins()
    number_of = {group: i for i, group in enumerate(sorted({r.group for r in records}))}
    counts: dict[str, SplitCounts] = {}
    with store.fresh_folder(name, pixels) as folder:
        for split in SPLITS:
            kept = []
            with (folder / f"{split}.pixels.u8").open("wb", buffering=2**20) as out:
                chosen = [r for r in records if r.split == split]
                for record, result in _decoded(listing, chosen, pixels):
                    if isinstance(result, BadFile):
                        bad.append((record.id, str(result)))
                    else:
                        image, size = result
                        out.write(np.ascontiguousarray(image).data)
                        twins.add(record, image)
                        sizes[size] += 1
                        kept.append(record)
                    done += 1
                    progress(done, len(records))
            several = any(isinstance(r.label, tuple) for r in records)
            counts[split] = _write_split(
                folder, split, kept, number_of, len(listing.classes), several
            )
        if bad and not skip_bad:
            raise BadFilesError(bad)
        if counts["train"].images == 0:
            raise UserError("No image is left to train on.")
        if listing.group_name != RECORD_GROUPS:
            notes += twins.notes(listing.group_name)
        info = DatasetInfo(
            name=name,
            pixels=pixels,
            kind=listing.kind,
            task=listing.task,
            classes=listing.classes,
            group_name=listing.group_name,
            license=listing.license,
            splits=counts,
            original_sizes=tuple((f"{w}×{h}", n) for (w, h), n in sizes.most_common(10)),
            skipped=tuple(bad),
            notes=tuple(notes),
            source=str(path.resolve()),
            key=key,
            files=store.checksums(folder),
            listing=store.listing_version(listing.kind),
            ungrouped_images=ungrouped,
            one_image_per_person=one_image_per_person,
        )
        store.commit(folder, info)
    return info


class _Twins:
    """Images that are the same, pixel by pixel, and are said to be of different groups."""

    def __init__(self) -> None:
        self._first: dict[bytes, Record] = {}
        self._found: list[tuple[Record, Record]] = []

    def add(self, record: Record, image: NDArray[np.uint8]) -> None:
        if image.min() == image.max():
            return  # blank: anybody's
        print_ = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()
        first = self._first.setdefault(print_, record)
        if first.group != record.group:
            self._found.append((first, record))

    def notes(self, group_name: str) -> list[str]:
        if not self._found:
            return []
        one, other = self._found[0]
        return [
            f"Images that are the same stand under different {group_name}s, {len(self._found):,}"
            f" time{'s' if len(self._found) > 1 else ''} (for instance {one.id} and {other.id}): if"
            f" that is one {group_name} under two names, no guarantee covers both at once."
        ]


Decoded = tuple[NDArray[np.uint8], tuple[int, int]] | BadFile
_TOGETHER = 16  # images a thread takes at a time: fewer hand-overs between threads


def _decoded(
    listing: Listing, records: list[Record], pixels: int
) -> Iterator[tuple[Record, Decoded]]:
    """Every record with its image or with what is wrong with it, in order, on all cores.

    Threads suffice: decoding and resizing run outside the interpreter's lock. Only a bounded
    number of images is in flight, whatever the size of the set.
    """

    def one(record: Record) -> Decoded:
        try:
            return listing.decode(record, pixels)
        except BadFile as error:
            return error

    def some(part: list[Record]) -> list[tuple[Record, Decoded]]:
        return [(record, one(record)) for record in part]

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    waiting: deque[Future[list[tuple[Record, Decoded]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for start in range(0, len(records), _TOGETHER):
                waiting.append(pool.submit(some, records[start : start + _TOGETHER]))
                if len(waiting) >= 4 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write_split(
    folder: Path,
    split: str,
    records: list[Record],
    number_of: dict[str, int],
    n_classes: int,
    several: bool,
) -> SplitCounts:
    labels = np.array([r.label for r in records], np.int64)
    if several and not len(labels):
        labels = np.zeros((0, n_classes), np.int64)
    groups = np.array([number_of[r.group] for r in records], np.int64)
    ids = np.array([r.id for r in records], dtype=np.str_)
    for name, array in (("labels", labels), ("groups", groups), ("ids", ids)):
        np.save(folder / f"{split}.{name}.npy", array, allow_pickle=False)
    return store.count_split(labels, groups, n_classes)
