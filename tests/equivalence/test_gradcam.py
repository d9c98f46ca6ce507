"""Closed-form Grad-CAM = autograd = Captum, and the model comes back as it was."""

from __future__ import annotations

import pytest
import torch
from captum.attr import LayerGradCam
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.explain.gradcam import closed_form_maps, forward_with_features, gradcam_maps

torch.set_num_threads(1)


class PooledNet(nn.Module):
    """Convolutions, global average pooling, one linear layer: the closed form applies."""

    cam_layer = "body"
    head_layer: str | None = "head"

    def __init__(self, channels: int = 6, classes: int = 3, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.GroupNorm(2, channels), nn.SiLU()
        )
        self.last = last or nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(self.last(self.body(images)).mean(dim=(2, 3))))


class FlatNet(PooledNet):
    """The same body under a head that looks at every cell: only autograd can explain it."""

    head_layer = None

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6 * 16, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1))


def build(kind: type[PooledNet], seed: int = 0) -> PooledNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().double()


def some_images(n: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).double()


def captum_maps(model: PooledNet, images: Tensor, classes: Tensor) -> Tensor:
    explainer = LayerGradCam(model.eval(), model.get_submodule(model.cam_layer))
    return explainer.attribute(images, target=classes, relu_attributions=True).squeeze(1).detach()


@pytest.mark.parametrize("kind", [PooledNet, FlatNet])
def test_maps_equal_captum(kind: type[PooledNet]) -> None:
    model, images = build(kind), some_images()
    classes = torch.tensor([0, 1, 2, 1, 0])
    ours = gradcam_maps(model, images, classes)
    assert ours.shape == (5, 4, 4)
    assert ours.max() > 0
    torch.testing.assert_close(ours, captum_maps(model, images, classes), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["gradcam", "gradcam++", "hirescam"])
def test_closed_form_equals_autograd(method: str) -> None:
    closed, general = build(PooledNet), build(PooledNet)
    general.head_layer = None
    images = some_images()
    expected = gradcam_maps(general, images, method=method)
    assert expected.max() > 0
    torch.testing.assert_close(
        gradcam_maps(closed, images, method=method), expected, rtol=1e-12, atol=1e-14
    )


def test_predicted_class_is_the_default() -> None:
    model, images = build(PooledNet), some_images()
    predicted = model.eval()(images).argmax(dim=1)
    assert torch.equal(gradcam_maps(model, images), gradcam_maps(model, images, predicted))


@pytest.mark.parametrize("kind", [PooledNet, FlatNet])
def test_batches_change_nothing(kind: type[PooledNet]) -> None:
    model, images, classes = build(kind), some_images(), torch.tensor([0, 1, 2, 1, 0])
    whole = gradcam_maps(model, images, classes)
    torch.testing.assert_close(gradcam_maps(model, images, classes, batch_size=2), whole)
    torch.testing.assert_close(
        gradcam_maps(model, images, batch_size=2), gradcam_maps(model, images)
    )


def test_hirescam_weighs_cells_one_by_one() -> None:
    model, images = build(FlatNet), some_images()
    features = model.body(images).detach().requires_grad_(True)
    logits = model.head(features.flatten(1))
    (gradient,) = torch.autograd.grad(logits.amax(dim=1).sum(), features)
    expected = (gradient * features).sum(dim=1).relu().detach()
    maps = gradcam_maps(model, images, method="hirescam")
    torch.testing.assert_close(maps, expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(maps, gradcam_maps(model, images))


def test_gradcam_plus_plus_by_hand() -> None:
    # One channel, A = [[1, 3]], weight 2: g = 1 per cell, share = 1 / (2 + 4), summed over two
    # cells and multiplied by g: 1/3; a channel of negative weight has no say.
    model = build(PooledNet)
    model.body = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False))
    model.body[0].weight.data = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]).double().view(2, 3, 1, 1)
    model.head = nn.Linear(2, 2).double()
    model.head.weight.data = torch.tensor([[2.0, -5.0], [0.0, 0.0]]).double()
    image = torch.zeros(1, 3, 1, 2).double()
    image[0, 0, 0] = torch.tensor([1.0, 3.0])
    image[0, 1, 0] = torch.tensor([7.0, 7.0])
    maps = gradcam_maps(model, image, torch.tensor([0]), method="gradcam++")
    torch.testing.assert_close(maps, torch.tensor([[[1 / 3, 1.0]]]).double())


