"""What a reader finds in a data set before a single image is decoded, and how it is split."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from xcal.config import nearest
from xcal.data.images import RECORD_GROUPS
from xcal.data.source_files import BadFile, Files
from xcal.errors import UserError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""What folders and columns call them."""

# Held back where a set brings no validation or test split of its own.
VALIDATION_SHARE = 0.1
TEST_SHARE = 0.1

Decode = Callable[["Record", int], tuple[NDArray[np.uint8], tuple[int, int]]]


@dataclass(frozen=True)
class Record:
    """One image to be: where it is, what it shows, whose it is."""

    id: str
    label: int | tuple[int, ...]
    """A class number; or a 0 or 1 for each finding."""
    group: str
    split: Split | None
    """None: the reader leaves it to `assign_splits`."""

    @property
    def stratum(self) -> int:
        """What the set is split by: the class; of several findings the first, or none."""
        if isinstance(self.label, int):
            return self.label
        return next((1 + k for k, found in enumerate(self.label) if found), 0)


@dataclass(frozen=True)
class Listing:
    """All that a reader knows of a data set."""

    kind: str
    default_name: str
    task: str
    classes: tuple[str, ...]
    group_name: str
    license: str
    records: tuple[Record, ...]
    decode: Decode
    """Record and side length → the square image and its original size; raises `BadFile`."""
    missing: tuple[tuple[str, str], ...] = ()
    """Files that are named but cannot be used, with the reason."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the set was read."""
    repeating: tuple[str, ...] = ()
    """Unused columns that look like identifiers of people and name somebody more than once."""

    @property
    def unnamed(self) -> int:
        """Images of which the source names no group, in a set that has groups."""
        if self.group_name == RECORD_GROUPS:
            return 0
        return sum(record.group == group_of_one(record.id) for record in self.records)


def group_of_one(image: str) -> str:
    """The group of an image of which the source names none."""
    return f"file {image}"


# What tables and headers hold where nobody is named; a lone sign (-, ?, ...) is no name either.
_NOBODY = frozenset(
    "na n/a #n/a n.a. <na> nan none null nil nul unknown unk undefined missing anonymous anonymized"
    " anonymised anon".split()
) | {"not available", "not applicable", "not known"}


def somebody(value: str) -> str:
    """The name or number as it stands in a patient column, without its spaces; empty: nobody's."""
    value = value.strip()
    plain = " ".join(value.casefold().replace("_", " ").split())
    return "" if plain in _NOBODY or not any(c.isalnum() for c in plain) else value


def check_written_one_way(table: str, rows: Sequence[Mapping[str, str]], column: str) -> None:
    """Refuse names that may be one person's: of other case or spaces, or numbers as 7, 007 and 7.0.

    The lines are told and not the names, which are private.
    """
    seen: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(rows, start=2):
        name = somebody(row.get(column, ""))
        plain = re.sub(r"\s", "", unicodedata.normalize("NFKC", name)).casefold()
        if whole := re.fullmatch(r"0*(\d+)(\.0*)?", plain):
            plain = whole[1]
        known, line = seen.setdefault(plain, (name, number))
        if known != name:
            raise UserError(
                f"{table}, lines {line} and {number}: column {column!r} has two names that differ"
                " in case, spaces or leading and trailing zeros only, and may be one"
                f" {group_name_of(column)}'s: write them alike, or say that they are two with"
                f" --group-column {column!r}."
            )


@dataclass(frozen=True)
class ColumnChoice:
    """Which columns of a table to read, where the user says so; None: found by name."""

    path: str | None = None
    label: str | None = None
    group: str | None = None


