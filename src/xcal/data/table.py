"""A CSV with path, label and optional group and split columns, beside its images."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from xcal.data.decode import is_image_name
from xcal.data.dicom import decode_file, group_of_file
from xcal.data.files import Files
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import (
    ColumnChoice,
    Listing,
    Record,
    Split,
    alone,
    chosen_column,
    find_column,
    group_name_of,
    read_table,
    rows_or_none,
    tables,
    unused_identifiers,
)
from xcal.errors import UserError

# Compared without case, spaces, underscores, hyphens and dots (`plain_column`).
_PATH = ("path", "file", "filename", "image", "image_path", "file_path", "image_file")
_LABEL = ("label", "class", "target", "diagnosis")
_GROUP = (
    "group group_id patient patient_id patient_number patient_no subject subject_id person"
    " person_id participant participant_id mrn lesion lesion_id"
).split()
_SPLIT = ("split", "set", "fold")
_SPLIT_OF: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def find_labelled_table(files: Files, choice: ColumnChoice) -> str | None:
    """The shallowest CSV that has a path and a label column, or the only one there is."""
    names = tables(files)
    for name in names:
        rows = rows_or_none(files, name)
        wanted = [
            [choice.path] if choice.path else _PATH,
            [choice.label] if choice.label else _LABEL,
        ]
        if rows and all(find_column(rows[0], some) for some in wanted):
            return name
    # With columns named by hand, what is wrong with the one table there is is worth saying.
    return names[0] if len(names) == 1 and (choice.path or choice.label) else None


def labelled_table(files: Files, table: str, name: str, choice: ColumnChoice) -> Listing:
    """Read the set that `table` describes; paths are relative to the table's folder."""
    rows = read_table(files, table)

    def column(wanted: str | None, option: str, names: Sequence[str]) -> str | None:
        if wanted is not None:
            return chosen_column(table, rows[0], wanted, option)
        return find_column(rows[0], names)

    path_column = column(choice.path, "--path-column", _PATH)
    label_column = column(choice.label, "--label-column", _LABEL)
    group_column = column(choice.group, "--group-column", _GROUP)
    split_column = find_column(rows[0], _SPLIT)
    if path_column is None or label_column is None:
        raise UserError(
            f"{table} needs the columns path and label; it has {', '.join(rows[0])}: say which they"
            " are with --path-column and --label-column."
        )
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
            group = f"group {group}" if group else own or alone(path)
            records.append(Record(path, numbers[label], group, split))
    if not records:
        raise UserError(f"None of the images that {table} names is there.")
    if group_column is not None:
        group_name = group_name_of(group_column)
    else:
        group_name = "patient" if by_file_patient else RECORD_GROUPS
    used = (path_column, label_column, group_column, split_column)
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
        notes=tuple(unused_identifiers(table, rows[0], used)),
    )