def test_forward_with_features_is_the_forward_pass() -> None:
    model, images = build(PooledNet).eval(), some_images()
    logits, features = forward_with_features(model, images)
    assert torch.equal(logits, model(images))
    assert torch.equal(features, model.body(images))
    assert logits.requires_grad
    assert features.requires_grad  # the caller's graph is not cut
    maps = closed_form_maps(features, model.head.weight, logits.argmax(dim=1))
    torch.testing.assert_close(maps, gradcam_maps(model, images))


@pytest.mark.parametrize("kind", [PooledNet, FlatNet])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_comes_back_as_it_was(kind: type[PooledNet], frozen: bool) -> None:
    model, images = build(kind), some_images()
    model.train()
    model.dropout.eval()  # a mix of modes, which model.train() would not restore
    model.requires_grad_(not frozen)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    images.requires_grad_(True)
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    maps = gradcam_maps(model, images)
    assert not maps.requires_grad
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all((p.grad == 7).all() for p in model.parameters())
    assert all(p.requires_grad is not frozen for p in model.parameters())
    assert images.grad is None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [PooledNet, FlatNet])
def test_works_inside_inference_mode(kind: type[PooledNet]) -> None:
    model, images = build(kind), some_images()
    expected = gradcam_maps(model, images)
    with torch.inference_mode():
        assert torch.equal(gradcam_maps(model, images.clone()), expected)


def test_no_hook_is_left_after_a_failure() -> None:
    model = build(PooledNet)
    with pytest.raises(RuntimeError):
        gradcam_maps(model, torch.zeros(1, 5, 8, 8).double())
    assert not any(module._forward_hooks for module in model.modules())


def test_an_empty_batch_has_no_maps() -> None:
    features = torch.zeros(0, 6, 4, 4)
    none = torch.zeros(0, dtype=torch.long)
    assert closed_form_maps(features, torch.ones(3, 6), none).shape == (0, 4, 4)
    assert gradcam_maps(build(PooledNet), some_images()[:0]).shape == (0, 4, 4)


def test_wrong_layers_are_refused_in_one_sentence() -> None:
    model, images = build(PooledNet), some_images()
    with pytest.raises(UserError, match="no explanation map called 'lime'"):
        gradcam_maps(model, images, method="lime")  # type: ignore[arg-type]
    model.cam_layer = "nowhere"
    with pytest.raises(UserError, match="no layer 'nowhere'"):
        gradcam_maps(model, images)
    model.cam_layer = "head"
    with pytest.raises(UserError, match="has 2 dimensions"):
        gradcam_maps(model, images)
    model.cam_layer, model.head_layer = "body", "body"
    with pytest.raises(UserError, match="not a linear layer"):
        gradcam_maps(model, images)


def test_a_feature_map_overwritten_later_is_refused() -> None:
    model, images = PooledNet(last=nn.ReLU(inplace=True)).double(), some_images()
    with pytest.raises(UserError, match="overwritten"):
        gradcam_maps(model, images)


def test_a_layer_off_the_path_to_the_logits_is_refused() -> None:
    class Aside(FlatNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) if self.training else self.aside(images)

        def aside(self, images: Tensor) -> Tensor:
            self.body(images)
            return images.mean(dim=(2, 3))

    with pytest.raises(UserError, match="do not depend"):
        gradcam_maps(build(Aside), some_images())
