"""Unit noise prepared by a second thread while the step computes something else."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.privacy.noise import NoiseKey, NoiseSource

_BLOCK = 1 << 20


class AheadNoise:
    """A noise source that keeps up to `ahead` standard normals of another one ready, in memory.

    Each number is handed out once. The source must not depend on the key (a secure one does not),
    and belongs to the thread from then on: draws that are not normals come from `direct`.
    """

    name = "ahead"

    def __init__(self, source: NoiseSource, direct: NoiseSource, *, ahead: int) -> None:
        self._direct = direct
        self._ready: queue.Queue[Tensor] = queue.Queue(maxsize=max(1, -(-ahead // _BLOCK)))
        self._rest = torch.empty(0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(source,), daemon=True)
        self._thread.start()

    def _prepare(self, source: NoiseSource) -> None:
        while not self._stopped.is_set():
            block = source.normals(NoiseKey("", "", 0, 0, "ahead"), _BLOCK)
            while not self._stopped.is_set():
                try:
                    self._ready.put(block, timeout=0.1)
                    break
                except queue.Full:
                    continue

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        """Independent standard normals, float32; waits for those not ready yet."""
        out = torch.empty(count)
        filled = 0
        while filled < count:
            if not len(self._rest):
                self._rest = self._ready.get()
            taken = min(count - filled, len(self._rest))
            out[filled : filled + taken] = self._rest[:taken]
            self._rest = self._rest[taken:]
            filled += taken
        return out

    def uniforms(self, key: NoiseKey, count: int) -> NDArray[np.float64]:
        return self._direct.uniforms(key, count)

    def scalar(self, key: NoiseKey) -> float:
        return self._direct.scalar(key)

    def close(self) -> None:
        """Stop preparing; what was prepared and not used is forgotten."""
        self._stopped.set()
        self._thread.join()
