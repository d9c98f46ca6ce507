"""NIH ChestX-ray14: images anywhere, `Data_Entry_2017.csv`, and lists that name the splits."""

from __future__ import annotations

from pathlib import PurePosixPath

from xcal.data.decode import is_image_name
from xcal.data.dicom import decode_file
from xcal.data.listing import (
    ColumnChoice,
    Listing,
    Record,
    Split,
    find_column,
    find_table,
    group_column,
    group_name_of,
    group_of_one,
    read_table,
    somebody,
    unused_identifiers,
)
from xcal.data.source_files import BadFile, Files
from xcal.data.table import SEVERAL
from xcal.errors import UserError

ANY_FINDING = "any-finding"
FINDINGS = "findings"
_NONE = "No Finding"
_LISTS: tuple[tuple[str, Split], ...] = (
    ("train_list.txt", "train"),
    ("train_val_list.txt", "train"),
    ("val_list.txt", "validation"),
    ("test_list.txt", "test"),
)


def find_entries(files: Files) -> str | None:
    """The table that the NIH publishes with the images."""
    return find_table(files, "Data_Entry_2017")


def chest_xray(files: Files, task: str | None, choice: ColumnChoice) -> Listing:
    """`task`: any finding against none (default), one named finding against the rest, or all
    findings at once, each by itself (`findings`).
    """
    table = find_entries(files)
    if table is None:
        raise UserError("The NIH layout needs Data_Entry_2017.csv beside the images.")
    rows = read_table(files, table)

    def column(name: str) -> str:
        if (found := find_column(rows[0], (name,))) is None:
            raise UserError(f"{table} has no column {name!r}.")
        return found

    image, labels = column("Image Index"), column("Finding Labels")
    patient = group_column(table, rows[0], choice, ("Patient ID",)) or column("Patient ID")
    findings = {row[image]: set(row[labels].split("|")) for row in rows}
    known = sorted(set().union(*findings.values()) - {_NONE})
    several = task == FINDINGS
    wanted, classes = (None, tuple(known)) if several else _task(task, known)

    images = {PurePosixPath(n).name: n for n in files.sizes if is_image_name(n)}
    split_of = _splits(files)
    records = []
    absent = unlisted = 0
    for row in rows:
        name = row[image]
        if name not in images:
            absent += 1
            continue
        if split_of and name not in split_of:
            unlisted += 1
            continue
        shown = findings[name] - {_NONE}
        label: int | tuple[int, ...] = int(bool(shown) if wanted is None else wanted in shown)
        if several:
            label = tuple(int(one in shown) for one in known)
        records.append(
            Record(
                id=images[name],
                label=label,
                group=somebody(row[patient]) or group_of_one(images[name]),
                split=split_of.get(name),
            )
        )
    if not records:
        raise UserError(f"None of the images that {table} names is there.")
    unused = unused_identifiers(table, rows, (image, labels, patient))
    notes = list(unused.notes)
    if several:
        notes.append(SEVERAL.format(count=len(known)))
    if absent:
        notes.append(f"{absent:,} images that {table} names are not there and were left out.")
    if unlisted:
        notes.append(f"{unlisted:,} images are in no split list and were left out.")
    return Listing(
        kind="chest-xray14",
        default_name="chest-xray14",
        task=FINDINGS if several else wanted or ANY_FINDING,
        classes=classes,
        group_name=group_name_of(patient),
        license="NIH public release, CC0",
        records=tuple(records),
        decode=lambda record, pixels: decode_file(files, record.id, pixels),
        notes=tuple(notes),
        repeating=unused.repeating,
    )


def _task(task: str | None, known: list[str]) -> tuple[str | None, tuple[str, str]]:
    """The finding asked for (None: any) and the two classes."""

    def plain(text: str) -> str:
        return text.lower().replace("_", "-").replace(" ", "-")

    if task is None or plain(task) == ANY_FINDING:
        return None, ("no finding", "finding")
    for finding in known:
        if plain(finding) == plain(task):
            return finding, (f"no {finding.lower()}", finding.lower())
    raise UserError(
        f"task is {task!r}, but must be {ANY_FINDING}, {FINDINGS} (all at once) or one of them: "
        f"{', '.join(plain(finding) for finding in known)}."
    )


def _splits(files: Files) -> dict[str, Split]:
    """Split by file name, from the lists that are there; the narrower list wins."""
    split_of: dict[str, Split] = {}
    by_name = {PurePosixPath(n).name: n for n in files.sizes}
    for list_name, split in _LISTS:
        if list_name in by_name:
            try:
                text = files.read(by_name[list_name]).decode("utf-8", "replace")
            except BadFile as error:
                raise UserError(f"{list_name} {error}.") from error
            split_of.update((line.strip(), split) for line in text.splitlines() if line.strip())
    return split_of
