"""Gradient inversion: pictures from a client's update, as an honest-but-curious server sees it.

The server knows the weights it sent, the network, the learning rate and the expected batch, so an
update is a gradient to it. Two attacks search for pictures with that gradient: DLG (Zhu et al.
2019), by its squared distance with L-BFGS, and the cosine attack (Geiping et al. 2020), by its
angle with a total-variation prior and Adam on signs. Labels are read off the last layer where one
picture was used (Zhao et al. 2020), and given to the attacker otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from xcal.audit.canaries import Tap
from xcal.audit.one_client import load_flat, train_one_client
from xcal.config import Experiment
from xcal.data.images import Images
from xcal.data.normalize import IMAGENET_MEAN, IMAGENET_STD, to_tensor
from xcal.dp.clipping.named import trainable
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.dp.sampling import poisson_draw
from xcal.experiments import make_experiment
from xcal.methods.client_data import Batch, LocalData
from xcal.models.model_registry import build_network

_MEAN = torch.tensor(IMAGENET_MEAN, dtype=torch.float64).view(1, 3, 1, 1)
_STD = torch.tensor(IMAGENET_STD, dtype=torch.float64).view(1, 3, 1, 1)
SUCCESS_DB = 20.0


@dataclass(frozen=True)
class Settings:
    """How hard the attacker tries."""

    dlg_steps: int = 150
    cosine_steps: int = 250
    cosine_rate: float = 0.1
    total_variation: float = 1e-4
    seed: int = 0


@dataclass(frozen=True)
class Inverted:
    """One attack on one client's update."""

    setting: str  # "one step" or "whole round"
    network: str
    epsilon: float | None  # None: no privacy
    attack: str
    psnr: tuple[float, ...]  # one value a picture
    ssim: tuple[float, ...]
    originals: Tensor  # in [0, 1]
    found: Tensor

    @property
    def recovered(self) -> float:
        """The share of pictures at 20 dB or more."""
        return float(np.mean(np.array(self.psnr) >= SUCCESS_DB))

    def summary(self) -> dict[str, object]:
        return {
            "setting": self.setting,
            "network": self.network,
            "epsilon": self.epsilon,
            "attack": self.attack,
            "psnr": [round(v, 2) for v in self.psnr],
            "ssim": [round(v, 3) for v in self.ssim],
            "median_psnr": round(float(np.median(self.psnr)), 2),
            "median_ssim": round(float(np.median(self.ssim)), 3),
            "recovered": self.recovered,
        }


def to_pixels(images: Tensor) -> Tensor:
    """Network inputs back as values in [0, 1]."""
    return (images.double() * _STD + _MEAN).clamp(0, 1)


@dataclass(frozen=True)
class Update:
    """What the server has: the weights it sent, and the gradient sum it reads off the answer.

    And, for a round of several steps, what it has not: which pictures were drawn how often. Given
    to the attacker all the same, so that it fails for no such reason.
    """

    model: nn.Module  # float64, with the weights sent
    gradient: tuple[Tensor, ...]
    originals: Tensor  # those that were drawn
    labels: Tensor
    times: Tensor  # how often each was drawn


class _Counted(LocalData):
    """A client's data that counts how often each image is drawn."""

    def __init__(self, images: Images) -> None:
        super().__init__(images, unit="record", images_per_unit=1)
        self.times = np.zeros(len(images), dtype=np.int64)

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Batch:
        tap = Tap(noise, key)
        batch = super().draw(rate, tap, key)
        self.times[poisson_draw(tap.uniforms_seen, rate)] += 1
        return batch


def update_of(experiment: Experiment, images: Images, classes: int) -> Update:
    """One real round of a client that holds just these images."""
    data = _Counted(images)
    trained = train_one_client(experiment, data, classes)
    model = build_network(experiment, classes).double()
    load_flat(model, trained.first.double())
    moved = (trained.first.double() - trained.final.double()) * (
        experiment.expected_batch_size / experiment.lr
    )
    parameters = list(trainable(model).values())
    pieces = torch.split(moved, [p.numel() for p in parameters])
    gradient = tuple(g.view_as(p) for g, p in zip(pieces, parameters, strict=True))
    drawn = images.take(np.flatnonzero(data.times))
    times = torch.from_numpy(data.times[data.times > 0]).double()
    labels = torch.from_numpy(drawn.labels)
    return Update(model, gradient, to_tensor(drawn.pixels), labels, times)


