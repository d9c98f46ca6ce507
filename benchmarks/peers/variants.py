"""The steps that are compared: one training step of each kind on the same random batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcal.dp.clipping import ClippingEngine
from xcal.dp.fix import fix
from xcal.dp.noise import NoiseKey, NoiseSource, SecureNoise, SeededNoise, release_tensors
from xcal.dp.noise_ahead import SecureNoiseAhead
from xcal.errors import UserError
from xcal.explain.gradcam import forward_with_features
from xcal.explain.signal import (
    SignalSettings,
    components,
    image_components,
    mask_images,
    scores,
    top_cells,
)
from xcal.methods.xcal_steered import SteeredParameters
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "efficientnet_b0": efficientnet_b0,
}
NETWORKS = tuple(BUILDERS)


class _First(nn.Module):
    """MONAI's ViT gives its hidden states as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.inner(images)[0]
        return scores


def _densenet121(_: int) -> nn.Module:
    from monai.networks.nets import DenseNet121

    return fix(DenseNet121(spatial_dims=2, in_channels=3, out_channels=CLASSES))[0]


def _vit(pixels: int) -> nn.Module:
    from monai.networks.nets import ViT

    return _First(
        ViT(
            in_channels=3, img_size=(pixels, pixels), patch_size=(8, 8), hidden_size=192,
            mlp_dim=768, num_layers=12, num_heads=3, classification=True, num_classes=CLASSES,
            spatial_dims=2, post_activation="",
        )
    )  # fmt: skip


# Networks of MONAI, as a user brings them; only if asked for.
FOREIGN: dict[str, Callable[[int], nn.Module]] = {"densenet121": _densenet121, "vit": _vit}

CLASSES = 8
CLIP = 1.0
SIGMA = 1.0
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """What every variant of a comparison shares."""

    network: str
    pixels: int
    batch: int = 32

    def model(self) -> nn.Module:
        if self.network in FOREIGN:
            torch.manual_seed(0)
            return FOREIGN[self.network](self.pixels).train()
        return BUILDERS[self.network](CLASSES, norm="group", seed=0).train()

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator)
        return images, torch.randint(0, CLASSES, (self.batch,), generator=generator)


@dataclass(frozen=True)
class Step:
    """`run(i)` is training step i; steps repeat in cycles of `cycle`."""

    run: Callable[[int], None]
    cycle: int = 1
    close: Callable[[], None] = lambda: None


def default_signal() -> tuple[int, float]:
    """`signal_every` and `signal_fraction` as a user gets them without asking."""
    fields = SteeredParameters.model_fields
    return int(fields["signal_every"].default), float(fields["signal_fraction"].default)


