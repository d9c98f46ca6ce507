"""A CSV with path, label and optional group and split columns, beside its images."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xcal.data.decode import decode_file, is_image, patient_of_file
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import (
    SPLIT_NAMES,
    ColumnChoice,
    Listing,
    Record,
    Split,
    check_written_one_way,
    chosen_column,
    find_column,
    find_group_column,
    group_column,
    group_name_of,
    group_of_one,
    plain_column,
    read_table,
    rows_or_none,
    somebody,
    tables,
    unused_identifiers,
)
from xcal.data.source_files import Files
from xcal.errors import UserError

# Compared by letters and digits alone, without case (`plain_column`).
PATH_COLUMNS = ("path", "file", "filename", "image", "image_path", "file_path", "image_file")
_LABEL = ("label", "class", "target", "diagnosis")
GROUP_COLUMNS = (
    "group group_id patient patient_id patient_number patient_no subject subject_id person"
    " person_id participant participant_id mrn lesion lesion_id"
).split()
_SPLIT = ("split", "set", "fold")


def find_labeled_table(files: Files, choice: ColumnChoice) -> str | None:
    """The shallowest CSV that has a path and a label column, or the only one there is."""
    names = tables(files)
    for name in names:
        rows = rows_or_none(files, name)
        if not rows:
            continue
        wanted: list[Sequence[str]] = [[choice.path] if choice.path else PATH_COLUMNS]
        listed = _finding_columns(rows[0], choice.label)
        wanted += [[one] for one in listed] or [[choice.label] if choice.label else _LABEL]
        if all(find_column(rows[0], some) for some in wanted):
            return name
    # With a label named by hand, what is wrong with the one table there is is worth saying.
    return names[0] if len(names) == 1 and choice.label else None


def labeled_table(files: Files, table: str, name: str, choice: ColumnChoice) -> Listing:
    """Read the set that `table` describes; paths are relative to the table's folder."""
    rows = read_table(files, table)

    def column(wanted: str | None, option: str, names: Sequence[str]) -> str | None:
        if wanted is not None:
            return chosen_column(table, rows[0], wanted, option)
        return find_column(rows[0], names)

    path_column = column(choice.path, "--path-column", PATH_COLUMNS)
    finding_columns = _finding_columns(rows[0], choice.label)
    label_column: str | None = "|".join(finding_columns)
    if not finding_columns:
        label_column = column(choice.label, "--label-column", _LABEL)
    whose = group_column(table, rows[0], choice, GROUP_COLUMNS)
    if whose is not None and choice.group is None:
        check_written_one_way(table, rows, whose)
    split_column = find_column(rows[0], _SPLIT)
    if path_column is None or label_column is None:
        raise UserError(
            f"{table} needs the columns path and label; it has {', '.join(rows[0])}: say which they"
            " are with --path-column and --label-column (one that holds the class, or, of findings"
            " with a column of 0 and 1 each, all of them with commas between), or, where folders"
            " are named by class, give the folder that they and the table are in."
        )
    classes, label_of = _labels(table, rows, label_column, finding_columns)
    folder = posixpath.dirname(table)
    records: list[Record] = []
    missing: list[tuple[str, str]] = []
    seen: set[str] = set()
    group_name = RECORD_GROUPS if whose is None else group_name_of(whose)
    # Who is meant by a column of lesions, or by one that the user chose, no header can say.
    ask_files = choice.group is None and group_name != "lesion"
    for number, row in enumerate(rows, start=2):
        given = row.get(path_column, "")
        path = posixpath.normpath(posixpath.join(folder, given.replace("\\", "/")))
        label = label_of(row)
        split: Split | None = None
        if split_column is not None:
            split = SPLIT_NAMES.get(row.get(split_column, "").lower())
            if split is None:
                raise UserError(
                    f"{table}, line {number}: column {split_column!r} must be train, validation "
                    "or test."
                )
        # Only files that were found below the folder can be named: no path leads outside it.
        if path not in files.sizes:
            missing.append((given or f"line {number}", f"is named in {table} but not there"))
        elif not is_image(files, path):
            missing.append((given, "is neither named as an image nor DICOM by its first bytes"))
        elif path in seen:
            missing.append((given, f"is named twice in {table}"))
        elif isinstance(label, str):
            missing.append((given, label))
        else:
            seen.add(path)
            group = somebody(row.get(whose, "")) if whose else ""
            own = patient_of_file(files, path) if ask_files else None
            check_one_person(table, f" {whose!r}", path, group, own)
            if own is not None and whose is None:
                group_name = "patient"
            group = group or own or ""
            group = f"group {group}" if group else group_of_one(path)
            records.append(Record(path, label, group, split))
    several = any(isinstance(record.label, tuple) for record in records)
    return listed_in(
        files,
        table,
        rows,
        (path_column, label_column, whose, split_column, *finding_columns),
        records,
        [SEVERAL.format(count=len(classes))] if several else [],
        kind="csv",
        default_name=name,
        task=label_column,
        classes=classes,
        group_name=group_name,
        license="unknown",
        missing=tuple(missing),
    )


