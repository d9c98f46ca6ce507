"""Data sets with odd splits and networks that do not fit, by `package.module:name`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from support import Micro, micro, tiny
from xcal.data.images import ImageData, Images


def _where(images: Images, keep: Any) -> Images:
    return images.take(np.flatnonzero(keep(images)))


def _nothing(images: Images) -> Any:
    return np.zeros(len(images), dtype=bool)


def no_test(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    return replace(data, test=_where(data.test, _nothing))


def no_validation(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    return replace(data, validation=_where(data.validation, _nothing))


def training_only(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = no_test(pixels=pixels, seed=seed)
    return replace(data, validation=_where(data.validation, _nothing))


def nothing_at_all(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = training_only(pixels=pixels, seed=seed)
    return replace(data, train=_where(data.train, _nothing))


def absent_in_test(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    return replace(data, test=_where(data.test, lambda i: i.labels != 1))


def one_class_in_test(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    return replace(data, test=_where(data.test, lambda i: i.labels == 1))


def one_image_of_a_class(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    first = int(np.flatnonzero(data.train.labels == 2)[0])
    keep = (data.train.labels != 2) | (np.arange(len(data.train)) == first)
    return replace(data, train=_where(data.train, lambda _: keep))


def one_group(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    return replace(data, train=replace(data.train, groups=np.zeros(len(data.train), np.int64)))


def few(*, pixels: int = 16, seed: int = 0) -> ImageData:
    """Four images a split, every class but one bare."""
    data = tiny(pixels=pixels, seed=seed)
    cut = {name: images.take(np.arange(4)) for name, images in data.splits()}
    return replace(data, **cut)


class _Blind(Micro):
    cam_layer = None


def blind(classes: int, *, seed: int | None = None) -> nn.Module:
    """A network whose map cannot be had."""
    model = _Blind(classes)
    model.load_state_dict(micro(classes, seed=seed).state_dict())
    return model


class _Narrow(Micro):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.unfold(2, 32, 32)[..., 0])


def narrow(classes: int, *, seed: int | None = None) -> nn.Module:
    """A network that 16 pixels are too few for."""
    return _Narrow(classes)


class _TwoLogits(Micro):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)[:, :2]


def two_logits(classes: int, *, seed: int | None = None) -> nn.Module:
    return _TwoLogits(classes)
