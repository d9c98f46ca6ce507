"""A CSV with path, label and optional group and split columns, beside its images."""

from __future__ import annotations

import posixpath

from xcal.data.decode import is_image_name
from xcal.data.dicom import decode_file, group_of_file
from xcal.data.files import Files
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import Listing, Record, Split, read_table, rows_or_none, tables
from xcal.errors import UserError

_PATH = ("path", "file", "filename", "file_name", "image", "image_path")
_LABEL = ("label", "class", "target", "diagnosis")
_GROUP = ("group", "patient", "patient_id", "subject", "subject_id", "lesion_id")
_SPLIT = ("split", "set", "fold")
_SPLIT_OF: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def find_labelled_table(files: Files) -> str | None:
    """The shallowest CSV that has a path and a label column."""
    for name in tables(files):
        rows = rows_or_none(files, name)
        columns = {c.lower() for c in rows[0]} if rows else set()
        if columns.intersection(_PATH) and columns.intersection(_LABEL):
            return name
    return None


def labelled_table(files: Files, table: str, name: str) -> Listing:
    """Read the set that `table` describes; paths are relative to the table's folder."""
    rows = read_table(files, table)
    column = {c.lower(): c for c in rows[0]}

    def first(names: tuple[str, ...]) -> str | None:
        return next((column[n] for n in names if n in column), None)

    path_column, label_column = first(_PATH), first(_LABEL)
    group_column, split_column = first(_GROUP), first(_SPLIT)
    if path_column is None or label_column is None:
        raise UserError(f"{table} needs the columns path and label; it has {', '.join(rows[0])}.")
    classes = tuple(sorted({row.get(label_column, "") for row in rows} - {""}))
    if len(classes) < 2:
        raise UserError(f"{table}: column {label_column!r} holds fewer than two classes.")
    numbers = {cls: i for i, cls in enumerate(classes)}
    folder = posixpath.dirname(table)
    records: list[Record] = []
    missing: list[tuple[str, str]] = []
    seen: set[str] = set()
    by_file_patient = False
    for number, row in enumerate(rows, start=2):
        given = row.get(path_column, "")
        path = posixpath.normpath(posixpath.join(folder, given.replace("\\", "/")))
        label = row.get(label_column, "")
        split: Split | None = None
        if split_column is not None:
            split = _SPLIT_OF.get(row.get(split_column, "").lower())
            if split is None:
                raise UserError(
                    f"{table}, line {number}: column {split_column!r} must be train, validation "
                    "or test."
                )
        # Only files that were found below the folder can be named: no path leads outside it.
        if path not in files.sizes:
            missing.append((given or f"line {number}", f"is named in {table} but not there"))
        elif not is_image_name(path):
            missing.append((given, "is not named as an image"))
        elif path in seen:
            missing.append((given, f"is named twice in {table}"))
        elif not label:
            missing.append((given, "has no label"))
        else:
            seen.add(path)
            group = row.get(group_column, "") if group_column else ""
            own = None if group else group_of_file(files, path)
            by_file_patient |= own is not None
            group = f"group {group}" if group else own or f"file {path}"
            records.append(Record(path, numbers[label], group, split))
    if not records:
        raise UserError(f"None of the images that {table} names is there.")
    if group_column is not None:
        group_name = "lesion" if "lesion" in group_column.lower() else "patient"
        group_name = "group" if group_column.lower() == "group" else group_name
    else:
        group_name = "patient" if by_file_patient else RECORD_GROUPS
    return Listing(
        kind="csv",
        default_name=name,
        task=label_column,
        classes=classes,
        group_name=group_name,
        licence="unknown",
        records=tuple(records),
        decode=lambda record, pixels: decode_file(files, record.id, pixels),
        missing=tuple(missing),
    )
