"""What one backward pass leaves behind: enough to know norms, then to form the clipped sum."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xcal.dp.clipping.convolution import (
    ConvShape,
    gram_squared_norms,
    per_image_weight_gradient,
    summed_weight_gradient,
    unmeasurable,
)
from xcal.dp.clipping.geometry import PLAIN, Geometry
from xcal.dp.clipping.precision import double, exact_device, single


@dataclass(frozen=True)
class Units:
    """Which unit each image of a batch belongs to. `of_image` None: every image is its own.

    `alike`: whatever the others are, a unit is measured in the same way, to the bit.
    """

    count: int
    of_image: Tensor | None = None
    alike: bool = False

    def per_image(self, values: Tensor) -> Tensor:
        """A value per unit, handed to each of the unit's images."""
        return values if self.of_image is None else values[self.of_image]

    def any_image(self, marks: Tensor) -> Tensor:
        """Per unit, whether any of its images is marked."""
        if self.of_image is None:
            return marks
        return torch.bincount(self.of_image[marks], minlength=self.count) > 0

    def summed(self, parts: Tensor) -> Tensor:
        """(T, images, N) summed over each unit's images into (T, units, N)."""
        if self.of_image is None:
            return parts
        of_units = parts.new_zeros(parts.shape[0], self.count, parts.shape[2])
        return of_units.index_add_(1, self.of_image, parts)

    def by_size(self) -> list[tuple[Tensor, Tensor]]:
        """Units with images, gathered by their number m of images: (unit ids, image ids (U, m))."""
        if self.of_image is None:
            images = torch.arange(self.count)
            return [(images, images.unsqueeze(1))]
        sizes = torch.bincount(self.of_image, minlength=self.count)
        order = torch.argsort(self.of_image, stable=True)
        starts = torch.cumsum(sizes, 0) - sizes
        buckets = []
        for size in torch.unique(sizes[sizes > 0]).tolist():
            every = torch.nonzero(sizes == size).squeeze(1)
            # How many units are worked through at once can change how each is rounded.
            for ids in torch.split(every, 1) if self.alike else (every,):
                inside = torch.arange(size, device=ids.device)
                buckets.append((ids, order[starts[ids].unsqueeze(1) + inside]))
        return buckets


@dataclass(frozen=True)
class _Pair:
    """A dense layer's input and output gradient, kept instead of its per-image gradients."""

    g: Tensor
    x: Tensor
    shape: ConvShape
    patches: Tensor | None


@dataclass(frozen=True)
class _Lookup:
    """Which rows of a table were read, (B, T), and the gradients of what was read, (B, T, D)."""

    g: Tensor
    ids: Tensor
    table: int

    def by_unit(self, units: Units) -> tuple[Tensor, Tensor, Tensor]:
        """Every unit's gradient where it is not 0: unit ids, rows of the table, their gradients."""
        of_image = torch.arange(len(self.ids), device=self.ids.device)
        unit_ids = of_image if units.of_image is None else units.of_image
        keys = (unit_ids.unsqueeze(1) * self.table + self.ids).flatten()
        read, places = torch.unique(keys, return_inverse=True)
        sums = self.g.new_zeros(len(read), self.g.shape[-1])
        sums.index_add_(0, places, self.g.flatten(0, 1))
        return read // self.table, read % self.table, sums


