"""Where a private step spends its time: `python benchmarks/profile_step.py --network vit`.

A network of `peers/`, 64 px, batch 32, one thread, in the process' own time; of the ViT also three
ways to the gradient of a linear layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import typer

from peers.variants import Setting, make_step
from xcal.dp.clipping.convolution import ConvShape, per_image_weight_gradient
from xcal.dp.clipping.tape import Tape, Units

BATCH, TOKENS, WIDE = 32, 65, 192
LAYERS = {"qkv": (WIDE, 3 * WIDE), "out": (WIDE, WIDE), "up": (WIDE, 4 * WIDE), "down": (768, WIDE)}
SHOWN = 12


def timed(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began)


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each; a first round warms up."""
    found = [{name: timed(run) for name, run in runs.items()} for _ in range(rounds + 1)][1:]
    return {name: median(one[name] for one in found) for name in runs}


def weight_gradients(rounds: int) -> None:
    """The plain sum, and norms and clipped sum from each image's gradient or from Gram matrices."""
    for name, (read, made) in LAYERS.items():
        x, g = torch.randn(BATCH, TOKENS, read), torch.randn(BATCH, TOKENS, made)
        shape = ConvShape((1, 1), (1, 1), (0, 0), (1, 1), 1, (made, read, 1, 1))
        pixels = [t.transpose(1, 2).unsqueeze(3) for t in (g, x)]

        def private(
            gram: bool, shape: ConvShape = shape, pixels: list[torch.Tensor] = pixels
        ) -> None:
            tape = Tape(Units(BATCH), torch.device("cpu"))
            if gram:
                tape.add_pair("w", *pixels, shape)
            else:
                tape.add_parts("w", per_image_weight_gradient(*pixels, shape))
            tape.squared_norms()
            tape.weighted_sum(torch.ones(BATCH, dtype=torch.float64))

        found = interleaved(
            {
                "plain": lambda x=x, g=g: g.flatten(0, 1).T @ x.flatten(0, 1),
                "each image's": lambda: private(False),
                "Gram": lambda: private(True),
            },
            rounds,
        )
        typer.echo(
            f"{name} ({read} -> {made}), ms: { ({k: round(v, 1) for k, v in found.items()}) }"
        )


def main(
    network: str = typer.Option("vit", help="Of those in peers/."),
    rounds: int = typer.Option(8, help="Interleaved steps of each."),
) -> None:
    """The step in plain ones, and what its operations take."""
    torch.set_num_threads(1)
    steps = {name: make_step(name, Setting(network, 64, BATCH)) for name in ("sgd", "ours")}
    counts = dict.fromkeys(steps, 0)

    def run(name: str) -> None:
        steps[name].run(counts[name])
        counts[name] += 1

    found = interleaved({name: lambda name=name: run(name) for name in steps}, rounds)
    typer.echo(f"step, ms: { ({k: round(v) for k, v in found.items()}) }")
    typer.echo(f"in plain steps: {found['ours'] / found['sgd']:.2f}")
    for name in steps:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(name)
        events = sorted(profile.key_averages(), key=lambda e: -e.self_cpu_time_total)
        total = sum(e.self_cpu_time_total for e in events)
        typer.echo(f"\n{name}, shares of the step:")
        for event in events[:SHOWN]:
            share = event.self_cpu_time_total / total
            typer.echo(f"  {event.key[:40]:<40} {share:6.1%} {event.count:6} calls")
    if network == "vit":
        typer.echo("")
        weight_gradients(rounds)


if __name__ == "__main__":
    typer.run(main)
