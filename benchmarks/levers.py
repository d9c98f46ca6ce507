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
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from numpy.typing import NDArray
from torch import Tensor

from xcal.data import catalog
from xcal.data.image_store import data_root
from xcal.data.normalize import to_tensor
from xcal.dp.calibration import calibrate, calibrate_fixed
from xcal.metrics.classification import auroc, macro_f1
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.probe import CONSTANTS, constants_of
from xcal.models.views import POOLED, FixedView
from xcal.models.weights import load_published, read_weights

RESULTS = Path(__file__).parent / "results" / "levers"
PIXELS, DELTA, ROUNDS, BATCH, CLIP, AVERAGE = 128, 1e-5, 20, 1024, 8.0, 0.2
PARTS = ("validation", "test", "train")
SYMMETRY = {"chest-xray14": "shifts"}  # all others: mirrored turns, the four turns first
CROPS = tuple(itertools.product((0, 1, 2), repeat=2))
"""Where a crop at twice the resolution begins, in quarters of the larger image's side."""


def views_of(name: str) -> tuple[FixedView, ...]:
    return POOLED[SYMMETRY.get(name, "mirrored-turns")]


# --- features -------------------------------------------------------------------------------------


def extract(name: str, weights: Path, folder: Path, pixels: int, crops: bool) -> None:
    """Pooled channels of every view of every image, before they are standardized.

    With `crops`, of the nine crops of `PIXELS` a side of the image at twice that size.
    """
    network = efficientnet_b0(
        2, norm="frozen", trainable="head", head_reads="stages:4-6", seed=0
    ).eval()
    neutral = {n: t for n, t in network.state_dict().items() if n in CONSTANTS}
    load_published(network, {**read_weights(weights), **neutral})
    reading = torch.nn.Sequential(*network.segments()[:-1]).eval()
    size = 2 * PIXELS if crops else pixels
    ask = _fast(reading, folder, PIXELS if crops else pixels)
    data = catalog.load(name, pixels=size, seed=0)
    for part in PARTS:
        path = folder / f"{name}-{part}{_ending(pixels, crops)}.npz"
        if path.exists():
            continue
        images = getattr(data, part)
        shown, began = np.asarray(images.pixels), time.monotonic()
        looks: list[Any] = [view.of for view in views_of(name)]
        if crops:
            looks = [partial(_crop, place=place) for place in CROPS]
        found = np.zeros((len(shown), len(looks), 768), dtype=np.float32)
        for start in range(0, len(shown), 32):
            some = to_tensor(shown[start : start + 32])
            for number, look in enumerate(looks):
                found[start : start + 32, number] = ask(look(some).contiguous())
            done = min(start + 32, len(shown))
            if done % 1024 < 32 or done == len(shown):
                left = (time.monotonic() - began) / done * (len(shown) - done)
                print(f"{path.stem}: {done} of {len(shown)}, {left:.0f} s left", flush=True)
        np.savez(path, x=found, y=images.labels, g=images.groups)


def _ending(pixels: int, crops: bool) -> str:
    return "-crops" if crops else "" if pixels == PIXELS else f"-{pixels}px"


