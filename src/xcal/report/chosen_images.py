"""Which images are to be explained: files, folders of files, or images of the run's test split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xcal.data.decode import (
    DICOM_ENDINGS,
    FORMATS,
    decode_file,
    is_dicom_name,
    is_image,
    is_image_name,
    strict_decoding,
)
from xcal.data.images import Images
from xcal.data.source_files import BadFile, FolderFiles
from xcal.errors import UserError
from xcal.report.runs import LoadedRun, load_data

TEST = "test:"


@dataclass(frozen=True)
class Picture:
    """One square RGB image of the run's size; `label` where the truth is known."""

    name: str
    pixels: NDArray[np.uint8]
    label: int | tuple[int, ...] | None = None
    """A class number; of several findings a 0 or 1 each."""


def find_pictures(run: LoadedRun, words: Sequence[str]) -> list[Picture]:
    """The images that `words` name, in that order.

    A word is a file, a folder (all images in it and below, by name), or `test:` and an image's id
    or its place in the run's own test split. Anything that cannot be read is a `UserError` that
    names it: a page with an image left out in silence would be taken for the whole.
    """
    pixels = run.experiment.pixels
    test: Images | None = None
    found: list[Picture] = []
    with strict_decoding():
        for word in words:
            if word.startswith(TEST):
                test = test if test is not None else load_data(run).test
                found.append(_from_test(test, word.removeprefix(TEST)))
            elif Path(word).is_dir():
                found += _from_folder(Path(word), pixels)
            else:
                found.append(Picture(Path(word).name, read_picture(Path(word), pixels)))
    return found


def file_names(pictures: Sequence[Picture]) -> list[str]:
    """A plain PNG name for each picture; no two alike, also where case does not count.

    Never the name of the image itself, so that nothing is lost where both stand in one folder.
    """
    taken: set[str] = set()
    names = []
    for picture in pictures:
        shown = picture.name
        if is_image_name(shown):
            shown = shown[: shown.rindex(".")]
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", shown).strip("-.")[:80] or "image"
        name, number = f"{stem}-explained", 1
        while name.lower() in taken:
            number += 1
            name = f"{stem}-explained-{number}"
        taken.add(name.lower())
        names.append(f"{name}.png")
    return names


def _from_test(test: Images, which: str) -> Picture:
    place = np.flatnonzero(test.ids == which)
    if len(place):
        index = int(place[0])
    elif which.isascii() and which.isdigit() and int(which) < len(test):
        index = int(which)
    else:
        if not len(test):
            raise UserError(
                f"{TEST}{which} names no image: the run's data set has no test images. Give image"
                " files instead."
            )
        example = f" an id, as {TEST}{test.ids[0]}, or"
        raise UserError(
            f"{TEST}{which} names no image of the run's test split: give{example} a number from 0"
            f" to {len(test) - 1}."
        )
    label = tuple(test.labels[index].tolist()) if test.multi_label else int(test.labels[index])
    return Picture(str(test.ids[index]), np.asarray(test.pixels[index]), label)


def _from_folder(folder: Path, pixels: int) -> list[Picture]:
    return [
        Picture(path.relative_to(folder).as_posix(), read_picture(path, pixels))
        for path in folder_images(folder)
    ]


def folder_images(folder: Path) -> list[Path]:
    """All image files in a folder and below, by name."""
    files = FolderFiles(folder)
    found = [folder / name for name in files.sizes if is_image(files, name)]
    if not found:
        raise UserError(f"The folder {folder} holds no images ({_known_endings()}).")
    return found


def read_picture(path: Path, pixels: int) -> NDArray[np.uint8]:
    """One image file, whatever its kind, as (pixels, pixels, 3)."""
    if not path.is_file():
        raise UserError(f"There is no image {path}: check the path.")
    files = _OneFile(path)
    try:
        # DICOM files often have no ending; their first bytes tell.
        if not is_image_name(path.name) and files.read(path.name)[128:132] != b"DICM":
            raise UserError(f"{path} is not named as an image ({_known_endings()}).")
        return decode_file(files, path.name, pixels)[0]
    except BadFile as problem:
        kind = "DICOM file" if is_dicom_name(path.name) else "image"
        raise UserError(f"The {kind} {path} {problem}: mend it or leave it out.") from None


class _OneFile(FolderFiles):
    """A single file with the checks of a folder's, without a walk through its neighbors."""

    def __init__(self, path: Path) -> None:
        self._root = path.parent
        self.sizes = {path.name: path.stat().st_size}


def _known_endings() -> str:
    return ", ".join([*FORMATS, *DICOM_ENDINGS])
