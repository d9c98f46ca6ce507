"""What moves accuracy at a given ε, one lever at a time, on features of a frozen backbone.

    python benchmarks/levers.py extract blood-cells ham10000 chest-xray14 --weights W.pth
    python benchmarks/levers.py extract blood-cells ham10000 --weights W.pth --pixels 224
    python benchmarks/levers.py extract blood-cells ham10000 --weights W.pth --crops
    python benchmarks/levers.py run blood-cells ham10000 chest-xray14 --epsilon 0.05 0.5 5
    python benchmarks/levers.py table

The head of `preset = "good"` (EfficientNet-B0, stages 4 to 6, maps and squares pooled, 128 px,
standardized by the public validation images) is trained by three clients of whole groups, record
level, δ = 1e-5, 20 rounds of Poisson batches of 1,024, C = 8, released weights averaged (0.2), as
`fl-dp` does; the multiplier is the package's plan. Arms of one seed share partition, draws and
noise. The rate (and λ, where an arm has one) is the best of one grid by macro F1 + AUROC on
validation images, over the first two seeds; test images are opened for that one only. A finished
cell is a line of `benchmarks/results/levers/cells.jsonl` and is not computed again.
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
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xcal.data import catalog
from xcal.data.image_store import data_root
from xcal.data.normalize import to_tensor
from xcal.dp.accounting import SCORE_SENSITIVITY, joint_factor, multiplier_table
from xcal.dp.calibration import PlanShape, calibrate, calibrate_fixed, plan_xcal
from xcal.explain.signal import SignalSettings
from xcal.methods.xcal_steered import (
    SteeredParameters,
    SteeredRule,
    SteeredState,
    next_effective_sigma,
)
from xcal.metrics.classification import auroc, macro_f1
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.probe import CONSTANTS, constants_of
from xcal.models.views import POOLED, FixedView
from xcal.models.weights import load_published, read_weights

RESULTS = Path(__file__).parent / "results" / "levers"
FILE = "half.jsonl"  # cells.jsonl: of all training images, by an earlier state of this file
PIXELS, DELTA, ROUNDS, BATCH, CLIP, AVERAGE = 128, 1e-5, 20, 1024, 8.0, 0.2
TAKEN = 2  # every second training image: features are what costs time here
PARTS = ("validation", "test", "train")
SYMMETRY = {"chest-xray14": "shifts"}  # all others: mirrored turns, the four turns first
WIDTHS = {3: 40, 4: 80, 5: 112, 6: 192, 7: 320}
STAGES = tuple(WIDTHS)  # whose maps are kept; `good` reads 4 to 6
CROPS = tuple(itertools.product((0, 1, 2), repeat=2))
"""Where a crop at twice the resolution begins, in quarters of the larger image's side."""


def views_of(name: str) -> tuple[FixedView, ...]:
    return POOLED[SYMMETRY.get(name, "mirrored-turns")]


# --- features -------------------------------------------------------------------------------------


