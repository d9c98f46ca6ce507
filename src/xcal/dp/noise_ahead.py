"""Secure unit noise prepared by a second thread while the step computes something else."""

from __future__ import annotations

import os
import queue
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.dp.noise import NoiseKey, SecureNoise, not_forked

_BLOCK = 1 << 20
_NO_KEY = NoiseKey("", "", 0, 0, "ahead")  # a secure source does not look at its key


class SecureNoiseAhead:
    """`SecureNoise` that keeps standard normals ready, in memory only; each is handed out once.

    The first request sets how many are kept ready: as many as it asked for. Nothing prepared
    outlives the process, and a forked child takes nothing that its parent had prepared.
    """

    name = "secure"

    def __init__(self) -> None:
        self._direct = SecureNoise()
        self._forget()
        not_forked(self)

    def _forget(self) -> None:
        self._process = os.getpid()
        self._ready: queue.Queue[Tensor | BaseException] | None = None
        self._rest = torch.empty(0)
        self._stop: weakref.finalize[..., SecureNoiseAhead] | None = None

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        """Independent standard normals, float32; waits for those not ready yet."""
        if os.getpid() != self._process:
            self._forget()
        if self._ready is None:
            self._ready = _start(self, count)
        out = torch.empty(count)
        filled = 0
        while filled < count:
            if not len(self._rest):
                self._rest = _next(self._ready)
            taken = min(count - filled, len(self._rest))
            out[filled : filled + taken] = self._rest[:taken]
            self._rest = self._rest[taken:]
            filled += taken
        return out

    def uniforms(self, key: NoiseKey, count: int) -> NDArray[np.float64]:
        return self._direct.uniforms(key, count)

    def scalar(self, key: NoiseKey) -> float:
        return self._direct.scalar(key)

    def discrete_normals(self, key: NoiseKey, count: int, scale: int) -> NDArray[np.int64]:
        return self._direct.discrete_normals(key, count, scale)

    def close(self) -> None:
        """Stop preparing; what was prepared and not used is forgotten."""
        if self._stop is not None:
            self._stop()
        self._forget()


def _next(ready: queue.Queue[Tensor | BaseException]) -> Tensor:
    """The next block; what stopped the thread is raised here, and nobody waits for ever."""
    block = ready.get()
    if isinstance(block, BaseException):
        ready.put(block)  # for whoever asks again: there is nobody who makes more
        raise RuntimeError("the noise could not be prepared") from block
    return block


def _start(owner: SecureNoiseAhead, count: int) -> queue.Queue[Tensor | BaseException]:
    """A thread that fills a queue until the owner is closed or gone; it holds no owner."""
    size = min(max(count, 1), _BLOCK)
    ready: queue.Queue[Tensor | BaseException] = queue.Queue(maxsize=-(-max(count, 1) // size))
    stopped = threading.Event()
    thread = threading.Thread(target=_prepare, args=(ready, stopped, size), daemon=True)
    owner._stop = weakref.finalize(owner, _end, thread, stopped)
    thread.start()
    return ready


def _prepare(
    ready: queue.Queue[Tensor | BaseException], stopped: threading.Event, size: int
) -> None:
    try:
        source = SecureNoise()  # its own cipher stream: two threads never share one
        while not stopped.is_set():
            _hand_over(ready, stopped, source.normals(_NO_KEY, size))
    except BaseException as error:
        _hand_over(ready, stopped, error)


def _hand_over(
    ready: queue.Queue[Tensor | BaseException],
    stopped: threading.Event,
    block: Tensor | BaseException,
) -> None:
    while not stopped.is_set():
        try:
            ready.put(block, timeout=0.1)
            return
        except queue.Full:
            continue


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(timeout=5)
