"""What a client's training step works with: its data, its model, its noise and its account."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcal.data.images import Images
from xcal.data.sampling import UnitTable, images_of, poisson_draw, to_tensor
from xcal.privacy.account import Account
from xcal.privacy.noise import NoiseKey, NoiseSource
from xcal.training.clipping import ClippingEngine


@dataclass(frozen=True)
class Batch:
    """One Poisson draw. `units[i]` is the drawn unit that image i belongs to."""

    images: Tensor
    labels: Tensor
    units: Tensor
    n_units: int

    def without(self, bad: Tensor) -> Batch:
        """The same draw, with the images of the units marked in `bad` taken out.

        The units keep their numbers: they are drawn, and contribute nothing.
        """
        keep = ~bad[self.units]
        return Batch(self.images[keep], self.labels[keep], self.units[keep], self.n_units)


class LocalData:
    """A client's images, drawn by unit of privacy.

    `units` is the number of units n, which the client declares: public and constant, the same for
    neighbours, since a null unit is a unit.
    """

    def __init__(
        self,
        images: Images,
        *,
        unit: str,
        images_per_unit: int,
        brightness: float = 1.0,
        device: str = "cpu",
    ) -> None:
        self.unit = unit
        self._images = images
        self._table = UnitTable.of("group" if unit == "group" else "record", images.groups)
        self._images_per_unit = images_per_unit
        self._brightness = brightness
        self._device = device

    @property
    def units(self) -> int:
        return self._table.n_units

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Batch:
        """Each unit independently with probability `rate`, never truncated."""
        drawn = poisson_draw(noise.uniforms(key, self.units), rate)
        chosen = None
        if int(self._table.sizes.max(initial=0)) > self._images_per_unit:
            views = NoiseKey(key.client, key.method, key.round, key.step, "views")
            chosen = noise.uniforms(views, self._table.n_images)
        indices, unit_of = images_of(drawn, self._table, self._images_per_unit, chosen)
        return Batch(
            to_tensor(self._images.pixels[indices], self._brightness).to(self._device),
            torch.from_numpy(self._images.labels[indices]).to(self._device),
            torch.from_numpy(unit_of).to(self._device),
            len(drawn),
        )

    def digest(self) -> str:
        """A fingerprint of all that a draw can return. It stays in the client's own ledger."""
        state = hashlib.sha256()
        for array in (self._images.pixels, self._images.labels, self._images.groups):
            state.update(np.ascontiguousarray(array).tobytes())
        state.update(repr((self._brightness, self._images_per_unit, self.units)).encode())
        return state.hexdigest()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, noised and sent, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A fingerprint of names, shapes and values, to the bit."""
    state = hashlib.sha256()
    for name, tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        state.update(f"{name}{array.shape}{array.dtype}".encode())
        state.update(memoryview(array.reshape(-1)).cast("B"))  # type: ignore[arg-type]
    return state.hexdigest()


class Optimiser:
    """Plain SGD, momentum or Adam on the noisy gradient: post-processing of a release."""

    def __init__(self, model: nn.Module, kind: str, lr: float, momentum: float) -> None:
        self._params = trainable(model)
        values = list(self._params.values())
        self._optimiser: torch.optim.Optimizer
        if kind == "adam":
            self._optimiser = torch.optim.Adam(values, lr=lr)
        else:
            self._optimiser = torch.optim.SGD(
                values, lr=lr, momentum=momentum if kind == "momentum" else 0.0
            )

    def step(self, gradient: Mapping[str, Tensor]) -> None:
        for name, parameter in self._params.items():
            parameter.grad = gradient[name].to(parameter.dtype)
        self._optimiser.step()
        for parameter in self._params.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Flat and named, for a checkpoint."""
        return {
            f"{name}/{key}": torch.as_tensor(value)
            for name, parameter in self._params.items()
            for key, value in self._optimiser.state.get(parameter, {}).items()
            if value is not None
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            self._optimiser.state[self._params[name]][key] = value.clone()


@dataclass(frozen=True)
class ReplayKey:
    """What tells a redone step from another one: all that stays the same, and a local secret."""

    secret: bytes
    context: str  # digest of data, configuration and versions


@dataclass(frozen=True)
class Bench:
    """The tools of one client in one round. Steps read it; only the model and account change."""

    client: str
    method: str
    round: int
    first_step: int  # of this round, in the numbering of all the client's steps
    model: nn.Module
    engine: ClippingEngine | None
    data: LocalData
    noise: NoiseSource
    account: Account | None
    optimiser: Optimiser
    batch: int  # expected batch B: the constant divisor
    clip: float
    replay: ReplayKey | None = None  # under seeded noise only
    validation_losses: tuple[float, ...] = ()  # public numbers that came with the request
    own_rounds: int = 1  # of this client, by the published schedule

    @property
    def rate(self) -> float:
        return self.batch / self.data.units

    def key(self, step: int, block: str) -> NoiseKey:
        return NoiseKey(self.client, self.method, self.round, step, block)

    def draw(self, step: int) -> Batch:
        return self.data.draw(self.rate, self.noise, self.key(step, "draw"))

    def inputs(self, step: int, *settings: object) -> str | None:
        """Digest of all that determines this step's release; None under secure noise.

        Weights, data, the noise's key, the whole configuration and every number that shapes the
        release: a redone step may reuse its noise only where all of it is the same.
        """
        if self.replay is None:
            return None
        weights = digest_tensors(self.model.state_dict().items())
        text = repr((weights, self.replay.context, self.key(step, ""), settings))
        # Keyed, since the chain of these digests travels: it must not confirm a guess at the data.
        return hmac.new(self.replay.secret, text.encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class StepRecord:
    """What one step let out: functions of releases and public constants only."""

    round: int
    step: int
    sigma: float
    signal: float | None
    share_spent: float


def mean_by_unit(values: Tensor, units: Tensor, n_units: int) -> NDArray[np.float64]:
    """The mean of an image's values over its unit; units without an image get 0."""
    where = units.cpu().numpy()
    sums = np.bincount(where, weights=values.double().cpu().numpy(), minlength=n_units)
    counts = np.bincount(where, minlength=n_units)
    result: NDArray[np.float64] = sums / np.maximum(counts, 1)
    return result
