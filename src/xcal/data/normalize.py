"""The tensor that a network takes, from pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Public constants: normalizing by statistics of the private images would be a release.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def to_tensor(
    pixels: NDArray[Any],
    brightness: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Images (N, H, W, 3) of uint8 as the float32 tensor (N, 3, H, W) that networks take.

    Values are scaled to [0, 1], multiplied by `brightness` and cut at 1 as a camera would, then
    normalized by the public constants `mean` and `std`. The input is not changed or shared.
    """
    # A copy of its own: memory-mapped images are read-only, which torch does not accept.
    planes = np.array(np.moveaxis(np.asarray(pixels), 3, 1), dtype=np.float32, order="C")
    images = torch.from_numpy(planes).mul_(brightness / 255.0)
    if brightness > 1.0:
        images.clamp_(max=1.0)
    shape = (1, len(mean), 1, 1)
    center = torch.tensor(mean, dtype=torch.float32).view(shape)
    return images.sub_(center).div_(torch.tensor(std, dtype=torch.float32).view(shape))
