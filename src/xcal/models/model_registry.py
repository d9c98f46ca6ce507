"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from xcal.config import Experiment, nearest
from xcal.errors import UserError
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18
from xcal.models.small import small
from xcal.models.views import OverViews
from xcal.models.weights import load_published, read_weights
from xcal.plugins import MANUAL, OwnCodeError, check_call, load_object, own_code

STAGED: dict[str, Callable[..., nn.Module]] = {
    "efficientnet_b0": efficientnet_b0,
    "resnet18": resnet18,
}
COLUMNED = "efficientnet_b0"
"""The network whose head may read several stages."""
NETWORKS = ("small", *STAGED)


def build_network(experiment: Experiment, classes: int) -> nn.Module:
    """The experiment's network with its first weights, a function of seed and weights file alone.

    The user's own, `package.module:name`, is a function `(classes, *, seed)` that returns an
    nn.Module with a `cam_layer` (dotted name of the module whose output is the CAM feature map) and
    a `head_layer` (dotted name of the final Linear after global average pooling); None: there is
    no such layer.
    """
    name, seed = experiment.network, experiment.seed
    if experiment.head_reads != "last" and name != COLUMNED:
        raise UserError(f"head_reads is for the network {COLUMNED}: leave it out for {name!r}.")
    if experiment.whiten and experiment.head_reads == "last":
        raise UserError("whiten is for a head that reads several stages: leave it out.")
    if name in STAGED:
        reads: dict[str, Any] = {}
        if experiment.head_reads != "last":
            reads = {"head_reads": experiment.head_reads, "whitened": bool(experiment.whiten)}
        network = STAGED[name](
            classes,
            norm=experiment.norm,
            output_stride=experiment.output_stride,
            trainable=experiment.train,
            train_norm_affine=experiment.train_norm,
            seed=seed,
            **reads,
        )
    elif name == "small":
        network = small(classes, seed=seed)
    elif ":" in name:
        network = _own(name, classes, seed)
    else:
        raise UserError(
            f"Unknown network {name!r}.{nearest(name, NETWORKS)}"
            f" Known: {', '.join(NETWORKS)}, or package.module:name."
        )
    if name not in STAGED and experiment.train != "all":
        raise UserError(f"The network {name!r} always trains whole: leave out train.")
    if experiment.weights is not None:
        load_published(network, read_weights(Path(experiment.weights)))
    if experiment.pool_views != "none":
        network = OverViews(network, experiment.pool_views)
    return network


def _own(name: str, classes: int, seed: int) -> nn.Module:
    """The user's own network, held to what a network is."""
    build = load_object(name, "network")

    def refusal(what: str) -> OwnCodeError:
        return OwnCodeError(f"The network {name!r} {what}: see {MANUAL}.")

    if isinstance(build, nn.Module):
        raise refusal("is a network, and must be a function (classes, *, seed) that makes one")
    check_call("network", name, build, name.partition(":")[2], ("classes", "*", "seed"))
    with own_code("network", name, "making it"):
        network = build(classes, seed=seed)
    if not isinstance(network, nn.Module):
        raise refusal(f"was made as a {type(network).__name__}, and must be a torch.nn.Module")
    with own_code("network", name, "its attributes"):
        modules = {path for path, _ in network.named_modules() if path}
        trains = any(p.requires_grad for p in network.parameters())
        named = {a: getattr(network, a, "") for a in ("cam_layer", "head_layer")}
    for attribute, layer in named.items():
        if layer == "":
            raise refusal(f"has no attribute {attribute!r}")
        if layer is not None and (not isinstance(layer, str) or layer not in modules):
            raise refusal(f"has {attribute} = {layer!r}, and no module of that name")
    if not trains:
        raise refusal("has no parameter that trains: let some require a gradient")
    return network
