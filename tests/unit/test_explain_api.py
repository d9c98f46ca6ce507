"""`xcal.explain` on networks that know nothing of xcal: any layer, tensors or arrays."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam
from torch import Tensor, nn

import xcal
from xcal.errors import UserError

torch.set_num_threads(1)


def small_cnn(*, inplace: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=inplace),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(inplace=inplace),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(8 * 36, 4),
        )


class TokenNet(nn.Module):
    """As a ViT: patches become tokens after a class token, which alone is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], 1)
        return self.head(self.last(self.block(tokens))[:, 0])


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", ["4", "5", "0"])
@pytest.mark.parametrize("inplace", [False, True])
def test_maps_are_captums(images: Tensor, layer: str, inplace: bool) -> None:
    model, oracle = small_cnn(inplace=inplace), small_cnn().eval()
    classes = torch.tensor([0, 3, 1, 2, 2])
    explainer = LayerGradCam(oracle, oracle.get_submodule(layer))
    expected = explainer.attribute(images, target=classes, relu_attributions=True).squeeze(1)
    found = xcal.explain.gradcam(model, images, layer=layer, classes=classes)
    by_module = xcal.explain.gradcam(model, images, model.get_submodule(layer), classes.tolist())
    assert expected.max() > 0
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(found, by_module)


def test_arrays_in_arrays_out_and_the_predicted_class_by_default(images: Tensor) -> None:
    model = small_cnn()
    tensor = xcal.explain.gradcam(model, images, "4")
    array = xcal.explain.gradcam(model, images.numpy(), "4")
    assert isinstance(array, np.ndarray) and array.shape == (5, 6, 6)
    assert np.array_equal(array, tensor.numpy())
    predicted = model.eval()(images).argmax(1)
    assert torch.equal(tensor, xcal.explain.gradcam(model, images, "4", predicted))
    doubled = xcal.explain.gradcam(model, images.double().numpy(), "4", 2)
    assert np.array_equal(doubled, xcal.explain.gradcam(model, images, "4", [2] * 5).numpy())


