"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from xcal.config import nearest
from xcal.errors import UserError
from xcal.models.small import small
from xcal.plugins import load_object

NETWORKS: dict[str, Callable[..., nn.Module]] = {"small": small}


def build_network(name: str, classes: int, *, seed: int) -> nn.Module:
    """A fresh network: `small`, or one of the user's own by `package.module:name`.

    The user's own is a function `(classes, *, seed)` that returns an nn.Module with a `cam_layer`
    (dotted name of the module whose output is the CAM feature map) and a `head_layer` (dotted name
    of the final Linear after global average pooling, or None).
    """
    if name in NETWORKS:
        return NETWORKS[name](classes, seed=seed)
    if ":" not in name:
        raise UserError(
            f"Unknown network {name!r}.{nearest(name, tuple(NETWORKS))}"
            f" Known: {', '.join(NETWORKS)}, or package.module:name."
        )
    network = load_object(name, "network")(classes, seed=seed)
    if not isinstance(network, nn.Module):
        raise UserError(f"The network {name!r} did not return a torch.nn.Module.")
    for attribute in ("cam_layer", "head_layer"):
        if not hasattr(network, attribute):
            raise UserError(f"The network {name!r} has no attribute {attribute!r}: see the manual.")
    return network
