"""Grad-CAM and three relatives on the network's CAM layer.

Every network names the module whose output is the feature map (`cam_layer`) and, where global
average pooling and one linear layer follow it, that linear layer (`head_layer`). For such a
network the gradient of class j's logit with respect to channel c is `W[j, c] / (H*W)` in every
cell, so no backward pass is needed. Other heads go through autograd, which is also the oracle the
closed form is tested against. A network whose layer gives tokens has a `cam_reshape` as well, a
function that lays them out as (images, channels, height, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcal.dp.clipping.precision import double
from xcal.errors import UserError
from xcal.explain.inference import undisturbed

MapMethod = Literal["gradcam", "gradcam++", "hirescam", "layercam"]


def forward_with_features(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """One forward pass: logits (N, classes) and the CAM layer's output (N, C, H, W).

    The pass runs in whatever mode and under whatever gradient setting the caller has chosen, so
    a training step takes its features from here for nothing. No hook is left behind.
    """
    logits, features = _forward_capturing(model, images, keep=lambda output: (output, output))
    return logits, _laid_out(model, features)


def closed_form_maps(features: Tensor, head_weight: Tensor, classes: Tensor) -> Tensor:
    """Grad-CAM (N, H, W), non-negative, of `classes` (N,): relu(sum_c W[j, c] / (H*W) * A_c).

    `features` is (N, C, H, W), `head_weight` (classes, C). Exact where global average pooling
    and one linear layer follow the features.
    """
    height, width = features.shape[2:]
    return _weighed(features, head_weight[classes] / (height * width))


def batches(
    images: Tensor, classes: Tensor | None, batch_size: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Images, and their classes, so many at a time; one batch at least, which may be empty."""
    for start in range(0, max(len(images), 1), batch_size):
        here = slice(start, start + batch_size)
        part = images[here]
        # A tensor born in inference mode cannot take part in autograd; a copy can.
        part = part.clone() if part.is_inference() else part.detach()
        yield part, None if classes is None else classes[here]


def gradcam_maps(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    method: MapMethod = "gradcam",
    batch_size: int = 64,
) -> Tensor:
    """Maps (N, H, W), non-negative, of `classes` (N,), by default of the predicted ones.

    Computed in evaluation mode, `batch_size` images at a time, in closed form where the network
    allows it. The model comes back as it was: each module's mode, gradients, hooks, and the
    random state.
    """
    if method not in get_args(MapMethod):
        known = ", ".join(get_args(MapMethod))
        raise UserError(f"There is no explanation map called {method!r}: choose one of {known}.")
    head_weight = head_weight_of(model)
    maps = []
    with undisturbed(model), torch.inference_mode(False):
        for part, chosen in batches(images, classes, batch_size):
            if head_weight is None:
                features, gradients = _features_and_gradients(model, part, chosen)
                maps.append(_maps_from_gradients(features, gradients, method))
            else:
                maps.append(_maps_in_closed_form(model, part, chosen, method, head_weight))
    return torch.cat(maps)


def channel_weights(model: nn.Module, images: Tensor) -> Tensor:
    """Grad-CAM's weights (N, C) of the feature map's channels, for each image's predicted class.

    The mean over the map's cells of the logit's gradient. Leaves the model as `gradcam_maps` does.
    """
    head_weight = head_weight_of(model)
    found = []
    with undisturbed(model), torch.inference_mode(False):
        for part, _ in batches(images, None, 64):
            if head_weight is None:
                _, gradients = _features_and_gradients(model, part, None)
                found.append(gradients.mean(dim=(2, 3)))
            else:
                with torch.no_grad():
                    logits, features = forward_with_features(model, part)
                    cells = features.shape[2] * features.shape[3]
                    found.append(head_weight[logits.argmax(dim=1)] / cells)
    return torch.cat(found)


