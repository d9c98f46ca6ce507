"""Canaries: units made to be found, put into real training by a fair coin each.

Two kinds. An *input* canary is a picture with a label it does not deserve: it goes through the
network, the clipping and the signal like any other. A *gradient* canary has no picture: where it is
drawn, a fixed direction of norm C is added to the sum of clipped gradients, the most that any unit
can do. A canary whose coin said no stays a unit that is drawn and contributes zero: the neighbor
of the guarantee, with the same declared number of units.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import binom
from torch import Tensor, nn

from xcal.audit.one_client import flat, load_flat
from xcal.data.images import Images
from xcal.dp.clipping import PLAIN, Bound, ClippedSum, ClippingEngine
from xcal.dp.clipping.named import trainable
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.dp.sampling import poisson_draw
from xcal.methods.client_data import Batch, LocalData


def toss_coins(count: int, seed: int) -> NDArray[np.bool_]:
    """One fair coin a canary, independent of everything else in the run."""
    return np.random.default_rng([seed, 0xC0117]).random(count) < 0.5


class Directions:
    """As many directions of norm 1 as canaries, orthogonal, each spread over random coordinates.

    The coordinates of all trainable parameters are shuffled and dealt out evenly; a direction has
    random signs on its own. So no canary disturbs another, and each touches every kind of layer.
    """

    def __init__(self, parameters: int, count: int, seed: int) -> None:
        if count > parameters:
            raise ValueError(f"{parameters} parameters hold no {count} orthogonal directions")
        rng = np.random.default_rng([seed, 0xD14EC])
        self.count, self.size, self._parameters = count, parameters // count, parameters
        self._places = torch.from_numpy(rng.permutation(parameters)[: count * self.size])
        signs = rng.integers(0, 2, count * self.size) * 2 - 1
        self._values = torch.from_numpy(signs / np.sqrt(self.size)).float()

    def sum_of(self, chosen: NDArray[np.int64]) -> Tensor:
        """The sum of the chosen directions, flat."""
        weights = torch.from_numpy(np.bincount(chosen, minlength=self.count)).float()
        flat = torch.zeros(self._parameters)
        flat[self._places] = weights.repeat_interleave(self.size) * self._values
        return flat

    def read(self, flat: Tensor) -> NDArray[np.float64]:
        """The inner product of a vector with every direction."""
        parts = flat[self._places].double() * self._values.double()
        result: NDArray[np.float64] = parts.view(self.count, self.size).sum(1).numpy()
        return result

    def read_weighted(
        self, flat: Tensor, spread: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How much of every direction is in a vector whose coordinates are unequally noisy.

        The best linear reading for noise of the given deviations, and its own deviation.
        """
        worth = self._values.double() / spread[self._places].double().square()
        precision = (worth * self._values.double()).view(self.count, self.size).sum(1)
        parts = (flat[self._places].double() * worth).view(self.count, self.size).sum(1)
        return (parts / precision).numpy(), precision.rsqrt().numpy()


class Tap:
    """A noise source that remembers the uniforms of one key: those that draw the units."""

    def __init__(self, noise: NoiseSource, key: NoiseKey) -> None:
        self._noise, self._key, self.name = noise, key, noise.name
        self.uniforms_seen: NDArray[np.float64] = np.zeros(0)

    def uniforms(self, key: NoiseKey, count: int) -> NDArray[np.float64]:
        values = self._noise.uniforms(key, count)
        if key == self._key:
            self.uniforms_seen = values
        return values

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        return self._noise.normals(key, count)

    def scalar(self, key: NoiseKey) -> float:
        return self._noise.scalar(key)

    def discrete_normals(self, key: NoiseKey, count: int, scale: int) -> NDArray[np.int64]:
        return self._noise.discrete_normals(key, count, scale)


