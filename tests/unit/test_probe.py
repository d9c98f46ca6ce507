"""A head that reads several stages: what it sees, its constants, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from xcal.cli.app import app
from xcal.dp.clipping import ClippingEngine
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.explain.gradcam import _features_and_gradients, _maps_from_gradients, gradcam_maps
from xcal.federation.constants import public_images, with_constants, write_constants
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.setup import prepare
from xcal.models.backbone import split_backbone
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.model_registry import build_network
from xcal.models.probe import CONSTANTS, TURN, Columns, constants_of, whitening
from xcal.models.weights import load_published

READS = "stages:4-6"
IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A weights file as it is published: all of the network, no constants."""
    path = tmp_path / "published.safetensors"
    safetensors.torch.save_file(efficientnet_b0(7, norm="frozen", seed=3).state_dict(), path)
    return path


@pytest.fixture(autouse=True)
def _own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "site"))


def keys(weights: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": "support:tiny", "network": "efficientnet_b0", "norm": "frozen", "pixels": 32,
        "train": "head", "unit": "record", "head_reads": READS, "weights": str(weights), **more,
    }  # fmt: skip


def columns_model(train: str = "head") -> Any:
    model = efficientnet_b0(3, norm="group", seed=0, head_reads=READS, trainable=train).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.classifier[1].weight.normal_(std=0.02, generator=generator)
        model.columns.mean.normal_(generator=generator)
        model.columns.deviation.uniform_(0.5, 2.0, generator=generator)
    return model


def test_a_probe_reads_the_stages_maps_and_squares_standardized() -> None:
    columns = Columns([2, 3], 0)
    columns.mean.fill_(0.25)
    columns.deviation.fill_(2.0)
    fine, coarse = torch.rand(2, 2, 4, 4), torch.rand(2, 3, 2, 2)
    found = columns([fine, coarse])
    assert found.shape == (2, 10, 4, 4)
    means = [m.mean((2, 3)) for m in (fine, fine.square(), coarse, coarse.square())]
    torch.testing.assert_close(found.mean((2, 3)), (torch.cat(means, 1) - 0.25) / 2.0)


def test_a_finer_map_is_averaged_down() -> None:
    fine = torch.rand(1, 1, 8, 8)
    found = Columns([1, 1], 1)([fine, torch.zeros(1, 1, 4, 4)])
    assert found.shape == (1, 4, 4, 4)
    torch.testing.assert_close(
        found[0, :2].mean((1, 2)), torch.stack([fine.mean(), fine.square().mean()])
    )


def test_constants_standardize_the_images_they_are_made_of() -> None:
    pooled = torch.randn(50, 4) * torch.tensor([1.0, 3.0, 0.5, 0.0]) + 2.0
    mean, deviation = constants_of(pooled)
    made = (pooled - mean) / deviation
    torch.testing.assert_close(made.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.std(0)[:3], torch.ones(3))
    assert deviation[3] == pytest.approx(float(deviation[:3].median()) / 100, rel=1.0)  # no blow-up


def test_the_map_is_finer_than_the_last_one_and_grad_cam_is_in_closed_form() -> None:
    model = columns_model()
    found = gradcam_maps(model, IMAGES)
    assert found.shape == (4, 4, 4)  # of 64 pixels; the last stage's map has 2×2 cells
    features, gradients = _features_and_gradients(model, IMAGES, None)
    torch.testing.assert_close(found, _maps_from_gradients(features, gradients, "gradcam"))


def test_a_signal_finds_its_map_in_what_is_kept() -> None:
    """Only masked images go through the network: the plain ones' maps were kept."""
    model = columns_model("head")
    split = split_backbone(model, seen=model.cam_layer)
    assert split is not None and split.passes(model.get_submodule(model.cam_layer))
    kept = split.begin(IMAGES)
    assert kept.shape == (4, 768, 4, 4)  # the map, and not its average
    pooled = split_backbone(model)
    assert pooled is not None and pooled.begin(IMAGES).shape == (4, 768)
    assert pooled.digest() != split.digest()  # alike in weights, unlike in what they make


@pytest.mark.parametrize("train", ["head", "last:1", "head+norm:2"])
def test_what_is_frozen_is_kept_and_gradients_are_each_image_s_own(train: str) -> None:
    model = columns_model(train)
    split = split_backbone(model)
    assert split is not None
    labels = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        torch.testing.assert_close(split.forward_head(split.begin(IMAGES)), model(IMAGES))
    found = ClippingEngine(model).clipped_sum(IMAGES, labels, clip=1.5)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected = {n: torch.zeros_like(p) for n, p in trained.items()}
    for image, label in zip(IMAGES, labels, strict=True):
        loss = torch.nn.functional.cross_entropy(model(image[None]), label[None])
        own = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
        norm = torch.stack([g.square().sum() for g in own.values()]).sum().sqrt()
        for name, gradient in own.items():
            # The engine keeps a thousandth below C.
            expected[name] += gradient * min(1.0, 1.5 / 1.001 / float(norm))
    for name, gradient in expected.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=2e-3, atol=2e-5)


def test_a_probe_starts_at_zero_and_what_is_not_read_is_not_there() -> None:
    model = efficientnet_b0(3, seed=0, head_reads=READS)
    assert not model.classifier[1].weight.any()
    assert len(model.features) == 7
    whole = efficientnet_b0(5, seed=1).state_dict()
    load_published(model, {**whole, "columns.mean": model.columns.mean + 1,
                           "columns.deviation": model.columns.deviation})  # fmt: skip
    assert torch.equal(model.columns.mean, torch.ones(768))
    assert torch.equal(
        model.features[6][0].block[0][0].weight, whole["features.6.0.block.0.0.weight"]
    )


