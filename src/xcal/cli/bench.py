"""`xcal bench`: how long a private step takes, beside plain SGD and its peers."""

from __future__ import annotations

import json
from pathlib import Path

import typer

app = typer.Typer(
    help="Step times and memory against plain SGD and peers.", invoke_without_command=True
)


@app.callback()
def bench_command(
    context: typer.Context,
    network: list[str] = typer.Option([], help="resnet18 or efficientnet_b0; both if not given."),
    pixels: list[int] = typer.Option([], help="64 or 128; both if not given."),
    variants: str | None = typer.Option(None, help="Comma-separated; all if not given."),
    rounds: int | None = typer.Option(None, help="Interleaved repetitions."),
    threads: list[int] = typer.Option([], help="1 or 2; both if not given."),
    memory: bool = typer.Option(True, help="Also measure memory, one process each."),
    out: Path = typer.Option(Path("benchmarks/results"), help="Where the table goes."),
    as_json: bool = typer.Option(False, "--json", help="Print the rows as JSON and nothing else."),
) -> None:
    """Time plain SGD, our step, Opacus, vmap and the signal, interleaved in one process."""
    if context.invoked_subcommand is not None:
        return
    from xcal.bench.results import write_results
    from xcal.bench.steps import ROUNDS, run_bench
    from xcal.bench.variants import NETWORKS, VARIANTS
    from xcal.federation.folder import command

    rows = run_bench(
        networks=network or NETWORKS,
        pixels=pixels or (64, 128),
        variants=variants.split(",") if variants else VARIANTS,
        rounds=ROUNDS if rounds is None else rounds,
        threads=threads or (1, 2),
        memory=memory,
        progress=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    path = write_results(rows, out, command=command())
    typer.echo(path.read_text())
    typer.echo(f"Written to {path}", err=True)


@app.command("signal")
def signal_command(
    out: Path = typer.Option(Path("benchmarks/results"), help="Where the table goes."),
) -> None:
    """What a signal costs against how well it is known, for the choice of its defaults."""
    from xcal.bench import signal_cost

    signal_cost.main([str(out)])


@app.command("road")
def road_command(
    network: str = typer.Option("efficientnet_b0", help="A network's name."),
    images: int = typer.Option(1000, help="How many images."),
    pixels: int = typer.Option(64, help="Their side."),
    threads: int = typer.Option(2, help="torch threads."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON and nothing else."),
) -> None:
    """Time ROAD: maps, imputation and forwards, four levels, both orders."""
    import torch

    from xcal.config import make_experiment
    from xcal.explain.road_timing import time_road
    from xcal.models.registry import build_network

    model = build_network(make_experiment({"network": network}, "the options"), 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = time_road(model, images=images, pixels=pixels).summary()
    finally:
        torch.set_num_threads(before)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(
        f"ROAD of {images} images at {pixels} px with {network}, {threads} threads:"
        f" {found['total_seconds']:.1f} s (maps {found['maps_seconds']:.1f}, ROAD"
        f" {found['road_seconds']:.1f}, of which imputation about"
        f" {found['imputation_seconds']:.1f} and forwards {found['forward_seconds']:.1f})."
    )