def test_the_model_comes_back_as_it_was(images: Tensor) -> None:
    model = small_cnn().train()
    model[1].eval()  # frozen normalization
    model[0].weight.requires_grad_(False)
    model[8].weight.grad = torch.ones_like(model[8].weight)
    modes = [m.training for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    maps = xcal.explain.gradcam(model, images, "4")
    xcal.explain.road(model, images, maps, levels=(50,))
    xcal.explain.signal(model, images, "4")
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert model[8].weight.grad.eq(1).all() and model[4].weight.grad is None
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_tokens_are_laid_out_by_the_reshape_given(images: Tensor) -> None:
    torch.manual_seed(5)
    model = TokenNet().double()

    def grid(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].transpose(1, 2).unflatten(2, (3, 3))

    found = xcal.explain.gradcam(model, images, "block", 1, reshape=grid)
    model.eval()
    taken: list[Tensor] = []

    def take(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        taken.append(output)

    handle = model.block.register_forward_hook(take)
    model(images.double())[:, 1].sum().backward()
    handle.remove()
    features, gradients = taken[0].detach()[:, 1:], taken[0].grad[:, 1:]
    expected = (features * gradients.mean(1, keepdim=True)).sum(2).relu().view(5, 3, 3)
    assert expected.max() > 0
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match="give a reshape"):
        xcal.explain.gradcam(model, images, "block")
    assert 0 <= xcal.explain.signal(model, images, "block", reshape=grid).score.max() <= 1


def test_road_takes_maps_of_either_shape_and_kind(images: Tensor) -> None:
    model = small_cnn()
    maps = xcal.explain.gradcam(model, images, "4")
    first = xcal.explain.road(model, images, maps, levels=(30, 60))
    second = xcal.explain.road(model, images.numpy(), maps.numpy()[:, None], levels=(30, 60))
    assert first.summary() == second.summary()
    assert first.morf.shape == (5, 2) and -0.5 <= first.road <= 0.5
    other = xcal.explain.road(model, images, maps, classes=1, levels=(30,))
    assert other.classes.tolist() == [1] * 5


def test_road_tells_a_map_that_knows_from_one_that_does_not() -> None:
    """A network that looks at the left half only: its map scores, the mirrored one does worse."""

    class Left(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen = x[..., :6].mean(dim=(1, 2, 3))
            return torch.stack([4 * seen, -4 * seen], 1)

    generator = torch.Generator().manual_seed(2)
    images = torch.randn(6, 3, 12, 12, generator=generator) * 0.1
    images[..., :3] += 2.0
    maps = torch.zeros(6, 12, 12)
    maps[..., :3] = 1.0
    right = xcal.explain.road(Left(), images, maps, classes=0)
    wrong = xcal.explain.road(Left(), images, maps.flip(2), classes=0)
    assert right.road > 0.1 > wrong.road


def test_the_signal_is_that_of_its_parts(images: Tensor) -> None:
    model = small_cnn()
    found = xcal.explain.signal(model, images, "4", alpha=0.5, beta=0.25, gamma=2.0)
    maps = xcal.explain.gradcam(model, images, "4")
    given = xcal.explain.signal(
        model, images.numpy(), maps=maps[:, None].numpy(), alpha=0.5, beta=0.25, gamma=2.0
    )
    expected = (0.5 * found.logit_drop + 0.25 * found.margin) * found.concentration**2
    torch.testing.assert_close(found.score, expected.clamp(0, 1))
    assert isinstance(given.score, np.ndarray) and np.array_equal(given.score, found.score.numpy())


def test_networks_of_xcal_need_no_layer() -> None:
    from xcal.models.small import small

    model = small(3, seed=0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(
        xcal.explain.gradcam(model, images), xcal.explain.gradcam(model, images, model.cam_layer)
    )


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m, x: xcal.explain.gradcam(m, x), "does not name its cam_layer"),
        (lambda m, x: xcal.explain.gradcam(m, x, "nine"), "has no layer 'nine'"),
        (lambda m, x: xcal.explain.gradcam(m, x, nn.ReLU()), "no module of the network"),
        (lambda m, x: xcal.explain.gradcam(m, x, "8"), "2 dimensions"),
        (lambda m, x: xcal.explain.gradcam(m, x[0], "4"), "give floating point of shape"),
        (lambda m, x: xcal.explain.gradcam(m, x.byte(), "4"), "torch.uint8"),
        (lambda m, x: xcal.explain.gradcam(m, x, "4", 4), "not among the network's 4"),
        (lambda m, x: xcal.explain.gradcam(m, x, "4", [1, 2]), "2 classes for 5 images"),
        (lambda m, x: xcal.explain.gradcam(m, x, "4", method="cam"), "no explanation map"),
        (lambda m, x: xcal.explain.gradcam(m[:5], x, "4"), "must give logits"),
        (lambda m, x: xcal.explain.road(m, x, x), "The maps have shape"),
        (lambda m, x: xcal.explain.road(m, x, "maps"), "neither a tensor nor an array"),
        (lambda m, x: xcal.explain.signal(m, x, maps=x[:, 0]), "negative"),
        (
            lambda m, x: xcal.explain.road(nn.Sequential(m, nn.Linear(4, 1)), x, x[:, 0]),
            "one logit",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(images: Tensor, call, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        call(small_cnn(), images)


def test_the_names_are_functions_in_whatever_order_things_are_imported() -> None:
    code = ""
    for first in (
        "import xcal.explain.signal",
        "from xcal.explain.road import road",
        "import xcal",
    ):
        code += f"{first}\nimport xcal.explain as e\nprint(e.signal.__name__, callable(e.road))\n"
        code += "import sys\n[sys.modules.pop(m) for m in list(sys.modules) if 'xcal' in m]\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["signal", "True"] * 3, done.stderr


def test_importing_xcal_does_not_import_torch() -> None:
    code = "import sys, xcal; print('torch' in sys.modules, 'explain' in dir(xcal))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
