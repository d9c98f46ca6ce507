"""What moves accuracy at a given ε, one lever at a time, on features of a frozen backbone.

    python benchmarks/levers.py extract blood-cells --weights W.pth --looks 4
    python benchmarks/levers.py extract ham10000 chest-xray14 --weights W.pth --looks 2
    python benchmarks/levers.py extract blood-cells ham10000 --weights W.pth --pixels 256 --looks 1
    python benchmarks/levers.py run blood-cells --epsilon 0.5 --seeds 3
    python benchmarks/levers.py run ham10000 --epsilon 0.5 --seeds 3 --stored AVERAGES MAPS
    python benchmarks/levers.py table
    python benchmarks/levers.py parts  # what each part of `xcal` adds

The head of `preset = "good"` (EfficientNet-B0, stages 4 to 6, maps and squares pooled, 128 px,
standardized by the public validation images) is trained by three clients of whole groups, record
level, δ = 1e-5, 20 rounds of Poisson batches of 1,024, C = 8, released weights averaged (0.2), as
`fl-dp` does; the multiplier is the package's plan. Arms of one seed share partition, draws and
noise. The rate is what validation images chose with all training images (`cells.jsonl`); where a
lever has variants or rates of its own, the best of them by macro F1 + AUROC on validation images,
over the first two seeds; test images are opened for that one only. A finished cell is a line of
`benchmarks/results/levers/half.jsonl` and is not computed again. The
lines of `cells.jsonl` and `table.md` are of all training images, by an earlier state of this file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import torch
import torch.nn.functional as F
from dp_accounting import pld
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from xcal.data import catalog
from xcal.data.image_store import data_root
from xcal.data.normalize import to_tensor
from xcal.dp.accounting import SCORE_SENSITIVITY, joint_factor, multiplier_table, quiet_library
from xcal.dp.calibration import PlanShape, calibrate, calibrate_fixed, plan_xcal
from xcal.explain.signal import SignalSettings
from xcal.methods.feature_store import FeatureStore, StoredRows
from xcal.methods.xcal_steered import (
    SCHEDULES,
    SteeredParameters,
    SteeredRule,
    SteeredState,
    next_effective_sigma,
)
from xcal.metrics.classification import auroc, macro_f1
from xcal.metrics.temperature import fit_temperature
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.probe import CONSTANTS, constants_of
from xcal.models.views import POOLED, FixedView
from xcal.models.weights import load_published, read_weights

RESULTS = Path(__file__).parent / "results" / "levers"
FILE = "half.jsonl"
PIXELS, DELTA, ROUNDS, BATCH, CLIP, AVERAGE = 128, 1e-5, 20, 1024, 8.0, 0.2
TAKEN = 2  # every second training image: features are what costs time here
PARTS = ("validation", "test", "train")
SYMMETRY = {"chest-xray14": "shifts"}  # all others: mirrored turns, the four turns first
WIDTHS = {3: 40, 4: 80, 5: 112, 6: 192, 7: 320}
GOOD = (4, 5, 6)  # the stages that `good` reads


def kept(pixels: int) -> tuple[int, ...]:
    """The stages whose maps are kept."""
    return tuple(WIDTHS) if pixels == PIXELS else GOOD


CROPS = tuple(itertools.product((0, 1, 2), repeat=2))
"""Where a crop at twice the resolution begins, in quarters of the larger image's side."""


def views_of(name: str) -> tuple[FixedView, ...]:
    return POOLED[SYMMETRY.get(name, "mirrored-turns")]


# --- features -------------------------------------------------------------------------------------


class _Reading(torch.nn.Module):
    """Images (N, 3, H, W) to the maps of these stages and their squares, on the grid of 1/16."""

    def __init__(self, weights: Path, stages: tuple[int, ...]) -> None:
        super().__init__()
        last = max(stages)
        self.kept = stages
        network = efficientnet_b0(
            2, norm="frozen", trainable="head", head_reads=f"stages:4-{last}", seed=0
        ).eval()
        neutral = {n: t for n, t in network.state_dict().items() if n in CONSTANTS}
        load_published(network, {**read_weights(weights), **neutral})
        self.stages = network.features

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number not in self.kept:
                continue
            both = torch.cat([x, x.square()], dim=1)
            if number < 4:
                both = F.avg_pool2d(both, 2)
            found.append(F.interpolate(both, scale_factor=2.0) if number > 5 else both)
        return torch.cat(found, dim=1)


def extract(name: str, weights: Path, folder: Path, pixels: int, looks: int) -> None:
    """Averaged channels of every view of every image, before they are standardized.

    `w` are the averages of the nine quarters that begin at `CROPS`, over all views turned back,
    `plain` those of the first view.
    """
    ask = _fast(_Reading(weights, kept(pixels)).eval(), folder, pixels)
    data = catalog.load(name, pixels=pixels, seed=0)
    views = views_of(name)[:looks]
    width = _columns(kept(pixels), pixels).stop
    for part in PARTS:
        path = folder / f"{name}-{part}{_ending(pixels)}.npz"
        if path.exists():
            continue
        images = getattr(data, part)
        if part == "train":
            images = images.take(np.arange(0, len(images), TAKEN))
        shown, began = np.asarray(images.pixels), time.monotonic()
        found = np.zeros((len(shown), len(views), width), dtype=np.float32)
        quarters = np.zeros((2, len(shown), len(CROPS), width), dtype=np.float32)
        for start in range(0, len(shown), 32):
            some, here = to_tensor(shown[start : start + 32]), slice(start, start + 32)
            total = torch.zeros(())
            for number, view in enumerate(views):
                maps = view.undo(ask(view.of(some).contiguous()))
                found[here, number] = maps.mean((2, 3))
                total = total + maps
                if number == 0:
                    quarters[0, here] = _quarters(maps)
            quarters[1, here] = _quarters(total / len(views))
            done = min(start + 32, len(shown))
            if done % 1024 < 32 or done == len(shown):
                left = (time.monotonic() - began) / done * (len(shown) - done)
                print(f"{path.stem}: {done} of {len(shown)}, {left:.0f} s left", flush=True)
        print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)
        np.savez(path, x=found, plain=quarters[0], w=quarters[1], y=images.labels, g=images.groups)


