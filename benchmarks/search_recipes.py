"""Searches, on validation images, for settings that learn well under a given ε.

    python benchmarks/search_recipes.py blood-cells --epsilon 0.5 --train head --lr 1 2 4

Every finished setting is a row of `benchmarks/results/recipes/DATA.csv`; a row that is there is not
computed again, so an interrupted search goes on where it stood. Training is the package's own
`client_round` and `server_round`; only what a frozen backbone makes of each image is computed once
for all settings and kept in `--scratch`. The test images are not opened, but by `--test`, once for
the setting that was chosen; those rows go to `DATA-test.csv`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Terms
from xcal.dp.noise import SeededNoise
from xcal.experiments import make_experiment
from xcal.federation.aggregation import Mean, averaged, server_round
from xcal.federation.constants import with_constants
from xcal.federation.evaluation import predict
from xcal.federation.exchange import RoundRequest, load_weights
from xcal.federation.folder import command, commit
from xcal.federation.loaded_site import LoadedSite, keep_freed_memory
from xcal.federation.rounds import client_round
from xcal.federation.setup import Federation, prepare
from xcal.methods.client_data import LocalData
from xcal.metrics.classification import macro_f1
from xcal.models.backbone import Split, split_backbone
from xcal.models.model_registry import build_network

RESULTS = Path(__file__).parent / "results" / "recipes"
# What a setting is known by; the rest of a row is what came of it.
KEYS = (
    "data train_images network pixels output_stride head_reads train epsilon method batch rounds"
    " local_epochs lr clip optimizer momentum average average_steps views augment seed"
).split()
FOUND = "test_macro_f1 validation_macro_f1 sigma seconds commit command".split()


def grid(**choices: Any) -> list[dict[str, Any]]:
    """All combinations of the listed values."""
    lists = [v if isinstance(v, list) else [v] for v in choices.values()]
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*lists)]


class Search:
    """One data set at one size, with one part of the network training."""

    def __init__(self, base: dict[str, Any], scratch: Path, command: str) -> None:
        self._base = base
        self._command = command
        self._scratch = scratch
        self._tables: dict[str, Tensor] = {}

    def activations(self, name: str, images: Images, split: Split) -> Tensor:
        """What the frozen backbone makes of all images, computed once and kept on disk."""
        key = f"{name}-{len(images)}-{split.digest()[:16]}"
        if key not in self._tables:
            about = f"{self._base['data']}-{self._base['pixels']}-{self._base['output_stride']}"
            path = self._scratch / f"{about}-{key}.npy"
            self._tables[key] = torch.from_numpy(_computed(path, images, split))
        return self._tables[key]

    def run(self, keys: dict[str, Any], test: bool = False) -> dict[str, Any]:
        """Train one setting; macro F1 on the validation images, of the model at the end.

        `test`: also, of the model at the end, on the test images.
        """
        began = time.monotonic()
        experiment = make_experiment({**self._base, **keys})
        federation = prepare(experiment)
        plan = federation.plans[0]
        assert plan is not None
        model = build_network(experiment, len(federation.data.classes))
        split = split_backbone(model)
        table = None
        if split is not None:
            table = self.activations("train", federation.data.train, split)
        with tempfile.TemporaryDirectory(dir=self._scratch) as place:
            sites = list(self._sites(federation, model, split, table, Path(place)))
            weights = {k: p.detach().clone() for k, p in trainable(model).items()}
            reported = weights
            for t in range(experiment.rounds):
                replies = [
                    client_round(
                        RoundRequest("search", t, federation.own_rounds(c), experiment),
                        weights,
                        site,
                    )
                    for c, site in enumerate(sites)
                ]
                weights, _ = server_round(t, weights, replies, Mean(), None)
                reported = averaged(reported, weights, 1.0 if t == 0 else experiment.average)
            load_weights(model, reported)
        validated = self._f1("validation", federation.data.validation, model, split)
        tested = self._f1("test", federation.data.test, model, split) if test else None
        return {
            "test_macro_f1": "" if tested is None else round(tested, 4),
            "validation_macro_f1": round(validated, 4),
            "sigma": round(plan.sigma_static, 3),
            "seconds": round(time.monotonic() - began, 1),
            "commit": commit(),
            "command": self._command,
        }

    def _sites(
        self,
        federation: Federation,
        model: nn.Module,
        split: Split | None,
        table: Tensor | None,
        place: Path,
    ) -> Iterator[LoadedSite]:
        experiment = federation.experiment
        for client, shard in enumerate(federation.parts.shards):
            site_dir = place / str(client)
            plan = federation.plans[client]
            assert plan is not None
            terms = Terms(f"search {client}", "record", plan.epsilon, plan.delta, simulated=True)
            ledger.create(site_dir / "ledger.sqlite", terms)
            data = LocalData(
                federation.data.train.take(shard.indices), unit="record", images_per_unit=1
            )
            if table is not None:
                kept = data.cache_features(split, experiment.feature_cache_mb)
                assert kept, "raise feature_cache_mb"
                data.inputs.fill(table[torch.from_numpy(shard.indices)])
            yield LoadedSite(
                str(client), site_dir, data, SeededNoise(experiment.seed), lambda: model
            )

    def _f1(self, name: str, images: Images, model: nn.Module, split: Split | None) -> float:
        if split is None:
            return predict(model, images).macro_f1()
        shown = self.activations(name, images, split)
        with torch.no_grad():
            logits = torch.cat([split.forward_head(part) for part in shown.split(256)])
        return float(macro_f1(images.labels, logits.argmax(1).numpy(), logits.shape[1]))


def _computed(path: Path, images: Images, split: Split) -> NDArray[np.float32]:
    """The table of all images, block after block into a file; a cut-off one is gone on with."""
    if not path.exists():
        part, count = path.with_suffix(".part.npy"), path.with_suffix(".count")
        one = split.begin(to_tensor(np.asarray(images.pixels[:1])))
        shape = (len(images), *one.shape[1:])
        done = int(count.read_text()) if count.exists() else 0
        table = np.lib.format.open_memmap(part, "r+" if done else "w+", np.float32, shape)
        for i in range(done, len(images), 32):
            table[i : i + 32] = split.begin(to_tensor(np.asarray(images.pixels[i : i + 32])))
            if i % 512 == 0:
                table.flush()
                count.write_text(str(i))
        table.flush()
        part.rename(path)
        count.unlink(missing_ok=True)
    found: NDArray[np.float32] = np.load(path)
    return found


def read_rows(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {tuple(row[k] for k in KEYS): row for row in csv.DictReader(file)}


def append_row(path: Path, row: dict[str, Any]) -> None:
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, [*KEYS, *FOUND], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def settings(base: dict[str, Any], keys: dict[str, Any]) -> Experiment:
    return make_experiment({**base, **keys})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--stride", type=int, default=32)
    parser.add_argument("--network", default="efficientnet_b0")
    parser.add_argument("--reads", default="last", help="what the head reads (head_reads)")
    parser.add_argument("--train", default="head")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 5.0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, nargs="+", default=[10])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1])
    parser.add_argument("--lr", type=float, nargs="+", default=[1.0])
    parser.add_argument("--clip", type=float, nargs="+", default=[1.0])
    parser.add_argument("--optimizer", nargs="+", default=["sgd"])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.9])
    parser.add_argument("--average", type=float, nargs="+", default=[0.5])
    parser.add_argument("--average-steps", type=float, nargs="+", default=[0.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--train-images", type=int, default=None)
    parser.add_argument("--method", default="fl-dp")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "recipes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.scratch.mkdir(parents=True, exist_ok=True)
    given.results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    keep_freed_memory()
    base = {
        "data": given.data,
        "unit": "record",
        "pixels": given.pixels,
        "output_stride": given.stride,
        "network": given.network,
        "method": given.method,
        "clients": 3,
        "delta": 1e-5,
        "accountant": "renyi",  # as all committed settings were found
        "feature_cache_mb": 4096,
        "chunk": 512,
        "expected_batch_size": 32,
    }
    if given.network == "efficientnet_b0":
        weights = Path(os.environ["XCAL_DATA"]) / "weights" / "efficientnet_b0-imagenet.pth"
        base |= {"norm": "frozen", "weights": str(weights), "train": given.train}
        base["head_reads"] = given.reads
        base["weights"] = with_constants(make_experiment(base)).weights
    if given.train_images is not None:
        base["train_images"] = given.train_images
    # Where files lie on this machine is nobody's business.
    told = re.sub(r" --(scratch|results) \S+", "", command())
    search = Search(base, given.scratch, told)
    path = given.results / f"{given.data}{'-test' if given.test else ''}.csv"
    wanted = grid(
        seed=given.seeds,
        epsilon=given.epsilon,
        optimizer=given.optimizer,
        momentum=given.momentum,
        batch=given.expected_batch_size,
        rounds=given.rounds,
        local_epochs=given.epochs,
        average=given.average,
        average_steps=given.average_steps,
        clip=given.clip,
        lr=given.lr,
    )
    for keys in wanted:
        resolved = settings(base, keys).resolved()
        row = {key: resolved[key] for key in KEYS} | {"train_images": given.train_images or "all"}
        if tuple(str(row[k]) for k in KEYS) in read_rows(path):
            continue
        row |= search.run(keys, given.test)
        append_row(path, row)
        shown = " ".join(f"{k}={row[k]}" for k in KEYS[2:] if k not in ("method", "augment"))
        print(f"{row['validation_macro_f1']:.3f} {row['test_macro_f1']} {shown}", flush=True)


if __name__ == "__main__":
    main()
