"""What moves accuracy at a given ε, one lever at a time, on features of a frozen backbone.

    python benchmarks/levers.py extract blood-cells ham10000 chest-xray14 --weights W.pth
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
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
SYMMETRY = {"chest-xray14": "shifts"}  # all others: turns


def views_of(name: str) -> tuple[FixedView, ...]:
    return POOLED[SYMMETRY.get(name, "turns")]


# --- features -------------------------------------------------------------------------------------


def extract(name: str, weights: Path, folder: Path) -> None:
    """Pooled channels of every view of every image, before they are standardized."""
    network = efficientnet_b0(
        2, norm="frozen", trainable="head", head_reads="stages:4-6", seed=0
    ).eval()
    neutral = {n: t for n, t in network.state_dict().items() if n in CONSTANTS}
    load_published(network, {**read_weights(weights), **neutral})
    reading = torch.nn.Sequential(*network.segments()[:-1]).eval()
    ask = _fast(reading, folder)
    data = catalog.load(name, pixels=PIXELS, seed=0)
    for part in PARTS:
        path = folder / f"{name}-{part}.npz"
        if path.exists():
            continue
        images = getattr(data, part)
        pixels, views, began = np.asarray(images.pixels), views_of(name), time.monotonic()
        found = np.zeros((len(pixels), len(views), 768), dtype=np.float32)
        for start in range(0, len(pixels), 32):
            shown = to_tensor(pixels[start : start + 32])
            for number, view in enumerate(views):
                found[start : start + 32, number] = ask(view.of(shown))
            done = min(start + 32, len(pixels))
            left = (time.monotonic() - began) / done * (len(pixels) - done)
            print(f"\r{name} {part}: {done} of {len(pixels)}, {left:.0f} s left", end="")
        print()
        np.savez(path, x=found, y=images.labels, g=images.groups)


def _fast(reading: torch.nn.Module, folder: Path) -> Any:
    """Nearly three times as fast in onnxruntime, where that is installed; equal to 1e-5."""
    try:
        import onnxruntime
    except ImportError:
        return lambda x: reading(x).detach().numpy()
    path = folder / "reading.onnx"
    axes = {"x": {0: "n"}, "y": {0: "n"}}
    example = torch.rand(32, 3, PIXELS, PIXELS)
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
    return lambda x: session.run(None, {"x": x.numpy()})[0]


@dataclass(frozen=True)
class Set:
    """Standardized features of one data set: x (N, 768), y, groups; by part."""

    parts: dict[str, tuple[Tensor, Tensor, NDArray[Any]]]

    @property
    def classes(self) -> int:
        return int(self.parts["train"][1].max()) + 1


@lru_cache(maxsize=8)
def load(folder: Path, name: str, train_views: int, test_views: int) -> Set:
    """Means over the first views, standardized by at most 512 public validation images."""

    def read(part: str, views: int) -> tuple[Tensor, Tensor, NDArray[Any]]:
        with np.load(folder / f"{name}-{part}.npz") as file:
            mean = torch.from_numpy(file["x"][:, :views].mean(axis=1))
            return mean, torch.from_numpy(file["y"]).long(), file["g"]

    public = read("validation", train_views)[0]
    some = np.linspace(0, len(public) - 1, min(len(public), 512)).round().astype(int)
    mean, deviation = constants_of(public[some])
    parts = {}
    for part in PARTS:
        x, y, g = read(part, train_views if part == "train" else test_views)
        parts[part] = ((x - mean) / deviation, y, g)
    return Set(parts)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train; `lams`: shrinkages of the public covariance to choose from."""

    pooled: bool
    test_pooled: bool
    accountant: str = "pld"
    once: bool = False  # one release of all images, solved with the public covariance
    whitened: bool = False
    lams: tuple[float, ...] = (0.0,)


ARMS = {
    "plain": Arm(False, False),
    "views": Arm(True, True),
    "views at test only": Arm(False, True),
    "views, Renyi accountant": Arm(True, True, accountant="renyi"),
    "one release": Arm(False, False, once=True, lams=(0.3, 3.0, 30.0)),
    "one release, views": Arm(True, True, once=True, lams=(0.3, 3.0, 30.0)),
    "whitened, views": Arm(True, True, whitened=True, lams=(0.3, 3.0)),
}
RATES = {0.05: (0.003, 0.01, 0.02, 0.05), 0.5: (0.02, 0.05, 0.1, 0.2), 5.0: (0.1, 0.2, 0.5, 1.0)}
ONCE_RATES = (0.1, 0.3, 1.0, 3.0)
CHOSEN_BY = 2  # seeds


@lru_cache(maxsize=256)
def multiplier(epsilon: float, rate: float, steps: int, accountant: str) -> float:
    find = calibrate if accountant == "renyi" else calibrate_fixed
    return find(epsilon, DELTA, rate, steps).sigma


def covariance(data: Set) -> Tensor:
    x = data.parts["validation"][0]
    return x.T @ x / len(x)


