"""Noise in whole numbers on a public grid, discrete Gaussian: shared by sites, or of one by itself.

Sites whose contributions can be seen only as a sum need only a share of the noise each: of n sites
that sum, at least `honest` add theirs and keep it to themselves. A site that adds all of it is a
sum of one. Sums are rounded to the grid *before* the noise, with what rounding may add counted in
the sensitivity, and from there on all is whole numbers: no floating point between what is charged
and what is released (docs/guarantee.md §10).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcal.dp.account import Account
from xcal.dp.accounting import joint_sigma
from xcal.dp.discrete import LARGEST_SCALE, LEAST_SCALE
from xcal.dp.ledger.rows import Release
from xcal.dp.mechanism import (
    ChargedStep,
    Mechanism,
    ReleasedTensors,
    UnchargedRelease,
    check_charged,
)
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.errors import UserError

Words = NDArray[np.uint64]

FINENESS = 1000  # rounding may add at most about 1/1000 to what one unit moves
# By how much rounding may part two sums in one coordinate: ½ each, and what a product in float64
# loses below LARGEST_SUM.
ROUNDING = 1 + 2.0**-10
LARGEST_SUM = 2.0**42
NOISE_REACH = 64  # deviations; beyond them lies less than e^−2000
BYTES = 7  # of one number at most, so that 64-bit arithmetic never wraps before we do


@dataclass(frozen=True)
class Part:
    """One quantity that sites sum: its coordinates, what one unit moves it by, its multiplier."""

    name: str
    size: int
    sensitivity: float
    multiplier: float


@dataclass(frozen=True)
class DistributedGrid:
    """The public constants of one sum: the same at every site that takes part in it.

    `sites` sum, at least `honest` of them add their noise and keep it secret, and none has more
    than `units` units. Everything follows from these and the parts.
    """

    parts: tuple[Part, ...]
    sites: int
    honest: int
    units: int

    def __post_init__(self) -> None:
        names = [p.name for p in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a sum has parts, and none twice: {names}")
        if not 1 <= self.honest <= self.sites:
            raise ValueError(f"of {self.sites} sites {self.honest} cannot be the honest ones")
        if not all(p.size > 0 and p.sensitivity > 0 and p.multiplier > 0 for p in self.parts):
            raise ValueError("every part has coordinates, a sensitivity and a multiplier")
        if (
            self._wanted_scale > LARGEST_SCALE  # first: the others follow from the scale
            or max(self.units * p.sensitivity * self.fineness(p) for p in self.parts) > LARGEST_SUM
            or self.width > BYTES
        ):
            raise UserError(
                f"Sums of {self.units} units at {self.sites} sites in {self.size} coordinates do"
                " not fit into whole numbers on a fine enough grid: train fewer parameters, or use"
                f" {'trust' if self.sites > 1 else 'noise_kind'} ="
                f" '{'site' if self.sites > 1 else 'gaussian'}'."
            )

    @property
    def size(self) -> int:
        """Coordinates of all parts."""
        return sum(p.size for p in self.parts)

    @cached_property
    def _wanted_scale(self) -> float:
        needed = max(FINENESS * math.sqrt(p.size) * p.multiplier for p in self.parts)
        return needed / math.sqrt(self.honest)

    @cached_property
    def scale(self) -> int:
        """s: the deviation of a site's own noise, a power of two."""
        least = max(self._wanted_scale, LEAST_SCALE)
        return min(1 << math.ceil(math.log2(least)), LARGEST_SCALE)

    def moved(self, part: Part) -> float:
        """D: by how much one unit moves the part's whole numbers, in norm, rounding included."""
        return math.sqrt(self.honest) * self.scale / part.multiplier

    def fineness(self, part: Part) -> float:
        """a: whole numbers in one unit of the part's own values. C·a + √d·(1 + 2⁻¹⁰) = D."""
        return (self.moved(part) - math.sqrt(part.size) * ROUNDING) / part.sensitivity

    @property
    def releases(self) -> tuple[Release, ...]:
        """What the ledger records: the honest sites' noise, and what one unit moves by."""
        honest_noise = math.sqrt(self.honest) * self.scale
        return tuple(
            Release(p.name, honest_noise / self.fineness(p), self.moved(p) / self.fineness(p))
            for p in self.parts
        )

    @property
    def sigma(self) -> float:
        """The multiplier of all parts together."""
        return joint_sigma(*(p.multiplier for p in self.parts))

    @cached_property
    def width(self) -> int:
        """Bytes of one number: sums of all sites do not wrap, but for noise beyond its reach."""
        sums = max(self.units * p.sensitivity * self.fineness(p) + 1 for p in self.parts)
        largest = self.sites * (sums + NOISE_REACH * self.scale)
        return math.ceil((math.log2(largest) + 1) / 8)

    @property
    def mask(self) -> np.uint64:
        return np.uint64((1 << 8 * self.width) - 1)

    def round(self, values: Mapping[str, Tensor | float]) -> NDArray[np.int64]:
        """The parts' values as whole numbers, one after the other: the nearest on the grid."""
        return np.concatenate([self.whole(p, values[p.name]) for p in self.parts])

    def whole(self, part: Part, value: Tensor | float) -> NDArray[np.int64]:
        """One part of them."""
        if not isinstance(value, Tensor):
            value = torch.tensor([value], dtype=torch.float64)
        flat = value.detach().reshape(-1).to("cpu", torch.float64)
        if len(flat) != part.size or not bool(torch.isfinite(flat).all()):
            raise ValueError(f"{part.name} is not {part.size} finite numbers")
        # No sum of units lies beyond; where floats say so, cutting it parts nobody further.
        most = math.ceil(self.units * part.sensitivity * self.fineness(part))
        whole = flat.mul(self.fineness(part)).round_().clamp_(-most, most)
        found: NDArray[np.int64] = whole.to(torch.int64).numpy()
        return found

    def wrap(self, numbers: NDArray[np.int64]) -> Words:
        """Modulo 2^k."""
        return numbers.view(np.uint64) & self.mask

    def pack(self, words: Words) -> bytes:
        """Numbers modulo 2^k in as few bytes as k has."""
        return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : self.width].tobytes()

    def unpack(self, data: bytes) -> Words:
        """The reverse; raises ValueError where it is not what `pack` made."""
        if len(data) != self.size * self.width:
            raise ValueError(f"{len(data)} bytes are not {self.size} numbers of {self.width}")
        bytes_ = np.zeros((self.size, 8), dtype=np.uint8)
        bytes_[:, : self.width] = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.width)
        return bytes_.view("<u8").reshape(-1).astype(np.uint64)

    def decode(self, total: Words) -> dict[str, NDArray[np.float64]]:
        """The parts' noisy sums, from their sum modulo 2^k."""
        shift = np.uint64(64 - 8 * self.width)
        signed = (total << shift).view(np.int64) >> np.int64(shift)  # the sign bit is k's highest
        ends = np.cumsum([p.size for p in self.parts])[:-1]
        return {
            p.name: piece / self.fineness(p)
            for p, piece in zip(self.parts, np.split(signed, ends), strict=True)
        }


