"""What shared noise under masks is worth: macro F1 and AUROC at equal ε, by the number of sites.

    export XCAL_FEATURES=features XCAL_DATA=...
    PYTHONPATH=. python benchmarks/masked_utility.py run blood-cells ham10000 chest-xray14
    PYTHONPATH=. python benchmarks/masked_utility.py table

A linear head on the features of the study scale `probe`, one image as the unit, unlike clients by
whole groups. `site` is `fl-dp` as it runs by default: 20 rounds of an epoch, every site adds all of
the noise, fixed plans by privacy-loss distributions. `masked` takes as many steps, one a round, and
a site adds 1/√h of the noise for h = N − 1 honest sites; its multiplier is that of the whole Rényi
orders at which the discrete Gaussian is proved, and its grid that of `DistributedGrid`, rounding
included. The noise here is a continuous Gaussian of the same deviation, and the masks are left out:
the sum is the same with them (tests/federation). Rates are chosen for each on validation
images, from a grid that goes on where its end is the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from levers import DELTA, clipped_slope, commit, intervals, multiplier, scores, shards_of
from numpy.typing import NDArray
from torch import Tensor

from reproduce.fast import fill_features
from reproduce.probe import PROBE_SCALE
from reproduce.scales import make_cell
from xcal.data.normalize import to_tensor
from xcal.dp.calibration import calibrate
from xcal.dp.distributed import DistributedGrid, Part
from xcal.federation.constants import with_constants
from xcal.federation.setup import prepare
from xcal.methods.feature_store import FeatureStore
from xcal.models.backbone import split_backbone
from xcal.models.model_registry import build_network
from xcal.studies.grid import PROBE

RESULTS = Path(__file__).parent / "results" / "masked"
PAGE = Path(__file__).parents[1] / "docs" / "findings-probe.md"
ROUNDS, CLIP, AVERAGE = 20, 8.0, 0.2
RATES = {0.5: (0.02, 0.05, 0.1, 0.2, 0.5), 5.0: (0.1, 0.2, 0.5, 1.0, 2.0)}
SITES, CHOSEN_BY = (3, 10, 50), 2
SETS = ("blood-cells", "chest-xray14", "ham10000")


@dataclass(frozen=True)
class Features:
    train: Tensor
    validation: Tensor
    test: Tensor
    labels: dict[str, Tensor]
    groups: dict[str, NDArray[Any]]

    @property
    def classes(self) -> int:
        return int(self.labels["train"].max()) + 1


@lru_cache(maxsize=1)
def features(name: str, epsilon: float) -> Features:
    """What the head reads of every image, by the store of the study."""
    values = PROBE_SCALE.values("fl-dp", name, PROBE, epsilon, 0)
    weights = Path(os.environ["XCAL_DATA"]) / "weights" / "efficientnet_b0-imagenet.pth"
    cell = make_cell("probe", values, 0)
    federation = prepare(with_constants(cell.experiment({"weights": str(weights)})))
    fill_features(federation)
    data = federation.data
    split = split_backbone(build_network(federation.experiment, len(data.classes)).eval())
    store = FeatureStore.of_environment()
    assert split is not None and store is not None, "set XCAL_FEATURES to a folder"
    found = {}
    for part in ("train", "validation", "test"):
        pixels = np.asarray(getattr(data, part).pixels)
        like = split.begin(to_tensor(pixels[:1]))

        def missing(_: NDArray[np.int64]) -> Tensor:
            raise RuntimeError("an image has no features yet")

        rows = store.rows(split.digest(), pixels, 1.0, like, missing)
        found[part] = rows[torch.arange(len(rows))]
    images = {part: getattr(data, part) for part in found}
    return Features(
        **found,
        labels={part: torch.from_numpy(i.labels).long() for part, i in images.items()},
        groups={part: i.groups for part, i in images.items()},
    )


def batch_of(sites: int, smallest: int) -> int:
    return min(max(32, 1024 * 3 // sites), smallest)


@lru_cache(maxsize=64)
def shared_deviation(
    epsilon: float, rate: float, steps: int, size: int, sites: int, units: int
) -> float:
    """Deviation of the noise that one of `sites` adds to its part of a sum."""
    sigma = calibrate(epsilon, DELTA, rate, steps, whole_orders=True).sigma
    part = Part("gradient", size, CLIP, sigma)
    grid = DistributedGrid((part,), sites, sites - 1, units)
    return grid.scale / grid.fineness(part)


def train(data: Features, epsilon: float, sites: int, masked: bool, seed: int, lr: float) -> Tensor:
    shards = shards_of(data.groups["train"], seed, sites)
    smallest = min(map(len, shards))
    batch = batch_of(sites, smallest)
    steps = ROUNDS * -(-smallest // batch)
    head = torch.zeros(data.classes, data.train.shape[1] + 1)
    draws = torch.Generator().manual_seed(7919 * seed + sites)
    noise = torch.Generator().manual_seed(7919 * seed + sites + 1)

    def drawn(start: Tensor, shard: NDArray[np.int64], deviation: float) -> Tensor:
        chosen = shard[(torch.rand(len(shard), generator=draws) < batch / len(shard)).numpy()]
        total = clipped_slope(start, data.train[chosen], data.labels["train"][chosen])
        return total + deviation * torch.randn(total.shape, generator=noise)

    reported = head
    if masked:
        largest = max(map(len, shards))
        deviation = shared_deviation(epsilon, batch / smallest, steps, head.numel(), sites, largest)
        share = 1 - (1 - AVERAGE) ** (ROUNDS / steps)
        for number in range(steps):
            total = torch.zeros_like(head)
            for shard in shards:
                total += drawn(head, shard, deviation)
            head = head - lr * total / (batch * sites)
            reported = head if number == 0 else (1 - share) * reported + share * head
        return reported
    deviation = CLIP * multiplier(epsilon, batch / smallest, steps, "pld")
    for number in range(ROUNDS):
        sent = torch.zeros_like(head)
        for shard in shards:
            own = head.clone()
            for _ in range(steps // ROUNDS):
                own -= lr * drawn(own, shard, deviation) / batch
            sent += own * len(shard)
        head = sent / len(data.train)
        reported = head if number == 0 else (1 - AVERAGE) * reported + AVERAGE * head
    return reported


def answers(x: Tensor, head: Tensor) -> NDArray[np.float64]:
    said: NDArray[np.float64] = torch.softmax(
        (x @ head[:, :-1].T + head[:, -1]).double(), dim=1
    ).numpy()
    return said


def best_rate(rates: Sequence[float], chosen_by: Callable[[float], float]) -> float:
    """The best of some rates; where that is the lowest or highest of them, of further ones too."""
    found = {lr: chosen_by(lr) for lr in rates}
    for _ in range(4):
        best = max(found, key=lambda lr: found[lr])
        if min(found) < best < max(found):
            break
        further = best / 2 if best == min(found) else best * 2
        found[further] = chosen_by(further)
    return max(found, key=lambda lr: found[lr])


def run(name: str, epsilon: float, sites: int, seeds: int) -> dict[str, Any]:
    data, said = features(name, epsilon), {}
    row: dict[str, Any] = {"set": name, "epsilon": epsilon, "sites": sites, "commit": commit()}
    labels = {part: found.numpy() for part, found in data.labels.items()}
    for masked in (False, True):

        def chosen_by(lr: float, masked: bool = masked) -> float:
            heads = [train(data, epsilon, sites, masked, s, lr) for s in range(CHOSEN_BY)]
            found = [scores(labels["validation"], answers(data.validation, h)) for h in heads]
            return sum(map(sum, found))

        lr = best_rate(RATES[epsilon], chosen_by)
        heads = [train(data, epsilon, sites, masked, seed, lr) for seed in range(seeds)]
        said[masked] = [answers(data.test, head) for head in heads]
        found = [scores(labels["test"], one) for one in said[masked]]
        arm = "masked" if masked else "site"
        row[arm] = {"rate": lr, "macro_f1": [a for a, _ in found], "auroc": [b for _, b in found]}
    spans = intervals(labels["test"], data.groups["test"], said[True], said[False])
    row["intervals"] = dict(zip(("macro_f1", "auroc"), spans, strict=True))
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| set | ε | sites | F1, site | F1, masked | masked − site [95 %] | AUROC, site"
        " | AUROC, masked | masked − site [95 %] | rates |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: (r["set"], r["epsilon"], r["sites"])):
        shown = [row["set"], f"{row['epsilon']:g}", str(row["sites"])]
        for measure in ("macro_f1", "auroc"):
            pair = [np.array(row[arm][measure]) for arm in ("site", "masked")]
            shown += [f"{one.mean():.3f} ± {one.std(ddof=1):.3f}" for one in pair]
            low, high = row["intervals"][measure]
            shown.append(f"{(pair[1] - pair[0]).mean():+.3f} [{low:+.3f}, {high:+.3f}]")
        shown.append(f"{row['site']['rate']:g}, {row['masked']['rate']:g}")
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines).replace("-0.", "−0.") + "\n"


def missing(rows: list[dict[str, Any]]) -> str:
    """Which settings there are no results of, in a sentence; empty where all are there."""
    known = {(row["set"], row["epsilon"], row["sites"]) for row in rows}
    told = []
    for name in SETS:
        lacking = [s for s in itertools.product([name], RATES, SITES) if s not in known]
        if len(lacking) == len(RATES) * len(SITES):
            told.append(name)
        else:
            told += [
                f"{name} with {sites} sites at ε = {epsilon:g}" for _, epsilon, sites in lacking
            ]
    return f"Not run yet: {', '.join(told)}.\n" if told else ""


def write(rows: list[dict[str, Any]]) -> None:
    """The table beside the rows and in the page, with what is missing."""
    made = table(rows)
    (RESULTS / "utility.md").write_text(made)
    part = "<!-- masked -->\n\n" + "\n".join(p for p in (made, missing(rows)) if p)
    text = re.sub(
        r"<!-- masked -->.*?(?=\n<!-- end -->)", lambda _: part, PAGE.read_text(), flags=re.DOTALL
    )
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 5.0])
    parser.add_argument("--sites", type=int, nargs="+", default=list(SITES))
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "utility.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(row["set"], row["epsilon"], row["sites"]) for row in rows}
    if given.what == "run":
        for asked in itertools.product(given.sets, given.epsilon, given.sites):
            if asked not in known:
                rows.append(run(*asked, given.seeds))
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        return
    write(rows)
    print(table(rows), missing(rows), sep="\n")


if __name__ == "__main__":
    main()