def _crop(images: Tensor, place: tuple[int, int]) -> Tensor:
    top, left = (PIXELS // 2 * step for step in place)
    return images[:, :, top : top + PIXELS, left : left + PIXELS]


def _fast(reading: torch.nn.Module, folder: Path, pixels: int) -> Any:
    """Nearly three times as fast in onnxruntime, where that is installed; equal to 1e-5."""
    try:
        import onnxruntime
    except ImportError:
        return lambda x: reading(x).detach().numpy()
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
    return lambda x: session.run(None, {"x": x.numpy()})[0]


@dataclass(frozen=True)
class Set:
    """Standardized features of one data set: x (N, D), y, groups; by part.

    `crops` (N, 9, 768) are those of the crops, standardized alike, where an arm looks closer.
    """

    parts: dict[str, tuple[Tensor, Tensor, NDArray[Any]]]
    crops: dict[str, Tensor] | None = None

    @property
    def classes(self) -> int:
        return int(self.parts["train"][1].max()) + 1


@lru_cache(maxsize=4)
def load(
    folder: Path, name: str, train_views: int, test_views: int, pixels: int, crops: bool
) -> Set:
    """Means over the first views, standardized by at most 512 public validation images."""

    def read(part: str, ending: str) -> tuple[NDArray[np.float32], Tensor, NDArray[Any]]:
        with np.load(folder / f"{name}-{part}{ending}.npz") as file:
            return file["x"], torch.from_numpy(file["y"]).long(), file["g"]

    def standardized(public: Tensor) -> Callable[[Tensor], Tensor]:
        some = np.linspace(0, len(public) - 1, min(len(public), 512)).round().astype(int)
        mean, deviation = constants_of(public[some])
        return lambda x: (x - mean) / deviation

    ending = _ending(pixels, False)
    public = read("validation", ending)[0][:, :train_views].mean(axis=1)
    alike, parts = standardized(torch.from_numpy(public)), {}
    for part in PARTS:
        x, y, g = read(part, ending)
        views = train_views if part == "train" else test_views
        parts[part] = (alike(torch.from_numpy(x[:, :views].mean(axis=1))), y, g)
    if not crops:
        return Set(parts)
    closer = {part: torch.from_numpy(read(part, "-crops")[0]) for part in PARTS}
    alike = standardized(closer["validation"].mean(1))
    return Set(parts, {part: alike(x) for part, x in closer.items()})


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    views: int = 1
    test_views: int | None = None  # None: as many
    accountant: str = "pld"
    once: bool = False  # one release of all images, solved with the public covariance
    first: float = 0.0  # share of ε for such a release, from which steps go on
    whitened: bool = False
    lams: tuple[float, ...] = (0.0,)  # shrinkages of the public covariance to choose from
    closer: str | None = None  # which crop is read beside the image from round `CLOSER_FROM` on
    pixels: int = PIXELS
    only: tuple[str, ...] | None = None  # the sets that it is for; None: all

    def fits(self, name: str) -> bool:
        return self.views <= len(views_of(name)) and (self.only is None or name in self.only)


MOST = {"blood-cells": 4, "ham10000": 4, "chest-xray14": 5}  # views of `pool_views` in `good`
CLOSER_FROM = 8
LARGE = ("blood-cells", "ham10000")  # sets whose originals have more than `PIXELS` a side


def arms(name: str) -> dict[str, Arm]:
    """The levers, with as many views as the set's symmetry has."""
    n = MOST[name]
    lams = (0.3, 1.0, 3.0, 10.0)
    found = {
        "plain": Arm(),
        "views": Arm(n),
        "views, mirrored too": Arm(8),
        "views at test only": Arm(1, n),
        "views, Renyi accountant": Arm(n, accountant="renyi"),
        "whitened": Arm(1, whitened=True, lams=lams),
        "whitened, views": Arm(n, whitened=True, lams=lams),
        "whitened, views, mirrored too": Arm(8, whitened=True, lams=lams),
        "one release": Arm(1, once=True, lams=(0.3, 3.0, 30.0)),
        "one release, views": Arm(n, once=True, lams=(0.3, 3.0, 30.0)),
        "one release first, views": Arm(n, first=0.3, lams=(0.3, 3.0, 30.0)),
        "closer by the model, views": Arm(n, closer="model", only=LARGE),
        "closer at the center, views": Arm(n, closer="center", only=LARGE),
        "closer at random, views": Arm(n, closer="random", only=LARGE),
        "224 px, views": Arm(4, pixels=224, only=LARGE),
        "224 px, whitened, views": Arm(4, whitened=True, lams=lams, pixels=224, only=LARGE),
    }
    return {label: arm for label, arm in found.items() if arm.fits(name)}


RATES = {0.05: (0.003, 0.01, 0.02, 0.05), 0.5: (0.02, 0.05, 0.1, 0.2), 5.0: (0.1, 0.2, 0.5, 1.0)}
ONCE_RATES = (0.1, 0.3, 1.0, 3.0)
CHOSEN_BY = 2  # seeds


@lru_cache(maxsize=256)
def multiplier(epsilon: float, rate: float, steps: int, accountant: str) -> float:
    find = calibrate if accountant == "renyi" else calibrate_fixed
    return find(epsilon, DELTA, rate, steps).sigma


@lru_cache(maxsize=256)
def multiplier_after(epsilon: float, rate: float, steps: int, first: float) -> float:
    """σ of the steps where one release of multiplier `first` went before, all under one δ."""

    def spent(sigma: float) -> float:
        accountant = PLDAccountant(
            NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=epsilon / 3000
        )
        accountant.compose(GaussianDpEvent(first))
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
        return float(accountant.get_delta(epsilon))

    low = multiplier(epsilon, rate, steps, "pld")
    high = 4 * low
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= DELTA else (middle, high)
    return high


def covariance(data: Set) -> Tensor:
    x = data.parts["validation"][0]
    return x.T @ x / len(x)


def shards_of(groups: NDArray[Any], seed: int, clients: int = 3) -> list[NDArray[np.int64]]:
    names = np.unique(groups)
    np.random.default_rng(1000 + seed).shuffle(names)
    return [np.flatnonzero(np.isin(groups, part)) for part in np.array_split(names, clients)]


def clipped_slope(head: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """The sum of the units' gradients of the head (classes, D + 1), each clipped to `CLIP`."""
    error = torch.softmax(inputs @ head[:, :-1].T + head[:, -1], dim=1)
    error[torch.arange(len(labels)), labels] -= 1
    norm = error.norm(dim=1) * (inputs.square().sum(dim=1) + 1).sqrt()
    error *= (CLIP / norm.clamp(min=1e-12)).clamp(max=1)[:, None]
    return torch.cat([error.T @ inputs, error.sum(0)[:, None]], dim=1)


def looked_closer(data: Set, part: str, head: Tensor, how: str) -> Tensor:
    """The features of an image and of one of its crops: a function of it and of a released head.

    `model`: the crop in which the head is surest of the class that it gives the whole image.
    """
    assert data.crops is not None
    x, crops = data.parts[part][0], data.crops[part]
    if how == "model":
        given = (x @ head[:, :-1].T + head[:, -1]).argmax(1)
        sure = torch.softmax(crops @ head[:, :-1].T + head[:, -1], dim=2)
        chosen = sure[torch.arange(len(x)), :, given].argmax(1)
    elif how == "center":
        chosen = torch.full((len(x),), CROPS.index((1, 1)))
    else:
        chosen = torch.randint(len(CROPS), (len(x),), generator=torch.Generator().manual_seed(0))
    return torch.cat([x, crops[torch.arange(len(x)), chosen]], dim=1) / math.sqrt(2)


@dataclass(frozen=True)
class Trained:
    head: Tensor
    coarse: Tensor | None = None  # the head by which crops were chosen


def train(data: Set, arm: Arm, epsilon: float, seed: int, rate: float, lam: float) -> Trained:
    """The reported head (classes, D + 1)."""
    x, y, _ = data.parts["train"]
    shards = shards_of(data.parts["train"][2], seed)
    rounds, solve, coarse = 1 if arm.once else ROUNDS, None, None
    if arm.once or arm.first:
        public = covariance(data)
        scale = lam * float(torch.diag(public).mean())
        solve = torch.linalg.inv(public + scale * torch.eye(len(public))) * scale
    head = torch.zeros(data.classes, x.shape[1] + 1)
    reported = head
    smallest = min(map(len, shards))

    def noisy(total: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        return total + sigma * CLIP * torch.randn(total.shape, generator=generator)

    def at_once(sigma: float, size: float) -> Tensor:
        """One release of all images of every client, solved: post-processing of it."""
        assert solve is not None
        total = torch.zeros_like(head)
        for client, shard in enumerate(shards):
            generator = torch.Generator().manual_seed(seed * 10**6 + 999_000 + client)
            total += noisy(clipped_slope(head, x[shard], y[shard]), sigma, generator)
        slope = total / len(x)
        return -size * torch.cat([slope[:, :-1] @ solve, slope[:, -1:]], dim=1)

    first = 0.0
    if arm.once:
        return Trained(at_once(multiplier(epsilon, 1.0, 1, "pld"), rate))
    if arm.first:
        first = multiplier(arm.first * epsilon, 1.0, 1, "pld")
        head = reported = at_once(first, 1.0)
    for number in range(rounds):
        if arm.closer is not None and number == CLOSER_FROM:
            coarse = reported
            x = looked_closer(data, "train", coarse, arm.closer)
            wider = torch.zeros(len(head), x.shape[1] + 1)
            wider[:, : head.shape[1] - 1] = head[:, :-1] * math.sqrt(2)
            wider[:, -1] = head[:, -1]
            head = wider
        total, weight = torch.zeros_like(head), 0
        for client, shard in enumerate(shards):
            features, classes, n = x[shard], y[shard], len(shard)
            batch = min(BATCH, n)
            steps = -(-n // batch)
            if first:
                sigma = multiplier_after(
                    epsilon, min(BATCH, smallest) / smallest, steps * rounds, first
                )
            else:
                sigma = multiplier(epsilon, batch / n, steps * rounds, arm.accountant)
            own = head.clone()
            generator = torch.Generator().manual_seed(seed * 10**6 + number * 1000 + client)
            for _ in range(steps):
                drawn = torch.rand(n, generator=generator) < batch / n
                slope = clipped_slope(own, features[drawn], classes[drawn])
                own -= rate * noisy(slope, sigma, generator) / batch
            total, weight = total + n * own, weight + n
        head = total / weight
        begins = number == (CLOSER_FROM if arm.closer is not None else 0)
        anew = begins or (number == 0 and not arm.first)
        reported = head if anew else (1 - AVERAGE) * reported + AVERAGE * head
    return Trained(reported, coarse)


def whitened(data: Set, lam: float) -> Set:
    """Features in the coordinates where the shrunk public covariance is the identity."""
    public = covariance(data)
    values, vectors = torch.linalg.eigh(public)
    shrunk = values.clamp(min=0) + lam * values.mean()
    turn = vectors * (values.mean() * (1 + lam) / shrunk).sqrt() @ vectors.T
    return Set({part: (x @ turn, y, g) for part, (x, y, g) in data.parts.items()})


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
    tested = arm.views if arm.test_views is None else arm.test_views
    base = load(folder, name, arm.views, tested, arm.pixels, arm.closer is not None)
    by_lam = {lam: whitened(base, lam) if arm.whitened else base for lam in arm.lams}
    best: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    rates = ONCE_RATES if arm.once else RATES[epsilon]
    for rate, lam in itertools.product(rates, arm.lams):
        data = by_lam[lam]
        labels = data.parts["validation"][1].numpy()
        value = 0.0
        for seed in range(CHOSEN_BY):
            trained = train(data, arm, epsilon, seed, rate, lam)
            said = answers(data, arm, trained, "validation")
            value += sum(scores(labels, said)) / CHOSEN_BY
        best = max(best, (value, rate, lam))
    _, rate, lam = best
    data = by_lam[lam]
    for seed in missing:
        trained = train(data, arm, epsilon, seed, rate, lam)
        said = answers(data, arm, trained, "test")
        f1, area = scores(data.parts["test"][1].numpy(), said)
        cell = {"set": name, "epsilon": epsilon, "arm": label, "seed": seed, "rate": rate}
        cell |= {"lam": lam, "macro_f1": round(f1, 4), "auroc": round(area, 4), "commit": commit()}
        np.save(folder / f"said-{name}-{epsilon}-{label}-{seed}.npy", said.astype(np.float32))
        with (RESULTS / "cells.jsonl").open("a") as file:
            file.write(json.dumps(cell) + "\n")
    print(f"{name} ε {epsilon} {label}: rate {rate:g}, λ {lam:g}", flush=True)


def commit() -> str:
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cells() -> list[dict[str, Any]]:
    path = RESULTS / "cells.jsonl"
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
    for _ in range(300):
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
    parser.add_argument("--crops", action="store_true")
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
            extract(name, given.weights, folder, given.pixels, given.crops)
    elif given.what == "run":
        for name, epsilon in itertools.product(given.sets, given.epsilon):
            for label in given.arms or arms(name):
                run(folder, name, epsilon, label, given.seeds)
    else:
        (RESULTS / "table.md").write_text(table(folder))
        print(table(folder))


if __name__ == "__main__":
    main()