@pytest.mark.parametrize("wrong", ["stages", "stages:6-4", "stages:0-3", "stages:4-9", "all"])
def test_what_no_head_can_read_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match="head_reads"):
        efficientnet_b0(3, head_reads=wrong)


def test_other_networks_have_no_probe() -> None:
    with pytest.raises(UserError, match="head_reads is for the network efficientnet_b0"):
        build_network(make_experiment({"network": "resnet18", "head_reads": READS}), 3)


def test_a_run_makes_the_constants_once_of_public_images(published: Path) -> None:
    made = make_experiment(keys(published))
    with pytest.raises(UserError, match="xcal data constants"):
        build_network(made, 3)
    found = with_constants(made)
    assert with_constants(made) == found == with_constants(found)
    assert Path(str(found.weights)).parent.name == "weights"
    tensors = safetensors.torch.load_file(str(found.weights))
    assert tensors.keys() - safetensors.torch.load_file(published).keys() == set(CONSTANTS)
    model = build_network(found, 3).eval()
    split = split_backbone(model)
    from xcal.data.normalize import to_tensor

    assert split is not None
    read = split.begin(to_tensor(public_images(made).pixels))
    torch.testing.assert_close(read.mean(0), torch.zeros(768), atol=1e-3, rtol=0)
    plain = make_experiment({**keys(published), "head_reads": "last"})
    assert with_constants(plain) is plain


def test_constants_go_with_stages_and_weights(published: Path, tmp_path: Path) -> None:
    plain = make_experiment({**keys(published), "head_reads": "last"})
    with pytest.raises(UserError, match="head_reads = 'stages:a-b'"):
        write_constants(plain, public_images(plain), tmp_path / "w.safetensors")


def test_the_command_writes_the_file_that_a_deployed_client_needs(
    published: Path, tmp_path: Path
) -> None:
    out = tmp_path / "with.safetensors"
    asked = ["data", "constants", "support:tiny", "--pixels", "32", "--weights", str(published)]
    result = CliRunner().invoke(app, [*asked, "--out", str(out)])
    assert result.exit_code == 0, result.output
    build_network(make_experiment(keys(out)), 3)
    assert CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "w.pth")]).exit_code != 0


def test_xcal_trains_a_probe_and_the_model_can_be_read_again(
    published: Path, tmp_path: Path
) -> None:
    from xcal.report.runs import load_run

    made = with_constants(
        make_experiment(keys(published, method="xcal-steered", rounds=1, batch=40, signal_every=1,
                             clients=2, clip=8.0, lr=0.1, road_images=0, road_test_images=0))
    )  # fmt: skip
    folder = RunFolder.create(tmp_path / "run", made, [])
    result = run_experiment(folder, None, prepare(made))
    assert result["rounds"] == 1
    model = load_run(folder.path).model
    kept = read_tensors(folder.path / "model.safetensors")
    assert kept is not None
    assert torch.equal(model.columns.mean, kept[0]["columns.mean"])  # type: ignore[union-attr]
    assert model.classifier[1].weight.any()  # type: ignore[index,union-attr]


def test_whitened_features_are_the_turned_ones(published: Path) -> None:
    """Public images vary alike in all directions, as far as the covariance is not shrunk."""
    pooled = torch.randn(400, 12, generator=torch.Generator().manual_seed(0)).double()
    pooled = pooled @ torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).double() + 3
    mean, deviation = constants_of(pooled)
    turn = whitening(pooled, 1e-9).double()
    spread = torch.cov(((pooled - mean) / deviation @ turn).T)
    assert torch.allclose(spread, torch.eye(12).double() * spread.diagonal().mean(), atol=1e-3)
    assert torch.allclose(turn, turn.T)
    heavy = whitening(pooled, 1e9)  # shrunk to nothing: as it was
    assert torch.allclose(heavy, torch.eye(12), atol=1e-3)

    made = with_constants(make_experiment(keys(published, whiten=3.0, method="fl-dp")))
    plain = with_constants(make_experiment(keys(published, method="fl-dp")))
    assert made.weights != plain.weights
    assert TURN in read_tensors(Path(str(made.weights)))[0]
    one, other = build_network(made, 3).eval(), build_network(plain, 3).eval()
    with torch.no_grad():
        turned = one.segments()[:-1], other.segments()[:-1]
        seen = [torch.nn.Sequential(*parts)(IMAGES) for parts in turned]  # type: ignore[arg-type]
    matrix = read_tensors(Path(str(made.weights)))[0][TURN]
    assert torch.allclose(seen[0], seen[1] @ matrix, atol=1e-3)


def test_weights_made_for_the_other_kind_of_channels_are_refused(published: Path) -> None:
    made = with_constants(make_experiment(keys(published, whiten=3.0, method="fl-dp")))
    with pytest.raises(UserError, match="whitening"):
        build_network(make_experiment(keys(Path(str(made.weights)), method="fl-dp")), 3)
    plain = with_constants(make_experiment(keys(published, method="fl-dp")))
    with pytest.raises(UserError, match="whitening"):
        build_network(make_experiment(keys(Path(str(plain.weights)), whiten=1, method="fl-dp")), 3)
    with pytest.raises(UserError, match="several stages"):
        build_network(make_experiment({"whiten": 1.0}), 3)
