"""A network cut in two where its first trainable parameter stands.

What comes before never changes while it trains, so what it makes of an image is a constant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# By the first tensor: modules that hold frozen weights are made anew for a look.
_DIGESTS: MutableMapping[Tensor, dict[str, tuple[list[Tensor], list[int], str]]]
_DIGESTS = WeakTensorKeyDictionary()


def kept_digest(what: str, tensors: list[Tensor], take: Callable[[], str]) -> str:
    """The fingerprint that `take` makes of `tensors`, as long as nobody writes into them.

    For frozen weights, which are asked about in every round. Writing past autograd (`.data`), which
    only code from elsewhere does, goes unnoticed until the network is built anew.
    """
    if not tensors:
        return take()
    first, *others = tensors
    kept, versions = _DIGESTS.setdefault(first, {}), [tensor._version for tensor in tensors]
    if what in kept:
        known, then, digest = kept[what]
        if then == versions and len(known) == len(others) and all(map(is_, known, others)):
            return digest
    digest = take()
    kept[what] = others, versions, digest  # not the first, which would never be freed
    return digest


@dataclass(frozen=True)
class Split:
    """The frozen backbone of a network and the rest, which share the network's own modules."""

    beginning: tuple[nn.Module, ...]
    rest: tuple[nn.Module, ...]

    def begin(self, images: Tensor) -> Tensor:
        """What the rest takes, from images; without gradients."""
        with torch.no_grad():
            return _through(self.beginning, images)

    def forward_head(self, activations: Tensor) -> Tensor:
        """Logits, from what the beginning made."""
        return _through(self.rest, activations)

    def passes(self, module: nn.Module) -> bool:
        """Whether the rest runs this module, so that its output can be seen there."""
        return any(module is one for part in self.rest for one in part.modules())

    def digest(self) -> str:
        """A fingerprint of the beginning: the same means the same activations.

        Of its weights, and of what its modules say of themselves: strides are no weights.
        """
        tensors = [t for part in self.beginning for t in (*part.parameters(), *part.buffers())]
        about = [f"{part!r} {getattr(part, 'views', '')!r}" for part in self.beginning]
        return kept_digest(repr(about), tensors, lambda: self._digest(about))

    def _digest(self, about: list[str]) -> str:
        state = hashlib.sha256(str(len(self.beginning)).encode())
        for part, told in zip(self.beginning, about, strict=True):
            state.update(told.encode())
            for name, value in part.state_dict().items():
                state.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
                state.update(value.detach().cpu().contiguous().numpy().tobytes())
        return state.hexdigest()


def split_backbone(model: nn.Module, seen: str | None = None) -> Split | None:
    """The split of a network that tells its `segments()`; None where nothing leading is frozen.

    The rest runs the module named `seen`, frozen or not, so that its output can be looked at.
    """
    watched = None if seen is None else model.get_submodule(seen)
    segments: Sequence[nn.Module] = model.segments() if hasattr(model, "segments") else ()  # type: ignore[operator]
    count = 0
    for segment in segments:
        if trains(segment):
            break
        if any(module is watched for module in segment.modules()):
            break
        count += 1
    if not 0 < count < len(segments):
        return None
    return Split(tuple(segments[:count]), tuple(segments[count:]))


def split_at_map(model: nn.Module) -> Split | None:
    """The split whose beginning gives the explained map; None where what makes it trains."""
    count = segments_to_map(model)
    segments: Sequence[nn.Module] = model.segments() if count else ()  # type: ignore[operator]
    if not count or any(trains(segment) for segment in segments[:count]):
        return None
    return Split(tuple(segments[:count]), tuple(segments[count:]))


def segments_to_map(network: nn.Module) -> int:
    """How many of the network's segments come up to its explained map, that one included.

    0 where it does not say: it has no `segments()`, or none of them ends at its `cam_layer`.
    """
    name = getattr(network, "cam_layer", None)
    if hasattr(network, "segments") and isinstance(name, str):
        explained = network.get_submodule(name)
        for index, segment in enumerate(network.segments()):  # type: ignore[operator]
            ends = segment
            while isinstance(ends, nn.Sequential) and ends is not explained and len(ends):
                ends = ends[-1]
            if ends is explained or segment is explained:
                return index + 1
    return 0


def trains(part: nn.Module) -> bool:
    """Whether any of its parameters does."""
    return any(parameter.requires_grad for parameter in part.parameters())


def _through(parts: Sequence[nn.Module], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x
