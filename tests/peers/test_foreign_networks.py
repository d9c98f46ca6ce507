"""Networks of MONAI and transformers, as they are built there: one sample at a time, exactly."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from against_reference import assert_exact
from xcal.dp.clipping import ClippingEngine
from xcal.dp.fix import fix

CLASSES = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def monai_nets():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their own making
        return pytest.importorskip("monai.networks.nets")


def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def densenet(**options):
    small = {"block_config": (2, 2), "init_features": 8, "growth_rate": 4} | options
    return monai_nets().DenseNet(
        spatial_dims=small.pop("spatial_dims", 2), in_channels=3, out_channels=CLASSES, **small
    )


def densenet121():
    return monai_nets().DenseNet121(spatial_dims=2, in_channels=3, out_channels=CLASSES)


class First(nn.Module):
    """MONAI's ViT gives its hidden states as well."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def monai_vit(layers=2, hidden=24, **options):
    return First(
        monai_nets().ViT(
            in_channels=3,
            img_size=options.pop("img_size", (32, 32)),
            patch_size=options.pop("patch_size", (8, 8)),
            hidden_size=hidden,
            mlp_dim=2 * hidden,
            num_layers=layers,
            num_heads=3,
            classification=True,
            num_classes=CLASSES,
            spatial_dims=2,
            post_activation="",
            qkv_bias=True,
            **options,
        )
    )


def hf_vit(layers=2, hidden=24):
    library = transformers()
    config = library.ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=3,
        intermediate_size=2 * hidden,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    return library.ViTForImageClassification(config)


def hf_convnext(sizes=(8, 12), depths=(1, 2)):
    library = transformers()
    config = library.ConvNextConfig(
        num_stages=len(sizes),
        hidden_sizes=list(sizes),
        depths=list(depths),
        num_labels=CLASSES,
        layer_scale_init_value=0.5,
    )
    return library.ConvNextForImageClassification(config)


SMALL = {
    "DenseNet of MONAI": lambda: fix(densenet())[0],
    "DenseNet of MONAI, frozen": lambda: fix(densenet(), batch_norm="frozen")[0],
    "ViT of MONAI": monai_vit,
    "ViT of MONAI, perceptron": lambda: monai_vit(proj_type="perceptron", save_attn=True),
    "ViT of transformers": hf_vit,
    "ConvNeXt of transformers": hf_convnext,
}


def batch(count, pixels=32, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, pixels, pixels, generator=generator, dtype=dtype)
    return images, torch.arange(count) % CLASSES


def shaken(model):
    generator = torch.Generator().manual_seed(3)
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return model


@pytest.mark.parametrize("network", SMALL)
def test_small_networks_equal_one_sample_at_a_time(network):
    torch.manual_seed(0)
    assert_exact(shaken(SMALL[network]()), *batch(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: fix(densenet121())[0],
        lambda: monai_vit(layers=6, hidden=192),
        lambda: hf_vit(layers=6, hidden=192),
        lambda: hf_convnext((32, 64, 96, 128), (2, 2, 3, 2)),
    ],
)
def test_networks_of_real_size_equal_one_sample_at_a_time(build):
    torch.manual_seed(0)
    assert_exact(shaken(build()), *batch(4))


@pytest.mark.parametrize("network", SMALL)
def test_in_float32_no_sample_exceeds_the_clip(network):
    torch.manual_seed(0)
    model = SMALL[network]().train()
    images, labels = batch(4, dtype=torch.float32)
    for brightness in (1.0, 300.0):
        for clip in (1.0, 1e-3):
            for one in range(4):
                part = slice(one, one + 1)
                found = ClippingEngine(model).clipped_sum(
                    brightness * (1 + images[part]), labels[part], clip=clip
                )
                squares = [float(g.double().square().sum()) for g in found.gradients.values()]
                assert sum(squares) ** 0.5 <= clip
