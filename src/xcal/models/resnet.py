"""ResNet-18 (He et al. 2016) under torchvision's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xcal.models.layers import HalvingMaxPool2d, staged

_NormMaker = Callable[[int], nn.Module]


def _conv3x3(inputs: int, outputs: int, stride: int, dilation: int) -> nn.Conv2d:
    return nn.Conv2d(
        inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False
    )  # fmt: skip


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, dilations: tuple[int, int], norm: _NormMaker
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride, dilations[0])
        self.bn1 = norm(outputs)
        self.conv2 = _conv3x3(outputs, outputs, 1, dilations[1])
        self.bn2 = norm(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + shortcut)


class ResNet18(nn.Module):
    """Images (B, 3, H, W) to logits; the feature map of `cam_layer` is what `fc` averages."""

    cam_layer: str = "layer4"
    head_layer: str | None = "fc"

    def __init__(self, classes: int, norm: _NormMaker, output_stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = norm(64)
        self.maxpool = HalvingMaxPool2d()
        self.layer1 = _stage(64, 64, 1, (1, 1), norm)
        self.layer2 = _stage(64, 128, 2, (1, 1), norm)
        self.layer3 = _stage(128, 256, 2, (1, 1), norm)
        if output_stride == 32:
            self.layer4 = _stage(256, 512, 2, (1, 1), norm)
        else:
            # The kernel that stood before the removed stride keeps its spacing; those after it
            # are spread by two, so that each still sees the pixels it saw before.
            self.layer4 = _stage(256, 512, 1, (1, 2), norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits

    def stages(self) -> list[list[nn.Module]]:
        """What `trainable = last:k` counts, from the images to the head."""
        stem: list[nn.Module] = [self.conv1, self.bn1]
        return [stem, [self.layer1], [self.layer2], [self.layer3], [self.layer4]]

    def segments(self) -> list[nn.Module]:
        """Modules that, one after the other, are the network."""
        stem = nn.Sequential(self.conv1, self.bn1, nn.ReLU(), self.maxpool)
        pool = nn.Sequential(self.avgpool, nn.Flatten(1))
        return [stem, self.layer1, self.layer2, self.layer3, self.layer4, pool, self.fc]


def _stage(
    inputs: int, outputs: int, stride: int, dilations: tuple[int, int], norm: _NormMaker
) -> nn.Sequential:
    before, after = dilations
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride, (before, after), norm),
        BasicBlock(outputs, outputs, 1, (after, after), norm),
    )


def resnet18(classes: int, **keys: Any) -> ResNet18:
    """A ResNet-18; keys as of `staged`."""
    model: ResNet18 = staged(ResNet18, classes, **keys)
    return model
