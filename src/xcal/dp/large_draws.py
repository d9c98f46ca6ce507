"""A draw that is too large for one pass: through the network in parts, and through each part again.

First without a graph, for the outputs that the loop makes its losses of; then, when it is known
what each output is worth to its own loss, part by part with everything recorded. Units stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from xcal.dp.apart import mapped, tensors
from xcal.dp.clipping import OpenPass
from xcal.dp.clipping.clipping_engine import in_chunks
from xcal.dp.clipping.precision import autocast_type, in_half, single
from xcal.dp.clipping.tape import Units
from xcal.errors import UserError


@dataclass(frozen=True)
class _Call:
    """One call of the network, and the random state that each part of it began with."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    states: list[list[Tensor]]
    half: torch.dtype | None
    outputs: int


class Parts:
    """The parts of one draw and the calls that were made for it.

    Guarantee: what `again` gives is, unit by unit, what one pass over the whole draw would be.
    """

    def __init__(self, module: nn.Module, units: Units, rows: int, at_once: int) -> None:
        self._module, self._rows, self._at_once = module, rows, at_once
        self._parts = [(ids, own) for ids, _, own in in_chunks(units, rows, at_once)]
        self._back = torch.argsort(torch.cat([ids for ids, _ in self._parts]))
        self._device = next(module.parameters()).device
        self._calls: list[_Call] = []

    def forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The network's answer to the whole draw, as if nothing led to it."""
        if any(t.requires_grad for t in tensors((args, dict(kwargs)))):
            raise self._whole("the network is given something that has a gradient itself")
        states, answers = [], []
        for ids, _ in self._parts:
            states.append(self._random_state())
            with torch.no_grad():
                answers.append(call(*self._of(args, ids), **self._of(dict(kwargs), ids)))
        whole = []
        for one in zip(*map(tensors, answers), strict=True):
            if any(
                not t.dim() or len(t) != len(p[0]) for t, p in zip(one, self._parts, strict=True)
            ):
                raise self._whole("the network's outputs do not have a row for every sample")
            whole.append(torch.cat(one)[self._back.to(one[0].device)])
        # Copies, so that the loop may write into them.
        shown = [t.requires_grad_().clone() if t.is_floating_point() else t for t in whole]
        counted = sum(t.requires_grad for t in shown)
        half = autocast_type(self._device)
        self._calls.append(_Call(call, args, kwargs, states, half, counted))
        rest = iter(shown)
        return mapped(answers[0], lambda _: next(rest))

    def again(
        self,
        losses: Tensor,
        outputs: list[GradientEdge],
        clip: float,
        asked: Callable[..., None],
    ) -> Iterator[tuple[OpenPass, Tensor, list[GradientEdge]]]:
        """Each part recorded: with a number per row whose gradient is that of the row's loss."""
        slopes = torch.autograd.grad(losses.sum(), outputs, allow_unused=True)
        for number, (ids, units) in enumerate(self._parts):
            opened = OpenPass(self._module, len(ids), clip=clip, units=units)
            opened.only_if(asked)
            ids = ids.to(losses.device)
            own = losses.detach()[ids] * 0  # not a number where the loss is none
            reached, first = [], 0
            for one in self._calls:
                worth = slopes[first : first + one.outputs]
                first += one.outputs
                with self._as_then(one, number), opened.recording():
                    answer = one.call(*self._of(one.args, ids), **self._of(dict(one.kwargs), ids))
                floats = [t for t in tensors(answer) if t.is_floating_point()]
                for made, slope in zip(floats, worth, strict=True):
                    if slope is not None and made.requires_grad:
                        own = own + (single(made) * single(slope[ids])).flatten(1).sum(1)
                        reached.append(get_gradient_edge(made))
            yield opened, own, reached

    def _whole(self, why: str) -> UserError:
        return UserError(
            f"A draw of {self._rows} rows goes through the network in parts, and {why}: set"
            f" max_physical_batch_size = None, or above {self._at_once}."
        )

    def _of(self, value: Any, ids: Tensor) -> Any:
        """The rows of a part; what has no row for every sample is left as it is."""
        return mapped(
            value, lambda t: t[ids.to(t.device)] if t.dim() and len(t) == self._rows else t
        )

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._on_gpu else states

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextmanager
    def _as_then(self, one: _Call, number: int) -> Iterator[None]:
        """The random state and the precision that the part had the first time."""
        devices = [self._device] if self._on_gpu else []
        with torch.random.fork_rng(devices=devices), in_half(self._device, one.half):
            torch.set_rng_state(one.states[number][0])
            for device, state in zip(devices, one.states[number][1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
