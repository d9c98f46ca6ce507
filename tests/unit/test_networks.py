"""The networks: names, strides, what trains, first weights, published weights."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from xcal.errors import UserError
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.layers import HalvingMaxPool2d, group_count
from xcal.models.resnet import resnet18
from xcal.models.weights import load_published, read_weights

BUILDERS = {"resnet18": resnet18, "efficientnet_b0": efficientnet_b0}
# The published networks' parameter counts with a head for 1,000 classes.
PARAMETERS = {"resnet18": 11_689_512, "efficientnet_b0": 5_288_548}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("network", BUILDERS)
@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_parameter_counts_are_the_published_ones(network, norm):
    model = BUILDERS[network](1000, norm=norm, seed=0)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[network]


@pytest.mark.parametrize("network", BUILDERS)
@pytest.mark.parametrize(("output_stride", "cells"), [(32, 2), (16, 4)])
def test_the_feature_map_and_the_head_agree(network, output_stride, cells):
    model = BUILDERS[network](5, output_stride=output_stride, seed=0).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = cam_map(model, images)
    assert found.shape[2:] == (cells, cells)
    head = model.get_submodule(model.head_layer)
    torch.testing.assert_close(model(images), head(found.mean((2, 3))))


def cam_map(model, images):
    seen = {}
    layer = model.get_submodule(model.cam_layer)
    handle = layer.register_forward_hook(lambda *hooked: seen.update(map=hooked[2]))
    with torch.no_grad():
        model(images)
    handle.remove()
    return seen["map"]


@pytest.mark.parametrize("network", BUILDERS)
def test_a_finer_map_agrees_where_the_coarse_one_looks(network):
    """Dilation in place of the last stride keeps what every second cell sees."""
    maps = []
    for output_stride in (32, 16):
        model = BUILDERS[network](5, norm="frozen", output_stride=output_stride, seed=0).double()
        with torch.no_grad():
            for name, module in model.named_modules():
                if name.endswith("fc2"):  # a gate averages the whole map, which differs
                    module.weight.zero_()
        generator = torch.Generator().manual_seed(3)
        maps.append(
            cam_map(model, torch.randn(1, 3, 64, 64, dtype=torch.float64, generator=generator))
        )
    coarse, fine = maps
    scale = float(coarse.abs().max())
    assert scale > 0
    assert float((fine[:, :, ::2, ::2] - coarse).abs().max()) <= 1e-12 * scale


@pytest.mark.parametrize("network", BUILDERS)
def test_first_weights_come_from_the_seed_alone(network):
    state = torch.get_rng_state()
    one, same, other, fresh = (BUILDERS[network](5, seed=s) for s in (1, 1, 2, None))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    first = next(iter(one.parameters()))
    assert not any(torch.equal(first, next(iter(m.parameters()))) for m in (other, fresh))
    assert all(torch.isfinite(t).all() for t in one.state_dict().values())


@pytest.mark.parametrize("network", BUILDERS)
def test_what_trains(network):
    build = BUILDERS[network]

    def trained(**options):
        return {n for n, p in build(5, seed=0, **options).named_parameters() if p.requires_grad}

    every = {name for name, _ in build(5, seed=0).named_parameters()}
    model = build(5, norm="frozen", seed=0)
    norms = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for part in ("weight", "bias")
    }
    head = {f"{model.head_layer}.{part}" for part in ("weight", "bias")}
    assert trained() == every
    assert trained(norm="frozen") == every - norms
    assert trained(norm="frozen", train_norm_affine=True) == every
    assert trained(trainable="head") == trained(norm="frozen", trainable="head") == head
    assert trained(trainable="head+norm") == head | norms
    assert trained(norm="frozen", trainable="head+norm") == head | norms
    stages = len(model.stages())
    growing = [trained(trainable=f"last:{k}") for k in range(1, stages + 1)]
    assert growing[-1] == every
    assert all(small < large for small, large in zip([head, *growing], growing, strict=False))


@pytest.mark.parametrize("network", BUILDERS)
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "batch"},
        {"output_stride": 8},
        {"trainable": "tail"},
        {"trainable": "last:0"},
        {"trainable": "last:99"},
        {"trainable": "last:x"},
    ],
)
def test_unknown_options_are_refused(network, options):
    with pytest.raises(UserError):
        BUILDERS[network](5, seed=0, **options)


def test_frozen_statistics_survive_training_mode():
    model = resnet18(5, norm="frozen", seed=0).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("channels", "groups"), [(16, 4), (24, 6), (64, 16), (112, 28), (512, 32), (7, 1), (2, 1)]
)
def test_groups_hold_at_least_four_channels(channels, groups):
    assert group_count(channels) == groups


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (7, 8), (16, 16), (9, 33)])
def test_the_quick_maximum_is_the_librarys(height, width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, height, width, generator=generator).relu()
    x[0, 0, 0, 0] = float("nan")
    pool = HalvingMaxPool2d()
    with torch.no_grad():
        quick = pool(x)
    assert quick.is_contiguous()
    expected = nn.functional.max_pool2d(x, 3, 2, 1)
    torch.testing.assert_close(quick, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(pool(x), expected, rtol=0, atol=0, equal_nan=True)


def published(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["fc.weight"] = torch.zeros(1000, 512)
    return weights


def test_published_weights_fill_all_but_the_head(tmp_path):
    source = resnet18(1000, norm="frozen", seed=1)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "a.safetensors")
    torch.save(source.state_dict(), tmp_path / "a.pth")
    for name in ("a.safetensors", "a.pth"):
        model = resnet18(5, norm="frozen", seed=2)
        head = model.fc.weight.detach().clone()
        load_published(model, read_weights(tmp_path / name))
        assert torch.equal(model.fc.weight, head)
        own, given = model.state_dict(), source.state_dict()
        assert all(torch.equal(own[n], given[n]) for n in own if not n.startswith("fc."))


def test_weights_that_do_not_fit_are_refused_and_change_nothing():
    model = resnet18(5, norm="frozen", seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    good = published(resnet18(5, norm="frozen", seed=1))
    lacking = {n: t for n, t in good.items() if n != "layer3.0.conv1.weight"}
    misshapen = good | {"layer3.0.conv1.weight": torch.zeros(2, 2)}
    spoiled = good | {"layer3.0.conv1.weight": good["layer3.0.conv1.weight"] * float("nan")}
    for weights in (lacking, misshapen, spoiled):
        with pytest.raises(UserError, match=r"layer3\.0\.conv1\.weight"):
            load_published(model, weights)
    with pytest.raises(UserError, match="extra"):
        load_published(model, good | {"extra": torch.zeros(1)})
    with pytest.raises(UserError, match="norm = frozen"):
        load_published(resnet18(5, norm="group", seed=0), good)
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused(tmp_path):
    witness = tmp_path / "ran"
    bomb = tmp_path / "bomb.pth"
    torch.save({"weight": Bomb(witness)}, bomb)
    with pytest.raises(UserError, match="could run code"):
        read_weights(bomb)
    plain = tmp_path / "plain.pth"
    plain.write_bytes(pickle.dumps(Bomb(witness)))
    with pytest.raises(UserError):
        read_weights(plain)
    assert not witness.exists()


def test_files_that_are_no_weights_are_refused(tmp_path):
    for name, content in {
        "a.safetensors": b"nonsense",
        "b.pth": b"nonsense",
        "c.pth": b"",
        "d.txt": b"1",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            read_weights(tmp_path / name)
    with pytest.raises(UserError, match=r"missing\.pth"):
        read_weights(tmp_path / "missing.pth")
    torch.save([1, 2, 3], tmp_path / "list.pth")
    with pytest.raises(UserError, match="state dict"):
        read_weights(tmp_path / "list.pth")


@pytest.mark.data
@pytest.mark.skipif("XCAL_DATA" not in os.environ, reason="XCAL_DATA is not set")
def test_the_published_file_loads_unchanged():
    path = Path(os.environ["XCAL_DATA"]) / "weights" / "efficientnet_b0-imagenet.pth"
    weights = read_weights(path)
    model = efficientnet_b0(1000, norm="frozen", seed=0)
    load_published(model, weights)
    own = model.state_dict()
    assert own.keys() == weights.keys()
    assert all(torch.equal(own[n], weights[n]) for n in own if not n.startswith("classifier."))
