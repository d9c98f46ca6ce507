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

from xcal.dp.account import Account
from xcal.dp.accounting import CostTable
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.losses import Loss
from xcal.dp.clipping.named import named_buffers, named_parameters, trainable
from xcal.dp.clipping.precision import double, exact_device
from xcal.dp.distributed import (
    ChargedShare,
    DiscreteMechanism,
    DistributedGrid,
    DistributedMechanism,
    Part,
)
from xcal.dp.ledger.rows import Release
from xcal.dp.mechanism import ChargedStep, Mechanism, ReleasedTensors, UnchargedRelease
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.methods.client_data import Batch, LocalData
from xcal.models.backbone import Split, kept_digest


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A fingerprint of names, shapes and values, to the bit."""
    state = hashlib.sha256()
    for name, tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        state.update(f"{name}{array.shape}{array.dtype}".encode())
        state.update(memoryview(array.reshape(-1)).cast("B"))  # type: ignore[arg-type]
    return state.hexdigest()


class Optimizer:
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
                "A step of a private method gave the optimizer a gradient that was not released by"
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
            exact = double(value.detach())
            self._sums[name] = self._sums[name].add_(exact) if name in self._sums else exact.clone()

    def weights(self) -> dict[str, Tensor]:
        """The mean; before the first step that counts, the weights as they are."""
        if not self._count:
            return {name: value.detach().clone() for name, value in self._params.items()}
        return {
            name: (self._sums[name] / self._count).to(value) for name, value in self._params.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Named tensors, for a checkpoint; none where nothing was added."""
        counted = {"/count": torch.tensor(self._count)} if self._count else {}
        return {**self._sums, **counted}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._count = int(state.get("/count", 0))
        self._sums = {
            name: value.to(exact_device(self._params[name].device), copy=True)
            for name, value in state.items()
            if name != "/count"
        }


@dataclass(frozen=True)
class ReplayKey:
    """What tells a redone step from another one: all that stays the same, and a local secret."""

    secret: bytes
    context: str  # digest of data, configuration and versions
    mark: str = ""  # begins every digest: how `context` was made


@dataclass(frozen=True)
class Sharing:
    """A sum that this step is a part of: among how many sites, and with whose noise.

    All of it is public, and the same at every site.
    """

    sigma: float  # the multiplier that the honest sites' noise has together
    sites: int
    honest: int
    units: int  # at most, at one site
    clip: float  # C of this round
    check: Callable[[DistributedGrid], None]  # refuses, before anything is charged
    given: list[tuple[DistributedGrid, NDArray[np.int64]]] = field(default_factory=list)

    def grid(self, *parts: Part) -> DistributedGrid:
        return DistributedGrid(parts, self.sites, self.honest, self.units)


@dataclass(frozen=True)
class StepContext:
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
    optimizer: Optimizer
    batch: int  # expected batch B: the constant divisor
    clip: float
    replay: ReplayKey | None = None  # under seeded noise only
    validation_losses: tuple[float, ...] = ()  # public numbers that came with the request
    own_rounds: int = 1  # of this client, by the published schedule
    split: Split | None = None  # where draws come with a frozen backbone's activations
    chunk: int = 256  # rows that go through the network at once
    rows: int = 0  # of every pass, filled up; 0: as many as there are
    charges: list[int] = field(default_factory=list)  # the steps charged, in order
    loss: Loss | None = None  # one number per image; None: cross-entropy
    half: torch.dtype | None = None  # what products of passes without clipping are rounded to
    sharing: Sharing | None = None  # where only a masked sum leaves, and sites share its noise
    discrete: bool = False  # whether its own noise is discrete, on sums rounded before it

    @cached_property
    def frozen(self) -> str:
        """Digest of what no step of this round changes."""
        fixed = [(n, p) for n, p in named_parameters(self.model) if not p.requires_grad]
        tensors: list[Tensor] = [p for _, p in fixed]
        return kept_digest("frozen", tensors, lambda: digest_tensors(fixed))

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
        release, for the digest that a replayed step is recognized by.
        """
        if self.account is None:
            raise UnchargedRelease("A step would be charged, and its run has no account.")
        if self.sharing is not None:
            raise UnchargedRelease("A step would release by itself what sites release together.")
        mechanism = self._mechanism(releases, sigma, priced)
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

    def _mechanism(
        self, releases: tuple[Release, ...], sigma: float, priced: CostTable | None
    ) -> Mechanism:
        if not self.discrete:
            return Mechanism(self.rate, sigma, releases, priced)
        trained = sum(p.numel() for p in trainable(self.model).values())
        parts = tuple(  # beside the gradient there are numbers only
            Part(
                r.name,
                trained if r.name == "gradient" else 1,
                r.sensitivity,
                r.noise / r.sensitivity,
            )
            for r in releases
        )
        return DiscreteMechanism.of(self.rate, sigma, parts, self.data.units)

    def charge_share(
        self, step: int, grid: DistributedGrid, *, settings: tuple[object, ...]
    ) -> ChargedShare:
        """Pay for this site's part of a sum, durably, before anything is drawn."""
        if self.account is None or self.sharing is None:
            raise UnchargedRelease("A step would share its noise, and its run does not.")
        self.sharing.check(grid)
        charged = DistributedMechanism.of(self.rate, grid).charge(
            self.account,
            self.round,
            step,
            inputs=self.inputs(step, grid, *settings),
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

        Weights, data, the noise's key, the configuration and every number that shapes the release:
        a redone step may reuse its noise only where all of it is the same.
        """
        if self.replay is None:
            return None
        learnt = digest_tensors([*trainable(self.model).items(), *named_buffers(self.model)])
        text = repr((learnt, self.frozen, self.replay.context, self.key(step, ""), settings))
        # Keyed, since the chain of these digests travels: it must not confirm a guess at the data.
        digest = hmac.new(self.replay.secret, text.encode(), "sha256").hexdigest()
        return f"{self.replay.mark}{digest}"


@dataclass(frozen=True)
class StepRecord:
    """What one step released: functions of releases and public constants only."""

    round: int
    step: int
    sigma: float
    signal: float | None
    share_spent: float
    clip: float | None = None  # where C follows earlier releases