def _quarters(maps: Tensor) -> NDArray[np.float32]:
    half = maps.shape[2] // 2
    return F.avg_pool2d(maps, half, half // 2).flatten(2).mT.numpy()


def _columns(stages: Sequence[int], pixels: int) -> slice:
    """Where the channels of these neighboring stages and their squares lie in what is kept."""
    before = sum(2 * WIDTHS[stage] for stage in kept(pixels) if stage < stages[0])
    return slice(before, before + sum(2 * WIDTHS[stage] for stage in stages))


def _ending(pixels: int) -> str:
    return "" if pixels == PIXELS else f"-{pixels}px"


def _fast(reading: torch.nn.Module, folder: Path, pixels: int) -> Any:
    """Nearly three times as fast in onnxruntime, where that is installed; equal to 1e-5."""
    try:
        import onnxruntime
    except ImportError:
        return torch.no_grad()(reading)
    path = folder / f"reading-{pixels}-{os.getpid()}.onnx"
    axes = {"x": {0: "n"}, "y": {0: "n"}}
    example = torch.rand(32, 3, pixels, pixels)
    torch.onnx.export(
        reading,
        (example,),
        str(path),
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes=axes,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options)
    path.unlink()
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@dataclass(frozen=True)
class Set:
    """Standardized features of one data set: x (N, D), y, groups; by part.

    `quarters` (N, 9, D) are the averages of the map's quarters, views turned back, standardized as
    x is; `closer` (N, 10, D) those of the map at twice the pixels, one view, the whole map last.
    """

    parts: dict[str, tuple[Tensor, Tensor, NDArray[Any]]]
    quarters: dict[str, Tensor]
    closer: dict[str, Tensor]

    @property
    def classes(self) -> int:
        return int(self.parts["train"][1].max()) + 1


def load(folder: Path, name: str, arm: Arm) -> Set:
    """Means over the first views, standardized by at most 512 public validation images."""
    looks = arm.closer is not None
    parted = (
        PARTS
        if looks or arm.keep
        else {"units": ("train",), "public": ("validation",)}.get(str(arm.signal), ())
    )
    return _load(folder, (name, arm.views, arm.pixels, arm.stages, looks, tuple(parted), arm.lam))


@lru_cache(maxsize=3)
def _load(folder: Path, kind: tuple[Any, ...]) -> Set:
    name, views, pixels, stages, looks, parted, lam = kind

    def read(key: str, part: str, pixels: int) -> NDArray[Any]:
        with np.load(folder / f"{name}-{part}{_ending(pixels)}.npz") as file:
            found: NDArray[Any] = file[key]
        return found[..., _columns(stages, pixels)] if key in ("x", "w", "plain") else found

    def looked(key: str, part: str, pixels: int) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(read(key, part, pixels)))

    def standardized(public: Tensor) -> Callable[[Tensor], Tensor]:
        some = np.linspace(0, len(public) - 1, min(len(public), 512)).round().astype(int)
        mean, deviation = constants_of(public[some])
        return lambda x: (x - mean) / deviation

    x = {part: looked("x", part, pixels)[:, :views].mean(dim=1) for part in PARTS}
    alike = standardized(x["validation"])
    parts = {
        part: (alike(x[part]), looked("y", part, pixels).long(), read("g", part, pixels))
        for part in PARTS
    }
    of = "plain" if views == 1 else "w"
    quarters = {part: alike(looked(of, part, pixels)) for part in parted}
    closer = {}
    if looks:
        for part in PARTS:
            w, whole = looked("w", part, 2 * PIXELS), looked("x", part, 2 * PIXELS)[:, :1]
            closer[part] = torch.cat([w, whole], dim=1)
        alike = standardized(closer["validation"][:, :9].mean(1))
        closer = {part: alike(near) for part, near in closer.items()}
    data = Set(parts, quarters, closer)
    return whitened(data, lam) if lam else data