class _Reading(torch.nn.Module):
    """Images (N, 3, H, W) to the maps of `STAGES` and their squares, on the grid of 1/16."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        last = max(STAGES)
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
            if number not in STAGES:
                continue
            both = torch.cat([x, x.square()], dim=1)
            if number < 4:
                both = F.avg_pool2d(both, 2)
            found.append(F.interpolate(both, scale_factor=2.0) if number > 5 else both)
        return torch.cat(found, dim=1)


def extract(name: str, weights: Path, folder: Path, pixels: int, looks: int) -> None:
    """Averaged channels of every view of every image, before they are standardized.

    `w` are the averages of the nine quarters that begin at `CROPS`, over all views turned back.
    """
    ask = _fast(_Reading(weights).eval(), folder, pixels)
    data = catalog.load(name, pixels=pixels, seed=0)
    views = views_of(name)[:looks]
    width = _columns(STAGES).stop
    for part in PARTS:
        path = folder / f"{name}-{part}{_ending(pixels)}.npz"
        if path.exists():
            continue
        images = getattr(data, part)
        if part == "train":
            images = images.take(np.arange(0, len(images), TAKEN))
        shown, began = np.asarray(images.pixels), time.monotonic()
        found = np.zeros((len(shown), len(views), width), dtype=np.float32)
        quarters = np.zeros((len(shown), len(CROPS), width), dtype=np.float32)
        for start in range(0, len(shown), 32):
            some, here = to_tensor(shown[start : start + 32]), slice(start, start + 32)
            total = torch.zeros(())
            for number, view in enumerate(views):
                maps = view.undo(ask(view.of(some).contiguous()))
                found[here, number] = maps.mean((2, 3))
                total = total + maps
            half = maps.shape[2] // 2
            quarters[here] = F.avg_pool2d(total / len(views), half, half // 2).flatten(2).mT.numpy()
            done = min(start + 32, len(shown))
            if done % 1024 < 32 or done == len(shown):
                left = (time.monotonic() - began) / done * (len(shown) - done)
                print(f"{path.stem}: {done} of {len(shown)}, {left:.0f} s left", flush=True)
        print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)
        np.savez(path, x=found, w=quarters, y=images.labels, g=images.groups)


def _columns(stages: Sequence[int]) -> slice:
    """Where the channels of these neighboring stages and their squares lie in what is kept."""
    widths = np.cumsum([0] + [2 * WIDTHS[stage] for stage in STAGES])
    return slice(int(widths[stages[0] - STAGES[0]]), int(widths[stages[-1] - STAGES[0] + 1]))


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


@lru_cache(maxsize=4)
def load(folder: Path, name: str, arm: Arm) -> Set:
    """Means over the first views, standardized by at most 512 public validation images."""
    channels = _columns(arm.stages)

    def read(part: str, pixels: int) -> tuple[Any, Any, Tensor, NDArray[Any]]:
        with np.load(folder / f"{name}-{part}{_ending(pixels)}.npz") as file:
            x, w = file["x"][..., channels], file["w"][..., channels]
            return x, torch.from_numpy(w), torch.from_numpy(file["y"]).long(), file["g"]

    def standardized(public: Tensor) -> Callable[[Tensor], Tensor]:
        some = np.linspace(0, len(public) - 1, min(len(public), 512)).round().astype(int)
        mean, deviation = constants_of(public[some])
        return lambda x: (x - mean) / deviation

    public = read("validation", arm.pixels)[0][:, : arm.views].mean(axis=1)
    alike, parts, quarters, closer = standardized(torch.from_numpy(public)), {}, {}, {}
    for part in PARTS:
        x, w, y, g = read(part, arm.pixels)
        tested = arm.views if arm.test_views is None else arm.test_views
        views = arm.views if part == "train" else tested
        parts[part] = (alike(torch.from_numpy(x[:, :views].mean(axis=1))), y, g)
        if arm.closer is not None or arm.signal is not None or arm.keep:
            quarters[part] = alike(w)
    if arm.closer is not None:
        for part in PARTS:
            x, w, _, _ = read(part, 2 * PIXELS)
            closer[part] = torch.cat([w, torch.from_numpy(x[:, :1])], dim=1)
        alike = standardized(closer["validation"][:, :9].mean(1))
        closer = {part: alike(x) for part, x in closer.items()}
    return Set(parts, quarters, closer)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    views: int = 1
    test_views: int | None = None  # None: as many
    accountant: str = "pld"
    whitened: bool = False
    lams: tuple[float, ...] = (0.0,)  # shrinkages of the public covariance to choose from
    closer: str | None = None  # which quarter, at twice the pixels, is read beside the image
    signal: str | None = None  # whose signal steers the noise in time: of "units", "public" images
    shares: str = "plan"  # of what a steered step takes its share
    keep: tuple[float, ...] = ()  # weights of the term of the most salient quarter, to choose from
    stages: tuple[int, ...] = (4, 5, 6)
    pixels: int = PIXELS
    only: tuple[str, ...] | None = None  # the sets that it is for; None: all

    def fits(self, name: str) -> bool:
        return self.views <= len(views_of(name)) and (self.only is None or name in self.only)


MOST = {"blood-cells": 8, "ham10000": 8, "chest-xray14": 5}  # views of `pool_views` in `xcal`
CLOSER_FROM = 8
LATE = 10  # the first round whose units have the term of `keep`
LARGE = ("blood-cells", "ham10000")  # sets whose originals have more than `PIXELS` a side


def arms(name: str) -> dict[str, Arm]:
    """The levers, with as many views as the set's symmetry has."""
    n = MOST[name]
    best = Arm(n, whitened=True, lams=(10.0,))
    found = {
        "plain": Arm(),
        "views": Arm(n),
        "four turns": Arm(4, only=LARGE),
        "whitened": Arm(1, whitened=True, lams=(10.0,)),
        "whitened, views": best,
        "views, Renyi accountant": Arm(n, accountant="renyi"),
        **{f"closer {how}": replace(best, closer=how, only=LARGE) for how in CLOSER},
        "steered by units": Arm(n, signal="units"),
        "steered by units, shares of what is left": Arm(n, signal="units", shares="left"),
        "steered by public images": Arm(n, signal="public"),
        "keeping the salient": Arm(n, keep=(0.03, 0.1, 0.3)),
        "256 px": Arm(1, pixels=256, only=LARGE),
        **{
            f"stages {a}-{b}": Arm(1, stages=tuple(range(a, b + 1)))
            for a, b in ((3, 6), (4, 7), (5, 7), (3, 7))
        },
    }
    return {label: arm for label, arm in found.items() if arm.fits(name)}


