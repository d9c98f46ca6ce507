"""Who wants to see how far the drawing of images has come: set around what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[int, int], None]  # done, of so many

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Within: images that are drawn are told of."""
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


def tell(done: int, total: int) -> None:
    watcher = _watcher.get()
    if watcher is not None:
        watcher(done, total)
