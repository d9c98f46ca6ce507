"""Sets whose folders say what an image shows: Kaggle's blood cells, any class-per-folder set."""

from __future__ import annotations

import gzip
import re
from functools import cache
from importlib.resources import files as packaged
from pathlib import PurePosixPath

from xcal.data.decode import decode_file, is_image, patient_of_file
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import SPLIT_NAMES, ColumnChoice, Listing, Record, Split, group_of_one
from xcal.data.source_files import Files
from xcal.data.table import check_one_person, passed_over, people_beside
from xcal.errors import UserError

# …/TRAIN/EOSINOPHIL/_12_3456.jpeg: neither number says which picture the file is a copy of.
_BLOOD_CELL = re.compile(
    r"(?:.*/)?(?P<file>(?P<split>TRAIN|TEST|TEST_SIMPLE)/"
    r"(?P<cell>EOSINOPHIL|LYMPHOCYTE|MONOCYTE|NEUTROPHIL)/_\d+_\d+\.jpe?g)"
)
_CELLS = ("eosinophil", "lymphocyte", "monocyte", "neutrophil")
AS_SHIPPED = "blood-cells-as-shipped"


def is_blood_cells(files: Files) -> bool:
    return bool(_blood_cell_files(files))


@cache
def blood_cell_pictures() -> dict[str, int]:
    """The picture that each file of TRAIN and TEST is a copy of, as found from the images.

    Keys are the last three parts of the path. A picture has one number wherever its copies lie.
    Photographs that were found to overlap count as one picture, also where they bear different
    classes. `benchmarks/recover_pictures.py` made the table.
    """
    raw = packaged("xcal.data").joinpath("blood_cells.csv.gz").read_bytes()
    rows = [line for line in gzip.decompress(raw).decode().splitlines() if line[0] != "#"]
    return {file: int(picture) for file, picture in (row.split(",") for row in rows[1:])}


def blood_cells(files: Files) -> Listing:
    """Kaggle "Blood Cell Images": copies of few pictures; the picture is the group.

    Any part of the set will do. No picture stands in both training and test: the TRAIN files of
    pictures that have copies in TEST are left out, in whatever part of the set was given.
    TEST_SIMPLE holds nothing but originals of copies in TEST, so it is left out altogether.
    """
    picture_of = blood_cell_pictures()
    tested = {n for file, n in picture_of.items() if file.startswith("TEST/")}
    found = _blood_cell_files(files)
    used = [(name, match) for name, match in found if match["split"] != "TEST_SIMPLE"]
    records = []
    unknown = []
    also_tested: list[int] = []
    for name, match in used:
        picture = picture_of.get(match["file"])
        if picture is None:
            unknown.append(name)
        elif match["split"] == "TRAIN" and picture in tested:
            also_tested.append(picture)
        else:
            records.append(_blood_cell(name, match, f"{picture:04d}"))
    if unknown:
        raise UserError(
            f"Which pictures {len(unknown)} of the files in TRAIN and TEST are copies of is not "
            f"known ({unknown[0]} is the first), as they do not belong to Kaggle's Blood Cell "
            "Images; remove them or, if every file is a picture of its own, remove TEST_SIMPLE "
            "and import with --kind folders."
        )
    notes = []
    for folder, split in (("TRAIN", "train"), ("TEST", "test")):
        of_split = [record.group for record in records if record.split == split]
        notes.append(
            f"{folder}: {len(of_split):,} files are copies of {len(set(of_split)):,} pictures; "
            "the picture is the group."
        )
    notes.append("Photographs that overlap, and so show the same cells, count as one picture.")
    if also_tested:
        notes.append(
            f"TRAIN: {len(also_tested):,} more files are left out, as their "
            f"{len(set(also_tested)):,} pictures have copies in TEST."
        )
    if simple := len(found) - len(used):
        notes.append(f"TEST_SIMPLE ({simple} files) is not used.")
    return _blood_cell_listing(files, "blood-cells", "picture", records, notes)


def blood_cells_as_shipped(files: Files) -> Listing:
    """The same files as Kaggle splits them, every copy a record of its own: others' protocol.

    Copies of one picture stand in training, validation and test, and at several clients. Results on
    it are flattered by that, and a guarantee per file says next to nothing of a picture.
    """
    records = [
        _blood_cell(name, match, group_of_one(name))
        for name, match in _blood_cell_files(files)
        if match["split"] != "TEST_SIMPLE"
    ]
    note = "Copies of one picture stand in training, validation and test: see docs/data.md."
    return _blood_cell_listing(files, AS_SHIPPED, RECORD_GROUPS, records, [note])


