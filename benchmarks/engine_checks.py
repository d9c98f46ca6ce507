"""What a step of `xcal.PrivacyEngine` costs with the looks that it takes at loop and network.

Interleaved in one process: plain SGD, the clipped step that `xcal run` takes, the engine as it is,
the engine without its looks, and Opacus in ghost mode, the last three each as a loop of a user.
After 0, 1, 4, 16, 64 … steps the engine looks inside the network as well: those are told apart.
Times are the process' own, on one thread, so that other work on the machine moves them little.

`python benchmarks/engine_checks.py --help`
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from peers.variants import CLIP, LEARNING_RATE, SIGMA, Setting, make_step
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


def step_of_runs(setting: Setting) -> Run:
    step = make_step("ours", setting)
    number = itertools.count()
    return lambda: step.run(next(number))


OPACUS = "opacus, ghost"
VARIANTS: dict[str, Callable[[Setting], Run]] = {
    "sgd": sgd,
    "step of xcal run": step_of_runs,
    "engine": ours,
    "engine, without looks": ours_blind,
    OPACUS: opacus_ghost,
}


def timed(run: Run) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(setting: Setting, rounds: int, opacus: int) -> list[dict[str, Any]]:
    """Steps in plain ones, paired with the plain step of the round; looks inside apart."""
    made: dict[str, Run] = {}
    failed: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # a library that does not take the network
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            made.pop(name, None)

    for name, build in VARIANTS.items():
        if name != OPACUS or opacus:
            run = attempt(name, partial(build, setting))
            if run is not None:
                made[name] = run
                attempt(name, run)  # the first warms up
    times: dict[str, dict[int, float]] = {name: {} for name in made}
    for step in range(1, rounds + 1):
        names = list(made)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            if name == OPACUS and step > opacus:
                continue
            seconds = attempt(name, partial(timed, made[name]))
            if seconds is not None:
                # With so many steps taken the engine looks again.
                inside = name == "engine" and step in (1, 4, 16, 64, 256)
                shown = "engine, when it looks inside" if inside else name
                times.setdefault(shown, {})[step] = seconds
    rows = []
    for name, found in times.items():
        ratios = sorted(seconds / times["sgd"][step] for step, seconds in found.items())
        if ratios:
            rows.append(
                {
                    "network": setting.network,
                    "pixels": setting.pixels,
                    "batch": setting.batch,
                    "variant": name,
                    "plain_steps": round(median(ratios), 2),
                    "quartiles": [round(ratios[len(ratios) * k // 4], 2) for k in (1, 3)],
                    "ms": round(1e3 * median(found.values())),
                    "steps": len(ratios),
                }
            )
    return rows + [
        {"network": setting.network, "variant": name, "refused": why}
        for name, why in failed.items()
    ]


def main(
    network: list[str] = typer.Option(["densenet121", "vit"], help="Of those in peers/."),
    pixels: int = typer.Option(64, help="Side of the images."),
    batch: int = typer.Option(32, help="Images a step."),
    rounds: int = typer.Option(40, help="Interleaved steps of each; two show that it works."),
    opacus: int = typer.Option(5, help="In how many of them Opacus takes part."),
) -> None:
    """Time a loop with the engine, with and without its looks, beside plain SGD and Opacus."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [row for one in network for row in measure(Setting(one, pixels, batch), rounds, opacus)]
    typer.echo(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
