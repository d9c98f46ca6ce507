"""Published weights: read without running anything from the file, and loaded strictly."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.models.probe import CONSTANTS, TURN


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a `.pth`/`.pt` state dict.

    Nothing in the file is executed: safetensors holds data only, and pickles are read by a loader
    that knows tensors and plain containers and refuses everything else.
    """
    try:
        found = path.is_file()
    except OSError:  # a name that no file can have
        found = False
    if not found:
        raise UserError(f"there is no weights file {path}: check the path")
    if path.suffix == ".safetensors":
        try:
            return dict(safetensors.torch.load_file(path))
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a readable safetensors file: {error}") from None
    if path.suffix not in (".pth", ".pt"):
        raise UserError(f"{path} is not a weights file we read: give .safetensors, .pth or .pt")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the loader warns of pickles it then refuses
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors and was not read, since loading it could run code: "
            "convert it to .safetensors where you trust it"
        ) from None
    except Exception:  # torch raises almost anything on a damaged file
        raise UserError(f"{path} is damaged or no torch weights file: fetch it again") from None
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise UserError(f"{path} is not a plain state dict of named tensors: save one")
    return dict(content)


def load_published(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy published weights into a network, strictly but for the head, which stays as it is.

    Every other name and shape must agree, both ways, and every number must be finite; what the
    network says it `leaves_out` is not asked for. Nothing is changed when something disagrees.
    """
    head = f"{getattr(model, 'head_layer', None) or ''}."
    apart = (head, *getattr(model, "leaves_out", ()))
    own = {n: t for n, t in model.state_dict().items() if not n.startswith(head)}
    given = {n: t for n, t in weights.items() if not n.startswith(apart)}
    if TURN in own.keys() ^ given.keys() and CONSTANTS[0] in own.keys() & given.keys():
        made, asked = ("for", "without") if TURN in given else ("without", "for")
        raise UserError(
            f"these weights were made {made} whitening, and the head is {asked} it: make another"
            " file with `xcal data constants`, or change whiten"
        )
    if set(CONSTANTS) & own.keys() - given.keys():
        raise UserError(
            "the head reads columns, and these weights lack the public constants that standardize"
            " them: make a file that has them with `xcal data constants`"
        )
    if any(name.endswith("running_mean") for name in given.keys() - own.keys()):
        raise UserError(
            "these weights come with batch-norm statistics, which this network has no place for: "
            "build it with norm = frozen"
        )
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing:
        raise UserError(f"the weights lack {missing[0]!r} ({len(missing)} in all): wrong network?")
    if unknown:
        raise UserError(
            f"the weights hold {unknown[0]!r} ({len(unknown)} in all), which this network has not: "
            "wrong network?"
        )
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise UserError(
                f"the weights' {name!r} has shape {tuple(given[name].shape)}, the network's "
                f"{tuple(tensor.shape)}: wrong network?"
            )
        if not torch.isfinite(given[name]).all():
            raise UserError(f"the weights' {name!r} is not finite: fetch the file again")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])