def _sgd(setting: Setting) -> Step:
    model, (images, labels) = setting.model(), setting.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def run(_: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Step(run)


Signal = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def _ours(
    setting: Setting,
    *,
    noise: NoiseSource | None = None,
    signal: Signal | None = None,
    every: int = 1,
    close: Callable[[], None] = lambda: None,
) -> Step:
    """Clip, add noise, round to the release grid, update: the private step without its ledger."""
    model, (images, labels) = setting.model(), setting.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = ClippingEngine(model)
    source = SeededNoise(0) if noise is None else noise
    parameters = dict(model.named_parameters())
    cam_layer = getattr(model, "cam_layer", None)

    def run(index: int) -> None:
        with_signal = signal is not None and index % every == 0
        sums = engine.clipped_sum(
            images, labels, clip=CLIP, capture=cam_layer if with_signal else None
        )
        if signal is not None and with_signal:
            assert sums.features is not None
            float(signal(model, images, sums.logits, sums.features).sum())
        key = NoiseKey("context", "ours", 0, index, "gradient")
        noisy = release_tensors(sums.gradients, SIGMA * CLIP, source, key)
        for name, parameter in parameters.items():
            parameter.grad = noisy[name].div_(setting.batch)
        optimizer.step()
        optimizer.zero_grad()

    return Step(run, every, close)


def _secure(setting: Setting) -> Step:
    """The secure source, with the next step's noise prepared meanwhile by a second thread."""
    noise = SecureNoiseAhead()
    return _ours(setting, noise=noise, close=noise.close)


def full_signal(model: nn.Module, images: Tensor, logits: Tensor, features: Tensor) -> Tensor:
    """Our signal: maps in closed form from the training forward, one more inference pass."""
    parts = image_components(model, images, logits, features, SignalSettings())
    return scores(parts, 1.0, 1.0, 1.0)


def _default_signal(setting: Setting) -> Step:
    every, fraction = default_signal()
    count = max(1, round(fraction * setting.batch))

    def some(model: nn.Module, images: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        return full_signal(model, images[:count], logits[:count], features[:count])

    return _ours(setting, signal=some, every=every)


def _naive_signal(model: nn.Module, images: Tensor, *_: Tensor) -> Tensor:
    """As one would write it first: a forward for the map, autograd, a forward on masked images."""
    settings = SignalSettings()
    logits, features = forward_with_features(model, images)
    chosen = logits.gather(1, logits.argmax(1, keepdim=True)).sum()
    (gradients,) = torch.autograd.grad(chosen, [features])
    weights = gradients.mean((2, 3), keepdim=True)
    maps = (weights * features).sum(1).relu().detach()
    cells = top_cells(maps, settings.q, positive_only=settings.positive_only)
    with torch.no_grad():
        masked = model(mask_images(images, cells, settings.fill))
    parts = components(logits, maps, cells, masked)
    return scores(parts, settings.alpha, settings.beta, settings.gamma)


def _opacus_hooks(setting: Setting) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    images, labels = setting.data()
    model = GradSampleModule(setting.model())
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=setting.batch,
    )

    def run(_: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Step(run)


def _opacus_ghost(setting: Setting) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    images, labels = setting.data()
    model = GradSampleModuleFastGradientClipping(setting.model(), max_grad_norm=CLIP)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=setting.batch,
    )
    loss = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def run(_: int) -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return Step(run)


def _vmap(setting: Setting, chunk: int = 8) -> Step:
    """Per-image gradients by torch.func, eight images at a time."""
    model, (images, labels) = setting.model(), setting.data()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    per_image: Any = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def run(_: int) -> None:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for start in range(0, setting.batch, chunk):
            part = slice(start, start + chunk)
            gradients = per_image(parameters, images[part], labels[part])
            squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
            factors = (CLIP / squares.sum(0).sqrt()).clamp_max(1)
            for name, gradient in gradients.items():
                total[name] += (factors @ gradient.flatten(1)).view_as(total[name])
        for name, parameter in parameters.items():
            noise = torch.empty_like(parameter).normal_(0.0, SIGMA * CLIP, generator=generator)
            parameter.sub_(total[name].add_(noise), alpha=LEARNING_RATE / setting.batch)

    return Step(run)


_MAKERS: dict[str, Callable[[Setting], Step]] = {
    "sgd": _sgd,
    "ours": _ours,
    "ours-secure-noise": _secure,
    "opacus-hooks": _opacus_hooks,
    "opacus-ghost": _opacus_ghost,
    "vmap": _vmap,
    "ours+naive-signal": lambda setting: _ours(setting, signal=_naive_signal),
    "ours+full-signal": lambda setting: _ours(setting, signal=full_signal),
    "ours+default-signal": _default_signal,
}
VARIANTS = tuple(_MAKERS)

# Timed beside the others, but no row of its own: what the second thread of the secure source saves.
SECURE_INLINE = "ours-secure-noise, not ahead"


def make_step(variant: str, setting: Setting) -> Step:
    """A fresh model and its training step."""
    if variant == SECURE_INLINE:
        return _ours(setting, noise=SecureNoise())
    if variant not in _MAKERS:
        raise UserError(f"there is no variant {variant!r}: choose from {', '.join(VARIANTS)}")
    return _MAKERS[variant](setting)
