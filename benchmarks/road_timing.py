"""How long ROAD takes on this machine, and on what."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import torch
import typer
from torch import nn

from xcal.experiments import make_experiment
from xcal.explain.gradcam import gradcam_maps
from xcal.explain.inference import predict_logits
from xcal.explain.road import (
    RoadSettings,
    removed_and_imputed,
    road,
    saliency_for_ranking,
)
from xcal.models.model_registry import build_network


@dataclass(frozen=True)
class RoadTiming:
    """Wall-clock seconds. `maps_seconds` and `road_seconds` are what a run pays; the other two
    repeat ROAD's parts on a share of the images, scaled up, and say where the time goes."""

    images: int
    pixels: int
    levels: tuple[float, ...]
    threads: int
    maps_seconds: float
    road_seconds: float
    imputation_seconds: float
    forward_seconds: float

    @property
    def total_seconds(self) -> float:
        """Maps and ROAD together: what evaluating a model costs."""
        return self.maps_seconds + self.road_seconds

    def summary(self) -> dict[str, float | int | list[float]]:
        """Plain numbers for a result file."""
        numbers = asdict(self)
        return {**numbers, "levels": list(self.levels), "total_seconds": self.total_seconds}


def time_road(
    model: nn.Module,
    *,
    images: int = 1000,
    pixels: int = 64,
    channels: int = 3,
    settings: RoadSettings | None = None,
    seed: int = 0,
) -> RoadTiming:
    """Time Grad-CAM maps and ROAD on `images` random images of `pixels` by `pixels`.

    Random images do: neither the networks nor the imputation look at content, and the removed
    regions are those of the model's own maps. Uses as many threads as torch is set to.
    """
    settings = settings or RoadSettings()
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(images, channels, pixels, pixels, generator=generator)
    # The first call of everything pays for what is set up only once.
    predict_logits(model, batch[: settings.batch_size])

    started = time.perf_counter()
    maps = gradcam_maps(model, batch)
    maps_seconds = time.perf_counter() - started

    started = time.perf_counter()
    road(model, batch, maps, settings)
    road_seconds = time.perf_counter() - started

    sample = min(images, max(settings.batch_size, images // 10))
    saliency, _, _ = saliency_for_ranking(maps[:sample], (pixels, pixels))
    started = time.perf_counter()
    chunks = list(removed_and_imputed(batch[:sample], saliency, settings))
    imputation_seconds = (time.perf_counter() - started) * images / sample
    started = time.perf_counter()
    for chunk in chunks:
        predict_logits(model, chunk.flatten(0, 1), batch_size=settings.batch_size)
    forward_seconds = (time.perf_counter() - started) * images / sample

    return RoadTiming(
        images=images,
        pixels=pixels,
        levels=settings.levels,
        threads=torch.get_num_threads(),
        maps_seconds=maps_seconds,
        road_seconds=road_seconds,
        imputation_seconds=imputation_seconds,
        forward_seconds=forward_seconds,
    )


def main(
    network: str = typer.Option("efficientnet_b0", help="A network's name."),
    images: int = typer.Option(1000, help="How many images."),
    pixels: int = typer.Option(64, help="Their side."),
    threads: int = typer.Option(2, help="torch threads."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON and nothing else."),
) -> None:
    """Time ROAD: maps, imputation and forwards, four levels, both orders."""
    torch.set_num_threads(threads)
    model = build_network(make_experiment({"network": network}, "the options"), 8)
    found = time_road(model, images=images, pixels=pixels).summary()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(
        f"ROAD of {images} images at {pixels} px with {network}, {threads} threads:"
        f" {found['total_seconds']:.1f} s (maps {found['maps_seconds']:.1f}, ROAD"
        f" {found['road_seconds']:.1f}, of which imputation about"
        f" {found['imputation_seconds']:.1f} and forwards {found['forward_seconds']:.1f})."
    )


if __name__ == "__main__":
    typer.run(main)
