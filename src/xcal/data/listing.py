"""What a reader finds in a data set before a single image is decoded, and how it is split."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from xcal.data.files import BadFile, Files
from xcal.errors import UserError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

# Held back where a set brings no validation or test split of its own.
VALIDATION_SHARE = 0.1
TEST_SHARE = 0.1

Decode = Callable[["Record", int], tuple[NDArray[np.uint8], tuple[int, int]]]


@dataclass(frozen=True)
class Record:
    """One image to be: where it is, what it shows, whose it is."""

    id: str
    label: int
    group: str
    split: Split | None
    """None: the reader leaves it to `assign_splits`."""


@dataclass(frozen=True)
class Listing:
    """All that a reader knows of a data set."""

    kind: str
    default_name: str
    task: str
    classes: tuple[str, ...]
    group_name: str
    licence: str
    records: tuple[Record, ...]
    decode: Decode
    """Record and side length → the square image and its original size; raises `BadFile`."""
    missing: tuple[tuple[str, str], ...] = ()
    """Files that are named but cannot be used, with the reason."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the set was read."""


def read_table(files: Files, name: str) -> list[dict[str, str]]:
    """The rows of a CSV by column name, stripped; comma, semicolon and tab are understood."""
    try:
        text = files.read(name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not text in UTF-8; save it again as CSV in UTF-8.") from error
    except BadFile as error:
        raise UserError(f"{name} {error}.") from error
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    rows = []
    try:
        for row in csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter):
            rows.append(
                {
                    key.strip(): value.strip()
                    for key, value in row.items()
                    if isinstance(key, str) and isinstance(value, str)
                }
            )
    except csv.Error as error:
        raise UserError(f"{name} cannot be read as CSV: {error}.") from error
    if not rows:
        raise UserError(f"{name} has no rows below its heading.")
    return rows


def tables(files: Files) -> list[str]:
    """The names of all CSVs, the shallowest first."""
    names = [n for n in files.sizes if n.lower().endswith((".csv", ".tsv"))]
    return sorted(names, key=lambda n: (n.count("/"), n))


def find_table(files: Files, stem: str) -> str | None:
    """The shallowest CSV whose name starts with `stem`, in any case."""
    for name in tables(files):
        if PurePosixPath(name).name.lower().startswith(stem.lower()):
            return name
    return None


def rows_or_none(files: Files, name: str) -> list[dict[str, str]]:
    """As `read_table`, but a table that cannot be read is one without rows.

    For looking at tables that may have nothing to do with the images.
    """
    try:
        return read_table(files, name)
    except UserError:
        return []


def assign_splits(
    records: Sequence[Record], n_classes: int, notes: list[str], seed: int = 0
) -> tuple[Record, ...]:
    """Give every record a split; what a set brings of its own stays.

    Whole groups are moved, chosen at random from `seed` within the class that most of their
    images have. Validation is cut from training, never from test; where there is no test split
    either, that is cut from training first.
    """
    given = {record.split for record in records}
    if given <= {"test"}:
        raise UserError("The set has a test split but no images to train on.")
    result = [replace(r, split="train") if r.split is None else r for r in records]
    rng = np.random.default_rng(seed)
    if "test" not in given:
        result = _move(result, "test", TEST_SHARE, n_classes, rng)
        notes.append(f"No test split was given: {TEST_SHARE:.0%} was cut from training.")
    if "validation" not in given:
        share = VALIDATION_SHARE / (1 - TEST_SHARE) if "test" not in given else VALIDATION_SHARE
        result = _move(result, "validation", share, n_classes, rng)
        notes.append(
            f"No validation split was given: {VALIDATION_SHARE:.0%} was cut from training."
        )
    splits_of: dict[str, set[str | None]] = defaultdict(set)
    for record in result:
        splits_of[record.group].add(record.split)
    torn = sum(len(splits) > 1 for splits in splits_of.values())
    if torn:
        notes.append(f"{torn} groups stand in more than one of the splits that the set brings.")
    return tuple(result)


def _move(
    records: list[Record], to: Split, share: float, n_classes: int, rng: np.random.Generator
) -> list[Record]:
    """Move about `share` of the training images, by whole groups and class by class."""
    labels_of: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if record.split == "train":
            labels_of[record.group].append(record.label)
    of_class: list[list[str]] = [[] for _ in range(n_classes)]
    for group in sorted(labels_of):
        counts = Counter(labels_of[group])
        of_class[min(counts, key=lambda c: (-counts[c], c))].append(group)
    moved: set[str] = set()
    for groups in of_class:
        sizes = np.array([len(labels_of[group]) for group in groups], np.int64)
        order = rng.permutation(len(groups))
        wanted = share * sizes.sum()
        taken = 0
        # Never the last group of a class: training would lose the class altogether.
        for i in order[:-1]:
            if taken + sizes[i] / 2 > wanted:
                break
            moved.add(groups[i])
            taken += int(sizes[i])
    return [
        replace(record, split=to) if record.split == "train" and record.group in moved else record
        for record in records
    ]