CLOSER = ("by the map", "at the center", "by feature norm", "everywhere", "at random")
"""Where to look closer; `everywhere`: at the whole image at twice the pixels."""
RATES = {0.05: (0.003, 0.01, 0.02, 0.05), 0.5: (0.02, 0.05, 0.1, 0.2), 5.0: (0.1, 0.2, 0.5, 1.0)}
KAPPA = 5.0
CHOSEN_BY = 2  # seeds


@lru_cache(maxsize=256)
def multiplier(epsilon: float, rate: float, steps: int, accountant: str) -> float:
    find = calibrate if accountant == "renyi" else calibrate_fixed
    return find(epsilon, DELTA, rate, steps).sigma


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
    drawn: Tensor | None = None,
) -> Tensor:
    """The sum of the units' gradients of the head (classes, D + 1), each clipped to `CLIP`.

    With `keep`, a unit's loss has that many times the loss of its most salient quarter alone.
    """
    ones = torch.ones(len(inputs), 1)
    wide, error = torch.cat([inputs, ones], 1), _errors(head, inputs, labels)
    square = error.square().sum(1) * wide.square().sum(1)
    if keep:
        assert quarters is not None and drawn is not None
        here = quarters[drawn]
        part = here[torch.arange(len(here)), salient(head, here, labels)]
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


def score_sum(head: Tensor, inputs: Tensor, quarters: Tensor) -> tuple[float, int]:
    """Σu and the count: u is the confidence lost without the most salient quarter, in [0, 1]."""
    logits = inputs @ head[:, :-1].T + head[:, -1]
    given = logits.argmax(1)
    rows = torch.arange(len(inputs))
    gone = quarters[rows, salient(head, quarters, given)]
    # The average without a quarter of the cells, which leaves three.
    after = (4 * inputs - gone) / 3 @ head[:, :-1].T + head[:, -1]
    lost = torch.softmax(logits, 1)[rows, given] - torch.softmax(after, 1)[rows, given]
    return float(lost.clamp(0, 1).sum()), len(inputs)


