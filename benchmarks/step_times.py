"""How long a private step takes, beside plain SGD, Opacus and vmap, interleaved in one process.

`python benchmarks/step_times.py --help`; `make bench` runs it whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from peers import NETWORKS, VARIANTS, run_bench, write_results
from peers.steps import ROUNDS
from xcal.federation.folder import command


def main(
    network: list[str] = typer.Option(
        [], help="resnet18, efficientnet_b0 (both if none is given), densenet121 or vit."
    ),
    pixels: list[int] = typer.Option([], help="64 or 128; both if not given."),
    variants: str | None = typer.Option(None, help="Comma-separated; all if not given."),
    rounds: int = typer.Option(ROUNDS, help="Interleaved repetitions."),
    threads: list[int] = typer.Option([], help="1 or 2; both if not given."),
    memory: bool = typer.Option(True, help="Also measure memory, one process each."),
    out: Path = typer.Option(Path("benchmarks/results"), help="Where the table goes."),
    as_json: bool = typer.Option(False, "--json", help="Print the rows as JSON and nothing else."),
) -> None:
    """Time plain SGD, our step, Opacus, vmap and the signal."""
    rows = run_bench(
        networks=network or NETWORKS,
        pixels=pixels or (64, 128),
        variants=variants.split(",") if variants else VARIANTS,
        rounds=rounds,
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


if __name__ == "__main__":
    typer.run(main)