def release_whole(
    value: Tensor | float, part: Part, grid: DistributedGrid, noise: NoiseSource, key: NoiseKey
) -> NDArray[np.float64]:
    """One part, rounded to the grid, plus a site's discrete noise; then in the part's own units."""
    noisy = grid.whole(part, value) + noise.discrete_normals(key, part.size, grid.scale)
    return noisy / grid.fineness(part)


@dataclass(frozen=True)
class GridMechanism(Mechanism):
    """Poisson-subsampled discrete Gaussian noise on a public grid."""

    grid: DistributedGrid | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid is None or self.releases != self.grid.releases:
            raise ValueError("what is released is what the grid says")

    def cost(self, order: float) -> float:
        """As the continuous Gaussian's: at whole orders the moments are the same."""
        if order != int(order):
            raise ValueError(f"the discrete Gaussian's cost is proved at whole orders, not {order}")
        return super().cost(order)


@dataclass(frozen=True)
class DiscreteMechanism(GridMechanism):
    """All the noise is one site's: it releases by itself, in whole numbers."""

    @staticmethod
    def of(rate: float, sigma: float, parts: tuple[Part, ...], units: int) -> DiscreteMechanism:
        """`sigma`: the multiplier of all parts together, to the last bit as it was planned."""
        grid = DistributedGrid(parts, sites=1, honest=1, units=units)
        return DiscreteMechanism(rate, sigma, grid.releases, grid=grid)

    def _charged(self, noise: NoiseSource, key: Callable[[str], NoiseKey]) -> ChargedWhole:
        return ChargedWhole(self, noise, key)