class Tape:
    """Gradients of all units of one backward pass, by parameter name, in whatever form is cheapest.

    A parameter used once by a dense layer may be kept as a pair (input, output gradient); one used
    several times is always kept as explicit rows, one per unit, summed over its uses, so that the
    norm is that of the whole gradient.

    All that comes out is scaled by `geometry`. A gradient is linear in the output gradient of its
    layer, so weights of channels are multiplied into that on the way in (`by_channel`); a weight of
    a whole parameter is multiplied into norms and sums on the way out.

    Nothing is kept in half precision, whatever a pass was made in.
    """

    def __init__(self, units: Units, device: torch.device, geometry: Geometry = PLAIN) -> None:
        self.units = units
        self._geometry = geometry
        self._device = device
        self.uses: Counter[str] = Counter()
        self._rows: dict[str, Tensor] = {}
        self._pairs: dict[str, _Pair] = {}
        self._lookups: dict[str, _Lookup] = {}
        self.asked: Callable[[], None] = lambda: None  # raises where nobody asked for gradients

    def by_channel(self, name: str, g: Tensor) -> Tensor:
        """An output gradient (B, channels, …) times the weights of the parameter's channels."""
        weights = self._geometry.channel_weights(name, g)
        return g if weights is None else g * weights.view(-1, *[1] * (g.dim() - 2))

    def by_input(self, name: str, x: Tensor) -> Tensor:
        """An input (B, features, …) times the weights of what the parameter reads."""
        weights = self._geometry.input_weights(name, x)
        return x if weights is None else x * weights.view(-1, *[1] * (x.dim() - 2))

    def _scaled(self, name: str, rows: Tensor) -> Tensor:
        """Gradients (B, channels, …) by the weights of the parameter's channels and inputs."""
        rows, weights = self.by_channel(name, rows), self._geometry.input_weights(name, rows)
        return rows if weights is None else rows * weights

    def add_rows(self, name: str, per_image: Tensor) -> None:
        """Record explicit gradients of one use of a parameter, per image, (B, channels, …)."""
        self.add_parts(name, _one_part(self._scaled(name, per_image)))

    def add_unit_rows(self, name: str, per_unit: Tensor, unit: int | None = None) -> None:
        """Add to the explicit gradients of a parameter, (U, *shape), or (1, *shape) of one unit."""
        self.asked()
        rows = _one_part(self._scaled(name, single(per_unit)))
        if unit is not None:
            every = rows.new_zeros(1, self.units.count, rows.shape[2])
            every[:, unit] = rows[:, 0]
            rows = every
        self._rows[name] = self._rows[name] + rows if name in self._rows else rows

    def take(self, name: str) -> Tensor | None:
        """Explicit gradients (units, N), which then are no longer here."""
        parts = self._rows.pop(name, None)
        return None if parts is None else parts[0]

    def add_lookup(self, name: str, g: Tensor, ids: Tensor, table: int) -> None:
        """Record that rows `ids` (B, T) of a table were read, with gradients `g` (B, T, D)."""
        self.asked()
        g = single(g)
        weights = self._geometry.channel_weights(name, g)
        if weights is not None:
            g = g * weights[ids].unsqueeze(-1)
        read = self._geometry.input_weights(name, g)
        g = g if read is None else g * read
        lookup = _Lookup(g.detach(), ids, table)
        if self.uses[name] > 1:
            unit_ids, read, sums = lookup.by_unit(self.units)
            rows = g.new_zeros(1, self.units.count, table * g.shape[-1])
            rows.view(self.units.count, table, -1)[unit_ids, read] = sums
            self._rows[name] = self._rows[name] + rows if name in self._rows else rows
        else:
            self._lookups[name] = lookup

    def add_parts(self, name: str, per_image: Tensor) -> None:
        """Record explicit gradients in parts (T, B, N), see `per_image_weight_gradient`."""
        self.asked()
        parts = self.units.summed(single(per_image))
        if self.uses[name] > 1:
            # Uses on maps of different sizes may come in different parts: bring all to one.
            parts = parts.permute(1, 2, 0).reshape(1, parts.shape[1], -1)
        self._rows[name] = self._rows[name] + parts if name in self._rows else parts

    def add_pair(
        self, name: str, g: Tensor, x: Tensor, shape: ConvShape, patches: Tensor | None = None
    ) -> None:
        """Record a use of a dense weight by its input and output gradient."""
        self.asked()
        if self.uses[name] > 1:
            self.add_parts(name, per_image_weight_gradient(g, x, shape))
        else:
            # Cut from the graph, or the pair would hold on to all that came before it.
            self._pairs[name] = _Pair(single(g.detach()), single(x.detach()), shape, patches)

    def by_image(self) -> Iterator[Tensor]:
        """All that is written here, with images (units, where they have several) first."""
        for parts in self._rows.values():
            yield parts.transpose(0, 1)
        for pair in self._pairs.values():
            yield pair.g
            yield pair.x
        for lookup in self._lookups.values():
            yield lookup.g

    def forget(self) -> dict[str, Tensor]:
        """All gradients that are written here, images (or units) first; then nothing is."""
        found = {name: parts.transpose(0, 1) for name, parts in self._rows.items()}
        found |= {f"{name} pair": pair.g for name, pair in self._pairs.items()}
        found |= {f"{name} lookup": lookup.g for name, lookup in self._lookups.items()}
        self._rows, self._pairs, self._lookups = {}, {}, {}
        return found

    def drop(self, units: Tensor) -> None:
        """Make nothing of the marked units, whatever was written of them: 0 x NaN is not 0."""
        kept = ~units
        for name, parts in self._rows.items():
            self._rows[name] = torch.where(kept.view(1, -1, 1), parts, 0.0)
        images = self.units.per_image(kept).view(-1, 1, 1, 1)
        for name, pair in self._pairs.items():
            g, x = torch.where(images, pair.g, 0.0), torch.where(images, pair.x, 0.0)
            self._pairs[name] = _Pair(g, x, pair.shape, None)
        for name, lookup in self._lookups.items():
            g = torch.where(self.units.per_image(kept).view(-1, 1, 1), lookup.g, 0.0)
            self._lookups[name] = _Lookup(g, lookup.ids, lookup.table)

    def squared_norms(self) -> Tensor:
        """The squared norm of every unit's whole scaled gradient, in float64.

        Infinite where it cannot be told, which is for numbers that no training brings about.
        """
        where = exact_device(self._device)
        total = torch.zeros(self.units.count, dtype=torch.float64, device=where)
        for name, parts in self._rows.items():
            total += self._geometry.one_weight(name) ** 2 * squared_lengths(parts).sum(0)
        for name, lookup in self._lookups.items():
            unit_ids, _, sums = lookup.by_unit(self.units)
            squared = self._geometry.one_weight(name) ** 2
            total.index_add_(0, unit_ids.to(where), squared * squared_lengths(sums))
        if self._pairs:
            buckets = self.units.by_size()
            for name, pair in self._pairs.items():
                squared = self._geometry.one_weight(name) ** 2
                for unit_ids, image_ids in buckets:
                    total[unit_ids.to(where)] += squared * self._pair_norms(pair, image_ids)
        return total

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """The sum over units of factor times scaled gradient, by name, in the parameter's order.

        Forgets each entry as it is used, so that memory falls while the sums are formed.
        """
        sums: dict[str, Tensor] = {}
        factors = _there(factors, self._device)
        for name in list(self._rows):
            parts = self._rows.pop(name)
            weighted = factors * self._geometry.one_weight(name)
            sums[name] = (weighted.to(parts.dtype) @ parts).T.contiguous()
        for name in list(self._lookups):
            lookup = self._lookups.pop(name)
            unit_ids, read, rows = lookup.by_unit(self.units)
            weighted = factors[unit_ids] * self._geometry.one_weight(name)
            sums[name] = rows.new_zeros(lookup.table, rows.shape[1])
            sums[name].index_add_(0, read, rows * weighted.to(rows.dtype).unsqueeze(1))
        per_image = self.units.per_image(factors)
        for name in list(self._pairs):
            pair = self._pairs.pop(name)
            weighted = per_image * self._geometry.one_weight(name)
            scaled = pair.g * weighted.to(pair.g.dtype).view(-1, 1, 1, 1)
            sums[name] = summed_weight_gradient(scaled, pair.x, pair.shape, pair.patches)
        return sums

    def _pair_norms(self, pair: _Pair, image_ids: Tensor) -> Tensor:
        pixels = image_ids.shape[1] * pair.x.shape[2] * pair.x.shape[3]
        if self.units.of_image is None:
            squared = gram_squared_norms(
                pair.g.unsqueeze(1), pair.x.unsqueeze(1), pair.shape, alike=self.units.alike
            )
        elif pixels**2 <= math.prod(pair.shape.weight_shape):
            squared = gram_squared_norms(pair.g[image_ids], pair.x[image_ids], pair.shape)
        else:
            # A unit of many images: its own gradient is smaller than its Gram matrix.
            squared = torch.stack([_many_images_norm(pair, ids) for ids in image_ids])
        too_large = unmeasurable(pair.x)[image_ids].any(1).to(squared.device)
        return torch.where(too_large, math.inf, squared)