def check_one_person(
    table: str, column: str, path: str, person: str | None, own: str | None
) -> None:
    """Refuse an image whose header names another patient than the table does."""
    if person and own is not None and own != person:
        raise UserError(
            f"{table} and the header of {path} (PatientID) name different people: mend one of them,"
            f" or say that the table is right with --group-column{column}."
        )


def listed_in(
    files: Files,
    table: str,
    rows: Sequence[Mapping[str, str]],
    used: Iterable[str | None],
    records: Sequence[Record],
    notes: Sequence[str],
    **about: Any,
) -> Listing:
    """The listing of images that a table names, which tells of columns that were not `used`."""
    if not records:
        raise UserError(f"None of the images that {table} names is there.")
    unused, repeating = unused_identifiers(table, rows, used)
    return Listing(
        records=tuple(records),
        decode=lambda record, pixels: decode_file(files, record.id, pixels),
        notes=(*unused, *notes),
        repeating=repeating,
        **about,
    )


_BINARY = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1, "no": 0, "yes": 1}
_NONE = {"nofinding", "nofindings", "none", "normal", "healthy", "negative"}
SEVERAL = "An image may show several of the {count} findings, or none: each is told by itself."


def _finding_columns(row: Mapping[str, str], wanted: str | None) -> list[str]:
    """The columns that a list with commas names; none where it names one column, or nothing."""
    if wanted is None or "," not in wanted or find_column(row, [wanted]) is not None:
        return []
    return [part.strip() for part in wanted.split(",") if part.strip()]


def findings_in(cell: str) -> list[str]:
    """The findings of a cell such as "Effusion|Mass"; none of "No Finding" and the like."""
    found = dict.fromkeys(part.strip() for part in cell.split("|"))
    return [one for one in found if one and plain_column(one) not in _NONE]


Label = int | tuple[int, ...] | str
"""A class number, or a 0 or 1 for each finding, or what is wrong."""


def _labels(
    table: str, rows: Sequence[Mapping[str, str]], column: str, findings: Sequence[str]
) -> tuple[tuple[str, ...], Callable[[Mapping[str, str]], Label]]:
    """The classes, or findings, and what gives a row's label."""
    if findings:
        chosen = (chosen_column(table, rows[0], one, "--label-column") for one in findings)
        columns = list(dict.fromkeys(chosen))
        if len(columns) < 2:
            raise UserError(f"--label-column {column!r} names one finding: name two or more.")

        def by_columns(row: Mapping[str, str]) -> Label:
            cells = {name: row.get(name, "").strip().lower() for name in columns}
            for name, cell in cells.items():
                if cell not in _BINARY:
                    return f"has {cell!r} in column {name!r}, where 0 or 1 must stand"
            return tuple(_BINARY[cell] for cell in cells.values())

        return tuple(columns), by_columns
    cells = {row.get(column, "") for row in rows} - {""}
    several = any("|" in cell for cell in cells)
    known = {one for cell in cells for one in findings_in(cell)} if several else cells
    classes = tuple(sorted(known))
    if len(classes) < 2:
        what = "findings" if several else "classes"
        raise UserError(f"{table}: column {column!r} holds fewer than two {what}.")
    numbers = {cls: i for i, cls in enumerate(classes)}

    def by_cell(row: Mapping[str, str]) -> Label:
        cell = row.get(column, "")
        if not cell:
            return "has no label"
        if not several:
            return numbers[cell]
        shown = findings_in(cell)
        return tuple(int(one in shown) for one in classes)

    return classes, by_cell


