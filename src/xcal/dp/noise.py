"""Where noise and Poisson draws come from. The only torch among what the guarantee is made of.

`SecureNoise` is for real clients: a stream cipher keyed by the operating system, no state kept.
`SeededNoise` is for simulation: a key serves one query in its life, and replay after a crash is the
caller's duty to check (same inputs, or refuse).
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from xcal.dp.discrete import discrete_gaussian

BLOCK = 1 << 16
GRID_BITS = 12  # releases are rounded to about 1/4096 of their noise's deviation


@dataclass(frozen=True)
class NoiseKey:
    """What one piece of randomness is for. No two queries share a key."""

    client: str
    method: str
    round: int
    step: int
    block: str  # "draw", "views", "gradient", "signal", ...


def release_grid(scale: float) -> float:
    """The public grid that releases with noise of deviation `scale` are rounded to.

    A power of two, so that rounding is exact. It hides the low bits of floating-point noise, which
    are known to give away what was added (Mironov 2012); it is no proof against timing.
    """
    return 1.0 if scale <= 0 else 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)


class NoiseSource(Protocol):
    """Gaussian noise and uniform draws, by key."""

    name: str

    def uniforms(self, key: NoiseKey, count: int) -> NDArray[np.float64]:
        """Independent uniforms in [0, 1) with 53 random bits."""
        ...

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        """Independent standard normals, float32."""
        ...

    def scalar(self, key: NoiseKey) -> float:
        """One standard normal in float64."""
        ...

    def discrete_normals(self, key: NoiseKey, count: int, scale: int) -> NDArray[np.int64]:
        """Independent draws of the discrete Gaussian N_Z(0, scale²), exactly."""
        ...


class _OfOneProcess(Protocol):
    """A source that compares `_process` with its process, and begins anew where they differ."""

    _process: int


_sources: weakref.WeakSet[Any] = weakref.WeakSet()


def not_forked(source: _OfOneProcess) -> None:
    """Have every forked child begin this source anew.

    Process numbers are used again: a child may have that of the process which made the source.
    """
    _sources.add(source)


def _begin_anew() -> None:
    for source in _sources:
        source._process = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)

_WORDS = slice(24, 24 + 624 * 8)  # where the Mersenne twister's words stand in torch's state


@lru_cache(maxsize=1)
def _torch_state_is_known() -> bool:
    """Whether torch lays out its generator's state as we fill it: checked against numpy's."""
    words = torch.Generator().manual_seed(12345).get_state().numpy()[_WORDS].view(np.uint64)
    twister = np.random.MT19937()
    twister._legacy_seeding(12345)
    return bool(np.array_equal(words, twister.state["state"]["key"]))


def _torch_generator(stream: int) -> torch.Generator:
    """torch's generator with its whole state drawn from `stream`.

    `manual_seed` keeps 32 bits of a seed: two of some 65,000 keys would share their noise.
    """
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    twister = np.random.MT19937(np.random.SeedSequence(stream)).state["state"]["key"]
    state.numpy()[_WORDS].view(np.uint64)[:] = twister
    generator.set_state(state)
    return generator


class SeededNoise:
    """Reproducible noise for simulation. Not private against anyone who knows the seed.

    `paired`: methods of one seed share draws and noise (common random numbers), so that what
    parts them is what they do and not their noise. Two of their models side by side then give away
    more than two runs would: they are for comparing, not for releasing.
    """

    name = "seeded"

    def __init__(self, seed: int, *, paired: bool = False) -> None:
        self._seed = seed
        self._paired = paired
        self._last: dict[tuple[str, str], tuple[int, int]] = {}

    def _stream(self, key: NoiseKey) -> int:
        """256 bits that belong to this key alone."""
        # A key serves one query: positions only ever go forward.
        position, lane = (key.round, key.step), (key.client, key.block)
        if self._last.get(lane, (-1, -1)) >= position:
            raise RuntimeError(f"the noise of {key} was used already")
        self._last[lane] = position
        if self._paired:
            key = replace(key, method="")
        text = repr((self._seed, *astuple(key)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")

    def uniforms(self, key: NoiseKey, count: int) -> NDArray[np.float64]:
        return np.random.Generator(np.random.Philox(self._stream(key))).random(count)

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        stream = self._stream(key)
        if _torch_state_is_known():
            # numpy's generator is as good and three times slower.
            return torch.empty(count).normal_(generator=_torch_generator(stream))
        philox = np.random.Generator(np.random.Philox(stream))
        return torch.from_numpy(philox.standard_normal(count, dtype=np.float32))

    def scalar(self, key: NoiseKey) -> float:
        return float(np.random.Generator(np.random.Philox(self._stream(key))).standard_normal())

    def discrete_normals(self, key: NoiseKey, count: int, scale: int) -> NDArray[np.int64]:
        return discrete_gaussian(np.random.Philox(self._stream(key)).random_raw, count, scale)


class SecureNoise:
    """AES-256 in counter mode, keyed by the operating system; nothing can be replayed."""

    name = "secure"

    def __init__(self) -> None:
        self._rekey()
        not_forked(self)

    def _rekey(self) -> None:
        self._process = os.getpid()
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
        self._stream = cipher.encryptor()

    def _words(self, count: int) -> NDArray[np.uint64]:
        if os.getpid() != self._process:  # a forked child must not repeat its parent's stream
            self._rekey()
        out = bytearray(count * 8 + 16)  # update_into wants one block of slack
        self._stream.update_into(bytes(count * 8), out)
        return np.frombuffer(out, dtype=np.uint64, count=count)

    def uniforms(self, key: NoiseKey, count: int) -> NDArray[np.float64]:
        return (self._words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        out = torch.empty(count + count % 2, dtype=torch.float32)
        for start in range(0, len(out), BLOCK):  # blocks that stay in the processor's cache
            block = out[start : start + BLOCK]
            self._fill(block)
        return out[:count]

    def _fill(self, out: Tensor) -> None:
        # Box–Muller in float64. 53 bits choose the radius: with 40, radii beyond 6.5σ would lie
        # further apart than the release grid, and give away what was added. 32 choose the angle.
        half = len(out) // 2
        words = self._words(half + (half + 1) // 2)
        radius = torch.from_numpy((words[:half] >> np.uint64(11)).astype(np.float64))
        radius.add_(1).mul_(2.0**-53).log_().mul_(-2).sqrt_()
        turns = words[half:].view(np.uint32)[:half].astype(np.float64)
        angle = torch.from_numpy(turns).mul_(2 * math.pi / 2**32)
        out[:half] = angle.cos().mul_(radius)
        out[half:] = radius.mul_(angle.sin_())

    def scalar(self, key: NoiseKey) -> float:
        first, second = (int(w) for w in self._words(2))
        radius = math.sqrt(-2 * math.log(((first >> 11) + 1) * 2.0**-53))
        return radius * math.cos(2 * math.pi * (second >> 11) * 2.0**-53)

    def discrete_normals(self, key: NoiseKey, count: int, scale: int) -> NDArray[np.int64]:
        return discrete_gaussian(self._words, count, scale)


def release_tensors(
    sums: Mapping[str, Tensor], scale: float, noise: NoiseSource, key: NoiseKey
) -> dict[str, Tensor]:
    """Every coordinate plus N(0, scale²), rounded to the public grid. `scale = 0` adds nothing.

    The caller has charged for it: 1/multiplier is the sensitivity of `sums` over `scale`.
    """
    if scale == 0:
        return {name: value.clone() for name, value in sums.items()}
    sizes = [value.numel() for value in sums.values()]
    device = next(iter(sums.values())).device
    pieces = torch.split(noise.normals(key, sum(sizes)).to(device), sizes)
    grid = release_grid(scale)
    released = {}
    for (name, value), piece in zip(sums.items(), pieces, strict=True):
        # Into the noise's own memory: fresh pages for millions of numbers cost more than the sum.
        target = piece.view_as(value).to(value.dtype)
        torch.add(value, target, alpha=scale, out=target)
        released[name] = target.mul_(1 / grid).round_().mul_(grid)
    return released


def release_scalar(value: float, scale: float, noise: NoiseSource, key: NoiseKey) -> float:
    """value + N(0, scale²) in float64, rounded to the public grid."""
    if scale == 0:
        return value
    grid = release_grid(scale)
    return round((value + scale * noise.scalar(key)) / grid) * grid
