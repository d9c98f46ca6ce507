"""Any torch network, and what it is asked with, as the functions of this package take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.explain.inference import predict_logits

Array = Any  # a torch tensor or a numpy array
Layer = nn.Module | str
Reshape = Callable[[Tensor], Tensor]


class AnyNetwork(nn.Module):
    """A network held by another that only adds where its maps are taken; nothing in it changes."""

    head_layer: str | None = None

    def __init__(
        self, model: nn.Module, layer: str | None = None, reshape: Reshape | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"The model is a {type(model).__name__}: give a torch.nn.Module.")
        super().__init__()
        self.training = model.training
        self.network = model
        self.cam_layer = None if layer is None else f"network.{layer}".removesuffix(".")
        self.cam_reshape = reshape

    def forward(self, images: Tensor) -> Tensor:
        answer = self.network(images)
        logits = getattr(answer, "logits", answer)  # as Hugging Face's networks give them
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(images):
            what = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"The network answers {len(images)} images with {what}: it must give logits of"
                " shape (images, classes)."
            )
        return logits


def at_layer(model: nn.Module, layer: Layer | None, reshape: Reshape | None) -> AnyNetwork:
    """The network with the layer whose output is explained; None: its own `cam_layer`."""
    network = AnyNetwork(model)
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    if layer is None:
        layer = getattr(model, "cam_layer", None)
        reshape = reshape or getattr(model, "cam_reshape", None)
        if layer is None:
            raise UserError(
                f"The network {type(model).__name__} does not name its cam_layer: give layer, a"
                " module of the network or its dotted name."
            )
    if isinstance(layer, str):
        if layer not in dict(model.named_modules(remove_duplicate=False)):
            raise UserError(f"The network {type(model).__name__} has no layer {layer!r}.")
        name = layer
    elif isinstance(layer, nn.Module) and layer in names:
        name = names[layer]
    else:
        raise UserError(
            f"The layer given is no module of the network {type(model).__name__}: give one of its"
            " modules, or a dotted name."
        )
    network = AnyNetwork(model, name, reshape)
    if name and name == getattr(model, "cam_layer", None):
        head = getattr(model, "head_layer", None)
        network.head_layer = None if head is None else f"network.{head}"
    return network


def prepared(
    model: nn.Module,
    images: Array,
    layer: Layer | None,
    classes: Any,
    grid: tuple[int, int] | None,
    reshape: Reshape | None,
) -> tuple[AnyNetwork, Tensor, Tensor | None]:
    """Network, images and classes for maps that need a grid and no features."""
    network = at_layer(model, layer, reshape) if grid is None else AnyNetwork(model)
    inputs = as_inputs(model, images)
    if grid is not None and not all(
        1 <= cells <= side for cells, side in zip(grid, inputs.shape[2:], strict=True)
    ):
        raise UserError(
            f"A grid of {grid} does not fit images of {tuple(inputs.shape[2:])} pixels: give height"
            " and width in cells, each 1 or more and no more than the pixels."
        )
    if len(inputs):
        check_compares(predict_logits(network, inputs[:1]))
    return network, inputs, as_classes(network, inputs, classes)


def as_inputs(model: nn.Module, images: Array) -> Tensor:
    """The images as a tensor of the network's device and precision."""
    tensor = _tensor(images, "images")
    if tensor.dim() != 4 or not tensor.is_floating_point():
        raise UserError(
            f"The images are {tensor.dtype} of shape {tuple(tensor.shape)}: give floating point of"
            " shape (images, channels, height, width), as the network takes them."
        )
    own = next((p for p in model.parameters() if p.is_floating_point()), None)
    return tensor.detach() if own is None else tensor.detach().to(own.device, own.dtype)


def as_maps(maps: Array, inputs: Tensor) -> Tensor:
    """Maps (N, h, w) in floating point, one for each image."""
    tensor = _tensor(maps, "maps").detach().to(inputs.device)
    if tensor.dim() == 4 and tensor.shape[1] == 1:
        tensor = tensor.squeeze(1)
    if tensor.dim() != 3 or len(tensor) != len(inputs):
        raise UserError(
            f"The maps have shape {tuple(tensor.shape)} for {len(inputs)} images: give one for"
            " each, (images, height, width) or (images, 1, height, width)."
        )
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_classes(network: nn.Module, inputs: Tensor, classes: Any) -> Tensor | None:
    """A class for each image, (N,); None for the predicted ones."""
    if classes is None or not len(inputs):
        return None
    chosen = _tensor([classes] if isinstance(classes, int) else classes, "classes")
    chosen = chosen.detach().to(inputs.device).reshape(-1)
    if len(chosen) == 1:
        chosen = chosen.expand(len(inputs))
    count = predict_logits(network, inputs[:1]).shape[1]
    if chosen.is_floating_point() or len(chosen) != len(inputs):
        raise UserError(
            f"There are {len(chosen)} classes for {len(inputs)} images: give one whole number for"
            " each, or one for all."
        )
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
        raise UserError(f"A class is not among the network's {count}: they count from 0.")
    return chosen.long()


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        return torch.from_numpy(np.array(values))  # a copy: torch takes no read-only memory
    except (TypeError, ValueError):
        raise UserError(f"The {what} are neither a tensor nor an array of numbers.") from None


def like(images: Array, found: Tensor) -> Array:
    """A result as what the images were."""
    found = found.detach()
    return found.to(images.device) if isinstance(images, Tensor) else found.cpu().numpy()


def check_compares(logits: Tensor) -> None:
    """Refuse a network of one logit."""
    if logits.shape[1] < 2:
        raise UserError(
            "The network gives one logit, and confidences are compared between classes: give it"
            " two, as torch.cat([-z, z], 1) makes of one."
        )


class OneFinding(AnyNetwork):
    """A network of several findings, with two answers (N, 2): that one is absent, that it is there.

    Their softmax is the finding's own probability, and a map of the second is a map of the finding.
    """

    def __init__(self, network: nn.Module, finding: int) -> None:
        # No `head_layer`: it is not one linear layer any more, and maps are made of gradients.
        layer, reshape = (getattr(network, name, None) for name in ("cam_layer", "cam_reshape"))
        super().__init__(network, layer, reshape)
        self.finding = finding

    def forward(self, images: Tensor) -> Tensor:
        there = super().forward(images)[:, self.finding]
        return torch.stack([torch.zeros_like(there), there], dim=1)
