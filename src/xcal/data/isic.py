"""HAM10000 and ISIC dermoscopy: a metadata CSV beside the images; the lesion is the group."""

from __future__ import annotations

from pathlib import PurePosixPath

from xcal.data.decode import is_image_name
from xcal.data.dicom import decode_file
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import (
    ColumnChoice,
    Listing,
    Record,
    find_column,
    group_column,
    group_name_of,
    group_of_one,
    read_table,
    rows_or_none,
    somebody,
    tables,
    unused_identifiers,
)
from xcal.data.source_files import Files
from xcal.errors import UserError

_IMAGE = ("image_id", "isic_id", "image_name", "image")
_DIAGNOSIS = ("dx", "diagnosis", "diagnosis_1", "benign_malignant")
_GROUP = ("lesion_id", "patient_id")

# Actinic keratoses and Bowen's disease, basal cell carcinoma, melanoma, squamous cell carcinoma.
_MALIGNANT = {
    "akiec",
    "bcc",
    "mel",
    "scc",
    "malignant",
    "melanoma",
    "basal cell carcinoma",
    "squamous cell carcinoma",
}
_BENIGN = {
    "nv",
    "bkl",
    "df",
    "vasc",
    "benign",
    "nevus",
    "naevus",
    "seborrheic keratosis",
    "dermatofibroma",
    "vascular lesion",
    "lentigo nos",
    "solar lentigo",
    "lichenoid keratosis",
}
_UNKNOWN = {"", "unk", "unknown", "indeterminate"}


def find_diagnoses(files: Files) -> str | None:
    """The table that names images and their diagnoses, if they are diagnoses of the skin."""
    for name in tables(files):
        rows = rows_or_none(files, name)
        image, diagnosis = _columns(rows)
        if image is not None and diagnosis is not None:
            found = {row.get(diagnosis, "").lower() for row in rows}
            if found <= _MALIGNANT | _BENIGN | _UNKNOWN:
                return name
    return None


def _columns(rows: list[dict[str, str]]) -> tuple[str | None, str | None]:
    columns = rows[0] if rows else {}
    return find_column(columns, _IMAGE), find_column(columns, _DIAGNOSIS)


def isic(files: Files, task: str | None, choice: ColumnChoice) -> Listing:
    """Malignant against benign (default), or `task="diagnosis"`: every diagnosis a class."""
    if task not in (None, "malignant", "diagnosis"):
        raise UserError(f"task is {task!r}, but must be malignant or diagnosis.")
    table = find_diagnoses(files)
    if table is None:
        raise UserError(
            "The HAM10000 / ISIC layout needs a CSV that names images (image_id) and diagnoses of "
            "the skin (dx) beside the images."
        )
    rows = read_table(files, table)
    image_column, diagnosis_column = _columns(rows)
    assert image_column is not None  # or the table would not have been found
    assert diagnosis_column is not None
    whose = next(filter(None, (group_column(table, rows[0], choice, (n,)) for n in _GROUP)), None)
    group_name = RECORD_GROUPS if whose is None else group_name_of(whose)
    by_diagnosis = task == "diagnosis"
    rows_with = [row for row in rows if row.get(diagnosis_column, "").lower() not in _UNKNOWN]
    diagnoses = sorted({row[diagnosis_column].lower() for row in rows_with})
    classes = tuple(diagnoses) if by_diagnosis else ("benign", "malignant")
    images = {PurePosixPath(n).stem: n for n in files.sizes if is_image_name(n)}
    records = []
    absent = 0
    for row in rows_with:
        image = images.get(PurePosixPath(row.get(image_column, "")).stem)
        if image is None:
            absent += 1
            continue
        diagnosis = row[diagnosis_column].lower()
        own = somebody(row.get(whose, "")) if whose else ""
        records.append(
            Record(
                id=image,
                label=diagnoses.index(diagnosis) if by_diagnosis else int(diagnosis in _MALIGNANT),
                group=f"{group_name} {own}" if own else group_of_one(image),
                split=None,
            )
        )
    if not records:
        raise UserError(f"None of the images that {table} names is there.")
    unused = unused_identifiers(table, rows, (image_column, diagnosis_column, whose))
    notes = list(unused.notes)
    if absent:
        notes.append(f"{absent:,} images that {table} names are not there and were left out.")
    if len(rows_with) < len(rows):
        notes.append(f"{len(rows) - len(rows_with):,} rows without a diagnosis were left out.")
    is_ham = "ham10000" in table.lower()
    return Listing(
        kind="isic",
        default_name="ham10000" if is_ham else "isic",
        task="diagnosis" if by_diagnosis else "malignant",
        classes=classes,
        group_name=group_name,
        license="CC BY-NC 4.0 (HAM10000)" if is_ham else "unknown (ISIC archive)",
        records=tuple(records),
        decode=lambda record, pixels: decode_file(files, record.id, pixels),
        notes=tuple(notes),
        repeating=unused.repeating,
    )