def stored(name: str, read: Path, maps: Path) -> Set:
    """What the package keeps of all images (`XCAL_FEATURES`), whitened where `xcal` whitens.

    `read`: the folder of what a head reads; `maps`: that of the training images' maps.
    """

    def rows(folder: Path, pixels: NDArray[np.uint8], shape: tuple[int, ...]) -> StoredRows:
        def missing(_: NDArray[np.int64]) -> Tensor:
            raise RuntimeError(f"{folder} does not have all images of {name}")

        backbone = folder.name.split("-32")[0]
        return FeatureStore(folder.parent).rows(
            backbone, pixels, 1.0, torch.zeros(1, *shape), missing
        )

    data, parts, channels = catalog.load(name, pixels=PIXELS, seed=0), {}, 768
    for part in PARTS:
        images = getattr(data, part)
        found = rows(read, np.asarray(images.pixels), (channels,))
        x = found[torch.arange(len(found))]
        parts[part] = (x, torch.from_numpy(images.labels).long(), images.groups)
    kept_maps = rows(maps, np.asarray(data.train.pixels), (channels, 8, 8))
    quarters = [
        F.avg_pool2d(kept_maps[some], 4, 2).flatten(2).mT
        for some in torch.arange(len(kept_maps)).split(256)
    ]
    return Set(parts, {"train": torch.cat(quarters)}, {})


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    views: int = 1
    accountant: str = "pld"
    lam: float = 0.0  # whitened by the public covariance, shrunk by so many mean eigenvalues
    closer: str | None = None  # which quarter, at twice the pixels, is read beside the image
    signal: str | None = None  # what steers the noise in time: see `SIGNALS`
    shares: str = "plan"  # of what a steered step takes its share
    tau: float = 0.05  # smoothing of the steering signal …
    contrast: float = 0.1  # … and its scale
    keep: float = 0.0  # weight of the term of the most salient quarter, from round `LATE` on
    start: float = 0.0  # share of the precision μ² that one release of all images takes; 1: all
    stages: tuple[int, ...] = GOOD
    pixels: int = PIXELS


VIEWS = {"blood-cells": 4, "ham10000": 2, "chest-xray14": 2}  # as many as `--looks`
CLOSER_FROM = 8
CLOSER_RATES = (0.5, 1.0)  # twice the numbers to train
LATE = 10  # the first round whose units have the term of `keep`
LARGE = ("blood-cells", "ham10000")  # sets whose originals have more than `PIXELS` a side
WHITENED = 10.0
CLOSER = ("by the map", "at the center", "by feature norm", "at random", "everywhere")
"""Where to look closer; `everywhere`: at the whole image at twice the pixels."""
SIGNALS = ("units", "public", "random", "decay", "rise")
"""The score of drawn units, released with noise; of public images; of no image; two schedules."""


@dataclass(frozen=True)
class Lever:
    """Variants to choose from by public validation, and the levers beside which it is shown."""

    variants: tuple[Arm, ...]
    beside: tuple[str, ...] = ("xcal",)
    rates: tuple[float, ...] = (1.0,)  # to choose from, times the set's own


def levers(name: str, epsilon: float) -> dict[str, Lever]:
    """Each changes one thing of `plain`, static noise as it was, or of `xcal` as it is."""
    plain = Arm()
    whitens = name in LARGE and epsilon >= 0.16
    base = Arm(VIEWS[name], lam=WHITENED if whitens else 0.0)
    renyi, timed = "xcal, Renyi accountant", ("xcal", "xcal, Renyi accountant")
    spans = tuple(tuple(range(a, b + 1)) for a, b in ((4, 6), (3, 6), (4, 7), (5, 7), (3, 7)))
    found = {
        "plain": Lever((plain,), ()),
        "views": Lever((Arm(VIEWS[name]),), ("plain",)),
        "xcal": Lever((base,), ("plain",)),
        renyi: Lever((replace(base, accountant="renyi"),)),
    }
    of = {s: replace(base, signal=s) for s in SIGNALS}
    quick = replace(of["public"], tau=0.2, contrast=0.02)
    found |= {
        "steered by units": Lever((of["units"],), timed),
        "steered by units, shares of what is left": Lever(
            (replace(of["units"], shares="left"),), timed
        ),
        "steered by public images": Lever((of["public"], quick), timed),
        "steered by random numbers": Lever((replace(quick, signal="random"),), timed),
        "noise falling on a line": Lever((of["decay"],), timed),
        "noise rising on a line": Lever((of["rise"],), timed),
        "a start from one release": Lever(
            tuple(replace(base, start=share) for share in (0.1, 0.25, 0.5))
        ),
        "one release alone": Lever((replace(base, start=1.0),)),
        "keeping the salient": Lever(tuple(replace(base, keep=k) for k in (0.03, 0.1, 0.3))),
        "stages by validation": Lever(tuple(replace(base, stages=span) for span in spans)),
    }
    if name in LARGE:
        for how in CLOSER:
            found[f"closer {how}"] = Lever((replace(base, closer=how),), rates=CLOSER_RATES)
            found[f"plain, closer {how}"] = Lever(
                (replace(plain, closer=how),), ("plain",), CLOSER_RATES
            )
        found["plain, 256 px"] = Lever((replace(plain, pixels=2 * PIXELS),), ("plain",))
    return found


def rate_of(name: str, epsilon: float, arm: Arm) -> float:
    """What validation images chose for its features with all training images (`cells.jsonl`)."""
    label = "plain" if arm.views == 1 else "whitened, views" if arm.lam else "views"
    rows = map(json.loads, (RESULTS / "cells.jsonl").read_text().splitlines())
    here = (name, epsilon, label)
    return next(float(c["rate"]) for c in rows if (c["set"], c["epsilon"], c["arm"]) == here)


KAPPA = 5.0
CHOSEN_BY = 2  # seeds