class CanaryData(LocalData):
    """A client's data whose last units are canaries. Drawing is the real one.

    Drawn canaries that are not in contribute nothing. With `in_gradient` those that are in bring no
    picture either: `drawn_in` tells the engine which directions to add.
    """

    def __init__(
        self, images: Images, included: NDArray[np.bool_], *, in_gradient: bool, **options: Any
    ) -> None:
        super().__init__(images, unit="record", images_per_unit=1, **options)
        self._included, self._in_gradient = included, in_gradient
        self._first = len(images) - len(included)
        self.drawn_in: NDArray[np.int64] = np.zeros(0, np.int64)

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Batch:
        tap = Tap(noise, key)
        batch = super().draw(rate, tap, key)
        drawn = poisson_draw(tap.uniforms_seen, rate)
        canary = drawn - self._first
        inside = (canary >= 0) & self._included[np.maximum(canary, 0)]
        self.drawn_in = canary[inside] if self._in_gradient else canary[:0]
        silent = canary >= 0 if self._in_gradient else (canary >= 0) & ~inside
        return batch.without(torch.from_numpy(silent))

    def taken(self) -> NDArray[np.int64]:
        """The gradient canaries of the last draw, once: a batch may be summed in portions."""
        drawn, self.drawn_in = self.drawn_in, self.drawn_in[:0]
        return drawn


