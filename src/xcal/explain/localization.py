"""Does the map lie where the evidence is known to be?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.errors import UserError
from xcal.explain.gradcam import enlarge_maps

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Localization:
    """Maps of N images against the region that truly decides; each array is (N,), in [0, 1].

    `pointing`: whether the map's highest pixel lies inside (where several are highest, the share
    of them that does). `inside`: share of the saliency that lies inside. `area`: share of the
    image that the region takes, which is what a map without knowledge reaches on both. A map that
    is all zero or not finite gets 0 and is counted in `empty_maps`; an image without any region
    has NaN throughout, is counted in `without_region`, and is left out of the means.
    """

    pointing: FloatArray
    inside: FloatArray
    area: FloatArray
    empty_maps: int
    without_region: int

    def summary(self) -> dict[str, float | int | None]:
        """Means over the images that have a region; None where there are none."""
        present = ~np.isnan(self.area)
        means: dict[str, float | int | None] = {
            name: float(getattr(self, name)[present].mean()) if present.any() else None
            for name in ("pointing", "inside", "area")
        }
        return {**means, "empty_maps": self.empty_maps, "without_region": self.without_region}


def localization(maps: Tensor, regions: Tensor) -> Localization:
    """Compare maps (N, h, w), enlarged to the regions (N, H, W), bool, with those regions."""
    if maps.dim() != 3 or regions.dim() != 3 or len(maps) != len(regions):
        raise UserError(
            f"The maps have the shape {tuple(maps.shape)} and the regions "
            f"{tuple(regions.shape)}: give one map and one region for each image."
        )
    if len(maps) == 0:
        nothing = np.zeros(0)
        return Localization(nothing, nothing, nothing, 0, 0)
    truth = regions.detach().cpu().bool()
    values = maps.detach().cpu().double()
    finite = torch.isfinite(values).flatten(1).all(dim=1)
    values = torch.where(finite[:, None, None], values, 0).clamp(min=0)
    saliency = enlarge_maps(values, (truth.shape[1], truth.shape[2])).flatten(1)
    truth = truth.flatten(1)
    total = saliency.sum(dim=1)
    # Pixels that rounding alone has set below the highest are highest as well.
    highest = saliency >= saliency.amax(dim=1, keepdim=True) * (1 - 2.0**-40)
    pointing = (highest & truth).sum(dim=1) / highest.sum(dim=1)
    inside = (saliency * truth).sum(dim=1) / total
    has_map, has_region = total > 0, truth.any(dim=1)
    pointing, inside = (torch.where(has_map, part.double(), 0) for part in (pointing, inside))
    area = truth.double().mean(dim=1)
    pointing, inside, area = (
        torch.where(has_region, part, torch.nan) for part in (pointing, inside, area)
    )
    return Localization(
        pointing=pointing.numpy(),
        inside=inside.numpy(),
        area=area.numpy(),
        empty_maps=int((~has_map).sum()),
        without_region=int((~has_region).sum()),
    )