def _blood_cell_files(files: Files) -> list[tuple[str, re.Match[str]]]:
    return [(name, match) for name in files.sizes if (match := _BLOOD_CELL.fullmatch(name))]


def _blood_cell(name: str, match: re.Match[str], group: str) -> Record:
    split: Split = "train" if match["split"] == "TRAIN" else "test"
    return Record(name, _CELLS.index(match["cell"].lower()), group, split)


def _blood_cell_listing(
    files: Files, kind: str, group_name: str, records: list[Record], notes: list[str]
) -> Listing:
    if not records:
        raise UserError("No TRAIN or TEST folder of the blood-cell layout holds any image.")
    return Listing(
        kind=kind,
        default_name=kind,
        task="cell",
        classes=_CELLS,
        group_name=group_name,
        license="MIT (Kaggle, Blood Cell Images)",
        records=tuple(records),
        decode=lambda record, pixels: decode_file(files, record.id, pixels),
        notes=tuple(notes),
    )


def class_folders(files: Files, name: str, choice: ColumnChoice) -> Listing:
    """Any set with one folder per class, with or without split folders above them.

    What all paths have in common is ignored. Below that, a folder named train, val or test (in
    any of the usual spellings) is a split; the first other folder is the class. Whose the images
    are, a DICOM header says, or a CSV beside them.
    """
    images = [n for n in files.sizes if is_image(files, n)]
    why = "".join(f" {note}" for note in passed_over(files, choice))
    if not images:
        raise UserError(
            f"No image was found; PNG, JPEG, BMP, GIF, TIFF, WebP and DICOM are read.{why}"
        )
    placed = _without_common(images)
    found: list[tuple[str, str, Split | None]] = []
    stray = []
    for image, parts in zip(images, placed, strict=True):
        folders = list(parts[:-1])
        split: Split | None = None
        if folders and folders[0].lower() in SPLIT_NAMES:
            split = SPLIT_NAMES[folders.pop(0).lower()]
        if not folders:
            stray.append(image)
        else:
            found.append((image, folders[0], split))
    if stray:
        raise UserError(
            f"{len(stray)} of {len(images)} images ({stray[0]} is the first) lie in no class "
            "folder; put every image into a folder named by its class, or give a CSV with the "
            f"columns path and label (--path-column, --label-column).{why}"
        )
    classes = tuple(sorted({cls for _, cls, _ in found}))
    if len(classes) < 2:
        raise UserError(
            f"All images lie in one class folder ({classes[0]}); at least two classes are needed."
            f"{why}"
        )
    if len({split is None for _, _, split in found}) == 2:
        raise UserError("Some images lie in train or test folders and some in none.")
    told = people_beside(files, [image for image, _, _ in found], choice)
    group_name = told.group_name or RECORD_GROUPS
    ask_files = choice.group is None and told.group_name in (None, "patient", "group")
    records = []
    for image, cls, split in found:
        person = told.of.get(image)
        own = patient_of_file(files, image) if ask_files else None
        check_one_person("The table beside the images", "", image, person, own)
        if own is not None and told.group_name is None:
            group_name = "patient"
        whose = person or own
        group = group_of_one(image) if whose is None else f"patient {whose}"
        records.append(Record(image, classes.index(cls), group, split))
    unread = passed_over(files, choice, told.tables)
    others = len(files.sizes) - len(images) - len(told.tables) - len(unread)
    left = (f"{others} files that are not images were left aside.",) if others else ()
    return Listing(
        kind="folders",
        default_name=name,
        task="folder",
        classes=classes,
        group_name=group_name,
        license="unknown",
        records=tuple(records),
        decode=lambda record, pixels: decode_file(files, record.id, pixels),
        notes=(*told.notes, *unread, *left),
        repeating=told.repeating,
    )


def _without_common(names: list[str]) -> list[tuple[str, ...]]:
    """The parts of every name below the folder that all of them share.

    Where all lie in one and the same folder its last part is kept: it is their class.
    """
    parts = [PurePosixPath(name).parts for name in names]
    # The first and the last in order differ as early as any two do.
    first, last = min(p[:-1] for p in parts), max(p[:-1] for p in parts)
    shared = 0
    while shared < len(first) - 1 and shared < len(last) and first[shared] == last[shared]:
        shared += 1
    return [p[shared:] for p in parts]
