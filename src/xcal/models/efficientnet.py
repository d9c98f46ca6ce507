"""EfficientNet-B0 (Tan and Le 2019) under torchvision's parameter names.

Without dropout and stochastic depth: the explanation signal compares two passes of one image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xcal.models.layers import staged
from xcal.models.probe import Columns, Tail, read_stages

_NormMaker = Callable[[int], nn.Module]


class _Stage(NamedTuple):
    expansion: int
    kernel: int
    stride: int
    outputs: int
    blocks: int


_STEM, _LAST = 32, 1280
_STAGES = (
    _Stage(1, 3, 1, 16, 1),
    _Stage(6, 3, 2, 24, 2),
    _Stage(6, 5, 2, 40, 2),
    _Stage(6, 3, 2, 80, 3),
    _Stage(6, 5, 1, 112, 3),
    _Stage(6, 5, 2, 192, 4),
    _Stage(6, 3, 1, 320, 1),
)
_SQUEEZE = 4
"""Channels of a block's input for each channel of its squeeze-excite bottleneck."""
_COLUMN_GRID = 4
"""The stage whose grid columns have where they read it: a sixteenth of the image's side."""


def _conv(
    inputs: int,
    outputs: int,
    norm: _NormMaker,
    *,
    kernel: int = 1,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    activation: bool = True,
) -> nn.Sequential:
    """Convolution, norm and, unless it ends a block, SiLU."""
    convolution = nn.Conv2d(
        inputs,
        outputs,
        kernel,
        stride,
        padding=(kernel - 1) // 2 * dilation,
        dilation=dilation,
        groups=groups,
        bias=False,
    )
    tail = [nn.SiLU()] if activation else []
    return nn.Sequential(convolution, norm(outputs), *tail)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate in (0, 1) computed from all channels' means."""

    def __init__(self, channels: int, bottleneck: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, bottleneck, 1)
        self.fc2 = nn.Conv2d(bottleneck, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        gate = torch.sigmoid(self.fc2(nn.functional.silu(self.fc1(means))))
        return gate * x


class InvertedBottleneck(nn.Module):
    """Expand, filter each channel, gate, project; beside a shortcut where shapes allow it."""

    def __init__(
        self, inputs: int, stage: _Stage, stride: int, dilation: int, norm: _NormMaker
    ) -> None:
        super().__init__()
        wide = inputs * stage.expansion
        layers: list[nn.Module] = []
        if wide != inputs:
            layers.append(_conv(inputs, wide, norm))
        layers.append(
            _conv(
                wide,
                wide,
                norm,
                kernel=stage.kernel,
                stride=stride,
                dilation=dilation,
                groups=wide,
            )
        )
        layers.append(SqueezeExcitation(wide, max(1, inputs // _SQUEEZE)))
        layers.append(_conv(wide, stage.outputs, norm, activation=False))
        self.block = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == stage.outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y + x if self.shortcut else y


class EfficientNetB0(nn.Module):
    """Images (B, 3, H, W) to logits; the classifier averages the feature map of `cam_layer`.

    That map is the last one, or, where `reads` names stages, the standardized columns of those
    stages. What comes after the last stage that is read is left out.
    """

    cam_layer: str = "features.8"
    head_layer: str | None = "classifier.1"
    leaves_out: tuple[str, ...] = ()  # published parts that this network does not have

    def __init__(
        self,
        classes: int,
        norm: _NormMaker,
        output_stride: int,
        reads: tuple[int, int] | None = None,
        whitened: bool = False,
    ) -> None:
        super().__init__()
        features: list[nn.Module] = [_conv(3, _STEM, norm, kernel=3, stride=2)]
        inputs, reached, dilation = _STEM, 2, 1
        for stage in _STAGES:
            blocks: list[nn.Module] = []
            for index in range(stage.blocks):
                stride = stage.stride if index == 0 else 1
                spread = dilation
                if stride * reached > output_stride:
                    # The kernel that held the removed stride keeps its spacing; all after it are
                    # spread instead, so that each still sees the pixels it saw before.
                    dilation *= stride
                    stride = 1
                reached *= stride
                blocks.append(InvertedBottleneck(inputs, stage, stride, spread, norm))
                inputs = stage.outputs
            features.append(nn.Sequential(*blocks))
        features.append(_conv(inputs, _LAST, norm))
        channels = _LAST
        self._first_read: int | None = None
        if reads is not None:
            first, last = reads
            self.leaves_out = tuple(f"features.{i}." for i in range(last + 1, len(features)))
            del features[last + 1 :]
        self.features = nn.Sequential(*features)
        if reads is not None:
            widths = [_STEM, *(stage.outputs for stage in _STAGES), _LAST]
            grid = min(max(_COLUMN_GRID - first, 0), last - first)
            self.columns = Columns(widths[first : last + 1], grid, whitened)
            self.map = nn.Identity()  # what is explained, whether or not its making is kept
            self.cam_layer = "map"
            self._first_read = first
            channels = self.columns.channels
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        # The published network has a dropout in first place, which has no parameters.
        self.classifier = nn.Sequential(nn.Identity(), nn.Linear(channels, classes))

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for segment in self.segments():
            x = segment(x)
        return x

    def stages(self) -> list[list[nn.Module]]:
        """What `trainable = last:k` counts, from the images to the head."""
        return [[stage] for stage in self.features]

    def segments(self) -> list[nn.Module]:
        """Modules that, one after the other, are the network."""
        stages = list(self.features)
        if self._first_read is not None:
            first = self._first_read
            stages[first:] = [Tail(stages[first:], self.columns), self.map]
        return [*stages, nn.Sequential(self.avgpool, nn.Flatten(1)), self.classifier]


def efficientnet_b0(
    classes: int, *, head_reads: str = "last", whitened: bool = False, **keys: Any
) -> EfficientNetB0:
    """An EfficientNet-B0 whose head reads the last map or some stages; keys as of `staged`.

    A head on columns starts at zero: under much noise a first guess at random would stay in it.
    """
    reads = read_stages(head_reads, len(_STAGES) + 2)
    model: EfficientNetB0 = staged(EfficientNetB0, classes, reads=reads, whitened=whitened, **keys)
    if reads is not None:
        nn.init.zeros_(model.classifier[1].weight)  # type: ignore[arg-type]
    return model
