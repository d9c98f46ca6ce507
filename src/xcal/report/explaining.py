"""What a model says of an image, where it looks, and what happens when that is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xcal.data.normalize import IMAGENET_MEAN, IMAGENET_STD, to_tensor
from xcal.explain.choosing import DEFAULT, make_maps
from xcal.explain.inference import predict_logits
from xcal.explain.road import RoadResult, RoadSettings, road
from xcal.explain.signal import mask_images, top_cells
from xcal.federation.evaluation import OnImages
from xcal.methods.base import SignalParameters
from xcal.report.chosen_images import Picture
from xcal.report.runs import LoadedRun


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

    @property
    def right(self) -> bool | None:
        """Whether the answer is the truth; None where that is not known."""
        return None if self.truth is None else self.truth == self.answer.name


def explain_pictures(
    run: LoadedRun,
    pictures: Sequence[Picture],
    *,
    method: str = DEFAULT,
    settings: RoadSettings | None = None,
    on_images: OnImages = lambda *_: None,
) -> list[Explanation]:
    """Explain each picture by its own; the model is left untouched.

    A picture's numbers do not depend on which others are explained with it.
    """
    found = []
    for picture in pictures:
        found.append(_explain(run, picture, method, settings or RoadSettings()))
        on_images(len(found), len(pictures))
    return found


def _explain(run: LoadedRun, picture: Picture, method: str, settings: RoadSettings) -> Explanation:
    inputs = to_tensor(picture.pixels[None])
    probabilities = _softmax(predict_logits(run.model, inputs))
    first = int(probabilities.argmax())
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
        truth=None if picture.label is None else run.classes[picture.label],
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
