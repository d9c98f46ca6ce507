"""What a client's training step works with: its data, its model, its noise and its account."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcal.data.augment import VIEWS, Augment, check_views, choose_views
from xcal.data.images import Images
from xcal.data.sampling import UnitTable, images_of, poisson_draw
from xcal.errors import UserError
from xcal.models.split import Split
from xcal.privacy.account import Account
from xcal.privacy.accounting import CostTable
from xcal.privacy.ledger_rows import Release
from xcal.privacy.mechanism import ChargedStep, Mechanism, ReleasedTensors, UnchargedRelease
from xcal.privacy.noise import NoiseKey, NoiseSource
from xcal.training.clipping import ClippingEngine
from xcal.training.inputs import Inputs, Rows


@dataclass(frozen=True)
class Batch:
    """One Poisson draw. `units[i]` is the drawn unit that row i belongs to.

    A row is an image, or one of several views of it; the signal is taken from `plain` ones only.
    """

    inputs: Tensor | Rows  # as images, or to be made when needed: a draw may be large
    labels: Tensor
    units: Tensor
    n_units: int
    plain: Tensor | None = None  # which rows are unchanged images; None: all
    one_row_each: bool = False  # by what a unit is, and not by who was drawn

    @property
    def images(self) -> Tensor:
        """Every row as an image."""
        return self.inputs.pictures() if isinstance(self.inputs, Rows) else self.inputs

    def pictures(self, rows: Tensor) -> Tensor:
        """The marked rows as images."""
        if isinstance(self.inputs, Rows):
            return self.inputs.take(rows).pictures()
        return self.inputs[rows]

    def only(self, rows: Tensor) -> Batch:
        """The marked rows. The units keep their numbers."""
        inputs = self.inputs
        return Batch(
            inputs.take(rows) if isinstance(inputs, Rows) else inputs[rows],
            self.labels[rows],
            self.units[rows],
            self.n_units,
            None if self.plain is None else self.plain[rows],
            self.one_row_each,
        )

    def without(self, bad: Tensor) -> Batch:
        """The same draw, with the images of the units marked in `bad` taken out.

        The units keep their numbers: they are drawn, and contribute nothing.
        """
        return self.only(~bad[self.units])


class TooManyUnits(UserError):
    """A client has more units than it declared."""


def check_declared_units(present: int, declared: int, where: str = "home.toml") -> None:
    """Refuse a declaration that the data do not fit into; nothing is left out silently."""
    if present > declared:
        raise TooManyUnits(
            f"{where} declares units = {declared}, and the data hold {present}: declare at least as"
            " many, with room for those to come."
        )


class LocalData:
    """A client's images, drawn by unit of privacy.

    `units` is the number of units n that rate, steps and weights are made of: public, and the same
    for neighbours. With `declared_units` it is that number, whatever the data hold: null units
    without images fill them up, are drawn like any other and contribute nothing, so that adding or
    removing a unit is a neighbour too. Without, units are counted, and only zero-out is.
    """

    def __init__(
        self,
        images: Images,
        *,
        unit: str,
        images_per_unit: int,
        brightness: float = 1.0,
        device: str = "cpu",
        views: int = 1,
        augment: Augment = "turns",
        declared_units: int | None = None,
    ) -> None:
        check_views(views, augment)
        self.unit = unit
        self.declared = declared_units is not None
        self._images = images
        self._table = UnitTable.of("group" if unit == "group" else "record", images.groups)
        if declared_units is not None:
            check_declared_units(self._table.n_units, declared_units)
            null = np.full(declared_units - self._table.n_units, len(images), dtype=np.int64)
            self._table = UnitTable(self._table.images, np.append(self._table.starts, null))
        self._images_per_unit = images_per_unit
        self._brightness = brightness
        self._device = device
        self._augment = augment
        self._views = views
        self.inputs = Inputs(images.pixels, VIEWS[augment], brightness, device)
        self._kept = False

    def keep_activations(self, split: Split | None, megabytes: int, rows: int = 0) -> bool:
        """Whether draws come with what the network's frozen beginning makes of their images.

        It is computed once for each image and kept, where all of it fits into `megabytes`; in
        passes of `rows` images where that is given. Whether it fits follows the real number of
        images, and changes time and memory only: `kept_alike` has looked that numbers are the same
        to the bit with and without, and gives 0 megabytes where they are not.
        """
        self._kept = self.inputs.keep(split, self._views, megabytes, rows)
        return self._kept

    def fits(self, split: Split, megabytes: int) -> bool:
        """Whether what this beginning makes of all images fits into `megabytes`."""
        return self.inputs.fits(split, self._views, megabytes)

    @property
    def units(self) -> int:
        """Declared, or counted where nothing is declared."""
        return self._table.n_units

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Batch:
        """Each unit, null or not, independently with probability `rate`, never truncated."""
        drawn = poisson_draw(noise.uniforms(key, self.units), rate)
        chosen = None
        if int(self._table.sizes.max(initial=0)) > self._images_per_unit:
            views = NoiseKey(key.client, key.method, key.round, key.step, "views")
            chosen = noise.uniforms(views, self._table.n_images)
        indices, unit_of = images_of(drawn, self._table, self._images_per_unit, chosen)
        shown = np.zeros((len(indices), 1), dtype=np.int64)
        if self._views > 1:
            # Every image of the set has uniforms of its own: its views depend on nobody else's.
            others = len(VIEWS[self._augment]) - 1
            source = NoiseKey(key.client, key.method, key.round, key.step, "augment")
            uniforms = noise.uniforms(source, self._table.n_images * others).reshape(-1, others)
            shown = choose_views(uniforms[indices], self._views)
        rows = Rows(self.inputs, np.repeat(indices, self._views), shown.reshape(-1), self._kept)
        plain = None if self._views == 1 else torch.from_numpy(rows.views == 0).to(self._device)
        return Batch(
            rows,
            torch.from_numpy(self._images.labels[rows.images]).to(self._device),
            torch.from_numpy(np.repeat(unit_of, self._views)).to(self._device),
            len(drawn),
            plain,
            one_row_each=self.unit == "record" and self._views == 1,
        )

    def digest(self) -> str:
        """A fingerprint of all that a draw can return. It stays in the client's own ledger."""
        state = hashlib.sha256()
        for array in (self._images.pixels, self._images.labels, self._images.groups):
            state.update(np.ascontiguousarray(array).tobytes())
        settings = self._brightness, self._images_per_unit, self.units, self._views, self._augment
        state.update(repr(settings).encode())
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
    """Plain SGD, momentum or Adam on the noisy gradient: post-processing of a release.

    `private`: it takes nothing but what was charged for and released.
    """

    def __init__(
        self, model: nn.Module, kind: str, lr: float, momentum: float, *, private: bool = False
    ) -> None:
        self._private = private
        self.before_step: Callable[[], None] | None = None
        self.after_step: Callable[[], None] | None = None
        self._params = trainable(model)
        values = list(self._params.values())
        self._optimiser: torch.optim.Optimizer
        if kind == "adam":
            self._optimiser = torch.optim.Adam(values, lr=lr)
        else:
            self._optimiser = torch.optim.SGD(
                values, lr=lr, momentum=momentum if kind == "momentum" else 0.0
            )

    def step(self, gradient: Mapping[str, Tensor] | ReleasedTensors) -> None:
        if isinstance(gradient, ReleasedTensors):
            gradient = gradient.tensors
        elif self._private:
            raise UnchargedRelease(
                "A step of a private method gave the optimiser a gradient that was not released by"
                " its charge: nothing was trained with it."
            )
        if self.before_step is not None:
            self.before_step()
        for name, parameter in self._params.items():
            parameter.grad = gradient[name].to(parameter.dtype)
        self._optimiser.step()
        for parameter in self._params.values():
            parameter.grad = None
        if self.after_step is not None:
            self.after_step()

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


