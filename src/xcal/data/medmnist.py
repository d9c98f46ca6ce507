"""The MedMNIST file format: one `.npz` with `train_images`, `train_labels`, `val_…`, `test_…`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xcal.data.decode import squared
from xcal.data.images import RECORD_GROUPS
from xcal.data.listing import Listing, Record, Split, group_of_one
from xcal.errors import UserError

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
    "bloodmnist": (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocyte",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
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
