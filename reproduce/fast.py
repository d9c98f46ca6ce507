"""The frozen part of a probe in onnxruntime: about three times as fast, equal to about 1e-5.

Studies at the scale `probe` ask the same backbone for tens of thousands of images. Only what never
trains goes this way, and only in simulations: features on disk (`XCAL_FEATURES`), and the answers
that ROAD and occlusion ask of a finished model. Without onnxruntime everything is torch's.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.federation.setup import Federation
from xcal.methods.base import SIGNAL_KEYS
from xcal.methods.feature_store import FeatureStore
from xcal.models.backbone import Split, segments_to_map, split_at_map, split_backbone, trains
from xcal.models.model_registry import build_network
from xcal.models.views import FixedView, OverViews

Ask = Callable[[Tensor], Tensor]
PLAIN = (FixedView(),)


def session(parts: Sequence[nn.Module], images: Tensor) -> Ask | None:
    """What these frozen parts make of images, by onnxruntime; None where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    network = nn.Sequential(*parts).eval()
    name = Split(tuple(parts), ()).digest()[:32]
    folder = Path(os.environ.get("XCAL_FEATURES") or tempfile.gettempdir()) / "onnx"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{images.shape[2]}px.onnx"
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network,
                (images,),
                str(own),
                dynamo=False,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
            )
        own.rename(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    runs = onnxruntime.InferenceSession(str(path), options)
    return lambda x: torch.from_numpy(runs.run(None, {"x": x.contiguous().numpy()})[0])


def _inner(model: nn.Module) -> tuple[nn.Module, tuple[FixedView, ...]]:
    """The network that looks at one view, and the views that are pooled."""
    if isinstance(model, OverViews):
        return model.network, model.views
    return model, PLAIN


class FastProbe(nn.Module):
    """Answers as the probe that it was made of does, view by view if asked."""

    def __init__(
        self, frozen: Sequence[nn.Module], head: nn.Module, views: Sequence[FixedView]
    ) -> None:
        super().__init__()
        self.head = head
        self._frozen, self._views = tuple(frozen), tuple(views)
        self._asks: dict[int, Ask] = {}  # by the side of an image
        if len(views) > 1:
            self.views = self._views

    def forward(self, images: Tensor, view: int | None = None) -> Tensor:
        views = self._views if view is None else (self._views[view],)
        side = images.shape[2]
        if side not in self._asks:
            ask = session(self._frozen, images)
            assert ask is not None
            self._asks[side] = ask
        read = torch.stack([self._asks[side](one.of(images)) for one in views]).mean(0)
        answers: Tensor = self.head(read)
        return answers


def fast_probe(model: nn.Module) -> nn.Module:
    """What answers for `model`: itself, unless only its last segment trains."""
    inner, views = _inner(model)
    parts = inner.segments() if hasattr(inner, "segments") else []  # type: ignore[operator]
    if not parts or any(trains(part) for part in parts[:-1]):
        return model
    if find_spec("onnxruntime") is None:
        return model
    return FastProbe(parts[:-1], parts[-1], views).eval()


def kept_maps(model: nn.Module, images: Tensor) -> Tensor | None:
    """What the explained layer holds of these images, kept on disk by content: all cells of a set
    explain the same few. None where part of it trains, or nothing is kept."""
    root, backbone = os.environ.get("XCAL_FEATURES"), split_at_map(model)
    inner, views = _inner(model)
    count = segments_to_map(inner)
    parts = inner.segments()[:count] if count else []  # type: ignore[operator]
    if root is None or backbone is None or not parts or any(map(trains, parts)):
        return None
    digest = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
    path = Path(root) / "explained" / f"{backbone.digest()[:32]}-{digest[:32]}.npy"
    if not path.exists():
        ask = session(parts, images)
        if ask is None:
            return None
        made = torch.stack([one.undo(ask(one.of(images))) for one in views]).mean(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}.npy")
        np.save(own, made.numpy())
        own.rename(path)
    return torch.from_numpy(np.load(path))


def fill_features(federation: Federation) -> None:
    """Put into the store what the cell would compute by itself, of every image it looks at.

    Maps are kept where a signal covers their cells; those of standardized channels serve every
    whitening, which is a product.
    """
    store, experiment = FeatureStore.of_environment(), federation.experiment
    if store is None or federation.parts is None or not experiment.feature_cache_mb:
        return
    model = build_network(experiment, len(federation.data.classes)).eval()
    read, mapped = split_backbone(model), split_at_map(model)
    inner, views = _inner(model)
    columns = getattr(inner, "columns", None)
    if read is None or mapped is None or columns is None:
        return
    wanted = (read.digest(), mapped.digest())
    covers = federation.method.uses >= SIGNAL_KEYS and getattr(experiment, "cover", "") == "cells"
    turn, columns.turn = columns.turn, None
    side = federation.data.train.pixels.shape[1]
    parts = inner.segments()[: segments_to_map(inner)]  # type: ignore[operator]
    ask = session(parts, torch.rand(32, 3, side, side))
    if ask is None:
        return
    like = ask(torch.zeros(1, 3, side, side))
    filling = _Filling(store, ask, views, mapped.digest(), wanted, turn, like)
    for shard in federation.parts.shards:
        filling.fill(federation.data.train.take(shard.indices), shard.brightness, covers)
    for public in (federation.data.validation, federation.data.test):
        filling.fill(public, 1.0, False)


@dataclass(frozen=True)
class _Filling:
    store: FeatureStore
    ask: Ask
    views: Sequence[FixedView]
    base: str  # the backbone whose maps are not whitened
    wanted: tuple[str, str]  # the one whose averages a head reads; the one whose maps are covered
    turn: Tensor | None
    like: Tensor  # one map

    def fill(self, images: Images, brightness: float, covers: bool) -> None:
        if not len(images):
            return
        pixels = np.asarray(images.pixels)

        def make(some: NDArray[np.int64]) -> Tensor:
            shown = to_tensor(pixels[some], brightness)
            return torch.stack([v.undo(self.ask(v.of(shown))) for v in self.views]).mean(0)

        read, mapped = self.wanted
        if not covers:
            average = partial(self._average, make)
        else:
            base = self.store.rows(self.base, pixels, brightness, self.like, make)
            average = partial(self._average, lambda some: base[torch.from_numpy(some)])
            if self.turn is not None:
                turn = self.turn.T[..., None, None]
                self.store.rows(
                    mapped,
                    pixels,
                    brightness,
                    self.like,
                    lambda some: F.conv2d(base[torch.from_numpy(some)], turn),
                )
        self.store.rows(read, pixels, brightness, self.like.mean((2, 3)), average)

    def _average(
        self, maps: Callable[[NDArray[np.int64]], Tensor], some: NDArray[np.int64]
    ) -> Tensor:
        means = maps(some).mean((2, 3))
        return means if self.turn is None else means @ self.turn