def _there(factors: Tensor, device: torch.device) -> Tensor:
    """Factors on the device of what they multiply, in float64 where there is such a thing."""
    if exact_device(device) == device:
        return factors
    return factors.float().to(device)


def _one_part(rows: Tensor) -> Tensor:
    return rows.reshape(1, len(rows), -1)


# Longer rows are measured in pieces: in float32 the library's norm of a million equal numbers was
# seen 0.2 % short.
_PIECE = 1 << 14


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared Euclidean lengths along the last axis, added up in float64."""
    pieces = torch.split(rows, _PIECE, dim=-1)
    lengths = [double(torch.linalg.vector_norm(piece, dim=-1)).square() for piece in pieces]
    return torch.stack(lengths).sum(0)


def _many_images_norm(pair: _Pair, ids: Tensor) -> Tensor:
    """Upper bound, tight to rounding, of one unit's squared weight-gradient norm."""
    g, x = pair.g[ids], pair.x[ids]
    squared = squared_lengths(summed_weight_gradient(g, x, pair.shape).reshape(-1))
    # What is summed later is rounded in another order; the difference is at most proportional to
    # this, by Cauchy and Schwarz: a pixel stands in at most as many patches as there are taps.
    taps = math.prod(pair.shape.kernel)
    reach = taps * double(g).square().sum() * double(x).square().sum()
    return squared + 8 * torch.finfo(g.dtype).eps * reach