@dataclass(frozen=True)
class People:
    """Whose images are, as tables beside them say; by the image's name."""

    of: dict[str, str]
    group_name: str | None = None
    """None: no table says anything."""
    tables: tuple[str, ...] = ()
    """Those that say something."""
    notes: tuple[str, ...] = ()
    repeating: tuple[str, ...] = ()


def people_beside(files: Files, images: Sequence[str], choice: ColumnChoice) -> People:
    """What CSVs beside images that lie in class folders say about whose they are.

    A table names an image by its path, from the table's folder or the whole set's, or by its name
    alone where no two images share it; an ending may be left out.
    """
    by_name: dict[str, str | None] = {}
    for image in images:
        for short in {posixpath.basename(image), posixpath.splitext(posixpath.basename(image))[0]}:
            by_name[short] = None if short in by_name else image
    there, of = set(images), dict[str, str]()
    names: list[str] = []
    used: list[str] = []
    notes: list[str] = []
    repeating: list[str] = []
    for table in tables(files):
        rows = rows_or_none(files, table)
        if not rows:
            continue
        path_column = find_column(rows[0], [choice.path] if choice.path else PATH_COLUMNS)
        if choice.group is not None:
            whose = find_column(rows[0], [choice.group])
        else:
            whose = find_group_column(table, rows[0], GROUP_COLUMNS)
        if path_column is not None and whose is not None:
            names.append(group_name_of(whose))
            used.append(table)
            if choice.group is None:
                check_written_one_way(table, rows, whose)
            for row in rows:
                given = posixpath.normpath(row[path_column].replace("\\", "/"))
                beside = posixpath.normpath(posixpath.join(posixpath.dirname(table), given))
                full = next((p for p in (beside, given) if p in there), None)
                named = full or by_name.get(posixpath.basename(given))
                person = somebody(row[whose])
                if named is None or not person:
                    continue
                if of.setdefault(named, person) != person:
                    raise UserError(
                        f"{table} names another {names[-1]} of {named} than a line before: mend it."
                    )
        unused, twice = unused_identifiers(table, rows, (path_column, path_column and whose))
        notes += unused
        repeating += twice
    if choice.group is not None and not names:
        raise UserError(
            f"No CSV beside the images has a column {choice.group!r} and one that names image"
            " files: name them with --group-column and --path-column."
        )
    if len(set(names)) > 1:
        raise UserError(
            f"The tables beside the images tell of {' and of '.join(sorted(set(names)))}s: say"
            " which column counts with --group-column."
        )
    return People(of, names[0] if of else None, tuple(used), tuple(notes), tuple(repeating))


def passed_over(files: Files, choice: ColumnChoice, used: Sequence[str] = ()) -> tuple[str, ...]:
    """Why the tables beside images in class folders, but those `used`, are not read: a sentence."""
    found = []
    for table in tables(files):
        if table in used:
            continue
        try:
            columns = list(read_table(files, table)[0])
        except UserError as error:
            found.append(f"{table} was passed over: {error}")
            continue
        wanted = (
            ("path", [choice.path] if choice.path else PATH_COLUMNS),
            ("label", [choice.label] if choice.label else _LABEL),
        )
        lacks = [what for what, names in wanted if find_column(columns, names) is None]
        options = " and ".join(f"--{what}-column" for what in lacks)
        found.append(
            f"{table} was passed over: of its columns ({', '.join(columns)}) none is named as one"
            f" for {' or '.join(lacks)}; if one is, say which with {options}."
            if lacks
            else f"{table} was passed over: import it by --kind csv."
        )
    return tuple(found)
