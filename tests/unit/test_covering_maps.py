"""Maps by covering: equal to Captum's, to their definition, and chosen on public images only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captum.attr import InputXGradient, LayerGradCam, Occlusion
from torch import Tensor, nn

import xcal
from xcal.errors import UserError
from xcal.explain.choosing import CANDIDATES, DEFAULT, MAPS, choose_map, make_maps, parts_of
from xcal.explain.faithfulness import insertion_deletion, randomisation_check
from xcal.explain.localization import localization
from xcal.explain.occlusion import blurred, cell_maps, occlusion_maps, rise_maps
from xcal.models.views import OverViews

torch.set_num_threads(1)


class Pooled(nn.Module):
    """Two convolutions, the average of the last map, one linear layer."""

    cam_layer = "features"
    head_layer = "head"

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.features = nn.Sequential(
                nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1)
            )
            self.head = nn.Linear(8, 4)
            self.head.weight.data.mul_(6)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


class Corner(nn.Module):
    """A network that knows where it looks: at how lively the upper left quarter is."""

    cam_layer = "features"
    head_layer = None

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.AvgPool2d(4)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        seen = self.features(images.square())[:, :, :2, :2].mean((1, 2, 3)) * self.weight
        return torch.stack([4 * seen, 2 - 4 * seen], 1)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double()


def lively() -> Tensor:
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(2)) * 0.3
    images[..., :8, :8] *= 4
    return images


class Turning(nn.Module):
    """A network that turns with its image: each pixel by itself, then the average of 4x4 blocks."""

    cam_layer = "features"
    head_layer = "head"

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            pixels = nn.Conv2d(3, 8, 1)
            self.features = nn.Sequential(pixels, nn.ReLU(), nn.AvgPool2d(4))
            self.head = nn.Linear(8, 4)
            self.head.weight.data.mul_(6)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))

    def segments(self) -> list[nn.Module]:
        return [self.features, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1)), self.head]


@pytest.mark.parametrize("kind", ["turns", "mirrored-turns"])
def test_windows_are_seen_in_views_by_turns_at_the_cost_of_one(images: Tensor, kind: str) -> None:
    model = Turning().double()
    pooled, passed = OverViews(model, kind), []
    model.features.register_forward_hook(lambda *given: passed.append(len(given[1][0])))
    wanted = occlusion_maps(model, images)
    once = sum(passed)
    # A network that turns with its image sees a window alike in every view.
    torch.testing.assert_close(occlusion_maps(pooled, images), wanted)
    # Besides the windows: the classes, by all views, the map's size, and four views intact.
    views = len(pooled.views)
    assert sum(passed) - 2 * once == (views - 1) * len(images) + (views - 1) + 3 * len(images)
    torch.testing.assert_close(rise_maps(pooled, images), rise_maps(model, images))


def test_occlusion_is_captums(images: Tensor) -> None:
    model, classes = Pooled().double(), torch.tensor([0, 3, 1, 2, 2])
    oracle = Occlusion(lambda x: model(x).softmax(1))
    expected = oracle.attribute(
        images,
        sliding_window_shapes=(3, 8, 8),
        strides=(3, 4, 4),
        baselines=blurred(images),
        target=classes,
    )[:, 0, ::4, ::4].double()  # which Captum gives in single precision
    found = xcal.explain.occlusion(model, images, classes=classes)
    assert found.shape == (5, 4, 4) and found.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_gradient_times_input_and_gradcam_are_captums(images: Tensor) -> None:
    model, classes = Pooled().double(), torch.tensor([0, 3, 1, 2, 2])
    product = InputXGradient(model).attribute(images.clone().requires_grad_(), target=classes)
    expected = F.avg_pool2d(product.sum(1, keepdim=True).detach(), 4).squeeze(1)
    torch.testing.assert_close(
        xcal.explain.maps(model, images, "gradient-input", classes=classes), expected
    )
    cam = LayerGradCam(model, model.features).attribute(images, target=classes)
    torch.testing.assert_close(
        xcal.explain.maps(model, images, "gradcam", classes=classes), cam.relu().squeeze(1).detach()
    )


def test_layercam_weighs_by_the_positive_gradient_of_each_cell(images: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.Flatten(), nn.Linear(320, 3)).double()
    features = model[0](images).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model[2](features.flatten(1))[:, 1].sum(), features)
    expected = (gradient.relu() * features.detach()).sum(1).relu()
    found = xcal.explain.gradcam(model, images, "0", 1, method="layercam")
    torch.testing.assert_close(found, expected)
    closed = make_maps(Pooled().double(), images, method="layercam")
    general = Pooled().double()
    general.head_layer = None
    torch.testing.assert_close(closed, make_maps(general, images, method="layercam"))


def test_cells_covered_in_closed_form_are_cells_covered_by_a_pass(images: Tensor) -> None:
    model = Pooled().double()
    features = model.features(images).detach()
    classes = model(images).argmax(1)

    def answer(maps: Tensor) -> Tensor:
        logits = model.head(maps.mean((2, 3))).softmax(1)
        return logits.gather(1, classes[:, None]).squeeze(1).detach()

    total, count = torch.zeros(5, 4, 4).double(), torch.zeros(4, 4)
    for i in range(3):
        for j in range(3):
            covered = features.clone()
            covered[:, :, i : i + 2, j : j + 2] = features.mean((2, 3), keepdim=True)
            total[:, i : i + 2, j : j + 2] += (answer(features) - answer(covered))[:, None, None]
            count[i : i + 2, j : j + 2] += 1
    torch.testing.assert_close(cell_maps(model, images), total / count)
    with pytest.raises(UserError, match="cell-occlusion needs"):
        make_maps(Corner(), lively(), method="cell-occlusion+gradcam")


@pytest.mark.parametrize("method", ["occlusion", "rise", "occlusion+gradcam"])
def test_covering_finds_where_a_network_looks(method: str) -> None:
    model, images = Corner(), lively()
    maps = make_maps(model, images, method=method)
    regions = torch.zeros(6, 16, 16, dtype=torch.bool)
    regions[:, :8, :8] = True
    found = localization(maps, regions).summary()
    assert maps.shape == (6, 4, 4)
    assert found["pointing"] == 1.0 and found["inside"] > 1.5 * found["area"]
    assert xcal.explain.road(model, images, maps).road > 0.1
    # Judged by a fill that neither the maps nor ROAD use.
    constant = [
        insertion_deletion(model, images, m, fill=0.0, base=0.0) for m in (maps, maps.flip(2))
    ]
    assert constant[0].deletion_auc.mean() < constant[1].deletion_auc.mean()
    assert constant[0].insertion_auc.mean() > constant[1].insertion_auc.mean()


def test_random_masks_follow_the_seed_and_get_steadier(images: Tensor) -> None:
    model = Pooled().double()
    first = xcal.explain.rise(model, images, masks=32, seed=1)
    assert torch.equal(first, xcal.explain.rise(model, images, masks=32, seed=1))
    assert not torch.equal(first, xcal.explain.rise(model, images, masks=32, seed=2))
    whole, one = (rise_maps(model, images, masks=m, seed=3) for m in (256, 16))
    again, other = (rise_maps(model, images, masks=m, seed=4) for m in (256, 16))
    assert (whole - again).norm() < (one - other).norm() / 2
    with pytest.raises(UserError, match="2 or more"):
        xcal.explain.rise(model, images, masks=1)


@pytest.mark.parametrize("method", [*MAPS, "occlusion+gradcam", "gradcam+++rise"])
def test_an_images_map_is_its_own_and_the_model_stays(images: Tensor, method: str) -> None:
    model = Pooled().double().train()
    state, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    maps = xcal.explain.maps(model, images, method)
    alone = xcal.explain.maps(model, images[3:4], method)
    array = xcal.explain.maps(model, images.numpy(), method, batch_size=3)
    assert maps.shape == (5, 4, 4) and maps.dtype == torch.float64
    torch.testing.assert_close(maps[3:4], alone)
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, maps.numpy(), atol=1e-12)
    assert model.training and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert xcal.explain.maps(model, images[:0], method).shape == (0, 4, 4)


@pytest.mark.parametrize("method", ["occlusion", "cell-occlusion", "rise", "occlusion+gradcam"])
def test_maps_change_when_weights_are_scrambled_and_controls_do_not(
    images: Tensor, method: str
) -> None:
    model = Pooled().double()

    def alike(name: str) -> float:
        last = randomisation_check(model, images, stages=1, method=name)[-1]
        return float(np.abs(last.agreement.rank_correlation).mean())

    assert alike(method) < 0.9
    assert alike("random") == 1.0


def test_any_network_with_a_grid_and_no_layer(images: Tensor) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 3)).double()
    assert xcal.explain.occlusion(model, images, grid=(3, 5), window=9).shape == (5, 3, 5)
    assert xcal.explain.rise(model, images.numpy(), grid=(4, 4), masks=9).shape == (5, 4, 4)
    for wrong in ((0, 4), (4, 17)):
        with pytest.raises(UserError, match="does not fit images"):
            xcal.explain.occlusion(model, images, grid=wrong)
    with pytest.raises(UserError, match="1 or more"):
        xcal.explain.occlusion(model, images, grid=(4, 4), window=0)
    with pytest.raises(UserError, match="cam_layer"):
        xcal.explain.occlusion(model, images)
    with pytest.raises(UserError, match="one logit"):
        xcal.explain.rise(nn.Sequential(model, nn.Linear(3, 1).double()), images, grid=(4, 4))


def test_an_image_that_is_broken_breaks_no_other(images: Tensor) -> None:
    images[1, 0, 3, 3] = torch.nan
    model = Pooled().double()
    for method in ("occlusion", "rise", "cell-occlusion"):
        found = make_maps(model, images, method=method).isfinite().flatten(1).all(1)
        assert found.tolist() == [True, False, True, True, True]


def test_the_choice_is_the_best_by_road_and_the_default_unless_shown(images: Tensor) -> None:
    class Turned(Corner):
        """What it reads is upside down, so that Grad-CAM points to the wrong end."""

        def forward(self, x: Tensor) -> Tensor:
            seen = self.features(x.square().flip(2))[:, :, 2:, :2].mean((1, 2, 3)) * self.weight
            return torch.stack([4 * seen, 2 - 4 * seen], 1)

    found = xcal.explain.choose_map(Turned(), lively())
    assert found.method in CANDIDATES and found.method != DEFAULT
    assert found.gain == pytest.approx(found.road[found.method] - found.road[DEFAULT])
    assert found.interval[0] > 0 and found.images == 6
    assert max(found.road, key=found.road.get) == found.method
    assert "above Grad-CAM" in found.sentence() and "no ε" in found.sentence()
    many = torch.cat([lively()] * 6)  # twelve for all, the rest for the best and the default
    asked: list[int] = []
    raced = choose_map(Turned(), many, on_images=lambda n, total: asked.extend((n, total)))
    assert raced.method == found.method and raced.images == 36
    kinds = len(raced.road)
    assert max(asked) == asked[-1] == asked[-2] == kinds * 12 + 3 * 24
    one_person = choose_map(Turned(), lively(), ["a"] * 6, candidates=["occlusion"])
    assert one_person.method == DEFAULT and one_person.road["occlusion"] > one_person.road[DEFAULT]
    nobody = choose_map(Turned(), lively()[:0])
    assert nobody.method == DEFAULT and not nobody.road and "none was chosen" in nobody.sentence()
    few = choose_map(Pooled().double(), images[:2], candidates=["hirescam", "cell-occlusion"])
    assert list(few.road) == [DEFAULT, "cell-occlusion"]
    assert "cell-occlusion" not in found.road


def test_names_of_maps() -> None:
    assert parts_of("gradcam+++occlusion") == ["gradcam++", "occlusion"]
    assert parts_of("gradcam++") == ["gradcam++"]
    for wrong in ("lime", "", "gradcam+", "occlusion+rise+gradcam", "auto"):
        with pytest.raises(UserError, match="no explanation map"):
            parts_of(wrong)


def test_all_occlusion_windows_lie_inside_images_of_any_size() -> None:
    model, odd = Pooled(), torch.randn(2, 3, 19, 13, generator=torch.Generator().manual_seed(5))
    assert occlusion_maps(model, odd).shape == (*odd.shape[:1], 5, 4)