class CanaryEngine(ClippingEngine):
    """The real clipping engine, with the drawn gradient canaries added to its sum.

    It notes in `bounds` what it was told, step by step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data: CanaryData,
        directions: Directions,
        bounds: list[Bound],
        **sizes: Any,
    ) -> None:
        super().__init__(model, **sizes)
        self._data, self._directions, self._bounds = data, directions, bounds

    def clipped_sum(self, *args: Any, clip: float, **options: Any) -> ClippedSum:
        self._bounds.append(Bound(clip, options.get("geometry", PLAIN)))
        found = super().clipped_sum(*args, clip=clip, **options)
        flat = self._directions.sum_of(self._data.taken()) * clip
        pieces = torch.split(flat, [g.numel() for g in found.gradients.values()])
        gradients = {
            name: value + piece.view_as(value)
            for (name, value), piece in zip(found.gradients.items(), pieces, strict=True)
        }
        return replace(found, gradients=gradients)


def plant(benign: Images, pictures: Images) -> Images:
    """Benign units and, last, canaries as one record-level data set."""
    return Images(
        pixels=np.concatenate([benign.pixels, pictures.pixels]),
        labels=np.concatenate([benign.labels, pictures.labels]),
        groups=np.arange(len(benign) + len(pictures), dtype=np.int64),
        ids=np.concatenate([benign.ids, pictures.ids]),
    )


def blank_pictures(count: int, pixels: int) -> Images:
    """Placeholders for gradient canaries, which have no picture."""
    return _pictures(np.zeros((count, pixels, pixels, 3), np.uint8), np.zeros(count, np.int64))


def mislabeled(source: Images, classes: int, seed: int) -> Images:
    """Real pictures under another label than their own."""
    shift = np.random.default_rng([seed, 0x1ABE1]).integers(1, classes, len(source))
    return _pictures(np.asarray(source.pixels), (source.labels + shift) % classes)


def _pictures(pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> Images:
    ids = np.array([f"canary-{i}" for i in range(len(labels))])
    return Images(pixels, labels, np.arange(len(labels), dtype=np.int64), ids)


# --- reading them off what a training releases ----------------------------------------------------


Scores = NDArray[np.float64]


def mixture_ratio(
    z: Scores,
    *,
    steps: int,
    rate: float,
    deviation: float | Scores,
    shift: float | Scores = 1.0,
) -> Scores:
    """log-likelihood ratio of "in" against "out" of a sum of `steps` releases.

    Each step adds `shift` with probability `rate`; noise of the given deviation is on the sum.
    """
    times = np.arange(steps + 1)[:, None]
    weight = binom.logpmf(times, steps, rate) if rate < 1 else np.where(times == steps, 0, -np.inf)
    moved = times * np.broadcast_to(np.asarray(shift, dtype=np.float64), z.shape)[None]
    result: Scores = logsumexp(
        weight + moved * (2 * z - moved) / (2 * np.square(deviation)), axis=0
    )
    return result


QUIET = 0.4  # a block this far below the usual deviation is no accident


def quiet_blocks(model: nn.Module, released: Tensor) -> Tensor | None:
    """Deviation of every coordinate of a release, if some blocks carry far less noise than others.

    A block is what one output channel's filter holds, or else a whole tensor.
    """
    parameters = list(trainable(model).values())
    spreads, quiet = [], False
    usual = float(released.double().square().mean().sqrt())
    for piece, parameter in zip(
        torch.split(released.double(), [p.numel() for p in parameters]), parameters, strict=True
    ):
        by_row = parameter.dim() > 1 and parameter[0].numel() >= 16
        rows = piece.view(len(parameter), -1) if by_row else piece.view(1, -1)
        own = rows.square().mean(1, keepdim=True).sqrt()
        low = (own < QUIET * usual) & torch.tensor(rows.shape[1] >= 16)
        quiet = quiet or bool(low.any())
        spreads.append(torch.where(low, own, usual).expand_as(rows).flatten())
    return torch.cat(spreads).clamp_min(1e-9) if quiet else None


def _in_scaled_space(model: nn.Module, released: Tensor, bound: Bound) -> Tensor:
    """A released gradient sum as it was when the noise was added."""
    parameters = trainable(model)
    pieces = torch.split(released, [p.numel() for p in parameters.values()])
    named = {k: v.view_as(p) for (k, p), v in zip(parameters.items(), pieces, strict=True)}
    return flat(bound.geometry.scaled(named))


@dataclass
class GradientWatcher:
    """Reads every canary's direction off every released sum.

    Where some blocks turn out to carry far less noise than others, they are read with the weight
    they deserve: a method that spares some of them must not be saved by the rest.
    """

    directions: Directions
    bounds: list[Bound]  # of the engine
    readings: list[Scores] = field(default_factory=list)
    own_spread: list[Scores | None] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)

    def __call__(self, before: nn.Module, released: Tensor) -> None:
        seen = _in_scaled_space(before, released, self.bounds[-1]) / self.bounds[-1].norm
        spread = quiet_blocks(before, seen)
        if spread is None:
            self.readings.append(self.directions.read(seen))
            self.own_spread.append(None)
        else:
            reading, deviation = self.directions.read_weighted(seen, spread)
            self.readings.append(reading)
            self.own_spread.append(deviation)
        self.deviations.append(float(seen.double().std()))


@dataclass
class InputWatcher:
    """How far each canary's own gradient reaches into every released sum."""

    images: Tensor
    labels: Tensor
    readings: list[Scores] = field(default_factory=list)
    norms: list[Scores] = field(default_factory=list)

    def __call__(self, before: nn.Module, released: Tensor) -> None:
        slope, norm = reach(before, self.images, self.labels, released)
        self.readings.append(slope / np.maximum(norm, 1e-12))
        self.norms.append(norm)


_SHORT = 0.01  # in weight space


def reach(
    model: nn.Module, images: Tensor, labels: Tensor, direction: Tensor
) -> tuple[Scores, Scores]:
    """For every image the inner product of its loss's gradient with `direction`, and its norm."""
    # A central difference along a short way: two passes forward, whatever the network is made of.
    length = float(direction.double().norm()) or 1.0
    here = flat(trainable(model))
    ends = []
    for sign in (1, -1):
        load_flat(model, here + direction * (sign * _SHORT / length))
        ends.append(image_losses(model, images, labels))
    load_flat(model, here)
    slope = (ends[0] - ends[1]) * (length / (2 * _SHORT))
    norms = ClippingEngine(model).clipped_sum(images, labels, clip=1.0).norms
    return slope, norms.double().numpy()


def image_losses(model: nn.Module, images: Tensor, labels: Tensor) -> Scores:
    with torch.no_grad():
        found = F.cross_entropy(model(images), labels, reduction="none")
    result: Scores = found.double().numpy()
    return result
