"""The private data loader: pays for a batch, then draws it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from xcal.dp.apart import mapped, tensors
from xcal.dp.refusals import Refused
from xcal.dp.steps import PrivateSteps

_LOOKED_AT = 6  # items
_SEEDS = 8  # draws at random that a collate function is looked at with


class PoissonBatches(Sampler[list[int]]):
    """One epoch of charged Poisson draws; ends early where the budget does."""

    def __init__(self, steps: PrivateSteps, done: int = 0) -> None:
        self._steps = steps
        self._done = done  # of an epoch that a resumed training was in

    def __len__(self) -> int:
        return self._steps.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        done, self._done = self._done, 0
        for _ in range(done, self._steps.per_epoch):
            indices = self._steps.draw()
            if indices is None:
                return
            yield indices


class _Collate:
    """The loader's own collate function; an empty draw has its shapes, and no rows."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, batch: list[Any]) -> Any:
        if batch:
            return self._collate(batch)
        return mapped(self._collate([self._dataset[0]]), lambda t: t[:0] if t.dim() else t)


class PrivateLoader(DataLoader[Any]):
    """Batches of units drawn by Poisson sampling, each paid for before it is drawn.

    It ends at the end of an epoch or of the budget. With worker processes batches are drawn, and
    so paid for, ahead of the loop: those that are not used when it is left are lost.

    Args:
        given: the loader that was handed in.
        steps: what the objects of one training share.
        done: batches of its first epoch that were taken already, of a resumed training.

    Guarantee: every batch is drawn after its charge is on record, each unit independently with
    probability 1/len(given); where the budget does not cover one more, it ends.
    """

    def __init__(self, given: DataLoader[Any], steps: PrivateSteps, done: int = 0) -> None:
        self._steps = steps
        super().__init__(
            given.dataset,
            batch_sampler=PoissonBatches(steps, done),
            collate_fn=_Collate(given.collate_fn, given.dataset),
            num_workers=given.num_workers,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
            generator=given.generator,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        steps = self._steps
        known = steps.spent
        steps.check_stepped()
        epoch = steps.begin_epoch()
        batches = super().__iter__()
        while True:
            steps.check_epoch(epoch)
            steps.check_stepped()
            if not steps.stopped:
                steps.check_ready()
            try:
                batch = next(batches)
            except StopIteration:
                break
            steps.open(batch)
            yield batch
        steps.end_epoch()
        if steps.spent and not known:
            warnings.warn(
                f"The privacy budget is spent after {steps.charged} steps: the loader ends here.",
                stacklevel=2,
            )


def check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose own sampling Poisson sampling would replace silently."""
    if isinstance(loader, PrivateLoader):
        raise Refused("loader", "The data_loader is private already: give the one it was made of.")
    sized = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
    if not sized or isinstance(loader.dataset, IterableDataset):
        raise Refused(
            "loader",
            "The data_loader must be a torch DataLoader over a data set with a length: Poisson"
            " sampling draws every item by itself, which a stream does not allow.",
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise Refused("loader", "The data_loader's data set is empty: nobody could be drawn.")
    if type(loader.batch_sampler) is not BatchSampler:
        raise Refused(
            "loader",
            "The data_loader has a batch sampler of its own (or batch_size=None), which Poisson"
            " sampling would replace: build it with batch_size instead.",
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain:
        raise Refused(
            "loader",
            f"The data_loader has a sampler of its own ({type(sampler).__name__}), which Poisson"
            " sampling would replace: use shuffle=True, and torch.utils.data.Subset for a part.",
        )
    if not len(loader):
        raise Refused("loader", "The data_loader has no batches: give it data.")
    _check_collate(loader)


def _check_collate(loader: DataLoader[Any]) -> None:
    """Refuse rows that are reordered, repeated or mixed on their way into a batch.

    Looked at on a few items. Where nothing is drawn at random, in reverse they must come out in
    reverse, and each as if alone. Where something is (an augmentation of every row), a row must
    come out the same, under the same draws, whoever stands in the other places.
    """
    collate = loader.collate_fn
    if collate is default_collate:
        return
    count = len(loader.dataset)  # type: ignore[arg-type]
    items = [
        loader.dataset[i] for i in sorted({i * count // _LOOKED_AT for i in range(_LOOKED_AT)})
    ]

    def made(of: list[Any], seed: int = 0) -> list[Tensor]:
        with drawing(seed):
            found = tensors(collate(list(of)))
        return [t for t in found if t.dim() and len(t) == len(of)]

    together = [made(items, seed) for seed in range(_SEEDS)]
    if all(_all_same(together[0], other) for other in together[1:]):
        kept = _kept(together[0], made(items[::-1]), [made([item]) for item in items])
    else:
        kept = all(
            _all_same(whole, made(items, seed)) and _whoever_else(whole, made, items, seed)
            for seed, whole in enumerate(together)
        )
    if not kept:
        raise Refused(
            "loader",
            "The collate function of the data_loader does not keep rows as they are (it sorts,"
            " repeats or mixes them, or draws at random in a way that cannot be repeated), so whose"
            " a row is would not be known: let it make every row of its own item alone, with draws"
            " of torch's, numpy's or Python's global generator, or do in the data set, item by"
            " item, what it does.",
        )


def _kept(together: list[Tensor], reverse: list[Tensor], alone: list[list[Tensor]]) -> bool:
    kept = len(together) == len(reverse) and all(
        _same(a, b.flip(0)) for a, b in zip(together, reverse, strict=True)
    )
    for number, whole in enumerate(together):
        for row, one in enumerate(alone):
            if number < len(one) and one[number].shape[1:] == whole.shape[1:]:  # not padded
                kept = kept and _same(whole[row], one[number][0])
    return kept


def _whoever_else(
    together: list[Tensor],
    made: Callable[[list[Any], int], list[Tensor]],
    items: list[Any],
    seed: int,
) -> bool:
    """Whether each row stays under the same draws when all other places hold other items."""
    for row, item in enumerate(items):
        for turn in range(1, len(items)):
            others = items[turn:] + items[:turn]
            others[row] = item
            moved = made(others, seed)
            if len(moved) != len(together) or not all(
                a.shape == b.shape and _same(a[row], b[row])
                for a, b in zip(together, moved, strict=True)
            ):
                return False
    return True


@contextmanager
def drawing(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Within, the global generators begin at `seed`; afterwards they are as they were."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _all_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape and _same(a, b) for a, b in zip(some, others, strict=True)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    floats = a.is_floating_point() and a.shape == b.shape
    return torch.allclose(a, b, equal_nan=True) if floats else torch.equal(a, b)