# What stands for a person or what is hers, alone or before a word for a number.
_WHOSE = "patient|subject|person|participant|individual|case|study|exam|visit|mrn|lesion|accession"
_IDENTIFIER = re.compile(
    rf".*({_WHOSE})(s|en)?(id|ids|identifier|number|num|no|nr|key|name|code|uid|index|idx)?"
    r"(hash|hashed|anon|anonymized|anonymised|pseudonym|pseudonymized|\d+)?"
)
_ID_AT_THE_END = re.compile(r"(?:.*[^A-Za-z])?[Ii][Dd]|.*[a-z](?:ID|UID)|.*InstanceUID")
_SHORT = re.compile(r"(pid|ptid|patid|patno|patnr|patnum|pat|pt|nhsnumber|nhsno|nhsid)s?")
# Whose name does not say whose the image is, though it may end in "id".
_NOT_A_PERSON = re.compile(
    r".*(site|hospital|center|centre|clinic|institution|scanner|device|camera|machine|class|label)"
    r"s?(id|ids|uid)"
)
_IMAGE_ITSELF = re.compile(r"(image|img|file|picture|slice|sop|isic)", re.IGNORECASE)


def plain_column(name: str) -> str:
    """A column's name as it is compared: `PatientID`, `Patient (ID)` and `patient_id` are one."""
    return re.sub(r"[\W_]", "", name).casefold() or name