def enlarge_maps(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (N, h, w) brought to the image's (height, width) by bilinear interpolation, float64.

    In double precision, so that rounding makes no ranking among pixels of equal saliency.
    """
    enlarged = F.interpolate(
        double(maps).unsqueeze(1), size=size, mode="bilinear", align_corners=False
    )
    return enlarged.squeeze(1)


def in_pixels(cells: Tensor, images: Tensor) -> Tensor:
    """What cells (N, h, w) hold, for the pixels of images (…, H, W): each belongs to one cell."""
    height, width = images.shape[-2:]
    # In whole numbers, so that no size of image puts a pixel on the wrong side of a border.
    rows = torch.arange(height, device=images.device) * cells.shape[1] // height
    columns = torch.arange(width, device=images.device) * cells.shape[2] // width
    return cells[:, rows[:, None], columns].unsqueeze(1)


def head_weight_of(model: nn.Module) -> Tensor | None:
    """The weight (classes, C) of the closed form, or None where the closed form does not apply."""
    name = getattr(model, "head_layer", None)
    if name is None:
        return None
    head = _submodule(model, "head_layer")
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"The network's head_layer {name!r} is not a linear layer: name the one that follows "
            "global average pooling, or set head_layer to None."
        )
    return head.weight.detach()


def _maps_in_closed_form(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None,
    method: MapMethod,
    head_weight: Tensor,
) -> Tensor:
    with torch.no_grad():
        logits, features = forward_with_features(model, images)
        if classes is None:
            classes = logits.argmax(dim=1)
        if method in ("gradcam", "hirescam"):
            # The gradient is the same in every cell, so HiResCAM and Grad-CAM coincide.
            return closed_form_maps(features, head_weight, classes)
        cells = features.shape[2] * features.shape[3]
        gradients = (head_weight[classes] / cells)[:, :, None, None].expand_as(features)
        return _maps_from_gradients(features, gradients, method)


def _features_and_gradients(
    model: nn.Module, images: Tensor, classes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The feature map and the gradient of the chosen class's logit with respect to it."""

    # The graph is cut at the feature map, so that the backward pass covers the head only, works
    # on a frozen network, and reaches no parameter's .grad.
    # What goes on is a copy: a layer that works in place may overwrite it.
    def leaf(output: Tensor) -> tuple[Tensor, Tensor]:
        cut = output.detach().requires_grad_(True)
        return cut, cut.clone()

    with torch.enable_grad():
        logits, features = _forward_capturing(model, images, keep=leaf)
        if classes is None:
            classes = logits.argmax(dim=1)
        chosen = logits.gather(1, classes.unsqueeze(1)).sum()
        if not chosen.requires_grad:
            raise UserError(
                f"The logits do not depend on the output of cam_layer {model.cam_layer!r}: "
                "name a layer that the logits are computed from."
            )
        (gradients,) = torch.autograd.grad(chosen, features)
    return _laid_out(model, features.detach()), _laid_out(model, gradients)


def _maps_from_gradients(features: Tensor, gradients: Tensor, method: MapMethod) -> Tensor:
    if method == "hirescam":
        return (gradients * features).sum(dim=1).relu_()
    if method == "layercam":  # Jiang et al. 2021
        return (gradients.relu() * features).sum(dim=1).relu_()
    if method == "gradcam":
        weights = gradients.mean(dim=(2, 3))
    else:
        # Grad-CAM++ (Chattopadhyay et al. 2018) for the exponential of the logit, whose higher
        # derivatives are powers of the first; the common positive factor is left out. A cell
        # without gradient, or with a vanishing denominator, weighs nothing.
        squared = gradients.square()
        mass = features.sum(dim=(2, 3), keepdim=True)
        denominator = 2 * squared + mass * gradients * squared
        share = torch.where(denominator != 0, squared / denominator, 0)
        weights = (share * gradients.relu()).sum(dim=(2, 3))
    return _weighed(features, weights)


def _weighed(features: Tensor, weights: Tensor) -> Tensor:
    """relu(Σ_c w_c A_c), (N, H, W), of features (N, C, H, W) and weights (N, C).

    Not by a product of matrices: a library rounds its odd cells by where an image lies in memory,
    and so by its place among the others.
    """
    return (weights[:, :, None, None] * features).sum(dim=1).relu_()


def _forward_capturing(
    model: nn.Module, images: Tensor, keep: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Forward pass: logits and what is kept of the CAM layer's output.

    `keep(output)` gives what is kept and what takes the output's place.
    """
    captured: list[Tensor] = []
    versions: list[int] = []

    def capture(_module: nn.Module, _inputs: object, output: object) -> object:
        # Layers of transformers often return their output first in a tuple.
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"The output of cam_layer {model.cam_layer!r} is a {type(tensor).__name__} and not"
                " a tensor: name another layer."
            )
        kept, passed_on = keep(tensor)
        captured.append(kept)
        versions.append(_version(kept))
        return (passed_on, *output[1:]) if isinstance(output, tuple) else passed_on

    handle = _submodule(model, "cam_layer").register_forward_hook(capture)
    try:
        logits = model(images)
    finally:
        handle.remove()
    if not captured:
        raise UserError(
            f"The network never calls its cam_layer {model.cam_layer!r}: name a layer that its "
            "forward pass goes through."
        )
    features = captured[-1]
    if _version(features) != versions[-1]:
        # The map would silently be that of another layer.
        raise UserError(
            f"The output of cam_layer {model.cam_layer!r} is overwritten by the layer after it: "
            "make that layer work out of place, or name it as the cam_layer."
        )
    return logits, features


def _laid_out(model: nn.Module, output: Tensor) -> Tensor:
    """The layer's output, or a gradient of it, as (images, channels, height, width)."""
    reshape = getattr(model, "cam_reshape", None)
    shaped: Tensor = output if reshape is None else reshape(output)
    if shaped.dim() != 4 or len(shaped) != len(output):
        given = " after cam_reshape" if reshape is not None else ""
        raise UserError(
            f"The output of cam_layer {model.cam_layer!r} has {shaped.dim()} dimensions{given}: "
            "name a layer whose output is (images, channels, height, width), or give a reshape "
            "that makes it so."
        )
    return shaped


def _version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _submodule(model: nn.Module, attribute: str) -> nn.Module:
    name = getattr(model, attribute, None)
    if not isinstance(name, str):
        raise UserError(
            f"The network {type(model).__name__} has no attribute {attribute}: set it to the "
            "dotted name of the layer."
        )
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UserError(
            f"The network {type(model).__name__} has no layer {name!r}, which its {attribute} "
            "names: correct the name."
        ) from None
