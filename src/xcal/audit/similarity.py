"""How alike two pictures are: PSNR and SSIM on values in [0, 1]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SIDE, _SPREAD = 11, 1.5  # the window of Wang et al. 2004
_C1, _C2 = 0.01**2, 0.03**2


def psnr(picture: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, one value a picture; equal pictures give 100."""
    error = (picture.double() - other.double()).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp_min(1e-10))


def ssim(picture: Tensor, other: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004), mean over pixels and channels, one a picture."""
    channels = picture.shape[1]
    at = torch.arange(_SIDE, dtype=torch.float64) - _SIDE // 2
    line = torch.exp(-(at**2) / (2 * _SPREAD**2))
    line = line / line.sum()
    window = torch.outer(line, line).expand(channels, 1, _SIDE, _SIDE)

    def smooth(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=channels)

    x, y = picture.double(), other.double()
    mean_x, mean_y = smooth(x), smooth(y)
    var_x, var_y = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2
    both = smooth(x * y) - mean_x * mean_y
    top = (2 * mean_x * mean_y + _C1) * (2 * both + _C2)
    bottom = (mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2)
    return (top / bottom).flatten(1).mean(1)
