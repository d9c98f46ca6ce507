"""A small private training, as a user writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from xcal.dp.engine import Private

N = 40


def network(outputs: int = 3, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, outputs)
    )


def data(targets: Tensor | None = None, seed: int = 2) -> TensorDataset:
    torch.manual_seed(seed)
    images = torch.randn(N, 1, 6, 6)
    labels = torch.randint(0, 3, (N,))
    return TensorDataset(images, labels if targets is None else targets)


def private(
    engine: xcal.PrivacyEngine | None = None,
    *,
    module: nn.Module | None = None,
    loader: DataLoader[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **keys: Any,
) -> Private:
    engine = engine or xcal.PrivacyEngine(seed=0)
    module = network() if module is None else module
    if loader is None:
        loader = DataLoader(data(), batch_size=8, shuffle=True)
    return engine.make_private_with_epsilon(
        **{
            "module": module,
            "optimizer": optimizer or torch.optim.SGD(module.parameters(), lr=0.1),
            "data_loader": loader,
            "target_epsilon": 5.0,
            "target_delta": 1e-3,
            "epochs": 2,
            "max_grad_norm": 1.0,
            **keys,
        }
    )


def train(made: Private, epochs: int = 1, most: int | None = None) -> int:
    """The loop of a user; how many steps it made."""
    model, optimizer, criterion, loader = made
    steps = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps == most:
                return steps
    return steps
