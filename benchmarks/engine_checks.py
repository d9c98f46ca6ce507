"""What a step of `xcal.PrivacyEngine` costs with the looks that it takes at loop and network.

Interleaved in one process, on DenseNet-121 and the ViT of MONAI: plain SGD, the engine as it is,
the engine without its looks, and Opacus in ghost mode, each as a loop of a user. After 0, 1,
2, 4, 8 … steps the engine looks inside the network as well: those steps are timed by themselves.

`python benchmarks/engine_checks.py --help`
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from peers.variants import CLIP, LEARNING_RATE, SIGMA, Setting
from xcal.dp.clipping import OpenPass
from xcal.dp.steps import PrivateSteps

Run = Callable[[], None]


def sgd(setting: Setting) -> Run:
    model, (images, labels) = setting.model(), setting.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return run


def private(setting: Setting, engine: Any, **options: Any) -> Run:
    """The loop that either library documents; every draw is the whole batch, as SGD has it."""
    model = setting.model()
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(*setting.data()), batch_size=setting.batch),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        **options,
    )

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return run


def ours(setting: Setting) -> Run:
    return private(setting, xcal.PrivacyEngine(seed=0))


@contextmanager
def _blind() -> Iterator[None]:
    with (
        patch.object(PrivateSteps, "look_again", lambda *_: None),
        patch.object(OpenPass, "check_apart", lambda *_, **__: None),
        patch("xcal.dp.wrappers.check_losses_apart", lambda *_: None),
    ):
        yield


def ours_blind(setting: Setting) -> Run:
    """Without its looks: for what they cost, and never for training."""
    step = ours(setting)

    def run() -> None:
        with _blind():
            step()

    return run


def opacus_ghost(setting: Setting) -> Run:
    from opacus import PrivacyEngine

    return private(setting, PrivacyEngine(), grad_sample_mode="ghost")


VARIANTS: dict[str, Callable[[Setting], Run]] = {
    "sgd": sgd,
    "engine": ours,
    "engine, without looks": ours_blind,
    "opacus, ghost": opacus_ghost,
}


def timed(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Seconds a step and in plain steps; of the engine those that look inside apart."""
    made: dict[str, Run] = {}
    failed: dict[str, str] = {}
    for name, build in VARIANTS.items():
        try:
            made[name] = build(setting)
        except Exception as error:  # a library that does not take the network
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    times: dict[str, list[float]] = {name: [] for name in made}
    looks: list[float] = []
    for step in range(rounds):
        for name, run in list(made.items()):
            try:
                seconds = timed(run)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                del made[name]
                continue
            # With so many steps taken the engine looks again.
            if name == "engine" and step & (step - 1) == 0:
                looks.append(seconds)
            elif step:  # the first warms up
                times[name].append(seconds)
    plain = median(times["sgd"])
    shown = {**{name: times[name] for name in made}, "engine, when it looks inside": looks}
    rows = [
        {
            "network": setting.network,
            "pixels": setting.pixels,
            "batch": setting.batch,
            "variant": name,
            "seconds": median(found) if found else None,
            "plain_steps": median(found) / plain if found else None,
            "steps": len(found),
        }
        for name, found in shown.items()
    ]
    return rows + [
        {"network": setting.network, "variant": name, "refused": why}
        for name, why in failed.items()
    ]


def main(
    network: list[str] = typer.Option(["densenet121", "vit"], help="Of those in peers/."),
    pixels: int = typer.Option(64, help="Side of the images."),
    batch: int = typer.Option(32, help="Images a step."),
    rounds: int = typer.Option(40, help="Interleaved steps of each; two show that it works."),
) -> None:
    """Time a loop with the engine, with and without its looks, beside plain SGD and Opacus."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [row for name in network for row in measure(Setting(name, pixels, batch), rounds)]
    typer.echo(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