class Noise:
    """The multiplier of a client's next step: fixed by a plan, or steered by a signal."""

    def __init__(self, arm: Arm, epsilon: float, units: int) -> None:
        self.batch = min(BATCH, units)
        self.steps = -(-units // self.batch)
        self.rate, self.arm = self.batch / units, arm
        self.fixed = multiplier(epsilon, self.rate, self.steps * ROUNDS, arm.accountant)
        if arm.signal is None:
            return
        shape = PlanShape(epsilon, DELTA, units, self.batch, ROUNDS)
        plan = plan_xcal(shape, kappa=KAPPA, w=0.5, signal=arm.signal == "units")
        settings = SignalSettings.of(SteeredParameters(), positive_only=True)
        # Public images have no noise in their signal: 1 is only a placeholder for it.
        self.rule = SteeredRule(replace(plan, sigma_signal=plan.sigma_signal or 0.0), settings)
        self.rule = replace(self.rule, shares=arm.shares)
        self.table = multiplier_table(plan.sample_rate, plan.order, plan.sigma_static)
        self.state, self.spent, self.taken = SteeredState(), 0.0, 0

    def next(self) -> float:
        if self.arm.signal is None:
            return self.fixed
        sigma, cost = next_effective_sigma(
            self.state, self.rule, self.spent, self.rule.plan.steps - self.taken, self.table
        )
        self.spent, self.taken = self.spent + cost, self.taken + 1
        assert self.spent <= self.rule.plan.budget
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


def train(data: Set, arm: Arm, epsilon: float, seed: int, rate: float, keep: float) -> Trained:
    """The reported head (classes, D + 1)."""
    x, y, _ = data.parts["train"]
    shards = shards_of(data.parts["train"][2], seed)
    noises = [Noise(arm, epsilon, len(shard)) for shard in shards]
    quarters, coarse = data.quarters.get("train"), None
    head = torch.zeros(data.classes, x.shape[1] + 1)
    fixed = arm.closer is not None and arm.closer != "by the map"
    if fixed:  # which quarter is read does not depend on a head: it is read from the beginning
        coarse = head
        x = looked_closer(data, "train", coarse, str(arm.closer))
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
                late = keep if number >= LATE else 0.0
                slope = clipped_slope(own, x[drawn], y[drawn], late, quarters, drawn)
                if arm.signal == "units":
                    assert quarters is not None
                    noise.read(*score_sum(own, x[drawn], quarters[drawn]), aside)
                elif arm.signal == "public":
                    some = slice(0, 256)
                    public = data.parts["validation"][0][some], data.quarters["validation"][some]
                    noise.read(*score_sum(own, *public), aside)
                blur = torch.randn(slope.shape, generator=generator)
                own -= rate * (slope + sigma * CLIP * blur) / noise.batch
            total, weight = total + n * own, weight + n
        head = total / weight
        reported = head if begins else (1 - AVERAGE) * reported + AVERAGE * head
    return Trained(reported, coarse)


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


def run(folder: Path, name: str, epsilon: float, label: str, seeds: int) -> None:
    done = {(c["set"], c["epsilon"], c["arm"], c["seed"]) for c in cells()}
    missing = [s for s in range(seeds) if (name, epsilon, label, s) not in done]
    arm = arms(name).get(label)
    if not missing or arm is None:
        return
    began, base = time.monotonic(), load(folder, name, arm)
    by_lam = {lam: whitened(base, lam) if arm.whitened else base for lam in arm.lams}
    best: tuple[float, ...] = (-1.0, 0.0, 0.0, 0.0)
    for rate, lam, keep in itertools.product(RATES[epsilon], arm.lams, arm.keep or (0.0,)):
        data = by_lam[lam]
        labels = data.parts["validation"][1].numpy()
        value = 0.0
        for seed in range(CHOSEN_BY):
            trained = train(data, arm, epsilon, seed, rate, keep)
            said = answers(data, arm, trained, "validation")
            value += sum(scores(labels, said)) / CHOSEN_BY
        best = max(best, (value, rate, lam, keep))
    value, rate, lam, keep = best
    data = by_lam[lam]
    for seed in missing:
        trained = train(data, arm, epsilon, seed, rate, keep)
        said = answers(data, arm, trained, "test")
        f1, area = scores(data.parts["test"][1].numpy(), said)
        cell = {"set": name, "epsilon": epsilon, "arm": label, "seed": seed, "rate": rate}
        cell |= {"keep": keep, "validation": round(value, 4)}
        cell |= {"lam": lam, "macro_f1": round(f1, 4), "auroc": round(area, 4), "commit": commit()}
        np.save(folder / f"said-{name}-{epsilon}-{label}-{seed}.npy", said.astype(np.float32))
        with (RESULTS / FILE).open("a") as file:
            file.write(json.dumps(cell) + "\n")
    print(
        f"{name} ε {epsilon} {label}: rate {rate:g}, {time.monotonic() - began:.0f} s", flush=True
    )


def commit() -> str:
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cells() -> list[dict[str, Any]]:
    path = RESULTS / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the table ------------------------------------------------------------------------------------


def difference(folder: Path, name: str, epsilon: float, label: str) -> tuple[list[float], ...]:
    """95 % intervals of the arm less `plain`, macro F1 and AUROC, over seeds and test groups."""
    with np.load(folder / f"{name}-test.npz") as file:
        labels, groups = file["y"].astype(np.int64), file["g"]
    both = [c for c in cells() if (c["set"], c["epsilon"], c["arm"]) == (name, epsilon, label)]
    seeds = sorted(c["seed"] for c in both)

    def read(arm: str, seed: int) -> NDArray[np.float64]:
        said: NDArray[np.float64] = np.load(folder / f"said-{name}-{epsilon}-{arm}-{seed}.npy")
        return said.astype(np.float64)

    return intervals(
        labels, groups, [read(label, s) for s in seeds], [read("plain", s) for s in seeds]
    )


def intervals(
    labels: NDArray[np.int64],
    groups: NDArray[Any],
    ours: Sequence[NDArray[np.float64]],
    theirs: Sequence[NDArray[np.float64]],
) -> tuple[list[float], ...]:
    """95 % intervals of paired differences of macro F1 and AUROC, over seeds and test groups."""
    members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    generator, found = np.random.default_rng(0), []
    for _ in range(200):
        chosen = np.concatenate(
            [members[i] for i in generator.integers(0, len(members), len(members))]
        )
        drawn = generator.choice(len(ours), len(ours))
        pairs = [
            np.subtract(
                scores(labels[chosen], ours[s][chosen]), scores(labels[chosen], theirs[s][chosen])
            )
            for s in drawn
        ]
        found.append(np.nanmean(pairs, axis=0))
    low, high = np.nanpercentile(found, [2.5, 97.5], axis=0)
    return [float(low[0]), float(high[0])], [float(low[1]), float(high[1])]


def table(folder: Path) -> str:
    lines = [
        "| set | ε | lever | η | F1 | less plain [95 %] | AUROC | less plain [95 %] |",
        "|---|---|---|---|---|---|---|---|",
    ]
    done = cells()
    for name, epsilon in dict.fromkeys((c["set"], c["epsilon"]) for c in done):
        here = [c for c in done if (c["set"], c["epsilon"]) == (name, epsilon)]
        plain = {c["seed"]: c for c in here if c["arm"] == "plain"}
        for label in dict.fromkeys(c["arm"] for c in here):
            own = [c for c in here if c["arm"] == label and c["seed"] in plain]
            if not own:
                continue
            row = [name, f"{epsilon:g}", label, f"{own[0]['rate']:g}"]
            spans = None if label == "plain" else difference(folder, name, epsilon, label)
            for k, measure in enumerate(("macro_f1", "auroc")):
                values = np.array([c[measure] for c in own])
                row.append(f"{values.mean():.3f} ± {values.std(ddof=1):.3f}")
                if spans is None:
                    row.append("")
                    continue
                gain = np.mean([c[measure] - plain[c["seed"]][measure] for c in own])
                row.append(f"{gain:+.3f} [{spans[k][0]:+.3f}, {spans[k][1]:+.3f}]")
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["extract", "run", "table"])
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--pixels", type=int, default=PIXELS)
    parser.add_argument("--looks", type=int, default=8, help="views to compute, at most")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.05, 0.5, 5.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", help="only these levers")
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
            for label in given.arms or arms(name):
                run(folder, name, epsilon, label, given.seeds)
    else:
        (RESULTS / "half.md").write_text(table(folder))
        print(table(folder))


if __name__ == "__main__":
    main()
