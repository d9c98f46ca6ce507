"""`xcal demo speed`: a private step beside a plain one and beside Opacus, in turns."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from xcal.cli.interrupts import stop_if_interrupted
from xcal.cli.show import make_table

if TYPE_CHECKING:
    from torch import nn

NETWORK, CLASSES, BATCH, PIXELS = "resnet18", 5, 32, 64
TURNS = 11
SLOW_TURNS = 2  # of what takes several times as long
CLIP = SIGMA = 1.0

Step = Callable[[], None]


def speed_part(console: Console, _: Path) -> list[str]:
    """Time the steps in turns, so that whatever else the machine does meets all of them."""
    import torch

    from xcal.federation.loaded_site import torch_threads

    console.print(
        f"One training step of {NETWORK} on {BATCH} images of {PIXELS} x {PIXELS} pixels, one CPU"
        " thread. A private step clips every image's gradient and adds noise. The kinds take turns,"
        " so that other load on this machine slows all of them."
    )
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, PIXELS, PIXELS)
    labels = torch.randint(0, CLASSES, (BATCH,))
    with torch_threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a peer says about itself
        steps: dict[str, Step] = {
            "plain SGD": _plain(images, labels),
            "xcal": _private(images, labels),
        }
        if find_spec("opacus") is not None:
            steps["Opacus"] = _opacus(images, labels)
        else:
            console.print("Opacus is not installed (the extra `demo` has it): it is left out.")
        times = _timed(console, steps)
    plain = times["plain SGD"]
    medians, rows = {}, []
    for name, taken in times.items():
        ratios = [one / plain[turn] for turn, one in enumerate(taken)]
        medians[name] = statistics.median(ratios)
        between = f"{min(ratios):.2f} to {max(ratios):.2f}"
        milliseconds = f"{1000 * statistics.median(taken):.0f}"
        rows.append((name, f"{medians[name]:.2f}", between, milliseconds))
    heads = ("step", ">time / plain SGD", ">range", ">ms")
    console.print(make_table("Step time (medians)", heads, rows))
    console.print("More networks and sizes, from a clone on an idle machine: `make bench`.")
    beside = f", with Opacus {medians['Opacus']:.1f} times" if "Opacus" in medians else ""
    return [f"A private step takes {medians['xcal']:.1f} times as long as plain SGD{beside}."]


def _timed(console: Console, steps: dict[str, Step]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # the first of each makes what the others use
        step()
    for turn in range(TURNS):
        for name, step in steps.items():
            stop_if_interrupted()
            if name == "Opacus" and turn >= SLOW_TURNS:
                continue
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
        shown = ", ".join(f"{n} {1000 * t[turn]:.0f} ms" for n, t in times.items() if len(t) > turn)
        console.print(f"  turn {turn + 1} of {TURNS}: {shown}")
    return times


def _network() -> nn.Module:
    from xcal.models.resnet import resnet18

    return resnet18(CLASSES, norm="group", seed=0).train()


def _plain(images: Any, labels: Any) -> Step:
    import torch

    model = _network()
    return _taken(model, torch.optim.SGD(model.parameters(), lr=1e-3), images, labels)


def _taken(model: nn.Module, optimizer: Any, images: Any, labels: Any) -> Step:
    from torch.nn.functional import cross_entropy

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def _private(images: Any, labels: Any) -> Step:
    """What a client of `xcal run` does to a batch: clip, add noise, round, update."""
    import torch

    from xcal.dp.clipping import ClippingEngine
    from xcal.dp.noise import NoiseKey, SeededNoise, release_tensors

    model = _network()
    engine, noise = ClippingEngine(model), SeededNoise(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    taken = [0]

    def step() -> None:
        sums = engine.clipped_sum(images, labels, clip=CLIP)
        key = NoiseKey("demo", "xcal", 0, taken[0], "gradient")
        released = release_tensors(sums.gradients, SIGMA * CLIP, noise, key)
        for name, parameter in model.named_parameters():
            parameter.grad = released[name].div_(BATCH)
        optimizer.step()
        taken[0] += 1

    return step


def _opacus(images: Any, labels: Any) -> Step:
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(_network())
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=BATCH,
    )
    return _taken(model, optimizer, images, labels)
