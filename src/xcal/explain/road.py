"""ROAD: does taking away what the map calls important change the answer? (Rong et al. 2022)

A share of the pixels is removed, most salient first (MoRF) or least salient first (LeRF), and
imputed from what is left, so that the hole itself gives nothing away. With f the output for the
class predicted on the intact image and Delta(k) = f(image with k % removed) - f(image),

    score = mean over k of (Delta_LeRF(k) - Delta_MoRF(k)) / 2.

On softmax confidence the score lies in [-1/2, 1/2]: this is `road`. The same difference of logits,
in percent of the intact logits, is unbounded and called `road_logit_percent`.

Pixels are removed by rank, with ties in random order. A threshold at a percentile would remove
everything from a map that is mostly zero, as a ReLU leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor, nn

from xcal.dp.clipping.precision import double
from xcal.errors import UserError
from xcal.explain.gradcam import enlarge_maps
from xcal.explain.imputation import impute
from xcal.explain.inference import predict_logits

FloatArray = NDArray[np.float64]

# Differences below this share of a map's largest value are rounding, not an order.
_RANK_RESOLUTION = 2.0**-40


@dataclass(frozen=True)
class RoadSettings:
    """levels: percent of pixels removed. noise: standard deviation of what is added to imputed
    values, in the units of the images as the network sees them. seed: of ties and noise."""

    levels: tuple[float, ...] = (20, 40, 60, 80)
    noise: float = 0.01
    seed: int = 0
    batch_size: int = 32

    def __post_init__(self) -> None:
        if not self.levels or not all(0 < level < 100 for level in self.levels):
            raise UserError(
                f"The ROAD levels are {list(self.levels)}: give percentages above 0 and below 100."
            )
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise UserError(f"The ROAD noise is {self.noise}: choose a number of 0 or more.")
        if self.batch_size < 1:
            raise UserError(f"The ROAD batch size is {self.batch_size}: choose 1 or more.")


@dataclass(frozen=True)
class RoadResult:
    """ROAD of N images at L levels.

    `confidence` and `logit` (N,) are the intact image's; `morf` and `lerf` (N, L) are the changes
    of confidence after removal, `morf_logit` and `lerf_logit` those of the logit, all for the
    class in `classes` (N,). A map that is constant or not finite ranks nothing: its pixels go in
    random order, and it is counted. An image on which the network gives a non-finite answer has
    changes of 0, and is counted.
    """

    levels: tuple[float, ...]
    classes: NDArray[np.int64]
    confidence: FloatArray
    morf: FloatArray
    lerf: FloatArray
    logit: FloatArray
    morf_logit: FloatArray
    lerf_logit: FloatArray
    constant_maps: int
    broken_maps: int
    broken_images: int
    answers: FloatArray  # (N, 1 + 2L, classes): all logits, intact first, then MoRF, then LeRF

    def matched(self, temperature: float) -> FloatArray:
        """The scores (N,) on softmax(logits / T): models of one calibration are on one scale.

        A model that is surer of the same answers has a higher ROAD for that alone. With T fitted on
        public images (`xcal.metrics.temperature`) what is left is what the maps do.
        """
        confidence = softmax(self.answers / temperature, axis=2)
        rows = np.arange(len(self.classes))
        change = confidence[rows, 1:, self.classes] - confidence[rows, :1, self.classes]
        levels = len(self.levels)
        return _score(change[:, :levels], change[:, levels:])

    @property
    def scores(self) -> FloatArray:
        """The score (N,) of each image on confidence, in [-1/2, 1/2]."""
        return _score(self.morf, self.lerf)

    @property
    def road(self) -> float:
        """The mean score on softmax confidence, in [-1/2, 1/2]; NaN without images."""
        return float(self.scores.mean()) if len(self.classes) else math.nan

    @property
    def road_logit_percent(self) -> float:
        """The mean score on logits in percent of the mean |intact logit|; unbounded.

        A ratio of means: the mean of ratios would be ruled by the images whose logit is near 0.
        NaN without images or where all intact logits are 0.
        """
        scale = float(np.abs(self.logit).mean()) if len(self.classes) else 0.0
        if scale == 0:
            return math.nan
        return float(100 * _score(self.morf_logit, self.lerf_logit).mean() / scale)

    def summary(self) -> dict[str, float | int | list[float] | None]:
        """What a result file holds: plain numbers, None for what is undefined."""
        images = len(self.classes)
        return {
            "road": _or_none(self.road),
            "road_logit_percent": _or_none(self.road_logit_percent),
            "images": images,
            "constant_maps": self.constant_maps,
            "broken_maps": self.broken_maps,
            "broken_images": self.broken_images,
            "levels": [float(level) for level in self.levels],
            "morf": self.morf.mean(axis=0).tolist() if images else None,
            "lerf": self.lerf.mean(axis=0).tolist() if images else None,
        }


def road(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    settings: RoadSettings | None = None,
    *,
    classes: Tensor | None = None,
    on_images: Callable[[int], None] = lambda *_: None,
) -> RoadResult:
    """ROAD of `maps` (N, h, w), enlarged to the images (N, C, H, W), for the predicted classes.

    Same seed, same result; an image's numbers depend on its place in the set, not on the batch
    size beyond rounding. The model is left untouched.
    """
    settings = settings or RoadSettings()
    if len(images) != len(maps):
        raise UserError(f"There are {len(images)} images and {len(maps)} maps: give one for each.")
    n, levels = len(images), len(settings.levels)
    if n == 0:
        return _result(settings, np.zeros((0, 1 + 2 * levels, 1)), np.zeros(0, np.int64), 0, 0)
    intact = predict_logits(model, images, batch_size=settings.batch_size)
    target = intact.argmax(dim=1) if classes is None else classes.to(intact.device)
    saliency, constant, broken = saliency_for_ranking(maps, (images.shape[2], images.shape[3]))
    answers = np.empty((n, 1 + 2 * levels, intact.shape[1]))
    answers[:, 0] = double(intact).cpu().numpy()
    done = 0
    for perturbed in removed_and_imputed(images, saliency, settings):
        count = len(perturbed)
        said = predict_logits(model, perturbed.flatten(0, 1), batch_size=settings.batch_size)
        answers[done : done + count, 1:] = double(said).cpu().numpy().reshape(count, 2 * levels, -1)
        done += count
        on_images(done)
    return _result(settings, answers, target.cpu().numpy(), constant, broken)


def removed_and_imputed(
    images: Tensor, saliency: FloatArray, settings: RoadSettings
) -> Iterator[Tensor]:
    """The images after removal, in chunks (n, 2*L, C, H, W): MoRF at each level, then LeRF.

    Chunks hold about one batch for the network. `saliency` is (N, H, W) and finite.
    """
    levels = len(settings.levels)
    per_chunk = max(1, settings.batch_size // (2 * levels))
    for start in range(0, len(images), per_chunk):
        originals = images[start : start + per_chunk]
        pixels = originals.detach().cpu().numpy()
        result = np.repeat(pixels[:, None], 2 * levels, axis=1)
        for offset, image in enumerate(pixels):
            # A generator per image: its ties and noise do not depend on how many came before.
            generator = np.random.default_rng([settings.seed, start + offset])
            order = removal_order(saliency[start + offset], generator)
            for column, ranking in enumerate((order, order[::-1])):
                for row, level in enumerate(settings.levels):
                    removed = removed_pixels(ranking, level, saliency.shape[1:])
                    values = impute(image, removed)
                    values += settings.noise * generator.standard_normal(values.shape)
                    result[offset, column * levels + row][:, removed] = values
        yield torch.from_numpy(result).to(originals.device)


def removal_order(saliency: FloatArray, generator: np.random.Generator) -> NDArray[np.intp]:
    """Flat pixel numbers, most salient first, equal ones in random order."""
    values = saliency.reshape(-1)
    return np.lexsort((generator.random(values.size), -values))


def removed_pixels(
    ranking: NDArray[np.intp], level: float, shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """The first `level` percent of the ranking as a mask; one pixel at least is always left."""
    count = min(round(level * ranking.size / 100), ranking.size - 1)
    removed = np.zeros(ranking.size, dtype=bool)
    removed[ranking[:count]] = True
    return removed.reshape(shape)


def saliency_for_ranking(maps: Tensor, size: tuple[int, int]) -> tuple[FloatArray, int, int]:
    """Maps enlarged to `size` and freed of rounding; how many are constant; how many not finite.

    Maps that are not finite come back all zero, which ranks nothing.
    """
    values = maps.detach().cpu()
    finite = torch.isfinite(values).flatten(1).all(dim=1)
    values = torch.where(finite[:, None, None], values.double(), 0.0)
    enlarged = enlarge_maps(values, size).numpy()
    quantum = np.abs(enlarged).max(axis=(1, 2), keepdims=True, initial=0) * _RANK_RESOLUTION
    # Where the map is all zero, any quantum will do.
    quantum = np.where(quantum > 0, quantum, 1.0)
    saliency = np.round(enlarged / quantum)
    constant = np.ptp(saliency, axis=(1, 2)) == 0 if len(saliency) else np.zeros(0, dtype=bool)
    broken = ~finite.numpy()
    return saliency, int((constant & ~broken).sum()), int(broken.sum())


def _result(
    settings: RoadSettings,
    answers: FloatArray,
    classes: NDArray[np.int64],
    constant_maps: int,
    broken_maps: int,
) -> RoadResult:
    """Turn logits (N, 1 + 2*L, classes), intact first, into changes; broken images become zeros."""
    levels = len(settings.levels)
    broken = np.asarray(~np.isfinite(answers).all(axis=(1, 2)))
    answers = np.where(broken[:, None, None], 0.0, answers)
    rows = np.arange(len(classes))
    logits = answers[rows, :, classes]
    confidences = softmax(answers, axis=2)[rows, :, classes]
    change = confidences[:, 1:] - confidences[:, :1]
    logit_change = logits[:, 1:] - logits[:, :1]
    return RoadResult(
        levels=settings.levels,
        classes=classes,
        confidence=np.where(broken, 0.0, confidences[:, 0]),
        morf=change[:, :levels],
        lerf=change[:, levels:],
        logit=logits[:, 0],
        morf_logit=logit_change[:, :levels],
        lerf_logit=logit_change[:, levels:],
        constant_maps=constant_maps,
        broken_maps=broken_maps,
        broken_images=int(broken.sum()),
        answers=answers,
    )


def _score(morf: FloatArray, lerf: FloatArray) -> FloatArray:
    score: FloatArray = (lerf - morf).mean(axis=1) / 2
    return score


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
