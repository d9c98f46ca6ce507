"""Collate functions that draw at random: every row by itself is taken, rows together are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from private_loop import data, network, private, train
from xcal.dp.refusals import Refused

Collate = Callable[[list[Any]], Any]


def noise_on_every_row(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x + 0.1 * torch.randn_like(x), y


def flips(items: list[Any]) -> Any:
    """Item by item, as torchvision's transforms are used in a collate function."""
    return default_collate([(x.flip(-1) if random.random() < 0.5 else x, y) for x, y in items])


def brightness(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x * torch.from_numpy(np.random.uniform(0.8, 1.2, (len(x), 1, 1, 1))).float(), y


@pytest.mark.parametrize("collate", [noise_on_every_row, flips, brightness])
def test_an_augmentation_of_every_row_by_itself_trains(collate: Collate) -> None:
    module, loader = network(), DataLoader(data(), batch_size=8, collate_fn=collate)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    made = private(module=module, loader=loader)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # the loop's own draws stay
    assert train(made) == 5


def mixup(items: list[Any]) -> Any:
    x, y = default_collate(items)
    share = torch.rand(())
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def mixup_at_times(items: list[Any]) -> Any:
    return mixup(items) if random.random() < 0.4 else default_collate(items)


def shuffled(items: list[Any]) -> Any:
    return default_collate(random.sample(items, len(items)))


def one_for_all(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x[:1].expand_as(x) + torch.randn_like(x), y


def centered(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x - x.mean(0) + 0.1 * torch.randn_like(x), y


own: Any = np.random.default_rng()


def draws_of_its_own(items: list[Any]) -> Any:
    x, y = default_collate(items)
    noise: Tensor = torch.from_numpy(own.normal(size=tuple(x.shape)))
    return x + noise.float(), y


@pytest.mark.parametrize(
    "collate", [mixup, mixup_at_times, shuffled, one_for_all, centered, draws_of_its_own]
)
def test_rows_that_are_not_kept_are_refused_with_a_way_out(collate: Collate) -> None:
    with pytest.raises(Refused, match="item by item") as refusal:
        private(loader=DataLoader(data(), batch_size=8, collate_fn=collate))
    assert refusal.value.code == "loader"