class ChargedWhole(ChargedStep):
    """What one charge allows: each release in whole numbers, with the noise that was charged."""

    mechanism: DiscreteMechanism

    def _part(self, name: str, sensitivity: float | None) -> Part:
        grid = self.mechanism.grid
        assert grid is not None
        self._take(name, None, None)
        part = next(p for p in grid.parts if p.name == name)
        # What is recorded has room for rounding: that is not the step's to use.
        if sensitivity is not None:
            check_charged(name, part.sensitivity, sensitivity)
        return part

    def release_scalar(self, name: str, value: float) -> float:
        part, grid = self._part(name, None), self.mechanism.grid
        assert grid is not None
        return float(release_whole(value, part, grid, self._noise, self._key(name))[0])

    def release_tensors(
        self,
        name: str,
        sums: dict[str, Tensor],
        *,
        sensitivity: float,
        noise: float | None = None,
    ) -> ReleasedTensors:
        if noise is not None:
            raise UnchargedRelease(f"Discrete noise on {name!r} is that of the charge, not more.")
        part, grid = self._part(name, sensitivity), self.mechanism.grid
        assert grid is not None
        flat = torch.cat([value.detach().reshape(-1) for value in sums.values()])
        noisy = torch.from_numpy(release_whole(flat, part, grid, self._noise, self._key(name)))
        pieces = torch.split(noisy, [value.numel() for value in sums.values()])
        return ReleasedTensors(
            {
                key: piece.view_as(value).to(value)
                for (key, value), piece in zip(sums.items(), pieces, strict=True)
            }
        )


@dataclass(frozen=True)
class DistributedMechanism(GridMechanism):
    """A site's part of a sum whose noise is shared: charged for what the honest add together."""

    @staticmethod
    def of(rate: float, grid: DistributedGrid) -> DistributedMechanism:
        return DistributedMechanism(rate, grid.sigma, grid.releases, grid=grid)

    def charge(
        self,
        account: Account,
        round_number: int,
        step: int,
        *,
        inputs: str | None,
        noise: NoiseSource,
        key: Callable[[str], NoiseKey],
    ) -> ChargedShare:
        charged = super().charge(account, round_number, step, inputs=inputs, noise=noise, key=key)
        assert isinstance(charged, ChargedShare)
        return charged

    def _charged(self, noise: NoiseSource, key: Callable[[str], NoiseKey]) -> ChargedShare:
        return ChargedShare(self, noise, key)


class ChargedShare(ChargedStep):
    """What one charge allows a site: one draw, and one contribution to one sum.

    A contribution carries only a share of the noise. It must reach nobody but under masks, as one
    of `grid.sites` that are summed.
    """

    mechanism: DistributedMechanism

    def release_scalar(self, name: str, value: float) -> float:
        raise UnchargedRelease(f"A step was charged for a share of {name!r}, not for all of it.")

    def release_tensors(
        self,
        name: str,
        sums: dict[str, Tensor],
        *,
        sensitivity: float,
        noise: float | None = None,
    ) -> ReleasedTensors:
        raise UnchargedRelease(f"A step was charged for a share of {name!r}, not for all of it.")

    def contribute(
        self, values: Mapping[str, Tensor | float], *, sensitivities: Mapping[str, float]
    ) -> NDArray[np.int64]:
        """All parts, rounded to the grid, plus this site's share of the noise.

        `sensitivities`: by how much one unit may really move each of them.
        """
        grid = self.mechanism.grid
        assert grid is not None
        for part in grid.parts:
            self._take(part.name, None, None)
            check_charged(part.name, part.sensitivity, sensitivities[part.name])
        whole = grid.round(values)
        return whole + self._noise.discrete_normals(self._key("share"), grid.size, grid.scale)
