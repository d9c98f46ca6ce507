"""What a frozen backbone makes of an image is kept: the same steps, up to rounding, and faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from support import TINY, tiny
from xcal.dp.clipping import Bound, ClippingEngine
from xcal.dp.noise import NoiseKey, SeededNoise
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.explain.gradcam import gradcam_maps
from xcal.explain.signal import SignalSettings, components, image_components, top_cells
from xcal.federation.evaluation import PublicImages, predict
from xcal.federation.files import read_tensors
from xcal.federation.setup import prepare
from xcal.methods.client_data import LocalData
from xcal.methods.context import Optimizer, StepContext
from xcal.methods.step_parts import clipped_sum, forward_with_components
from xcal.models.backbone import split_at_map, split_backbone
from xcal.models.model_registry import build_network

NETWORK = {"network": "resnet18", "pixels": 32}


def network(train: str, name: str = "resnet18") -> Any:
    return build_network(make_experiment({"network": name, "train": train}), 3)


def bench_keeping(megabytes: int, model: Any, data: LocalData, **settings: int) -> StepContext:
    """A context whose frozen backbone is kept where `megabytes` allow it."""
    split = split_backbone(model)
    assert data.cache_features(split, megabytes) == (megabytes > 0)
    return StepContext(
        client="0", method="m", round=0, first_step=0, model=model,
        engine=ClippingEngine(model), data=data, noise=SeededNoise(0), account=None,
        optimizer=Optimizer(model, "sgd", 0.1, 0.0), clip=1.0,
        split=split if megabytes else None, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
@pytest.mark.parametrize("train", ["head", "last:1", "last:2", "head+norm:2"])
def test_backbone_and_head_are_the_network(name: str, train: str) -> None:
    model = network(train, name)
    split = split_backbone(model)
    assert split is not None
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(split.forward_head(split.begin(images)), model(images))
    held = {id(p) for part in split.rest for p in part.parameters()}
    assert all(id(p) in held for p in model.parameters() if p.requires_grad)
    assert split.passes(model.get_submodule(model.cam_layer)) == (train != "head")


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_the_backbone_can_end_before_what_is_looked_at(name: str) -> None:
    model = network("head", name)
    split, shorter = split_backbone(model), split_backbone(model, seen=model.cam_layer)
    assert split is not None and shorter is not None
    assert shorter.passes(model.get_submodule(model.cam_layer))
    assert shorter.digest() != split.digest()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(shorter.forward_head(shorter.begin(images)), model(images))


@pytest.mark.parametrize("train", ["all", "head+norm"])
def test_where_the_first_layers_train_nothing_is_kept(train: str) -> None:
    assert split_backbone(network(train)) is None


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("train", ["head", "last:1"])
def test_clipped_sums_are_those_of_the_whole_network(train: str, views: int) -> None:
    model = network(train)
    sums = []
    for megabytes in (0, 64):
        data = LocalData(tiny(pixels=32, train=24).train, unit="group", images_per_unit=2,
                         views=views)  # fmt: skip
        context = bench_keeping(megabytes, model, data, batch=6)
        for capture in (None, model.cam_layer):
            batch = data.draw(0.6, SeededNoise(1), NoiseKey("0", "m", 0, 0, "draw"))
            sums.append(clipped_sum(context, batch, capture=capture))
    for name in sums[0].gradients:
        for one in sums[1:]:
            torch.testing.assert_close(one.gradients[name], sums[0].gradients[name],
                                       rtol=1e-4, atol=1e-6)  # fmt: skip
    torch.testing.assert_close(sums[1].features, sums[3].features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_scores_are_those_of_the_whole_network_where_the_map_is_frozen(
    share: float, views: int
) -> None:
    model = network("head")
    found = []
    for megabytes in (0, 64):
        data = LocalData(tiny(pixels=32, train=24).train, unit="record", images_per_unit=1,
                         views=views)  # fmt: skip
        context = bench_keeping(megabytes, model, data, batch=12, chunk=4)
        batch = data.draw(0.6, SeededNoise(1), NoiseKey("0", "m", 0, 0, "draw"))
        entering = np.arange(batch.n_units) < share * batch.n_units
        found.append(
            forward_with_components(context, batch, entering, SignalSettings(), Bound(1.0))
        )
    (sums, parts, chosen), (kept_sums, kept_parts, kept_chosen) = found
    assert torch.equal(chosen, kept_chosen)
    assert int(chosen.sum()) == int(entering.sum())  # one plain image a unit
    for name in sums.gradients:
        torch.testing.assert_close(kept_sums.gradients[name], sums.gradients[name],
                                   rtol=1e-4, atol=1e-6)  # fmt: skip
    for name in ("logit_drop", "margin", "concentration"):
        torch.testing.assert_close(getattr(kept_parts, name), getattr(parts, name),
                                   rtol=1e-4, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("fill", ["imagenet", "image-mean"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_covering_cells_is_what_the_head_says_of_the_covered_map(name: str, fill: str) -> None:
    model = network("head", name)
    split = split_at_map(model)
    assert split is not None
    images = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    settings = SignalSettings(q=0.3, fill=fill, cover="cells")
    with torch.no_grad():
        features = split.begin(images)
        logits = split.forward_head(features)
        maps = gradcam_maps(model, images)
        cells = top_cells(maps, settings.q, positive_only=True)[:, None]
        instead = features.mean(dim=(2, 3), keepdim=True) if fill == "image-mean" else 0.0
        covered = split.forward_head(torch.where(cells, instead, features))
        wanted = components(logits, maps, cells[:, 0], covered)
    found = image_components(model, images, logits, features, settings)
    for part in ("logit_drop", "margin", "concentration"):
        torch.testing.assert_close(getattr(found, part), getattr(wanted, part),
                                   rtol=1e-4, atol=1e-6)  # fmt: skip
    assert float(found.logit_drop.max()) > 0


@pytest.mark.parametrize("megabytes", [1, 64])  # where the maps fit, and where they do not
@pytest.mark.parametrize("rows", [0, 8])
def test_scores_by_cells_take_no_pass_and_are_those_of_the_whole_network(
    rows: int, megabytes: int
) -> None:
    model = network("head")
    settings, found = SignalSettings(cover="cells"), []
    for kept in (0, megabytes):
        data = LocalData(tiny(pixels=32, train=24).train, unit="record", images_per_unit=1)
        context = replace(bench_keeping(kept, model, data, batch=12, chunk=8), rows=rows)
        if kept:
            data.cache_maps(split_at_map(model), kept, rows)
        batch = data.draw(0.6, SeededNoise(1), NoiseKey("0", "m", 0, 0, "draw"))
        entering = np.arange(batch.n_units) % 2 == 0
        found.append(forward_with_components(context, batch, entering, settings, Bound(1.0)))
    (_, parts, chosen), (_, kept_parts, kept_chosen) = found
    assert torch.equal(chosen, kept_chosen)
    for part in ("logit_drop", "margin", "concentration"):
        torch.testing.assert_close(getattr(kept_parts, part), getattr(parts, part),
                                   rtol=1e-4, atol=1e-5)  # fmt: skip


def test_cells_of_a_network_without_a_linear_head_are_refused_before_anything() -> None:
    with pytest.raises(UserError, match="cover = 'cells'"):
        prepare(make_experiment({**TINY, "method": "xcal-steered", "cover": "cells",
                                 "network": "misbehaving:headless"}))  # fmt: skip


def test_public_images_are_judged_alike_with_and_without_kept_activations() -> None:
    model, images = network("last:1"), tiny(pixels=32, train=40).train
    kept = PublicImages(images, feature_cache_mb=64)
    for change in (None, "fc.weight", "conv1.weight"):  # the rest changes, then the beginning
        if change is not None:
            with torch.no_grad():
                model.get_parameter(change).mul_(1.5)
        judged = kept.predict(model).probabilities
        np.testing.assert_allclose(judged, predict(model, images).probabilities, atol=1e-5)
        assert np.array_equal(
            judged, PublicImages(images, feature_cache_mb=64).predict(model).probabilities
        )


def test_activations_are_the_same_to_the_bit_whoever_asks_first() -> None:
    split = split_backbone(network("last:1"))
    found = []
    for order in ((0.1, 0.9), (0.9, 0.1)):
        data = LocalData(tiny(pixels=32, train=90).train, unit="record", images_per_unit=1)
        data.cache_features(split, 64)
        drawn = {
            rate: data.draw(rate, SeededNoise(1), NoiseKey("0", "m", 0, 0, "draw")).inputs
            for rate in order
        }
        found.append({rate: drawn[rate].activations() for rate in order})
    assert all(torch.equal(found[0][rate], found[1][rate]) for rate in (0.1, 0.9))


def test_in_passes_of_one_size_an_image_s_activations_do_not_depend_on_who_else_is_there() -> None:
    split = split_backbone(network("last:1"))
    images = tiny(pixels=32, train=90).train
    nobody = np.zeros(1, dtype=np.int64)

    def of(first: int, last: int) -> Any:
        data = LocalData(images.take(np.arange(first, last)), unit="record", images_per_unit=1)
        assert data.cache_features(split, 64, rows=16)
        return data.inputs.activations(np.arange(last - first), nobody)

    whole = of(0, 90)
    for first, last in ((0, 1), (1, 90), (37, 60)):
        assert torch.equal(of(first, last), whole[first:last])


@pytest.mark.parametrize("views", [1, 3])
def test_an_empty_draw_is_empty_with_activations_too(views: int) -> None:
    model = network("last:1")
    data = LocalData(tiny(pixels=32, train=24).train, unit="record", images_per_unit=1, views=views)
    assert data.cache_features(split_backbone(model), 64)
    batch = data.draw(0.0, SeededNoise(1), NoiseKey("0", "m", 0, 0, "draw"))
    context = StepContext(
        client="0", method="m", round=0, first_step=0, model=model,
        engine=ClippingEngine(model), data=data, noise=SeededNoise(0), account=None,
        optimizer=Optimizer(model, "sgd", 0.1, 0.0), batch=6, clip=1.0,
        split=split_backbone(model),
    )  # fmt: skip
    for capture in (None, model.cam_layer):
        sums = clipped_sum(context, batch, capture=capture)
        assert all(float(g.abs().max()) == 0 for g in sums.gradients.values())


def test_too_little_memory_falls_back_to_the_whole_network() -> None:
    data = LocalData(tiny(pixels=32).train, unit="record", images_per_unit=1)
    assert not data.cache_features(split_backbone(network("last:1")), 0)
    assert data.cache_features(split_backbone(network("last:1")), 64)
    large = LocalData(tiny(pixels=32, train=600).train, unit="record", images_per_unit=1)
    assert not large.cache_features(split_backbone(network("last:1")), 1)


def test_a_run_with_and_without_kept_activations_ends_alike(tmp_path: Path) -> None:
    keys = {**TINY, **NETWORK, "train": "last:1", "method": "xcal-steered", "rounds": 1, "lr": 0.1}
    keys |= {"clients": 1, "units_per_client": 20, "road_images": 0, "road_test_images": 0}
    models = []
    for megabytes in (0, 64):
        out = tmp_path / str(megabytes)
        xcal.run(out, **keys, feature_cache_mb=megabytes)
        found = read_tensors(out / "model.safetensors")
        assert found is not None
        models.append(found[0])
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-3, atol=1e-4)