@lru_cache(maxsize=256)
def multiplier(epsilon: float, rate: float, steps: int, accountant: str) -> float:
    find = calibrate if accountant == "renyi" else calibrate_fixed
    return find(epsilon, DELTA, rate, steps).sigma


@lru_cache(maxsize=256)
def split_multipliers(
    epsilon: float, rate: float, steps: int, share: float
) -> tuple[float, float | None]:
    """σ of one release of all units and of the steps after it, together (ε, δ).

    μ² of the target's Gaussian is split by `share`; then δ of the two composed is computed by
    privacy-loss distributions, and the steps' σ raised until it is at most 99 % of DELTA.
    """
    whole = multiplier(epsilon, 1.0, 1, "pld")
    if share == 1:
        return whole, None
    first = whole / math.sqrt(share)
    rest = math.sqrt(1 - share) / whole  # μ that is left; its ε at DELTA:
    low, high = 0.0, epsilon
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _gaussian_delta(middle, rest) < DELTA else (middle, high)
    sigma = multiplier(high, rate, steps, "pld")
    while _composed_delta(epsilon, first, rate, sigma, steps) > 0.99 * DELTA:
        sigma *= 1.003
    return first, sigma


def _gaussian_delta(epsilon: float, mu: float) -> float:
    below = float(special.ndtr(mu / 2 - epsilon / mu))
    return below - math.exp(epsilon) * float(special.ndtr(-mu / 2 - epsilon / mu))


def _composed_delta(epsilon: float, first: float, rate: float, sigma: float, steps: int) -> float:
    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        value_discretization_interval=max(epsilon / 5000, 1e-5),
    )
    with quiet_library():
        accountant.compose(dp_accounting.GaussianDpEvent(first))
        step = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, step), steps)
        return float(accountant.get_delta(epsilon))