def find_column(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """The column that bears the first of `names` that any bears."""
    by_name = {plain_column(c): c for c in reversed(list(columns))}
    return next((by_name[n] for n in map(plain_column, names) if n in by_name), None)


def find_group_column(table: str, columns: Iterable[str], names: Sequence[str]) -> str | None:
    """The one column that says whose an image is; a table with two of them is refused.

    A lesion is somebody's: beside a column of people one of lesions is not a second one.
    """
    wanted = set(map(plain_column, names))
    found = [c for c in columns if plain_column(c) in wanted]
    found = [c for c in found if "lesion" not in plain_column(c)] or found
    if len(found) > 1:
        raise UserError(
            f"{table} has several columns that may say whose an image is,"
            f" {' and '.join(map(repr, found))}: say which one does with --group-column"
            f" {found[0]!r}."
        )
    return found[0] if found else None


def group_column(
    table: str, columns: Iterable[str], choice: ColumnChoice, names: Sequence[str]
) -> str | None:
    """The column that says whose an image is: the user's choice, or the one that is named so."""
    if choice.group is not None:
        return chosen_column(table, columns, choice.group, "--group-column")
    return find_group_column(table, columns, names)


def chosen_column(table: str, columns: Iterable[str], wanted: str, option: str) -> str:
    """The column that the user named with `option`, or a refusal that names those there are."""
    there = list(columns)
    found = wanted if wanted in there else find_column(there, (wanted,))
    if found is None:
        raise UserError(
            f"{table} has no column {wanted!r} for {option}.{nearest(wanted, there)} It has"
            f" {', '.join(map(repr, there))}."
        )
    return found


def group_name_of(column: str) -> str:
    """What the groups of such a column are called."""
    name = plain_column(column)
    if name in ("group", "groupid"):
        return "group"
    for word in ("lesion", "case", "study", "exam", "visit", "accession", "picture"):
        if word in name:
            return word
    return "patient" if _IDENTIFIER.fullmatch(name) else "group"


def is_identifier(column: str) -> bool:
    """Whether a column's name looks as if it held who or whose something is."""
    plain = plain_column(column)
    if _IMAGE_ITSELF.search(column):
        return False
    if _IDENTIFIER.fullmatch(plain) or _SHORT.fullmatch(plain):
        return True
    return bool(_ID_AT_THE_END.fullmatch(column.strip())) and not _NOT_A_PERSON.fullmatch(plain)


def unused_identifiers(
    table: str, rows: Sequence[Mapping[str, str]], used: Iterable[str | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to say of columns that may say whose an image is; which of them name somebody twice."""
    found = [c for c in rows[0] if c not in set(used) and is_identifier(c)]
    if not found:
        return (), ()
    repeating = []
    for column in found:
        people = [name for row in rows if (name := somebody(row.get(column, "")))]
        if len(set(people)) < len(people):
            repeating.append(column)
    note = (
        f"{table} has columns that may say whose an image is and that were not used:"
        f" {', '.join(map(repr, found))}. If one of them does, import with --group-column"
        f" {(repeating or found)[0]!r}."
    )
    return (note,), tuple(repeating)


class SameColumnTwice(UserError):
    """Two columns of one name may say whose the images are: no table to pass over in silence."""


def read_table(files: Files, name: str) -> list[dict[str, str]]:
    """The rows of a CSV by column name, stripped; comma, semicolon and tab are understood.

    So is a first line `sep=;`, as Excel writes and reads it, also with another sign.
    """
    try:
        text = files.read(name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not text in UTF-8; save it again as CSV in UTF-8.") from error
    except BadFile as error:
        raise UserError(f"{name} {error}.") from error
    # Excel's word to itself, before the heading: `sep=;`.
    above = 0
    if said := re.match(r'"?sep=([,;\t|])"?[,;\t|]*\r?\n', text, re.IGNORECASE):
        above, text = 1, text[said.end() :]
    head = text.partition("\n")[0]
    delimiter = said[1] if said else max(",;\t", key=head.count)
    rows = []
    try:
        # A short row's missing cells are empty ones, or its columns would not be seen.
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restval="")
        heading = [c.strip() for c in reader.fieldnames or ()]
        twice = [c for c, count in Counter(heading).items() if count > 1 and is_identifier(c)]
        if twice:
            raise SameColumnTwice(
                f"{name} has two columns called {twice[0]!r}, which may say whose an image is:"
                " rename one of them, and say which one does with --group-column."
            )
        for row in reader:
            # An unquoted delimiter shifts all cells after it, also the one that names a person.
            if any(cell.strip() for cell in row.get(None) or ()):
                raise UserError(
                    f"{name}, line {above + reader.line_num}: the row has more cells than the"
                    f" heading has columns ({len(heading)}), so that which cell belongs to which"
                    " column is not"
                    f" known; put text with {delimiter!r} in it between double quotes."
                )
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


def rows_or_none(files: Files, name: str) -> list[dict[str, str]]:
    """As `read_table`, but a table that cannot be read is one without rows.

    For looking at tables that may have nothing to do with the images.
    """
    try:
        return read_table(files, name)
    except SameColumnTwice:
        raise
    except UserError:
        return []


def assign_splits(
    records: Sequence[Record],
    n_classes: int,
    notes: list[str],
    *,
    all_train: bool = False,
    group_name: str = "group",
) -> tuple[Record, ...]:
    """Give every record a split; what a set brings of its own stays, unless `all_train`.

    Whole groups are moved, chosen at random, always alike, within the class that most of their
    images have. Validation is cut from training, never from test; where there is no test split
    either, that is cut from training first.
    """
    if all_train:
        notes.append("Every image is for training, as asked for: none is left to measure with.")
        return tuple(replace(record, split="train") for record in records)
    given = {record.split for record in records}
    if given <= {"test"}:
        raise UserError("The set has a test split but no images to train on.")
    result = [replace(r, split="train") if r.split is None else r for r in records]
    rng = np.random.default_rng(0)
    if "test" not in given:
        result = _move(result, "test", TEST_SHARE, n_classes, rng)
        notes.append(_cut(result, "test", len(records)))
    if "validation" not in given:
        share = VALIDATION_SHARE / (1 - TEST_SHARE) if "test" not in given else VALIDATION_SHARE
        result = _move(result, "validation", share, n_classes, rng)
        notes.append(_cut(result, "validation", len(records)))
    splits_of: dict[str, set[str | None]] = defaultdict(set)
    for record in result:
        splits_of[record.group].add(record.split)
    torn = sum("train" in splits and len(splits) > 1 for splits in splits_of.values())
    if torn:
        notes.append(
            f"{torn} {group_name}s stand in training and in validation or test of the splits that"
            " the set brings, so that unit = 'group' is refused."
        )
    return tuple(result)


def _cut(records: Sequence[Record], to: Split, whole: int) -> str:
    """What became of a split that the set did not bring."""
    moved = sum(record.split == to for record in records)
    if not moved:
        return f"No {to} split was given, and there are too few images to cut one from training."
    return f"No {to} split was given: {moved:,} of {whole:,} images were cut from training."


def _move(
    records: list[Record], to: Split, share: float, n_classes: int, rng: np.random.Generator
) -> list[Record]:
    """Move about `share` of the training images, by whole groups and class by class."""
    labels_of: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if record.split == "train":
            labels_of[record.group].append(record.stratum)
    of_class: list[list[str]] = [[] for _ in range(1 + n_classes)]  # one more: no finding at all
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
