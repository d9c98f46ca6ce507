"""What a model says of an image, where it looks, and what happens when that is taken away."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.config import nearest
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
from xcal.data.normalize import IMAGENET_MEAN, IMAGENET_STD, to_tensor
from xcal.data.source_files import BadFile, FolderFiles
from xcal.errors import UserError
from xcal.explain.any_network import OneFinding
from xcal.explain.choosing import DEFAULT, make_maps
from xcal.explain.inference import predict_logits
from xcal.explain.road import RoadResult, RoadSettings, road
from xcal.explain.signal import mask_images, top_cells
from xcal.federation.evaluation import OnImages
from xcal.methods.base import SignalParameters
from xcal.report.runs import LoadedRun, load_data


@dataclass(frozen=True)
class Answer:
    """The class with the highest softmax confidence, and that confidence in [0, 1]."""

    name: str
    confidence: float


@dataclass(frozen=True)
class Explanation:
    """One image explained. Images are (3, H, W) in [0, 1]; the map is (h, w).

    `covered` has the top cells of the map replaced by the run's fill; `covered_share` is the share
    of the cells that this took. `kept` is what remains of the confidence in the class first
    answered. `curve` is the confidence in that class by percent of pixels removed and imputed,
    most salient first (`morf`) and least salient first (`lerf`); `road` its score in [-1/2, 1/2].
    `notes` say in words where an explanation is none.
    """

    name: str
    truth: str | None
    answer: Answer
    probabilities: tuple[float, ...]
    image: Tensor
    saliency: Tensor
    covered: Tensor
    covered_share: float
    covered_answer: Answer
    kept: float
    levels: tuple[float, ...]
    morf: tuple[float, ...]
    lerf: tuple[float, ...]
    road: float
    notes: tuple[str, ...]
    classes: tuple[str, ...]
    """What `probabilities` are of."""
    likeliest: str
    """The network's own answer: of a finding that is asked for, whether it is there."""

    @property
    def right(self) -> bool | None:
        """Whether the answer is the truth; None where that is not known."""
        return None if self.truth is None else self.truth == self.likeliest


def explain_pictures(
    run: LoadedRun,
    pictures: Sequence[Picture],
    *,
    method: str = DEFAULT,
    settings: RoadSettings | None = None,
    finding: str | None = None,
    on_images: OnImages = lambda *_: None,
) -> list[Explanation]:
    """Explain each picture by its own; the model is left untouched.

    A picture's numbers do not depend on which others are explained with it. Of a run that tells
    several findings at once one is explained: `finding`, or the likeliest in each picture.
    """
    number = _number_of(run, finding)
    found = []
    for picture in pictures:
        asked, shown = (run, picture) if not run.multi_label else _one_of(run, picture, number)
        found.append(_explain(asked, shown, method, settings or RoadSettings()))
        on_images(len(found), len(pictures))
    return found


def _number_of(run: LoadedRun, finding: str | None) -> int | None:
    if finding is None:
        return None
    if not run.multi_label:
        raise UserError("--finding is for runs that tell several findings at once: leave it out.")
    by_name = {name.casefold(): number for number, name in enumerate(run.classes)}
    if finding.casefold() not in by_name:
        raise UserError(
            f"The run has no finding {finding!r}.{nearest(finding, run.classes)} It tells"
            f" {', '.join(run.classes)}."
        )
    return by_name[finding.casefold()]


def _one_of(run: LoadedRun, picture: Picture, number: int | None) -> tuple[LoadedRun, Picture]:
    """The run and the picture as a question of one finding."""
    if number is None:
        logits = predict_logits(run.model, to_tensor(picture.pixels[None]))[0]
        number = int(logits.nan_to_num(-math.inf).argmax())
    label = picture.label[number] if isinstance(picture.label, tuple) else None
    return run.one_finding(number), replace(picture, label=label)


def _explain(run: LoadedRun, picture: Picture, method: str, settings: RoadSettings) -> Explanation:
    inputs = to_tensor(picture.pixels[None])
    probabilities = _softmax(predict_logits(run.model, inputs))
    likeliest = int(probabilities.argmax())
    first = 1 if isinstance(run.model, OneFinding) else likeliest  # there, also if unlikely
    maps = make_maps(run.model, inputs, torch.tensor([first]), method=method)
    # Cells without any saliency are never covered, whatever the run's own method does.
    asked = run.experiment
    assert isinstance(asked, SignalParameters)
    cells = top_cells(maps, asked.q, positive_only=True)
    masked = mask_images(inputs, cells, asked.fill)
    after = _softmax(predict_logits(run.model, masked))
    curve = road(run.model, inputs, maps, settings, classes=torch.tensor([first]))
    confidence = float(probabilities[first])
    return Explanation(
        name=picture.name,
        truth=run.classes[picture.label] if isinstance(picture.label, int) else None,
        answer=Answer(run.classes[first], confidence),
        probabilities=tuple(map(float, probabilities)),
        image=_visible(inputs[0]),
        saliency=maps[0],
        covered=_visible(masked[0]),
        covered_share=float(cells.double().mean()),
        covered_answer=Answer(run.classes[int(after.argmax())], float(after.max())),
        kept=float(after[first]),
        levels=settings.levels,
        morf=tuple(map(float, curve.confidence[0] + curve.morf[0])),
        lerf=tuple(map(float, curve.confidence[0] + curve.lerf[0])),
        road=curve.road,
        notes=_notes(maps, curve),
        classes=run.classes,
        likeliest=run.classes[likeliest],
    )


def _softmax(logits: Tensor) -> Tensor:
    """Confidences (classes,) of one image; all 0 where the network gives no finite answer."""
    return logits[0].double().softmax(dim=0).nan_to_num(0.0)


def _visible(inputs: Tensor) -> Tensor:
    """From what the network sees back to colors in [0, 1]."""
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (inputs * deviation + mean).clamp(0, 1)


def _notes(maps: Tensor, curve: RoadResult) -> tuple[str, ...]:
    notes = []
    if curve.broken_images:
        notes.append("The network gives no finite answer for this image: there is none to explain.")
    elif curve.broken_maps:
        notes.append("The map holds numbers that are not finite: it explains nothing.")
    elif not bool(maps.max() > 0):
        everywhere = "zero everywhere" if curve.constant_maps else "nowhere above zero"
        order = ", and the curve removes pixels in random order" if curve.constant_maps else ""
        notes.append(
            f"The map is {everywhere}: nothing in the image speaks for this class, nothing was"
            f" covered{order}."
        )
    elif curve.constant_maps:
        notes.append("The map is the same everywhere: the curve removes pixels in random order.")
    return tuple(notes)


# --- which images: files, folders of files, or images of the run's test split ---------------------


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
                for path in folder_images(folder := Path(word)):
                    name = path.relative_to(folder).as_posix()
                    found.append(Picture(name, read_picture(path, pixels)))
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