class StepAverage:
    """The mean of the weights that a round's last steps left: post-processing of releases."""

    def __init__(self, model: nn.Module, steps: int, share: float) -> None:
        self._params = trainable(model)
        self._first = steps - math.ceil(share * steps)
        self._count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, step: int) -> None:
        """After a step, with the weights as it left them."""
        if step < self._first:
            return
        self._count += 1
        for name, value in self._params.items():
            exact = value.detach().double()
            self._sums[name] = self._sums[name].add_(exact) if name in self._sums else exact.clone()

    def weights(self) -> dict[str, Tensor]:
        """The mean; before the first step that counts, the weights as they are."""
        if not self._count:
            return {name: value.detach().clone() for name, value in self._params.items()}
        return {
            name: (self._sums[name] / self._count).to(value.dtype)
            for name, value in self._params.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Named tensors, for a checkpoint; none where nothing was added."""
        counted = {"/count": torch.tensor(self._count)} if self._count else {}
        return {**self._sums, **counted}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._count = int(state.get("/count", 0))
        self._sums = {
            name: value.to(self._params[name].device, copy=True)
            for name, value in state.items()
            if name != "/count"
        }


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
    split: Split | None = None  # where draws come with a frozen beginning's activations
    chunk: int = 256  # rows that go through the network at once
    rows: int = 0  # of every pass, filled up; 0: as many as there are
    charges: list[int] = field(default_factory=list)  # the steps charged, in order

    @cached_property
    def frozen(self) -> str:
        """Digest of what no step of this round changes."""
        fixed = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        return digest_tensors(fixed)

    @property
    def rate(self) -> float:
        return self.batch / self.data.units

    def key(self, step: int, block: str) -> NoiseKey:
        return NoiseKey(self.client, self.method, self.round, step, block)

    def draw(self, step: int) -> Batch:
        """A batch for a method without a guarantee; what is private is drawn by its charge."""
        if self.account is not None:
            raise UnchargedRelease("A step of a private method drew a batch without a charge.")
        return self.data.draw(self.rate, self.noise, self.key(step, "draw"))

    def charge(
        self,
        step: int,
        releases: tuple[Release, ...],
        sigma: float,
        *,
        settings: tuple[object, ...],
        priced: CostTable | None = None,
    ) -> ChargedStep:
        """Pay for what this step will release, durably, before anything is drawn.

        `sigma`: the multiplier of all `releases` together. `settings`: what else shapes the
        release, for the digest that a replayed step is recognised by.
        """
        if self.account is None:
            raise UnchargedRelease("A step would be charged, and its run has no account.")
        mechanism = Mechanism(self.rate, sigma, releases, priced)
        charged = mechanism.charge(
            self.account,
            self.round,
            step,
            inputs=self.inputs(step, *settings),
            noise=self.noise,
            key=partial(self.key, step),
        )
        self.charges.append(step)
        return charged

    @property
    def share_spent(self) -> float:
        """Σρ/R of the run so far; 0 without an account."""
        return 0.0 if self.account is None else self.account.filter.share_spent

    def inputs(self, step: int, *settings: object) -> str | None:
        """Digest of all that determines this step's release; None under secure noise.

        Weights, data, the noise's key, the whole configuration and every number that shapes the
        release: a redone step may reuse its noise only where all of it is the same.
        """
        if self.replay is None:
            return None
        learnt = digest_tensors([*trainable(self.model).items(), *self.model.named_buffers()])
        text = repr((learnt, self.frozen, self.replay.context, self.key(step, ""), settings))
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
    clip: float | None = None  # where C follows earlier releases


def mean_by_unit(values: Tensor, units: Tensor, n_units: int) -> NDArray[np.float64]:
    """The mean of an image's values over its unit; units without an image get 0."""
    where = units.cpu().numpy()
    sums = np.bincount(where, weights=values.double().cpu().numpy(), minlength=n_units)
    counts = np.bincount(where, minlength=n_units)
    result: NDArray[np.float64] = sums / np.maximum(counts, 1)
    return result