def covariance(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def shards_of(groups: NDArray[Any], seed: int, clients: int = 3) -> list[NDArray[np.int64]]:
    names = np.unique(groups)
    np.random.default_rng(1000 + seed).shuffle(names)
    return [np.flatnonzero(np.isin(groups, part)) for part in np.array_split(names, clients)]


def _errors(head: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    error = torch.softmax(inputs @ head[:, :-1].T + head[:, -1], dim=1)
    error[torch.arange(len(labels)), labels] -= 1
    return error


def clipped_slope(
    head: Tensor,
    inputs: Tensor,
    labels: Tensor,
    keep: float = 0.0,
    quarters: Tensor | None = None,
) -> Tensor:
    """The sum of the units' gradients of the head (classes, D + 1), each clipped to `CLIP`.

    With `keep`, a unit's loss has that many times the loss of its most salient quarter alone.
    """
    ones = torch.ones(len(inputs), 1)
    wide, error = torch.cat([inputs, ones], 1), _errors(head, inputs, labels)
    square = error.square().sum(1) * wide.square().sum(1)
    if keep:
        assert quarters is not None
        part = quarters[torch.arange(len(quarters)), salient(head, quarters, labels)]
        narrow, other = torch.cat([part, ones], 1), keep * _errors(head, part, labels)
        square = square + other.square().sum(1) * narrow.square().sum(1)
        square = square + 2 * (error * other).sum(1) * (wide * narrow).sum(1)
    scale = (CLIP / square.clamp(min=1e-12).sqrt()).clamp(max=1)[:, None]
    total = (error * scale).T @ wide
    return total + (other * scale).T @ narrow if keep else total


def looked_closer(data: Set, part: str, head: Tensor, how: str) -> Tensor:
    """The features of an image and of one of its quarters, closer.

    A function of the image and of a released head: `by the map` is the quarter with most of the
    head's map (before ReLU) of the class that it gives the image.
    """
    x, quarters, closer = data.parts[part][0], data.quarters[part], data.closer[part]
    if how == "by the map":
        chosen = salient(head, quarters, (x @ head[:, :-1].T + head[:, -1]).argmax(1))
    elif how == "by feature norm":
        chosen = quarters.square().sum(2).argmax(1)
    elif how == "at random":
        chosen = torch.randint(len(CROPS), (len(x),), generator=torch.Generator().manual_seed(0))
    else:
        place = CROPS.index((1, 1)) if how == "at the center" else len(CROPS)
        chosen = torch.full((len(x),), place)
    return torch.cat([x, closer[torch.arange(len(x)), chosen]], dim=1) / math.sqrt(2)


def salient(head: Tensor, quarters: Tensor, classes: Tensor) -> Tensor:
    """The quarter with most of the map of each image's class, in closed form: the map is linear."""
    found: Tensor = torch.einsum("nqd,nd->nq", quarters, head[classes, :-1]).argmax(1)
    return found


def lost(head: Tensor, inputs: Tensor, quarters: Tensor, temperature: float = 1.0) -> Tensor:
    """The confidence (N, 9) that each image's answer loses without each of its quarters."""
    head = head / temperature
    logits = inputs @ head[:, :-1].T + head[:, -1]
    given, rows = logits.argmax(1), torch.arange(len(inputs))
    # The average without a quarter of the cells, which leaves three.
    after = (4 * inputs[:, None] - quarters) / 3 @ head[:, :-1].T + head[:, -1]
    before = torch.softmax(logits, 1)[rows, given]
    return before[:, None] - torch.softmax(after, 2)[rows, :, given]


def score_sum(head: Tensor, inputs: Tensor, quarters: Tensor) -> tuple[float, int]:
    """Σu and the count: u is the confidence lost without the most salient quarter, in [0, 1]."""
    given = (inputs @ head[:, :-1].T + head[:, -1]).argmax(1)
    gone = quarters[torch.arange(len(inputs)), salient(head, quarters, given)]
    u = lost(head, inputs, gone[:, None])[:, 0].clamp(0, 1)
    return float(u.sum()), len(inputs)


def faithfulness(data: Set, head: Tensor) -> float:
    """Mean confidence lost without the most salient quarter less that without a mean one.

    On test images, after a temperature fitted on validation images: models of unlike confidence
    are on one scale.
    """
    x, y, _ = data.parts["validation"]
    temperature = fit_temperature((x @ head[:, :-1].T + head[:, -1]).numpy(), y.numpy())
    x, quarters = data.parts["test"][0], data.quarters["test"]
    found = lost(head, x, quarters, temperature)
    given = (x @ head[:, :-1].T + head[:, -1]).argmax(1)
    most = found[torch.arange(len(x)), salient(head, quarters, given)]
    return float((most - found.mean(1)).mean())


class Noise:
    """The multiplier of a client's next step: fixed by a plan, or steered by a signal."""

    def __init__(self, arm: Arm, epsilon: float, units: int) -> None:
        self.batch = min(BATCH, units)
        self.steps = -(-units // self.batch)
        self.rate, self.arm = self.batch / units, arm
        total = self.steps * ROUNDS
        self.first: float | None = None  # of one release before the steps
        self.ratios: list[float] = []
        self.static = multiplier(epsilon, self.rate, total, arm.accountant)
        if arm.start:
            self.first, rest = split_multipliers(epsilon, self.rate, total, arm.start)
            self.static = rest or math.inf
        if arm.signal is None:
            return
        shape = PlanShape(epsilon, DELTA, units, self.batch, ROUNDS)
        plan = plan_xcal(shape, kappa=KAPPA, w=0.5, signal=arm.signal == "units")
        settings = SignalSettings.of(SteeredParameters(), positive_only=True)
        self.rule = SteeredRule(
            # Public images have no noise in their signal.
            replace(plan, sigma_signal=plan.sigma_signal or 0.0),
            settings,
            tau=arm.tau,
            contrast=arm.contrast,
            shares=arm.shares,
            source=arm.signal if arm.signal in SCHEDULES else "model",
        )
        self.table = multiplier_table(plan.sample_rate, plan.order, plan.sigma_static)
        self.state, self.spent, self.taken = SteeredState(), 0.0, 0

    def next(self) -> float:
        if self.arm.signal is None:
            return self.static
        sigma, cost = next_effective_sigma(
            self.state, self.rule, self.spent, self.rule.plan.steps - self.taken, self.table
        )
        self.spent, self.taken = self.spent + cost, self.taken + 1
        assert self.spent <= self.rule.plan.budget
        self.ratios.append(sigma / self.rule.plan.sigma_static)
        self.sigma = sigma * joint_factor(KAPPA if self.arm.signal == "units" else None, None)
        return self.sigma

    def read(self, total: float, count: int, generator: torch.Generator) -> None:
        """The signal of the step: of drawn units with noise on Σ(u − ½), or of public images."""
        mean = total / count
        if self.arm.signal == "units":
            draw = float(torch.randn((), generator=generator))
            blurred = total - count / 2 + KAPPA * SCORE_SENSITIVITY * self.sigma * draw
            mean = 0.5 + blurred / self.batch
        self.state = self.state.updated(mean, self.rule)


@dataclass(frozen=True)
class Trained:
    head: Tensor
    coarse: Tensor | None = None  # the head by which quarters were chosen
    ratios: tuple[float, ...] = ()  # steered multipliers over the static one


@lru_cache(maxsize=2)
def _spectrum(x: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(covariance(x))
    return values, vectors


def started(data: Set, shards: Sequence[Any], noises: Sequence[Noise], seed: int) -> Tensor:
    """The head from one release of every client: the sum of all clipped gradients at zero.

    Solved with the public covariance; how far it is shrunk and how long the step is are what
    gives public validation images the least cross-entropy, which is post-processing.
    """
    x, y, _ = data.parts["train"]
    total, weight = torch.zeros(data.classes, x.shape[1] + 1), 0
    for client, (shard, noise) in enumerate(zip(shards, noises, strict=True)):
        generator = torch.Generator().manual_seed(seed * 10**6 + 900_000 + client)
        drawn = torch.from_numpy(shard)
        assert noise.first is not None
        blur = noise.first * CLIP * torch.randn(total.shape, generator=generator)
        total += clipped_slope(torch.zeros_like(total), x[drawn], y[drawn]) + blur
        weight += len(shard)
    public, labels, _ = data.parts["validation"]
    values, vectors = _spectrum(public)
    best, found = math.inf, total
    for lam in (0.1, 0.3, 1.0, 3.0, 1e6):
        shrunk = values.clamp(min=0) + lam * values.mean()
        inverse = vectors / shrunk @ vectors.T * (1 + lam) * values.mean()
        step = -torch.cat([total[:, :-1] @ inverse, total[:, -1:]], 1) / weight
        logits = public @ step[:, :-1].T + step[:, -1]
        for length in np.geomspace(0.01, 30, 22):
            loss = float(F.cross_entropy(float(length) * logits, labels))
            if loss < best:
                best, found = loss, float(length) * step
    return found


def train(data: Set, arm: Arm, epsilon: float, seed: int, rate: float) -> Trained:
    """The reported head (classes, D + 1)."""
    x, y, groups = data.parts["train"]
    shards = shards_of(groups, seed)
    noises = [Noise(arm, epsilon, len(shard)) for shard in shards]
    quarters, coarse = data.quarters.get("train"), None
    head = torch.zeros(data.classes, x.shape[1] + 1)
    if arm.start:
        head = started(data, shards, noises, seed)
        if arm.start == 1:
            return Trained(head)
    if arm.closer is not None and arm.closer != "by the map":
        # Which quarter is read does not depend on a head: it is read from the beginning.
        coarse = head
        x = looked_closer(data, "train", coarse, arm.closer)
        head = torch.zeros(len(head), x.shape[1] + 1)
    reported = head
    for number in range(ROUNDS):
        begins = number == 0
        if arm.closer == "by the map" and number == CLOSER_FROM:
            coarse, begins = reported, True
            x = looked_closer(data, "train", coarse, arm.closer)
            wider = torch.zeros(len(head), x.shape[1] + 1)
            wider[:, : head.shape[1] - 1] = reported[:, :-1] * math.sqrt(2)
            wider[:, -1] = reported[:, -1]
            head = wider
        total, weight = torch.zeros_like(head), 0
        for client, (shard, noise) in enumerate(zip(shards, noises, strict=True)):
            n, own = len(shard), head.clone()
            generator = torch.Generator().manual_seed(seed * 10**6 + number * 1000 + client)
            aside = torch.Generator().manual_seed(seed * 10**6 + 500_000 + number * 1000 + client)
            for _ in range(noise.steps):
                drawn = torch.from_numpy(shard)[torch.rand(n, generator=generator) < noise.rate]
                sigma = noise.next()
                if arm.keep and number >= LATE:
                    assert quarters is not None
                    slope = clipped_slope(own, x[drawn], y[drawn], arm.keep, quarters[drawn])
                else:
                    slope = clipped_slope(own, x[drawn], y[drawn])
                if arm.signal == "units":
                    assert quarters is not None
                    noise.read(*score_sum(own, x[drawn], quarters[drawn]), aside)
                elif arm.signal == "public":
                    some = slice(0, 256)
                    public = data.parts["validation"][0][some], data.quarters["validation"][some]
                    noise.read(*score_sum(own, *public), aside)
                elif arm.signal == "random":
                    noise.read(float(torch.rand((), generator=aside)), 1, aside)
                blur = torch.randn(slope.shape, generator=generator)
                own -= rate * (slope + sigma * CLIP * blur) / noise.batch
            total, weight = total + n * own, weight + n
        head = total / weight
        reported = head if begins else (1 - AVERAGE) * reported + AVERAGE * head
    return Trained(reported, coarse, tuple(np.mean([n.ratios for n in noises], axis=0).tolist()))


def whitened(data: Set, lam: float) -> Set:
    """Features in the coordinates where the shrunk public covariance is the identity."""

    def turn(x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(covariance(x))
        shrunk = values.clamp(min=0) + lam * values.mean()
        return vectors * (values.mean() * (1 + lam) / shrunk).sqrt() @ vectors.T

    own = turn(data.parts["validation"][0])
    parts = {part: (x @ own, y, g) for part, (x, y, g) in data.parts.items()}
    quarters, closer = {part: x @ own for part, x in data.quarters.items()}, data.closer
    if closer:
        near = turn(closer["validation"][:, :9].mean(1))
        closer = {part: x @ near for part, x in closer.items()}
    return Set(parts, quarters, closer)


def answers(data: Set, arm: Arm, trained: Trained, part: str) -> NDArray[np.float64]:
    x, head = data.parts[part][0], trained.head
    if arm.closer is not None and trained.coarse is not None:
        x = looked_closer(data, part, trained.coarse, arm.closer)
    result: NDArray[np.float64] = torch.softmax(
        (x @ head[:, :-1].T + head[:, -1]).double(), dim=1
    ).numpy()
    return result


def scores(labels: NDArray[np.int64], said: NDArray[np.float64]) -> tuple[float, float]:
    return macro_f1(labels, said.argmax(1), said.shape[1]), auroc(labels, said)


def run(
    folder: Path, name: str, epsilon: float, label: str, seeds: int, whole: Set | None = None
) -> None:
    """With `whole`, features of all training images as the package keeps them."""
    done = {(c["set"], c["epsilon"], c["lever"], c["seed"]) for c in cells()}
    missing = [s for s in range(seeds) if (name, epsilon, label, s) not in done]
    lever = levers(name, epsilon).get(label)
    if not missing or lever is None:
        return
    began = time.process_time()
    best, chosen = -1.0, lever.variants[0]
    rate = rate_of(name, epsilon, chosen)
    candidates = list(itertools.product(lever.variants, lever.rates))
    for arm, times in candidates if len(candidates) > 1 else ():
        if arm.start == 1 and times != 1:
            continue  # no step is taken
        data, value = whole or load(folder, name, arm), 0.0
        one = times * rate_of(name, epsilon, arm)
        labels = data.parts["validation"][1].numpy()
        for seed in range(CHOSEN_BY):
            trained = train(data, arm, epsilon, seed, one)
            said = answers(data, arm, trained, "validation")
            value += sum(scores(labels, said)) / CHOSEN_BY
        if value > best:
            best, chosen, rate = value, arm, one
    data = whole or load(folder, name, chosen)
    for seed in missing:
        trained = train(data, chosen, epsilon, seed, rate)
        said = answers(data, chosen, trained, "test")
        f1, area = scores(data.parts["test"][1].numpy(), said)
        cell = {"set": name, "epsilon": epsilon, "lever": label, "seed": seed, "rate": rate}
        cell["images"] = len(data.parts["train"][0])
        cell |= {
            "variant": _variant(lever, chosen),
            "validation": round(best, 4) if best > 0 else None,
        }
        cell |= {"macro_f1": round(f1, 4), "auroc": round(area, 4)}
        if chosen.keep and "test" in data.quarters:
            other = train(data, replace(chosen, keep=0.0), epsilon, seed, rate).head
            found = (faithfulness(data, trained.head), faithfulness(data, other))
            cell["faithfulness"], cell["faithfulness_beside"] = (round(f, 4) for f in found)
        if trained.ratios:
            cell["noise"] = [round(r, 3) for r in trained.ratios[:: len(trained.ratios) // 10]]
        cell["commit"] = commit()
        np.save(_said(folder, name, epsilon, label, seed), said.astype(np.float32))
        with (RESULTS / FILE).open("a") as file:
            file.write(json.dumps(cell) + "\n")
    print(
        f"{name} ε {epsilon} {label}: rate {rate:g}, {_variant(lever, chosen)},"
        f" {time.process_time() - began:.0f} s",
        flush=True,
    )


def _variant(lever: Lever, chosen: Arm) -> dict[str, Any]:
    """What of the lever's variants was chosen."""
    return {
        f.name: getattr(chosen, f.name)
        for f in fields(Arm)
        if len({getattr(arm, f.name) for arm in lever.variants}) > 1
    }


def _said(folder: Path, name: str, epsilon: float, label: str, seed: int) -> Path:
    return folder / f"said-{name}-{epsilon}-{label}-{seed}.npy"


def commit() -> str:
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cells() -> list[dict[str, Any]]:
    path = RESULTS / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the table ------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _resampled(folder: Path, name: str, epsilon: float, label: str, seed: int) -> NDArray[Any]:
    """Macro F1 and AUROC (2, R) of one trained head over resamples of the test groups."""
    said = np.load(_said(folder, name, epsilon, label, seed)).astype(np.float64)
    labels, times = _test(name)
    return weighted_scores(labels, said, times)


@lru_cache
def _test(name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The labels of a set's test images, and how often each counts in every resample."""
    test = catalog.load(name, pixels=PIXELS, seed=0).test
    return test.labels.astype(np.int64), _times(test.groups)


def difference(
    folder: Path, name: str, epsilon: float, label: str, beside: str, seeds: Sequence[int]
) -> tuple[list[float], ...]:
    """95 % intervals of the lever less another, macro F1 and AUROC, over seeds and test groups."""

    def read(arm: str) -> NDArray[Any]:
        return np.stack([_resampled(folder, name, epsilon, arm, seed) for seed in seeds])

    return _spans(read(label) - read(beside))


RESAMPLES = 200


def _times(groups: NDArray[Any]) -> NDArray[np.float64]:
    """How often each image counts (R, N) where groups are drawn anew."""
    _, place = np.unique(groups, return_inverse=True)
    generator, n = np.random.default_rng(0), int(place.max()) + 1
    return np.stack(
        [
            np.bincount(generator.integers(0, n, n), minlength=n)[place].astype(np.float64)
            for _ in range(RESAMPLES)
        ]
    )


def _spans(gains: NDArray[Any]) -> tuple[list[float], ...]:
    """95 % intervals of gains (seeds, 2, R), seeds drawn anew as well."""
    drawn = np.random.default_rng(1).integers(0, len(gains), (RESAMPLES, len(gains)))
    found = np.stack([gains[drawn[i], :, i].mean(axis=0) for i in range(RESAMPLES)])
    low, high = np.nanpercentile(found, [2.5, 97.5], axis=0)
    return [float(low[0]), float(high[0])], [float(low[1]), float(high[1])]


def intervals(
    labels: NDArray[np.int64],
    groups: NDArray[Any],
    ours: Sequence[NDArray[np.float64]],
    theirs: Sequence[NDArray[np.float64]],
) -> tuple[list[float], ...]:
    """95 % intervals of paired differences of macro F1 and AUROC, over seeds and test groups."""
    times = _times(groups)
    gains = [
        weighted_scores(labels, a, times) - weighted_scores(labels, b, times)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return _spans(np.stack(gains))


def weighted_scores(
    labels: NDArray[np.int64], said: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Macro F1 and AUROC (2, R) where image i counts times[r, i] times: `scores` of resamples."""
    f1, areas = [], []
    answer = said.argmax(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        for k in range(said.shape[1]):
            true, told = labels == k, answer == k
            mentions = times[:, true].sum(1) + times[:, told].sum(1)
            f1.append(2 * times[:, true & told].sum(1) / mentions)
            order = np.argsort(said[:, k], kind="stable")
            begins = np.flatnonzero(np.diff(said[order, k], prepend=-1.0))  # of equal scores
            hits = np.add.reduceat(times[:, order] * true[order], begins, axis=1)
            others = np.add.reduceat(times[:, order] * ~true[order], begins, axis=1)
            below = np.cumsum(others, axis=1) - others / 2
            areas.append((hits * below).sum(1) / (hits.sum(1) * others.sum(1)))
        return np.stack([np.nanmean(f1, axis=0), np.nanmean(areas, axis=0)])


MANY = ("blood-cells", "ham10000", "chest-xray14")
TITLES = {"ham10000": "HAM10000", "chest-xray14": "chest X-rays"}


def table(folder: Path) -> str:
    """Of each ε: what every lever is worth beside another, F1 and AUROC, by set."""
    done, parts = cells(), []
    for epsilon in sorted({c["epsilon"] for c in done}):
        here: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for c in done:
            if c["epsilon"] == epsilon:
                here.setdefault((c["set"], c["lever"]), {})[c["seed"]] = c
        sets = [name for name in MANY if (name, "xcal") in here]
        heads = [f"{TITLES.get(name, name)}, {m}" for name in sets for m in ("F1", "AUROC")]
        lines = [
            f"| ε = {epsilon:g} | less | {' | '.join(heads)} |",
            "|---|---|" + "---|" * len(heads),
        ]
        every = {name: levers(name, epsilon) for name in sets}
        for label in dict.fromkeys(itertools.chain(*every.values())):
            besides = dict.fromkeys(
                b for one in every.values() if label in one for b in one[label].beside
            ) or {"": None}
            for beside in besides:
                row = [label, beside]
                for name in sets:
                    row += _gains(folder, name, epsilon, here, label, beside)
                if any(cell != "–" for cell in row[2:]):
                    lines.append("| " + " | ".join(row) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _gains(
    folder: Path,
    name: str,
    epsilon: float,
    here: dict[tuple[str, str], dict[int, dict[str, Any]]],
    label: str,
    beside: str,
) -> list[str]:
    """F1 and AUROC: the mean less another's with its interval, or the mean where there is none."""
    own, other = here.get((name, label), {}), here.get((name, beside), {})
    both = sorted(own.keys() & other.keys())
    if len(own) < 2 or (beside and len(both) < 2):
        return ["–", "–"]
    found = []
    spans = difference(folder, name, epsilon, label, beside, both) if beside else ()
    for k, measure in enumerate(("macro_f1", "auroc")):
        if not beside:
            values = np.array([c[measure] for c in own.values()])
            found.append(f"{values.mean():.3f} ± {values.std(ddof=1):.3f}")
            continue
        gain = np.mean([own[s][measure] - other[s][measure] for s in both])
        found.append(f"{gain:+.3f} [{spans[k][0]:+.3f}, {spans[k][1]:+.3f}]".replace("-", "−"))
    return found


PARTS_OF_XCAL = {
    "views": ("views", "plain"),
    "accounting": ("views", "views, Renyi accountant"),
    "whitening": ("whitened, views", "views"),
}


def parts_table() -> str:
    """What each part of `xcal` adds, on all training images (`cells.jsonl`): paired by seed.

    The intervals are Student's over the seeds alone.
    """
    rows = [json.loads(line) for line in (RESULTS / "cells.jsonl").read_text().splitlines()]
    found = {(c["set"], c["epsilon"], c["arm"], c["seed"]): c for c in rows}
    seeds = sorted({c["seed"] for c in rows})
    wide = float(special.stdtrit(len(seeds) - 1, 0.975)) / math.sqrt(len(seeds))
    kinds = [f"{part}, {m}" for part in PARTS_OF_XCAL for m in ("F1", "AUROC")]
    lines = [f"| set | ε | {' | '.join(kinds)} |", "|---|---|" + "---|" * len(kinds)]
    for name, epsilon in itertools.product(MANY, (0.05, 0.5, 5.0)):
        row = [TITLES.get(name, name), f"{epsilon:g}"]
        for (ours, theirs), m in itertools.product(PARTS_OF_XCAL.values(), ("macro_f1", "auroc")):
            gains = np.array(
                [
                    found[name, epsilon, ours, s][m] - found[name, epsilon, theirs, s][m]
                    for s in seeds
                ]
            )
            row.append(f"{gains.mean():+.3f} ± {wide * gains.std(ddof=1):.3f}".replace("-", "−"))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["extract", "run", "table", "parts"])
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--pixels", type=int, default=PIXELS)
    parser.add_argument("--looks", type=int, default=8, help="views to compute, at most")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.05, 0.5, 5.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--levers", nargs="+", help="only these")
    parser.add_argument(
        "--stored",
        type=Path,
        nargs=2,
        help="features that a study kept in XCAL_FEATURES, of averages and of maps, in place of"
        " extracted ones: `xcal` and what is shown beside it",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = data_root() / "levers"
    folder.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if given.what == "extract":
        for name in given.sets:
            extract(name, given.weights, folder, given.pixels, given.looks)
    elif given.what == "run":
        for name, epsilon in itertools.product(given.sets, given.epsilon):
            whole = stored(name, *given.stored) if given.stored else None
            for label in given.levers or levers(name, epsilon):
                run(folder, name, epsilon, label, given.seeds, whole)
    elif given.what == "parts":
        print(parts_table())
    else:
        (RESULTS / "half.md").write_text(table(folder))
        print(table(folder))


if __name__ == "__main__":
    main()
