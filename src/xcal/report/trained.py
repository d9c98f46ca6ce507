"""A trained run as a script uses it: its model, its classes, images in, answers out."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.data.decode import Square, as_rgb, squared, strict_decoding, to_eight_bits
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.data.source_files import BadFile
from xcal.errors import UserError
from xcal.experiments import read_pinned
from xcal.explain.inference import predict_logits
from xcal.federation.evaluation import OnImages
from xcal.federation.folder import RunFolder
from xcal.federation.given_objects import objects_of
from xcal.federation.outcome import public_subset
from xcal.federation.setup import validation_is_public
from xcal.metrics.temperature import as_questions, confidences, fit_temperature
from xcal.plugins import given
from xcal.report.explaining import read_picture
from xcal.report.runs import LoadedRun, load_data, load_run

FITTED_ON = 1000
"""Validation images that a temperature is fitted on, at most: one number needs no more."""
_AT_ONCE = 64


@dataclass(frozen=True)
class Predicted:
    """What the model says of N images.

    `names` holds the class of each image, None where the network gave no finite answer;
    `confidences` (N, classes) is the softmax, all NaN where there is no answer. Of several findings
    at once `names` holds those that are as likely as not, with | between ("" where none is), and
    `confidences` the probability of each by itself.
    """

    names: tuple[str | None, ...]
    confidences: NDArray[np.float64]
    calibrated: bool

    @property
    def confidence(self) -> NDArray[np.float64]:
        """That of the class in `names`, or of the likeliest finding, (N,)."""
        found: NDArray[np.float64] = self.confidences.max(axis=1)
        return found


@dataclass(frozen=True)
class Trained:
    """A run's model and how to use it.

    Args:
        run: the run's own experiment, its model and its classes.
        temperature: logits are divided by it; 1 changes nothing.
        fitted_on: the public images that the temperature was fitted on; None: it was not.

    Guarantee: the model was released under the run's privacy statement, and using it costs nothing
    more; what is computed from new images is as private as they are.
    """

    run: LoadedRun
    temperature: float = 1.0
    fitted_on: str | None = None

    @property
    def model(self) -> nn.Module:
        """The network with the weights of the last round, in evaluation mode."""
        return self.run.model

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.run.classes

    @property
    def experiment(self) -> Experiment:
        """The keys that the run was made with."""
        return self.run.experiment

    def preprocess(self, image: Any) -> Tensor:
        """One image as the network takes it: a tensor (3, pixels, pixels).

        The whole picture is kept: its sides are scaled to the run's size, and colors are normalized
        as in training.

        Args:
            image: the path of a file (PNG, JPEG, DICOM and others), a PIL image, or an array
                (H, W) or (H, W, 3) as decoded from a file.
        """
        return to_tensor(self.square(image)[None])[0]

    def square(self, image: Any) -> Square:
        """The same before it is normalized: (pixels, pixels, 3) of uint8.

        Args:
            image: as for `preprocess`.
        """
        pixels = self.experiment.pixels
        if isinstance(image, str | os.PathLike):
            with strict_decoding():
                return read_picture(Path(image), pixels)
        if isinstance(image, np.ndarray):
            image = _picture(image)
        if not isinstance(image, Image.Image):
            raise UserError(
                f"An image is given as {type(image).__name__}: give a path, a PIL image or an array"
                " (height, width) or (height, width, 3)."
            )
        return squared(as_rgb(ImageOps.exif_transpose(image)), pixels)

    def predict(self, images: Any, on_images: OnImages = lambda *_: None) -> Predicted:
        """The class, or the findings, and the confidences of each image.

        Args:
            images: tensors as `preprocess` makes them, one (3, H, W), many (N, 3, H, W) or a list
                of them; or anything that `preprocess` takes, or a list of that.
            on_images: is told how many are done, of how many.
        """
        return self.answers(self.logits(images, on_images))

    def answers(self, logits: NDArray[np.float64]) -> Predicted:
        """What logits of this model say, by the temperature.

        Args:
            logits: (N, classes), as `logits` gives them.
        """
        several = self.run.multi_label
        if several:
            found = confidences(as_questions(logits), self.temperature)[:, 1].reshape(logits.shape)
        else:
            found = confidences(logits, self.temperature)
        answered: NDArray[np.bool_] = np.asarray(np.isfinite(found).all(axis=1))
        best = np.where(np.isfinite(found), found, 0).argmax(axis=1)
        names = (
            None if not answered[i] else self._called(found[i]) if several else self.classes[k]
            for i, k in enumerate(best)
        )
        return Predicted(tuple(names), found, self.fitted_on is not None)

    def _called(self, probabilities: NDArray[np.float64]) -> str:
        """The findings that are as likely as not."""
        told = zip(self.classes, probabilities, strict=True)
        return "|".join(name for name, value in told if value >= 0.5)

    def logits(self, images: Any, on_images: OnImages = lambda *_: None) -> NDArray[np.float64]:
        """What the network gives, (N, classes), before temperature and softmax.

        Args:
            images: as for `predict`.
            on_images: is told how many are done, of how many.
        """
        if isinstance(images, Tensor):
            images = images[None] if images.dim() == 3 else images
        elif isinstance(images, str | os.PathLike | Image.Image) or getattr(images, "ndim", 4) < 4:
            images = [images]
        elif not hasattr(images, "__len__"):
            images = list(images)
        own = next(self.model.parameters())
        parts = [np.zeros((0, len(self.classes)))]
        for start in range(0, len(images), _AT_ONCE):
            end = min(start + _AT_ONCE, len(images))
            some = [self._input(images[i]) for i in range(start, end)]
            inputs = torch.stack(some).to(own.device)
            parts.append(predict_logits(self.model, inputs).double().cpu().numpy())
            on_images(end, len(images))
        return np.concatenate(parts)

    def _input(self, image: Any) -> Tensor:
        if not isinstance(image, Tensor):
            return self.preprocess(image)
        pixels = self.experiment.pixels
        if image.shape != (3, pixels, pixels) or not image.is_floating_point():
            raise UserError(
                f"A tensor of {image.dtype} and shape {tuple(image.shape)} is no image of this run,"
                f" (3, {pixels}, {pixels}): make it with preprocess."
            )
        return image.detach().float()

    def calibrated(self, on_images: OnImages = lambda *_: None) -> Trained:
        """With one temperature, fitted on public validation images of the run's data set.

        Args:
            on_images: is told how many are done, of how many.

        Raises:
            UserError: where there are none that may be used for that.

        Guarantee: no private image is looked at: the temperature is of images that are public, or
        of which somebody agreed, by name, that they are.
        """
        images = public_validation(self.run)
        logits = self.logits(images.pixels, on_images)
        fitted_on = f"{len(images)} public validation images of {self.experiment.data}"
        labels = images.labels
        if images.multi_label:
            logits, labels = as_questions(logits), labels.reshape(-1)
        return replace(self, temperature=fit_temperature(logits, labels), fitted_on=fitted_on)


def load(run: str | os.PathLike[str], *, model: Any = None, layer: Any = None) -> Trained:
    """The finished run in the folder `run`, ready to use; see `xcal.load`."""
    folder = Path(run)
    RunFolder.find(folder)
    objects = objects_of(read_pinned(folder / "experiment.toml"), {"model": model, "layer": layer})
    with given(objects):
        return Trained(load_run(folder))


def public_validation(run: LoadedRun) -> Images:
    """Validation images that a number may be fitted on and told: public ones, or agreed to be.

    A temperature goes with every prediction, so images of a set of one's own are not used unless
    somebody agreed to it (`public_validation`).
    """
    experiment = run.experiment
    if not validation_is_public(experiment):
        raise UserError(
            f"nobody agreed that the validation images of {experiment.data} are public"
            " (public_validation)."
        )
    found = public_subset(load_data(run).validation, FITTED_ON)
    if found is None:
        raise UserError(f"the data set {experiment.data} has no validation images.")
    return found


def _picture(values: NDArray[Any]) -> Image.Image:
    """An array as decoded from a file, as a picture; gray of other depths by its own range."""
    colors = values.ndim == 3 and values.shape[2] == 3
    try:
        if values.dtype == np.uint8 and (values.ndim == 2 or colors):
            return Image.fromarray(np.ascontiguousarray(values))
        if values.ndim == 2 and values.size and values.dtype.kind in "uif":
            return Image.fromarray(to_eight_bits(values))
    except (BadFile, ValueError) as problem:
        raise UserError(f"The array {problem}: mend it or leave it out.") from None
    raise UserError(
        f"An array of {values.dtype} and shape {values.shape} is no image: give uint8 of shape"
        " (height, width) or (height, width, 3), or gray of any number type."
    )
