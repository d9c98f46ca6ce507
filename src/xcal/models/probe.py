"""What a head reads where the last map is not enough: several stages at once, standardized.

A noisy head learns fastest from few channels that vary alike. Published features do neither: all
images of one kind share a large common part, which costs clipping norm and tells no class from
another. So the channels are centered and scaled by *public* constants, which come with the weights
file. Statistics of the private images would be releases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcal.errors import UserError

CONSTANTS = ("columns.mean", "columns.deviation")
"""The names of the constants in a weights file."""
TURN = "columns.turn"
"""The name of the matrix that whitens them, where a head reads them so."""


def read_stages(head_reads: str, count: int) -> tuple[int, int] | None:
    """First and last stage of `stages:a-b`, of a network of stages 0 to `count` - 1.

    None for `last`.
    """
    if head_reads == "last":
        return None
    match = re.fullmatch(r"stages:(\d+)-(\d+)", head_reads)
    if match is not None:
        first, last = int(match[1]), int(match[2])
        if 1 <= first <= last < count:
            return first, last
    raise UserError(
        f"head_reads is {head_reads!r}: choose 'last', or 'stages:a-b' with 1 ≤ a ≤ b ≤ {count - 1}"
    )


class Columns(nn.Module):
    """Maps of several stages, and their squares, as the channels of one map (N, C, H, W).

    The squares are taken in each map's own cells before all are brought to the grid of map number
    `grid`, so that the head's average also sees how much a channel varies within an image. Every
    channel is then `(value − mean) / deviation`, and all are mixed by the matrix `turn` where they
    are whitened. No cell depends on another image, and a linear head on the map's average has
    Grad-CAM in closed form.
    """

    mean: Tensor
    deviation: Tensor
    turn: Tensor | None

    def __init__(self, channels: Sequence[int], grid: int, whitened: bool = False) -> None:
        super().__init__()
        self.channels = 2 * sum(channels)
        self._grid = grid
        self.register_buffer("mean", torch.zeros(self.channels))
        self.register_buffer("deviation", torch.ones(self.channels))
        self.register_buffer("turn", torch.eye(self.channels) if whitened else None)

    def reset_constants(self) -> None:
        """Constants that change nothing, where no file has brought others."""
        self.mean.zero_()
        self.deviation.fill_(1.0)
        if self.turn is not None:
            self.turn.zero_().fill_diagonal_(1.0)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        height, width = maps[self._grid].shape[2:]
        both = [part for one in maps for part in (one, one.square())]
        stacked = torch.cat([_resized(part, (height, width)) for part in both], dim=1)
        shape = (1, -1, 1, 1)
        alike = (stacked - self.mean.view(shape)) / self.deviation.view(shape)
        return alike if self.turn is None else F.conv2d(alike, self.turn.T[..., None, None])


class Tail(nn.Module):
    """The stages that are read, and the map that is made of them."""

    def __init__(self, stages: Sequence[nn.Module], columns: Columns) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        read: Tensor = self.columns(maps)
        return read


def constants_of(pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, from the channels' averages (N, C) over public images.

    A channel that hardly varies among them would be blown up by its own deviation: no deviation is
    taken for less than a hundredth of the median one.
    """
    exact = pooled.double()
    deviation = exact.std(dim=0)
    floor = max(float(deviation.median()) / 100, 1e-6)
    return exact.mean(dim=0).float(), deviation.clamp(min=floor).float()


def whitening(pooled: Tensor, shrunk: float) -> Tensor:
    """The symmetric matrix in whose coordinates public images vary alike in all directions.

    Their covariance, of standardized channels, is shrunk by `shrunk` times its mean eigenvalue:
    few images tell little of small ones. Lengths stay about what they were.
    """
    mean, deviation = constants_of(pooled)
    alike = (pooled.double() - mean) / deviation
    values, vectors = torch.linalg.eigh(torch.cov(alike.T))
    level = values.mean()
    scale = (level * (1 + shrunk) / (values.clamp(min=0) + shrunk * level)).sqrt()
    return (vectors * scale @ vectors.T).float()


def _resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """A map on another grid: finer ones are averaged down, coarser ones repeated."""
    if tuple(x.shape[2:]) == size:
        return x
    if x.shape[2] > size[0]:
        return F.adaptive_avg_pool2d(x, size)
    return F.interpolate(x, size=size, mode="nearest")
