"""The network and a site's data: plain torch."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    )


def load(site: Path) -> tuple[TensorDataset, list[int]]:
    """Scans with their findings, and whose each is."""
    with np.load(site / "data.npz") as data:
        scans, findings = torch.from_numpy(data["scans"]), torch.from_numpy(data["findings"])
        return TensorDataset(scans, findings), data["patients"].tolist()
