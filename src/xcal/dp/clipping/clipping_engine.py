"""The clipping engine: what a private step asks of a network, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from xcal.dp.clipping.fallback import Fallback, NoRule
from xcal.dp.clipping.geometry import PLAIN, Bound, Geometry
from xcal.dp.clipping.losses import Loss, check_independent
from xcal.dp.clipping.named import named_modules, named_parameters, trainable
from xcal.dp.clipping.plain import Plain
from xcal.dp.clipping.precision import double, exact_device, no_autocast, single
from xcal.dp.clipping.recorder import (
    INSTEAD_OF_BATCH_NORM,
    RecordedPass,
    TapeRecorder,
    record,
    refuse_other_uses,
)
from xcal.dp.clipping.rule_check import check_rules
from xcal.dp.clipping.tape import Tape, Units
from xcal.dp.sampling import filled_up
from xcal.errors import UserError

# Their parameters go into operations that have no rule, and nothing in them may train.
_WITHOUT_RULE = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.EmbeddingBag)

# Norms in float32 carry rounding errors; clipping this much lower keeps the promise all the same.
_FLOAT32_MARGIN = 1e-3

# Far from the smallest number with all its bits, 2^-126, also after a geometry's weights.
_SMALLEST_FACTOR = 2.0**-100


@dataclass(frozen=True)
class ClippedSum:
    """One batch's clipped gradient sum, and what its forward pass showed on the way.

    Everything here is private: only `gradients`, after noise, may leave the step.
    """

    gradients: dict[str, Tensor]
    """Sum over units of clipped unit gradients, scaled by `bound.geometry`, by parameter name."""
    logits: Tensor
    """Per image, in the order given, detached."""
    features: Tensor | None
    """Per image, the output of the module named by `capture`, detached."""
    norms: Tensor
    """Per unit, scaled, before clipping, in float64; not to be trusted where `dropped`."""
    dropped: Tensor
    """Per unit, true where something was not finite: the unit contributed exactly 0."""
    bound: Bound
    """What each unit was held to: the sensitivity of `gradients`."""

    def of_units(self, numbers: Tensor, count: int) -> ClippedSum:
        """The same, its units by their `numbers` among `count`; those that are not there have 0."""
        if len(self.norms) == count:
            return self
        norms, dropped = self.norms.new_zeros(count), self.dropped.new_zeros(count)
        norms[numbers.to(norms.device)], dropped[numbers] = self.norms, self.dropped
        return replace(self, norms=norms, dropped=dropped)


def joined(parts: Sequence[ClippedSum]) -> ClippedSum:
    """The sum of one batch that was given in parts, each of whole units, in the units' order."""
    if len(parts) == 1:
        return parts[0]
    if any(part.bound != parts[0].bound for part in parts):
        raise ValueError("the parts of one batch were clipped to different bounds")
    total: dict[str, Tensor] = {}
    for part in parts:
        _add(total, part.gradients)
    total = {name: value.to(parts[0].gradients[name]) for name, value in total.items()}
    shown = [part.features for part in parts if part.features is not None]
    return ClippedSum(
        total,
        torch.cat([part.logits for part in parts]),
        torch.cat(shown) if shown else None,
        torch.cat([part.norms for part in parts]),
        torch.cat([part.dropped for part in parts]),
        parts[0].bound,
    )