def read_label(update: Update) -> Tensor:
    """The label of a single picture: the class whose logit the step raised."""
    return update.gradient[-1].argmin().reshape(1)  # the head's bias comes last


def _gradient_of(update: Update, guess: Tensor, labels: Tensor) -> Sequence[Tensor]:
    """The gradient sum that the guessed pictures would have given."""
    losses = F.cross_entropy(update.model(guess), labels, reduction="none")
    loss = (losses * update.times).sum()
    parameters = list(trainable(update.model).values())
    return torch.autograd.grad(loss, parameters, create_graph=True)


def _start(update: Update, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(update.originals.shape, generator=generator, dtype=torch.float64)
    return (0.5 * noise).requires_grad_()


def dlg(update: Update, labels: Tensor, settings: Settings) -> Tensor:
    """Deep leakage from gradients: the squared distance, by L-BFGS."""
    guess = _start(update, settings.seed)
    scale = sum(float(g.square().sum()) for g in update.gradient) or 1.0
    optimizer = torch.optim.LBFGS(
        [guess],
        max_iter=settings.dlg_steps,
        max_eval=2 * settings.dlg_steps,
        history_size=100,
        tolerance_grad=1e-14,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def distance() -> float:
        total = guess.new_zeros(())
        for mine, seen in zip(_gradient_of(update, guess, labels), update.gradient, strict=True):
            total = total + (mine - seen).square().sum()
        total = 1000 * total / scale
        (guess.grad,) = torch.autograd.grad(total, guess)
        return float(total.detach())

    optimizer.step(distance)
    return guess.detach()


def cosine(update: Update, labels: Tensor, settings: Settings) -> Tensor:
    """The angle between gradients with a total-variation prior, by Adam on signs."""
    guess = _start(update, settings.seed)
    optimizer = torch.optim.Adam([guess], lr=settings.cosine_rate)
    marks = [int(settings.cosine_steps * share) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, gamma=0.1)
    low, high = ((0 - _MEAN) / _STD), ((1 - _MEAN) / _STD)
    length = math.sqrt(sum(float(g.square().sum()) for g in update.gradient)) or 1.0
    best, best_value = guess.detach().clone(), math.inf
    for _ in range(settings.cosine_steps):
        inner = square = guess.new_zeros(())
        for mine, seen in zip(_gradient_of(update, guess, labels), update.gradient, strict=True):
            inner = inner + (mine * seen).sum()
            square = square + mine.square().sum()
        rough = (guess.diff(dim=2).abs().mean() + guess.diff(dim=3).abs().mean()) / 2
        value = 1 - inner / (length * square.sqrt()) + settings.total_variation * rough
        (slope,) = torch.autograd.grad(value, guess)
        if float(value.detach()) < best_value:
            best, best_value = guess.detach().clone(), float(value.detach())
        guess.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            guess.copy_(torch.minimum(torch.maximum(guess, low), high))
    return best


ATTACKS: dict[str, Callable[[Update, Tensor, Settings], Tensor]] = {"dlg": dlg, "cosine": cosine}


def matched(originals: Tensor, found: Tensor) -> Tensor:
    """Found pictures in the originals' order: the assignment with the least squared error."""
    cost = (originals[:, None] - found[None]).square().flatten(2).mean(2)
    _, order = linear_sum_assignment(cost.numpy())
    return found[torch.from_numpy(order)]


def relit(originals: Tensor, found: Tensor) -> Tensor:
    """Found pictures with the originals' mean and deviation in every channel.

    For a network that standardizes its input, whose gradient holds neither. It flatters the attack.
    """
    axes = (2, 3)
    centered = found - found.mean(axes, keepdim=True)
    spread = found.std(axes, keepdim=True).clamp_min(1e-6)
    wanted = originals.std(axes, keepdim=True)
    return (centered / spread * wanted + originals.mean(axes, keepdim=True)).clamp(0, 1)


def invert(
    update: Update,
    *,
    attack: str,
    setting: str,
    network: str,
    epsilon: float | None,
    settings: Settings,
    standardized: bool = False,
) -> Inverted:
    """Run one attack and measure what it found."""
    labels = read_label(update) if len(update.labels) == 1 else update.labels
    if len(labels) > 1:  # more pictures in one gradient take longer to come apart
        settings = replace(
            settings, dlg_steps=2 * settings.dlg_steps, cosine_steps=2 * settings.cosine_steps
        )
    raw = ATTACKS[attack](update, labels, settings)
    originals = to_pixels(update.originals)
    found = relit(originals, raw.double()) if standardized else to_pixels(raw)
    found = matched(originals, found)
    return Inverted(
        setting,
        network,
        epsilon,
        attack,
        tuple(psnr(originals, found).tolist()),
        tuple(ssim(originals, found).tolist()),
        originals.float(),
        found.float(),
    )


def joined(parts: Sequence[Inverted]) -> Inverted:
    """Attacks on several clients' updates as one result."""
    return replace(
        parts[0],
        psnr=tuple(v for p in parts for v in p.psnr),
        ssim=tuple(v for p in parts for v in p.ssim),
        originals=torch.cat([p.originals for p in parts]),
        found=torch.cat([p.found for p in parts]),
    )


def experiment_for(
    base: Experiment, *, network: str, epsilon: float | None, batch: int
) -> Experiment:
    """One round of the base experiment: plain, or under static noise at ε."""
    keys = base.model_dump() | {"network": network, "expected_batch_size": batch}
    keys |= {"rounds": 1, "clients": 1, "local_epochs": 1, "optimizer": "sgd"}
    keys |= {"method": "fl"} if epsilon is None else {"method": "fl-dp", "epsilon": epsilon}
    return make_experiment(keys, "the audit")


def invert_all(
    base: Experiment,
    images: Images,
    round_images: Images,
    classes: int,
    *,
    network: str,
    epsilons: Sequence[float | None],
    settings: Settings,
    on_attack: Callable[[int], None] = lambda _: None,
) -> list[Inverted]:
    """Every attack on single steps of one picture and on a whole round, plain and at each ε."""
    results = []
    for epsilon in epsilons:
        one = experiment_for(base, network=network, epsilon=epsilon, batch=1)
        whole = experiment_for(
            base, network=network, epsilon=epsilon, batch=max(1, len(round_images) // 2)
        )
        singles = [update_of(one, images.take(np.array([i])), classes) for i in range(len(images))]
        together = update_of(whole, round_images, classes)
        for attack in ATTACKS:
            attacked = partial(
                invert,
                attack=attack,
                network=network,
                epsilon=epsilon,
                settings=settings,
                standardized=network == "small",
            )
            parts = []
            for update in singles:
                parts.append(attacked(update, setting="one step"))
                on_attack(1)
            results += [joined(parts), attacked(together, setting="whole round")]
            on_attack(1)
    return results


# --- how alike two pictures are, on values in [0, 1] ----------------------------------------------

_SIDE, _SPREAD = 11, 1.5  # the window of Wang et al. 2004
_C1, _C2 = 0.01**2, 0.03**2


def psnr(picture: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, one value a picture; equal pictures give 100."""
    error = (picture.double() - other.double()).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp_min(1e-10))


def ssim(picture: Tensor, other: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004), mean over pixels and channels, one a picture."""
    channels = picture.shape[1]
    at = torch.arange(_SIDE, dtype=torch.float64) - _SIDE // 2
    line = torch.exp(-(at**2) / (2 * _SPREAD**2))
    line = line / line.sum()
    window = torch.outer(line, line).expand(channels, 1, _SIDE, _SIDE)

    def smooth(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=channels)

    x, y = picture.double(), other.double()
    mean_x, mean_y = smooth(x), smooth(y)
    var_x, var_y = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2
    both = smooth(x * y) - mean_x * mean_y
    top = (2 * mean_x * mean_y + _C1) * (2 * both + _C2)
    bottom = (mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2)
    return (top / bottom).flatten(1).mean(1)