def train(data: Set, arm: Arm, epsilon: float, seed: int, rate: float, lam: float) -> Tensor:
    """The reported head (classes, 768 + 1)."""
    x, y, groups = data.parts["train"]
    names = np.unique(groups)
    np.random.default_rng(1000 + seed).shuffle(names)
    shards = [np.flatnonzero(np.isin(groups, part)) for part in np.array_split(names, 3)]
    rounds = 1 if arm.once else ROUNDS
    solve = None
    if arm.once:
        public = covariance(data)
        scale = lam * float(torch.diag(public).mean())
        solve = torch.linalg.inv(public + scale * torch.eye(len(public))) * scale
    own_images = [(x[shard], y[shard]) for shard in shards]
    head = torch.zeros(data.classes, x.shape[1] + 1)
    reported = head
    for number in range(rounds):
        total, weight = torch.zeros_like(head), 0
        for client, (features, classes) in enumerate(own_images):
            n = len(classes)
            batch = n if arm.once else min(BATCH, n)
            steps = 1 if arm.once else -(-n // batch)
            sigma = multiplier(epsilon, batch / n, steps * rounds, arm.accountant)
            own = head.clone()
            generator = torch.Generator().manual_seed(seed * 10**6 + number * 1000 + client)
            for _ in range(steps):
                drawn = torch.rand(n, generator=generator) < batch / n
                inputs, labels = features[drawn], classes[drawn]
                error = torch.softmax(inputs @ own[:, :-1].T + own[:, -1], dim=1)
                error[torch.arange(len(labels)), labels] -= 1
                norm = error.norm(dim=1) * (inputs.square().sum(dim=1) + 1).sqrt()
                error *= (CLIP / norm.clamp(min=1e-12)).clamp(max=1)[:, None]
                slope = torch.cat([error.T @ inputs, error.sum(0)[:, None]], dim=1)
                noise = torch.randn(slope.shape, generator=generator)
                slope = (slope + sigma * CLIP * noise) / batch
                if solve is not None:  # post-processing of the release
                    slope = torch.cat([slope[:, :-1] @ solve, slope[:, -1:]], dim=1)
                own -= rate * slope
            total, weight = total + n * own, weight + n
        head = total / weight
        reported = head if number == 0 else (1 - AVERAGE) * reported + AVERAGE * head
    return reported


def whitened(data: Set, lam: float) -> Set:
    """Features in the coordinates where the shrunk public covariance is the identity."""
    public = covariance(data)
    values, vectors = torch.linalg.eigh(public)
    shrunk = values.clamp(min=0) + lam * values.mean()
    turn = vectors * (values.mean() * (1 + lam) / shrunk).sqrt() @ vectors.T
    return Set({part: (x @ turn, y, g) for part, (x, y, g) in data.parts.items()})


def answers(data: Set, head: Tensor, part: str) -> NDArray[np.float64]:
    x = data.parts[part][0]
    result: NDArray[np.float64] = torch.softmax(
        (x @ head[:, :-1].T + head[:, -1]).double(), dim=1
    ).numpy()
    return result


def scores(labels: NDArray[np.int64], said: NDArray[np.float64]) -> tuple[float, float]:
    return macro_f1(labels, said.argmax(1), said.shape[1]), auroc(labels, said)


def run(folder: Path, name: str, epsilon: float, label: str, seeds: int) -> None:
    done = {(c["set"], c["epsilon"], c["arm"], c["seed"]) for c in cells()}
    missing = [s for s in range(seeds) if (name, epsilon, label, s) not in done]
    if not missing:
        return
    arm, most = ARMS[label], len(views_of(name))
    base = load(folder, name, most if arm.pooled else 1, most if arm.test_pooled else 1)
    by_lam = {lam: whitened(base, lam) if arm.whitened else base for lam in arm.lams}
    best: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    rates = ONCE_RATES if arm.once else RATES[epsilon]
    for rate, lam in itertools.product(rates, arm.lams):
        data = by_lam[lam]
        labels = data.parts["validation"][1].numpy()
        value = 0.0
        for seed in range(CHOSEN_BY):
            head = train(data, arm, epsilon, seed, rate, lam)
            value += sum(scores(labels, answers(data, head, "validation"))) / CHOSEN_BY
        best = max(best, (value, rate, lam))
    _, rate, lam = best
    data = by_lam[lam]
    for seed in missing:
        head = train(data, arm, epsilon, seed, rate, lam)
        said = answers(data, head, "test")
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

    ours = {s: read(label, s) for s in seeds}
    theirs = {s: read("plain", s) for s in seeds}
    members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    generator, found = np.random.default_rng(0), []
    for _ in range(300):
        chosen = np.concatenate(
            [members[i] for i in generator.integers(0, len(members), len(members))]
        )
        drawn = generator.choice(seeds, len(seeds))
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
        for label in ARMS:
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
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.05, 0.5, 5.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = data_root() / "levers"
    folder.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if given.what == "extract":
        for name in given.sets:
            extract(name, given.weights, folder)
    elif given.what == "run":
        for name, epsilon, label in itertools.product(given.sets, given.epsilon, given.arms):
            run(folder, name, epsilon, label, given.seeds)
    else:
        (RESULTS / "table.md").write_text(table(folder))
        print(table(folder))


if __name__ == "__main__":
    main()
