"""The signal of METHOD section 2 on examples small enough to compute by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from support import image_scores
from xcal.errors import UserError
from xcal.explain.gradcam import forward_with_features
from xcal.explain.signal import (
    Components,
    SignalSettings,
    batch_score,
    components,
    image_components,
    mask_images,
    scores,
    top_cells,
)

torch.set_num_threads(1)


class TinyNet(nn.Module):
    cam_layer = "body"
    head_layer: str | None = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.SiLU())
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(5, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(images).mean(dim=(2, 3))))


def tiny_net(seed: int = 0) -> TinyNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyNet()


def some_images(n: int = 6) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def one_map(values: list[list[float]]) -> Tensor:
    return torch.tensor([values])


def test_top_cells_takes_the_k_largest() -> None:
    maps = one_map([[5.0, 4.0, 3.0], [2.0, 1.0, 0.5]])
    # ceil(0.2 * 6) = 2, ceil(0.5 * 6) = 3
    assert top_cells(maps, 0.2, positive_only=True).flatten().tolist() == [True] * 2 + [False] * 4
    assert top_cells(maps, 0.5, positive_only=True).sum() == 3
    assert top_cells(maps, 1.0, positive_only=True).all()


def test_k_does_not_suffer_from_binary_fractions() -> None:
    maps = torch.arange(1, 101, dtype=torch.float64).view(1, 10, 10)
    assert 0.55 * 100 > 55
    assert top_cells(maps, 0.55, positive_only=True).sum() == 55


def test_ties_are_in() -> None:
    maps = one_map([[1.0, 1.0], [1.0, 0.0]])
    assert top_cells(maps, 0.25, positive_only=True).sum() == 3


def test_a_sparse_map_masks_everything_only_under_the_published_rule() -> None:
    maps = one_map([[1.0, 0.0], [0.0, 0.0]])
    assert top_cells(maps, 0.5, positive_only=True).sum() == 1
    assert top_cells(maps, 0.5, positive_only=False).all()


@pytest.mark.parametrize("positive_only", [True, False])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_degenerate_maps_mask_nothing(value: float, positive_only: bool) -> None:
    maps = torch.full((1, 3, 3), value)
    assert not top_cells(maps, 0.2, positive_only=positive_only).any()
    maps = torch.zeros(1, 3, 3)
    maps[0, 1, 1] = value
    assert not top_cells(maps, 0.2, positive_only=positive_only).any()


def test_a_constant_map_masks_every_cell() -> None:
    assert top_cells(torch.full((1, 3, 3), 2.5), 0.2, positive_only=True).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_precision_can_be_quantized(dtype: torch.dtype) -> None:
    maps = torch.tensor([[[4.0, 3.0], [2.0, 1.0]]], dtype=dtype)
    assert top_cells(maps, 0.5, positive_only=True).flatten().tolist() == [True, True, False, False]


def test_equal_cells_that_rounding_tore_apart_are_equal_again() -> None:
    generator = torch.Generator().manual_seed(0)
    # Values on the grid, as a flat region of a feature map gives them, many of them alike.
    maps = torch.randint(0, 6, (500, 8, 8), generator=generator).double() / 5
    torn = maps * (1 + 1e-7 * torch.randn(maps.shape, generator=generator).double())
    for positive_only in (True, False):
        expected = top_cells(maps, 0.2, positive_only=positive_only)
        assert torch.equal(top_cells(torn, 0.2, positive_only=positive_only), expected)
        assert torch.equal(top_cells(torn.float(), 0.2, positive_only=positive_only), expected)


def test_masking_enlarges_cells_to_blocks() -> None:
    images = torch.ones(1, 3, 4, 4)
    cells = torch.tensor([[[True, False], [False, False]]])
    masked = mask_images(images, cells, "imagenet")
    expected = torch.ones(4, 4)
    expected[:2, :2] = 0
    assert torch.equal(masked, expected.expand(1, 3, 4, 4))
    assert (images == 1).all()  # a copy


@pytest.mark.parametrize(("side", "cells"), [(100, 7), (64, 8), (30, 4), (224, 7), (5, 5)])
def test_every_cell_gets_its_pixels(side: int, cells: int) -> None:
    grid = torch.eye(cells * cells, dtype=torch.bool).view(-1, cells, cells)
    masked = mask_images(torch.ones(cells * cells, 1, side, side), grid, 0.0)
    covered = masked == 0
    assert (covered.sum(dim=0) == 1).all()  # disjoint and complete
    assert (covered.flatten(1).sum(dim=1) >= (side // cells) ** 2).all()


def test_fills() -> None:
    images = torch.arange(24.0).view(2, 3, 2, 2)
    cells = torch.ones(2, 1, 1, dtype=torch.bool)
    assert (mask_images(images, cells, 0.5) == 0.5).all()
    by_channel = mask_images(images, cells, (1.0, 2.0, 3.0))
    assert torch.equal(by_channel[1, :, 0, 0], torch.tensor([1.0, 2.0, 3.0]))
    means = mask_images(images, cells, "image-mean")
    assert torch.equal(means[0, :, 1, 1], torch.tensor([1.5, 5.5, 9.5]))
    with pytest.raises(UserError, match="channels"):
        mask_images(images, cells, (1.0, 2.0))
    with pytest.raises(UserError, match="unknown"):
        mask_images(images, cells, "gray")


def test_components_by_hand() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    masked = torch.tensor([[1.0, 2.5, 0.0], [5.0, 4.0, 1.0]])
    maps = torch.tensor([[[3.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
    cells = torch.tensor([[[True, False], [False, False]], [[True, True], [True, True]]])
    parts = components(logits, maps, cells, masked)
    assert parts.logit_drop.tolist() == [2.0, 0.0]  # 3 - 1; 2 - 4 is no fall
    assert parts.margin.tolist() == [1.5, 1.0]  # 2.5 - 1; 5 - 4
    assert parts.concentration.tolist() == [0.75, 1.0]
    assert parts.logit_drop.dtype == torch.float64


def test_two_classes_are_enough_and_one_is_not() -> None:
    maps, cells = torch.ones(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool)
    parts = components(torch.tensor([[1.0, 0.0]]), maps, cells, torch.tensor([[0.0, 0.25]]))
    assert (parts.logit_drop.item(), parts.margin.item()) == (1.0, 0.25)
    with pytest.raises(UserError, match="two logits"):
        components(torch.ones(1, 1), maps, cells, torch.ones(1, 1))


def parts_of(*rows: tuple[float, float, float]) -> Components:
    drop, margin, concentration = torch.tensor(rows, dtype=torch.float64).view(-1, 3).T
    return Components(drop, margin, concentration)


def test_scores_by_hand() -> None:
    parts = parts_of((0.2, 0.1, 0.5), (9.0, 0.0, 0.5), (0.4, 0.4, 0.0), (0.0, 0.0, 1.0))
    assert scores(parts, 1, 1, 1).tolist() == pytest.approx([0.15, 1.0, 0.0, 0.0])
    assert scores(parts, 2, 0.5, 2).tolist() == pytest.approx([0.1125, 1.0, 0.0, 0.0])
    # gamma = 0 ignores the concentration, but an all-zero map still scores nothing
    assert scores(parts, 1, 1, 0).tolist() == pytest.approx([0.3, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_number_anywhere_scores_zero(broken: float) -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]]).repeat(4, 1)
    masked = torch.tensor([[1.0, 2.5, 0.0]]).repeat(4, 1)
    maps = torch.ones(4, 2, 2)
    logits[0, 2], masked[1, 2], maps[2, 0, 0] = broken, broken, broken
    cells = top_cells(maps, 0.2, positive_only=True)
    parts = components(logits, maps, cells, masked)
    assert scores(parts, 1, 1, 1).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert scores(parts, 0.1, 0, 1).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.2])
    # the one sound image's drop of 2 over four images drawn; so is its concentration of 1
    assert batch_score(parts, 0.1, 0, 1) == pytest.approx(0.1 * 2 / 4 * 1 / 4)


def test_batch_score_is_the_formula_on_means() -> None:
    parts = parts_of((0.2, 0.0, 0.5), (0.4, 0.2, 1.0))
    assert batch_score(parts, 1, 1, 1) == pytest.approx((0.3 + 0.1) * 0.75)
    assert batch_score(parts, 1, 1, 2) == pytest.approx((0.3 + 0.1) * 0.75**2)
    assert batch_score(parts, 100, 1, 1) == 1.0
    assert batch_score(parts_of((0.4, 0.4, 0.0)), 1, 1, 0) == 0.0
    assert batch_score(parts_of(), 1, 1, 1) == 0.0


def test_image_scores_follow_the_steps_one_by_one() -> None:
    model, images = tiny_net().eval(), some_images()
    settings = SignalSettings(q=0.3, alpha=2.0, fill=(0.1, 0.2, 0.3))
    with torch.no_grad():
        logits, features = forward_with_features(model, images)
    expected = []
    for image, logit, feature in zip(images, logits, features, strict=True):
        chosen = logit.argmax()
        cam = (model.head.weight[chosen][:, None, None] * feature / 16).sum(dim=0).relu().detach()
        k = math.ceil(0.3 * 16)
        cells = (cam >= cam.flatten().sort(descending=True).values[k - 1]) & (cam > 0)
        covered = cells.repeat_interleave(2, dim=0).repeat_interleave(2, dim=1)
        fill = torch.tensor([0.1, 0.2, 0.3])[:, None, None].expand(3, 8, 8)
        after = model(torch.where(covered, fill, image)[None])[0].detach()
        drop = max(0.0, float(logit[chosen] - after[chosen]))
        others = torch.cat([after[:chosen], after[chosen + 1 :]])
        margin = max(0.0, float(others.max() - after[chosen]))
        concentration = float(cam[cells].sum() / cam.sum()) if cam.sum() > 0 else 0.0
        expected.append(min(1.0, (2 * drop + margin) * concentration))
    assert max(expected) > 0
    result = image_scores(model, images, logits, features, settings)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(expected, abs=1e-6)


def test_networks_without_closed_form_get_the_same_scores() -> None:
    model, images = tiny_net().eval(), some_images()
    logits, features = forward_with_features(model, images)
    closed = image_scores(model, images, logits, features, SignalSettings())
    model.head_layer = None
    general = image_scores(model, images, logits, features, SignalSettings())
    torch.testing.assert_close(general, closed, rtol=0, atol=1e-6)


def test_the_signal_leaves_the_model_alone() -> None:
    model, images = tiny_net(), some_images()
    model.train()
    model.body.eval()
    logits, features = forward_with_features(model, images)
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    result = image_scores(model, images, logits, features, SignalSettings())
    assert not result.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    logits.sum().backward()  # the training graph is still whole
    assert model.head.weight.grad is not None


def test_an_empty_batch_gives_empty_tensors() -> None:
    model = tiny_net()
    images, logits, features = torch.zeros(0, 3, 8, 8), torch.zeros(0, 3), torch.zeros(0, 5, 4, 4)
    assert image_scores(model, images, logits, features, SignalSettings()).shape == (0,)
    parts = image_components(model, images, logits, features, SignalSettings())
    assert batch_score(parts, 1, 1, 1) == 0.0
    assert top_cells(torch.zeros(0, 4, 4), 0.2, positive_only=True).shape == (0, 4, 4)
    none = torch.zeros(0, 4, 4, dtype=torch.bool)
    assert mask_images(images, none, "image-mean").shape == images.shape
    assert components(logits, torch.zeros(0, 4, 4), none, logits).margin.shape == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"q": 0.0},
        {"q": 1.5},
        {"q": math.nan},
        {"alpha": -1.0},
        {"beta": math.inf},
        {"gamma": math.nan},
        {"fill": "gray"},
    ],
)
def test_nonsense_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        SignalSettings(**wrong)