def _add(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Sums of many parts are kept in float64: their roundings may all go the same way."""
    for name, gradient in gradients.items():
        total[name] = total[name].add_(double(gradient)) if name in total else double(gradient)


@dataclass(frozen=True)
class _Batch:
    """Images with their labels and the weight of each one's loss within its unit."""

    images: Tensor
    labels: Tensor
    weights: Tensor
    units: Units
    forward: Callable[[Tensor], Tensor] | None = None
    loss: Loss | None = None

    def take(self, image_ids: Tensor, units: Units) -> _Batch:
        return replace(
            self,
            images=self.images[image_ids],
            labels=self.labels[image_ids],
            weights=self.weights[image_ids],
            units=units,
        )

    def of_rows(self, rows: int) -> _Batch:
        """Exactly `rows` images and as many units, in the order of those with images, then others.

        What is filled up are copies of an image, each a unit of its own.
        """
        of_image = self.units.of_image
        if of_image is not None:
            _, of_image = torch.unique(of_image, return_inverse=True)
            added = torch.arange(rows - len(of_image), device=of_image.device)
            of_image = torch.cat([of_image, added + int(of_image.max()) + 1])
        return replace(
            self,
            images=filled_up(self.images, rows),
            labels=filled_up(self.labels, rows),
            weights=filled_up(self.weights, rows),
            units=Units(rows, of_image, alike=True),
        )

    def present(self) -> Tensor:
        """The numbers of the units that have images."""
        if self.units.of_image is None:
            return torch.arange(self.units.count, device=self.images.device)
        present: Tensor = torch.unique(self.units.of_image)
        return present


class ClippingEngine:
    """Sums of clipped per-unit gradients of a network's mean loss (cross-entropy if none is given).

    Guaranteed: each unit moves the sum by at most `clip` in Euclidean norm over all trainable
    parameters together, whatever its images hold, as long as the network treats the images of a
    batch independently. Networks that cannot be clipped right are refused with a `UserError` that
    names the module. The network is left as found: hooks, modes, gradients and statistics.

    `chunk` bounds the images that go through the network at once; a larger batch, or a larger
    unit, is worked through in parts with the same result.

    Libraries round an image's numbers differently in batches of other sizes. With `rows` every pass
    takes exactly so many (at most `chunk`), filled up with copies of one of its images that count
    for nothing, so that what a unit contributes does not depend on how many others were drawn; see
    `passes` for what this rests on.

    `fallback="vmap"` (or `"loop"`, where vmap has no way) works through modules that have no rule
    one sample at a time: exact, slower, and with memory for every sample's own copy of their
    gradient. `dropout` lets layers draw at random, for every sample by itself; a step that is
    redone then draws anew, so nothing that is replayed may use it. `half` (bfloat16) is what
    products are rounded to in passes; norms and sums stay in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk: int = 256,
        rows: int = 0,
        fallback: str | None = None,
        dropout: bool = False,
        half: torch.dtype | None = None,
    ) -> None:
        self._half = half
        if chunk < 1:
            raise UserError(f"chunk is {chunk}: a clipping engine needs chunks of at least 1 image")
        self._fallback = None if fallback is None else Fallback(fallback)
        self._dropout = dropout
        _refuse_unsupported(model, self._fallback, dropout)
        self._model = model
        self._rows = min(rows, chunk)
        self._chunk = self._rows or chunk
        self._trusted_loss: Loss | None = None

    def clipped_sum(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        clip: float,
        geometry: Geometry = PLAIN,
        units: Tensor | None = None,
        n_units: int | None = None,
        capture: str | None = None,
        forward: Callable[[Tensor], Tensor] | None = None,
        loss: Loss | None = None,
    ) -> ClippedSum:
        """The sum over units of their gradients, each scaled down to norm `clip` if longer.

        With a `geometry` D all of it is in the scaled space: the sum of Dg · min(1, clip/‖Dg‖).

        `units[i]`, in 0 … n_units - 1, is the unit of image i (default: each image its own). A
        unit's gradient is that of the mean cross-entropy of its images. `clip` may be infinite.
        In float32 units are clipped to clip/(1 + 1e-3), so that rounding cannot carry them past
        `clip`; in float64 to `clip` itself. A unit with anything not finite, or with a label that
        is no class, contributes exactly 0. A batch may be empty.

        `forward` gives the logits where `images` are not the network's input but what its frozen
        beginning made of it, image by image. `loss(output, labels)` gives one number per image, by
        that image alone; without it, cross-entropy with class numbers or with soft targets.
        """
        if not clip > 0:
            raise UserError(f"clip is {clip}: the clipping norm must be greater than 0")
        _refuse_unsupported(self._model, self._fallback, self._dropout)
        geometry.check(self._model)
        bound = Bound(clip, geometry)
        batch = _checked_batch(
            images, labels, units, n_units, dtype=self._dtype(images), simplify=not self._rows
        )
        batch = replace(batch, forward=forward, loss=loss)
        # Norms and sums must agree to rounding; TF32 convolutions keep ten bits only.
        tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with no_autocast(images.device), tf32 if images.is_cuda else nullcontext():
            check_rules(self._model, images, labels, forward, loss, self._fallback)
            return self._clip(batch, bound, capture)

    def _clip(self, batch: _Batch, bound: Bound, capture: str | None) -> ClippedSum:
        if not len(batch.images):
            return self._empty_batch(batch, bound, capture)
        if len(batch.images) <= self._chunk:
            return self._clip_together(batch, bound, capture)
        return self._clip_in_chunks(batch, bound, capture)

    def _record(self, batch: _Batch, bound: Bound, capture: str | None) -> RecordedPass:
        """One pass. With fixed rows, the tape has the units of `_Batch.of_rows`."""
        count = len(batch.images)
        if self._rows:
            batch = batch.of_rows(self._rows)
        seen = record(
            self._model,
            batch.images,
            batch.labels,
            batch.weights,
            batch.units,
            geometry=bound.geometry,
            capture=capture,
            forward=batch.forward,
            loss=batch.loss,
            fallback=self._fallback,
            half=self._half,
        )
        if batch.loss is not None and batch.loss is not self._trusted_loss:
            check_independent(batch.loss, seen.logits, batch.labels)
            self._trusted_loss = batch.loss
        if len(batch.images) == count:
            return seen
        return RecordedPass(
            seen.tape,
            seen.logits[:count],
            None if seen.features is None else seen.features[:count],
            seen.finite[:count],
        )

    def _clip_together(self, batch: _Batch, bound: Bound, capture: str | None) -> ClippedSum:
        """One pass over the whole batch; a second one without the dropped units if there are."""
        units = batch.units
        seen = self._record(batch, bound, capture)
        norms = measured = seen.tape.squared_norms().sqrt()
        if self._rows:
            present = batch.present()
            norms = measured.new_zeros(units.count)
            norms[present.to(norms.device)] = measured[: len(present)]
        dropped = _not_finite(norms, seen.finite) | units.any_image(~seen.finite)
        if dropped.any():
            gradients, dropped = self._without(batch, dropped, bound)
        else:
            limit = bound.norm / (1 + self._margin())
            factors = _factors(limit, measured)
            if self._rows:
                factors[len(present) :] = 0  # copies of an image that is finite: nothing is left
            gradients = seen.tape.weighted_sum(factors)
        return ClippedSum(
            self._every_parameter(gradients), seen.logits, seen.features, norms, dropped, bound
        )

    def _without(
        self, batch: _Batch, dropped: Tensor, bound: Bound
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The sum over the other units, computed anew: 0 x NaN is not 0.

        Dropping is repeated until nothing that is not finite is left.
        """
        kept = torch.nonzero(~dropped).squeeze(1)
        image_ids = torch.nonzero(batch.units.per_image(~dropped)).squeeze(1)
        if not len(image_ids):
            return {}, dropped
        renumbered = torch.cumsum(~dropped, 0) - 1
        of_image = batch.units.of_image
        units = Units(len(kept), None if of_image is None else renumbered[of_image[image_ids]])
        rest = self._clip_together(batch.take(image_ids, units), bound, None)
        dropped = dropped.clone()
        dropped[kept] = rest.dropped
        return rest.gradients, dropped

    def _clip_in_chunks(self, batch: _Batch, bound: Bound, capture: str | None) -> ClippedSum:
        """Chunk after chunk, a unit's images always together."""
        total: dict[str, Tensor] = {}
        where = exact_device(batch.images.device)
        norms = torch.zeros(batch.units.count, dtype=torch.float64, device=where)
        dropped = batch.images.new_zeros(batch.units.count, dtype=torch.bool)
        order, logits, features = [], [], []
        for image_ids, unit_ids, units in in_chunks(batch.units, len(batch.images), self._chunk):
            part = batch.take(image_ids, units)
            if len(image_ids) > self._chunk:
                one = self._clip_large_unit(part, bound, capture)
            else:
                one = self._clip_together(part, bound, capture)
            _add(total, one.gradients)
            norms[unit_ids.to(where)], dropped[unit_ids] = one.norms, one.dropped
            order.append(image_ids)
            logits.append(one.logits)
            features.append(one.features)
        back = torch.argsort(torch.cat(order))
        shown = [part for part in features if part is not None]
        return ClippedSum(
            {
                name: total[name].to(p.device, p.dtype)
                for name, p in named_parameters(self._model)
                if name in total
            },
            torch.cat(logits)[back],
            torch.cat(shown)[back] if shown else None,
            norms,
            dropped,
            bound,
        )

    def _clip_large_unit(self, unit: _Batch, bound: Bound, capture: str | None) -> ClippedSum:
        """A single unit with more images than a chunk: gradients add up first, then are clipped."""
        total: dict[str, Tensor] = {}
        finite, logits, features = True, [], []
        everyone = torch.arange(len(unit.images), device=unit.images.device)
        for ids in torch.split(everyone, self._chunk):
            part = unit.take(ids, Units(1, torch.zeros_like(ids)))
            seen = self._record(part, bound, capture)
            finite = finite and bool(seen.finite.all())
            own = torch.zeros(seen.tape.units.count, dtype=torch.float64)
            own = own.to(exact_device(ids.device))
            own[0] = 1
            for name, gradient in seen.tape.weighted_sum(own).items():
                total[name] = total[name].add_(gradient) if name in total else gradient
            logits.append(seen.logits)
            features.append(seen.features)
        norm = math.sqrt(sum(float(double(g).square().sum()) for g in total.values()))
        dropped = not (finite and math.isfinite(norm))
        if dropped:
            total = {}
        elif norm > 0:
            limit = bound.norm / (1 + self._margin())
            factor = float(_factors(limit, torch.tensor(norm, dtype=torch.float64)))
            total = {name: gradient * factor for name, gradient in total.items()}
        shown = [part for part in features if part is not None]
        device = unit.images.device
        return ClippedSum(
            self._every_parameter(total),
            torch.cat(logits),
            torch.cat(shown) if shown else None,
            torch.tensor([norm], dtype=torch.float64, device=exact_device(device)),
            torch.tensor([dropped], device=device),
            bound,
        )

    def _empty_batch(self, batch: _Batch, bound: Bound, capture: str | None) -> ClippedSum:
        """Zeros, with the shapes that a blank image of the same size shows."""
        blank = batch.images.new_zeros(1, *batch.images.shape[1:])
        nobody = batch.units.count
        single = replace(
            batch,
            images=blank,
            labels=batch.labels.new_zeros(1, *batch.labels.shape[1:]),
            weights=batch.weights.new_ones(1),
            units=Units(1),
            loss=_any_loss,
        )
        one = self._clip_together(single, bound, capture)
        return replace(
            one,
            gradients=self._every_parameter({}),
            logits=one.logits[:0],
            features=None if one.features is None else one.features[:0],
            norms=one.norms.new_zeros(nobody),
            dropped=one.dropped.new_zeros(nobody),
        )

    def _margin(self) -> float:
        return _margin(self._model)

    def _dtype(self, images: Tensor) -> torch.dtype:
        """In which losses are weighted: words come as integers."""
        if images.is_floating_point():
            return images.dtype
        return next((p.dtype for _, p in named_parameters(self._model)), torch.float32)

    def _every_parameter(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _every_parameter(self._model, gradients)


class MixedRows(UserError):
    """What one unit contributes to a pass depends on others of its batch."""


class OpenPass:
    """A pass in two halves, for a training loop that calls network and loss itself.

    Everything that the network does inside `recording()` is recorded; several calls count together.
    `finish` then takes one loss per image, made of their outputs, and goes back through all of it.
    Guaranteed: as `ClippingEngine.clipped_sum`. Networks that draw at random (dropout) are taken:
    nothing is done again here.
    """

    def __init__(self, model: nn.Module, rows: int, *, clip: float, units: Units) -> None:
        self._model, self.units, self._bound = model, units, Bound(clip)
        self.check()
        self._names = {id(p): name for name, p in trainable(model).items()}
        like = next(iter(trainable(model).values()))
        self._tape = Tape(units, like.device)
        self._anchor = like.detach().new_zeros((), requires_grad=True)
        self._rows = rows
        self._plain = Plain(model, rows, self._tape, self._anchor)

    def check(self) -> None:
        """Refuse a network that cannot be clipped right as it stands."""
        check_supported(self._model)

    def recording(self) -> TapeRecorder:
        """The context in which the network is called."""
        self.check()
        return TapeRecorder(self._plain, self._rows, self._tape, self._anchor)

    def only_if(self, asked: Callable[[], None]) -> None:
        """`asked` raises where a backward pass through the network is not the one of `finish`."""
        self._tape.asked = asked

    def check_apart(
        self, losses: Tensor, outputs: Sequence[GradientEdge], *, inside: bool, seed: int
    ) -> None:
        """Refuse losses by which one unit's gradient depends on others.

        Some units' losses count double: the gradients of the others must stay as they are, at the
        network's outputs and, with `inside`, wherever a parameter is used. What is mixed without a
        gradient (a value that was detached) is not seen.
        """
        count = self.units.count
        if count < 2:
            return
        refuse_other_uses(losses, self._names)
        source = torch.Generator().manual_seed(seed)
        doubled = (torch.randperm(count, generator=source) % 2 == 0).to(losses.device)
        still = torch.zeros_like(doubled)
        with no_autocast(losses.device):
            plain = self._gradients(losses, outputs, still, inside)
        for marked in (doubled, ~doubled):
            with no_autocast(losses.device):
                moved = self._gradients(losses, outputs, marked, inside)
            if not self._stay(plain, moved, ~marked):
                raise MixedRows(
                    "The loss of one row depends on others of the batch, on its way through network"
                    " or loop, so one unit's influence cannot be bounded: combine nothing across"
                    " rows, keep them in their order, and the batch as the first dimension."
                )

    def _gradients(
        self, losses: Tensor, outputs: Sequence[GradientEdge], doubled: Tensor, inside: bool
    ) -> dict[str, Tensor]:
        total = (losses * (1 + self.units.per_image(doubled).to(losses.dtype))).sum()
        asked = [*outputs, get_gradient_edge(self._anchor)] if inside else list(outputs)
        if not asked:
            return {}
        found = torch.autograd.grad(total, asked, retain_graph=True, allow_unused=True)
        named = {str(i): g for i, g in enumerate(found[: len(outputs)]) if g is not None}
        return {**named, **self._tape.forget(), **self._plain.forget()} if inside else named

    def _stay(self, plain: Mapping[str, Tensor], moved: Mapping[str, Tensor], kept: Tensor) -> bool:
        floor = 1e-6 * max((_typical(g) for g in plain.values()), default=0.0)
        for name, before in plain.items():
            after = moved[name]
            if before.dim() == 0 or len(before) not in (self._rows, self.units.count):
                if bool(before.any()):
                    return False
                continue
            mine = self.units.per_image(kept) if len(before) == self._rows else kept
            if not bool(mine.any()):
                continue
            own = double(before[mine].reshape(int(mine.sum()), -1))
            moves = (double(after[mine].reshape(own.shape)) - own).abs()
            moves = moves.nan_to_num(0.0, 0.0, 0.0)
            allowed = 1e-4 * own.nan_to_num(0.0, 0.0, 0.0).abs().amax(1, keepdim=True) + floor
            if bool((moves > allowed).any()):
                return False
        return True

    def finish(self, losses: Tensor) -> ClippedSum:
        """The sum over units of clipped gradients of their images' mean loss; see `ClippedSum`.

        Its `logits` are the losses.
        """
        of_image = self.units.of_image
        weighted = single(losses)
        if of_image is not None:
            sizes = torch.bincount(of_image, minlength=self.units.count)
            weighted = weighted / sizes.to(weighted.dtype)[of_image]
        total = weighted.sum()
        refuse_other_uses(total, self._names)
        # Norms and sums must agree to rounding; TF32 convolutions keep ten bits only.
        tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with no_autocast(losses.device), tf32:
            torch.autograd.grad(total, [self._anchor], allow_unused=True)
            self._plain.settle()
            norms = self._tape.squared_norms().sqrt()
            finite = torch.isfinite(losses.detach())
            dropped = _not_finite(norms, finite) | self.units.any_image(~finite)
            if dropped.any():
                self._tape.drop(dropped)
            limit = self._bound.norm / (1 + _margin(self._model))
            factors = _factors(limit, norms).masked_fill(dropped.to(norms.device), 0.0)
            gradients = _every_parameter(self._model, self._tape.weighted_sum(factors))
        return ClippedSum(gradients, losses.detach(), None, norms, dropped, self._bound)


def check_supported(model: nn.Module) -> None:
    """Refuse a network that an `OpenPass` could not clip right as it stands."""
    _refuse_unsupported(model, None, dropout=True)


def _not_finite(norms: Tensor, beside: Tensor) -> Tensor:
    """Per unit, on the device of the rest: norms may be kept elsewhere."""
    return ~torch.isfinite(norms).to(beside.device)


def _typical(rows: Tensor) -> float:
    """The largest number of a row, as it is for most rows."""
    if rows.dim() == 0 or not rows.numel():
        return 0.0
    largest = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    return float(largest.nan_to_num(0.0, 0.0, 0.0).abs().amax(1).median())


def _margin(model: nn.Module) -> float:
    types = {p.dtype for p in trainable(model).values()}
    return 0.0 if types <= {torch.float64} else _FLOAT32_MARGIN


def _every_parameter(model: nn.Module, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the network's own order and shapes, zeros for parameters the loss did not reach."""
    return {
        name: (
            gradients[name].view(parameter.shape)
            if name in gradients
            else torch.zeros_like(parameter, requires_grad=False)
        )
        for name, parameter in trainable(model).items()
    }


def _any_loss(output: Tensor, _: Tensor) -> Tensor:
    """Of a blank image, of which only shapes are looked at."""
    return output.flatten(1).sum(1)


def _factors(limit: float, norms: Tensor) -> Tensor:
    """What each unit's gradient is multiplied by, in float64.

    In float32 a very small factor has few bits left, and rounding it up could double a unit: one
    that would be scaled down so far contributes nothing.
    """
    factors = (limit / norms).clamp_max(1)
    return torch.where(factors < _SMALLEST_FACTOR, 0.0, factors)


def _checked_batch(
    images: Tensor,
    labels: Tensor,
    units: Tensor | None,
    n_units: int | None,
    *,
    dtype: torch.dtype,
    simplify: bool,
) -> _Batch:
    """With `simplify`, units that happen to have one image each are treated as if all did.

    That spares time, and it depends on who was drawn.
    """
    count = len(images)
    if labels.shape[:1] != (count,):
        raise UserError(
            f"{count} images come with labels of shape {tuple(labels.shape)}: give one class "
            "number per image"
        )
    images, labels = images.detach(), labels.detach()
    if units is None:
        if n_units not in (None, count):
            raise UserError(f"n_units is {n_units} for {count} images: say which unit each is of")
        return _Batch(images, labels, images.new_ones(count, dtype=dtype), Units(count))
    if units.shape != (count,):
        raise UserError(
            f"{count} images come with units of shape {tuple(units.shape)}: give one unit number "
            "per image"
        )
    units = units.long()
    highest = int(units.max()) + 1 if count else 0
    declared = highest if n_units is None else n_units
    if highest > declared or (count and int(units.min()) < 0):
        raise UserError(f"unit numbers must lie in 0 ... n_units - 1 = {declared - 1}")
    if (
        simplify
        and declared == count
        and torch.equal(units, torch.arange(count, device=units.device))
    ):
        return _Batch(images, labels, images.new_ones(count, dtype=dtype), Units(count))
    sizes = torch.bincount(units, minlength=declared)
    return _Batch(images, labels, 1 / sizes.to(dtype)[units], Units(declared, units))


def in_chunks(units: Units, images: int, limit: int) -> Iterator[tuple[Tensor, Tensor, Units]]:
    """(image ids, unit ids, their units renumbered): at most `limit` images, or one larger unit."""
    if units.of_image is None:
        for ids in torch.split(torch.arange(images), limit):
            yield ids, ids, Units(len(ids))
        return
    sizes = torch.bincount(units.of_image, minlength=units.count)
    order = torch.argsort(units.of_image, stable=True)
    ends = torch.cumsum(sizes, 0)
    filled = sizes.tolist()
    start = 0
    while start < units.count:
        stop, size = start + 1, filled[start]
        while stop < units.count and size + filled[stop] <= limit:
            size += filled[stop]
            stop += 1
        first = int(ends[start]) - filled[start]
        image_ids = order[first : first + size]
        if size:
            local = Units(stop - start, units.of_image[image_ids] - start)
            yield image_ids, torch.arange(start, stop, device=order.device), local
        start = stop


def _draws(module: nn.Module) -> bool:
    return not isinstance(module, _DropoutNd) or module.p > 0


def _where(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else type(module).__name__


def _refuse_unsupported(model: nn.Module, fallback: Fallback | None, dropout: bool) -> None:
    """Raise, naming the module, if a network's per-unit gradients cannot be had or kept apart."""
    for name, module in named_modules(model):
        if isinstance(module, _NormBase):
            pooled = isinstance(module, _BatchNorm) and module.running_mean is None
            learning = module.training and module.running_mean is not None
            if pooled or learning or (isinstance(module, _BatchNorm) and module.training):
                raise UserError(
                    f"{_where(name, module)} takes statistics from the batch, which mixes people's "
                    "data: " + INSTEAD_OF_BATCH_NORM
                )
        draws = isinstance(module, _DropoutNd | nn.RReLU) and module.training and _draws(module)
        if draws and not dropout:
            raise UserError(
                f"{_where(name, module)} draws at random inside the network, which a redone step "
                "could not draw again: remove it, or put it in evaluation mode (or allow it "
                "with dropout=True where no step is ever redone)"
            )
        own = [n for n, p in module._parameters.items() if p is not None and p.requires_grad]
        if own and isinstance(module, _WITHOUT_RULE):
            if fallback is None:
                raise NoRule(f"{name}.{own[0]}")
            fallback.add(name)
    for name, parameter in trainable(model).items():
        if is_lazy(parameter):
            raise UserError(
                f"parameter {name!r} has no shape yet: give the network a batch of made-up images"
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"parameter {name!r} is {parameter.dtype}: keep the network in float32, and use "
                "torch.autocast in bfloat16 for its passes"
            )
