"""Whether the rules keep a network's samples apart: looked at once, before it is relied on.

The rules go by shapes: what has as many rows as there are samples is taken for the batch. A network
from elsewhere may turn its dimensions about, and two sizes may happen to be equal. So three made-up
samples go through it together and one at a time, with made-up weights (its own may be zero, or a
stranger's), and both must give the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xcal.dp.clipping.fallback import Fallback
from xcal.dp.clipping.losses import Loss, per_sample
from xcal.dp.clipping.named import named_modules, trainable
from xcal.dp.clipping.precision import double
from xcal.dp.clipping.recorder import record
from xcal.dp.clipping.tape import Units
from xcal.dp.sampling import filled_up
from xcal.errors import UserError

_SAMPLES = 3
_seen: set[tuple[object, ...]] = set()


def check_rules(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    forward: Callable[[Tensor], Tensor] | None,
    loss: Loss | None,
    fallback: Fallback | None,
) -> None:
    """Refuse a network whose per-sample gradients are not what one sample at a time gives.

    Only the shape of `inputs` is looked at. Once in a process for a network's layers.
    """
    if type(model).__module__.startswith("xcal.models.") or not len(inputs):
        return  # our own are compared in the tests
    if forward is model:  # else it would be kept, and another copy of it be asked again
        forward = None
    trained = tuple(trainable(model))
    kinds = tuple(type(module) for _, module in named_modules(model))
    code = getattr(forward, "__code__", forward), getattr(loss, "__code__", loss)
    way = None if fallback is None else fallback.way
    question = (repr(model), kinds, trained, tuple(inputs.shape[1:]), inputs.dtype, *code, way)
    if question in _seen:
        return
    targets = filled_up(labels[:1].nan_to_num(0, 0, 0), _SAMPLES)
    run = forward or model
    with _resting(model), torch.enable_grad():
        if not _agree_somehow(model, inputs, targets, run, loss, fallback):
            raise UserError(
                f"the per-sample gradients of this network ({type(model).__name__}) are not what "
                "one sample at a time gives, so no sample's influence can be bounded: keep the "
                "batch as the first dimension everywhere, and every sample apart from the others"
            )
    _seen.add(question)


def _agree_somehow(model: nn.Module, *rest: Any) -> bool:
    """In float64, where no rounding blurs it; as it is, if the network cannot be had in float64."""
    own = next(p.dtype for p in model.parameters() if p.requires_grad)
    try:
        return _agree(model, torch.float64, *rest)
    except (RuntimeError, TypeError):  # the latter of devices that have no float64
        if own == torch.float64:
            raise
    return _agree(model, own, *rest)


def _agree(
    model: nn.Module,
    dtype: torch.dtype,
    inputs: Tensor,
    targets: Tensor,
    run: Callable[[Tensor], Tensor],
    loss: Loss | None,
    fallback: Fallback | None,
) -> bool:
    source = torch.Generator().manual_seed(0)
    samples = _made_up(inputs, source, dtype)
    if targets.is_floating_point():
        targets = targets.to(dtype)
    with _other_weights(model, source, dtype):
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        units, weights = Units(_SAMPLES), samples.new_ones(_SAMPLES, dtype=dtype)
        seen = record(
            model, samples, targets, weights, units, forward=run, loss=loss, fallback=fallback
        )
        norms = seen.tape.squared_norms().sqrt()
        factors = torch.arange(1.0, 1.0 + _SAMPLES, dtype=torch.float64, device=norms.device)
        together = seen.tape.weighted_sum(factors)
        alone = {name: torch.zeros_like(p, requires_grad=False) for name, p in named.items()}
        lengths = []
        for i in range(_SAMPLES):
            output = run(samples[i : i + 1])
            losses, _ = per_sample(loss, getattr(output, "logits", output), targets[i : i + 1])
            if not losses.requires_grad:
                return True  # nothing that trains is reached
            found = torch.autograd.grad(losses.sum(), list(named.values()), allow_unused=True)
            own = {n: g for n, g in zip(named, found, strict=True) if g is not None}
            lengths.append(sum(float(double(g).square().sum()) for g in own.values()) ** 0.5)
            for name, gradient in own.items():
                alone[name] += (i + 1) * gradient
    if not (all(map(math.isfinite, lengths)) and norms.isfinite().all()):
        return True  # such samples contribute nothing
    # Rounding flips decisions of a network in float32; samples taken for others differ by more.
    share, floor = (1e-6, 1e-7) if dtype == torch.float64 else (5e-2, 1e-3)
    floor *= sum(lengths)
    for length, norm in zip(lengths, norms.tolist(), strict=True):
        if abs(length - norm) > share * length + floor:
            return False
    for name, part in alone.items():
        mine = together[name].view_as(part) if name in together else torch.zeros_like(part)
        if float((part - mine).norm()) > share * float(part.norm()) + floor:
            return False
    return True


@contextmanager
def _other_weights(model: nn.Module, source: torch.Generator, dtype: torch.dtype) -> Iterator[None]:
    """Made-up weights and the network's own buffers, in this type; all is put back.

    One tensor for one parameter, wherever it stands: what is tied stays tied.
    """
    made: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        kept: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        places += [(one, n, value) for one in kept for n, value in one.items() if value is not None]
    try:
        for place, name, value in places:
            if id(value) not in made:
                made[id(value)] = _other(value, source, dtype)
            place[name] = made[id(value)]
        yield
    finally:
        for place, name, value in places:
            place[name] = value


def _other(value: Tensor, source: torch.Generator, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, nn.Parameter):
        return value.to(dtype) if value.is_floating_point() else value
    drawn = torch.randn(value.shape, generator=source).to(value.device, dtype)
    # Weights by the number of their inputs, scales and shifts around one.
    other = drawn / value[0].numel() ** 0.5 if value.dim() > 1 else 1 + 0.2 * drawn
    return other.requires_grad_(value.requires_grad)


def _made_up(inputs: Tensor, source: torch.Generator, dtype: torch.dtype) -> Tensor:
    shape = (_SAMPLES, *inputs.shape[1:])
    if inputs.is_floating_point():
        return torch.randn(shape, generator=source).to(inputs.device, dtype)
    # Every table has a first and a second word.
    return torch.randint(0, 2, shape, generator=source).to(inputs.device, inputs.dtype)


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, so that nothing is drawn at random; modes are put back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
