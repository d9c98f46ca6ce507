"""Published sets as they are downloaded: ChestX-ray14; HAM10000 and ISIC; MedMNIST."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xcal.data.decode import is_image_name, squared
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import (
    ColumnChoice,
    Listing,
    Record,
    Split,
    find_column,
    group_column,
    group_name_of,
    group_of_one,
    read_table,
    rows_or_none,
    somebody,
    tables,
)
from xcal.data.source_files import BadFile, Files
from xcal.data.table import SEVERAL, listed_in
from xcal.errors import UserError

# --- ChestX-ray14: images anywhere, `Data_Entry_2017.csv`, and lists that name the splits ---------

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
    stem = "data_entry_2017"
    return next((n for n in tables(files) if PurePosixPath(n).name.lower().startswith(stem)), None)


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
        group = somebody(row[patient]) or group_of_one(images[name])
        records.append(Record(images[name], label, group, split_of.get(name)))
    notes = [SEVERAL.format(count=len(known))] if several else []
    if absent:
        notes.append(_absent(absent, table))
    if unlisted:
        notes.append(f"{unlisted:,} images are in no split list and were left out.")
    return listed_in(
        files,
        table,
        rows,
        (image, labels, patient),
        records,
        notes,
        kind="chest-xray14",
        default_name="chest-xray14",
        task=FINDINGS if several else wanted or ANY_FINDING,
        classes=classes,
        group_name=group_name_of(patient),
        license="NIH public release, CC0",
    )


def _absent(count: int, table: str) -> str:
    return f"{count:,} images that {table} names are not there and were left out."


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


# --- dermoscopy: a metadata CSV beside the images; the lesion is the group ------------------------

_IMAGE = ("image_id", "isic_id", "image_name", "image")
_DIAGNOSIS = ("dx", "diagnosis", "diagnosis_1", "benign_malignant")
_GROUP = ("lesion_id", "patient_id")
# Actinic keratoses and Bowen's disease, basal cell carcinoma, melanoma, squamous cell carcinoma.
_MALIGNANT = set(
    "akiec|bcc|mel|scc|malignant|melanoma|basal cell carcinoma|squamous cell carcinoma".split("|")
)
_BENIGN = set(
    "nv|bkl|df|vasc|benign|nevus|naevus|seborrheic keratosis|dermatofibroma|vascular lesion"
    "|lentigo nos|solar lentigo|lichenoid keratosis".split("|")
)
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
        label = diagnoses.index(diagnosis) if by_diagnosis else int(diagnosis in _MALIGNANT)
        group = f"{group_name} {own}" if own else group_of_one(image)
        records.append(Record(image, label, group, split=None))
    notes = [_absent(absent, table)] if absent else []
    if len(rows_with) < len(rows):
        notes.append(f"{len(rows) - len(rows_with):,} rows without a diagnosis were left out.")
    is_ham = "ham10000" in table.lower()
    return listed_in(
        files,
        table,
        rows,
        (image_column, diagnosis_column, whose),
        records,
        notes,
        kind="isic",
        default_name="ham10000" if is_ham else "isic",
        task="diagnosis" if by_diagnosis else "malignant",
        classes=tuple(diagnoses) if by_diagnosis else ("benign", "malignant"),
        group_name=group_name,
        license="CC BY-NC 4.0 (HAM10000)" if is_ham else "unknown (ISIC archive)",
    )


# --- MedMNIST: one `.npz` with `train_images`, `train_labels`, `val_…`, `test_…` ------------------


_PARTS: tuple[tuple[str, Split], ...] = (
    ("train", "train"),
    ("val", "validation"),
    ("test", "test"),
)
_MOST_BYTES = 64 * 2**30

# The files hold numbers only; these are the published names, by the beginning of the file's name.
_CLASSES: dict[str, tuple[str, ...]] = {
    "pneumoniamnist": ("normal", "pneumonia"),
    "breastmnist": ("malignant", "normal or benign"),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "bloodmnist": tuple(
        "basophil|eosinophil|erythroblast|immature granulocyte|lymphocyte|monocyte|neutrophil"
        "|platelet".split("|")
    ),
}


def medmnist(path: Path, task: str | None = None) -> Listing:
    """Any 2D set of the format, 28 to 224 pixels.

    Sets with several labels an image (ChestMNIST) are read as any finding against none, as one
    label against the rest (`task` = its number), or as all labels at once (`task` = findings).
    """
    arrays = _arrays(path)
    stem = path.stem.lower()
    several = any(labels.ndim == 2 and labels.shape[1] > 1 for _, labels, _ in arrays)
    numbered = [(_labels(labels, path, task), split) for _, labels, split in arrays]
    if several:
        classes: tuple[str, ...] = ("no finding", "finding")
        if task == "findings":
            count = max(labels.shape[1] for _, labels, _ in arrays if labels.ndim == 2)
            classes = tuple(f"label {k}" for k in range(count))
        elif task not in (None, "any-finding"):
            classes = (f"not label {task}", f"label {task}")
    else:
        if task is not None:
            raise UserError(f"{path} has one label an image; it has no task {task!r}.")
        count = 1 + max(int(labels.max(initial=0)) for labels, _ in numbered)
        named = next((c for name, c in _CLASSES.items() if stem.startswith(name)), ())
        classes = named if len(named) >= count else tuple(f"class {i}" for i in range(count))
    if len(classes) < 2:
        raise UserError(f"{path} holds fewer than two classes.")
    place = {}
    records = []
    for (images, _, split), (labels, _) in zip(arrays, numbered, strict=True):
        for i, label in enumerate(labels):
            name = f"{split}/{i:06d}"
            place[name] = (images, i)
            shown = tuple(map(int, label)) if label.ndim else int(label)
            records.append(Record(name, shown, group_of_one(name), split))

    def decode(record: Record, pixels: int) -> tuple[NDArray[np.uint8], tuple[int, int]]:
        images, i = place[record.id]
        image = Image.fromarray(np.ascontiguousarray(images[i]))
        return squared(image, pixels), image.size

    return Listing(
        kind="medmnist",
        default_name=stem,
        task=task or ("any-finding" if several else "label"),
        classes=classes,
        group_name=RECORD_GROUPS,
        license="CC BY-NC 4.0 (MedMNIST)" if stem.startswith("derma") else "CC BY 4.0 (MedMNIST)",
        records=tuple(records),
        decode=decode,
        notes=("The file does not say whose images they are.",),
    )


def _labels(labels: NDArray[Any], path: Path, task: str | None) -> NDArray[np.int64]:
    if labels.ndim == 1 or labels.shape[1] == 1:
        return labels.reshape(-1).astype(np.int64)
    if task == "findings":
        return (labels > 0).astype(np.int64)
    if task in (None, "any-finding"):
        return np.any(labels > 0, axis=1).astype(np.int64)
    if not (task or "").isdigit() or int(task or "") >= labels.shape[1]:
        raise UserError(
            f"task is {task!r}, but must be any-finding, findings or the number of one of the "
            f"{labels.shape[1]} labels of {path}, counted from 0."
        )
    return (labels[:, int(task or "")] > 0).astype(np.int64)


def _arrays(path: Path) -> list[tuple[NDArray[np.uint8], NDArray[Any], Split]]:
    """Images, labels and split of every part that the file holds."""
    found = []
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > _MOST_BYTES:
            raise UserError(f"{path} unpacks to {unpacked:,} bytes, more than may be read.")
        # No pickles: an array file must not be able to run code.
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            for part, split in _PARTS:
                if {f"{part}_images", f"{part}_labels"} <= names:
                    found.append((file[f"{part}_images"], file[f"{part}_labels"], split))
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not an .npz file that can be read: {error}.") from error
    if not found:
        raise UserError(f"{path} holds no train_images and train_labels: not the MedMNIST format.")
    for images, labels, split in found:
        gray = images.ndim == 3
        color = images.ndim == 4 and images.shape[3] == 3
        if images.dtype != np.uint8 or not (gray or color):
            raise UserError(
                f"{path}: the {split} images have shape {images.shape} and type {images.dtype}; "
                "only 2D sets of 8-bit gray or color images are read."
            )
        whole = np.issubdtype(labels.dtype, np.integer) or labels.dtype == np.bool_
        if not whole or labels.ndim not in (1, 2) or len(labels) != len(images):
            raise UserError(f"{path}: the {split} labels do not fit its images.")
        if labels.size and labels.min() < 0:
            raise UserError(f"{path}: the {split} labels hold a negative number.")
    return found
