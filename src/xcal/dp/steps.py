"""One private training, step by step: charge, draw, clip, release.

The objects of a loop (`wrappers.py`, `loader.py`) only pass on what the loop does. What holds is
here: a batch is drawn after its charge is on record, what comes of it is released once, with the
noise that was charged for, and the optimizer takes nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import _global_optimizer_pre_hooks

from xcal.dp.account import Account
from xcal.dp.apart import Shown, check_rows_apart, mapped, tensors
from xcal.dp.batch_invariance import Remembered, check_remembers_nothing
from xcal.dp.clipping import ClippedSum, MixedRows, OpenPass, check_supported, joined
from xcal.dp.clipping.precision import no_autocast
from xcal.dp.clipping.tape import Units
from xcal.dp.filter import BudgetExhausted
from xcal.dp.large_draws import Parts
from xcal.dp.mechanism import ChargedStep, Mechanism
from xcal.dp.noise import NoiseKey, NoiseSource
from xcal.dp.refusals import Refused
from xcal.dp.sampling import UnitTable, images_of, poisson_draw
from xcal.errors import UserError


@dataclass(frozen=True)
class Records:
    """The data set as units: what a charged step draws from."""

    table: UnitTable

    def draw(
        self, rate: float, noise: NoiseSource, key: NoiseKey
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Each unit independently: its records' indices, each one's unit, how many units."""
        drawn = poisson_draw(noise.uniforms(key, self.table.n_units), rate)
        largest = max(1, int(self.table.sizes.max(initial=0)))
        indices, unit_of = images_of(drawn, self.table, largest)
        return indices, unit_of, len(drawn)


@dataclass
class Draw:
    """A batch that was paid for, from its draw to the optimizer's step."""

    charged: ChargedStep
    indices: list[int]
    unit_of: Tensor
    units: int
    opened: OpenPass | None = None
    called: bool = False
    going_back: bool = False
    before: Remembered | None = None
    outputs: list[GradientEdge] = field(default_factory=list)
    parts: Parts | None = None  # where it is too large to go through the network at once
    released: dict[str, Tensor] | None = None
    stepped: bool = False

    @property
    def rows(self) -> int:
        return len(self.indices)


class PrivateSteps:
    """What network, criterion, optimizer and loader of one training share.

    Guarantee: every batch is drawn after its charge is on record; the sum of its units' gradients,
    each clipped to the norm that was charged for, is released once, with the noise that was charged
    for; `p.grad` holds nothing of the data before that, and the optimizer takes nothing else.
    """

    def __init__(
        self,
        module: nn.Module,
        account: Account,
        mechanism: Mechanism,
        records: Records,
        noise: NoiseSource,
        *,
        by_group: bool,
        per_epoch: int,
        divisor: float,
        at_once: int | None = None,
    ) -> None:
        self.module, self.account, self.mechanism = module, account, mechanism
        self.per_epoch = per_epoch
        self.spent = False
        self._halted = account.halted_before(0)  # in an earlier round: for good
        self.taken = 0  # optimizer steps
        self._records, self._noise = records, noise
        self._by_group, self._divisor, self._at_once = by_group, divisor, at_once
        self._ahead: deque[Draw] = deque()
        self._current: Draw | None = None
        self._stepping = False
        self._epoch = 0
        self._shown = Shown()
        self._looked_at: set[str] = set()
        # The loop's network and optimizer, when they are made.
        self.in_training: Callable[[], bool] = lambda: True
        self.optimizer: torch.optim.Optimizer | None = None

    def __deepcopy__(self, _: object) -> PrivateSteps:
        return self  # a copy of the network is another network of the same training

    @property
    def charged(self) -> int:
        """Steps that were paid for."""
        return len(self.account.charges)

    @property
    def stopped(self) -> bool:
        """Whether this training makes no further step."""
        return self.spent or self._halted

    @property
    def clip(self) -> float:
        return self.mechanism.releases[0].sensitivity

    def restore(self, charged: int, taken: int) -> None:
        """Go on where a training was saved; in memory, with its charges paid again."""
        for step in range(self.charged, charged):
            self.mechanism.charge(
                self.account, 0, step, inputs=None, noise=self._noise, key=self._key(step)
            )
        self.taken = taken

    @staticmethod
    def _key(step: int) -> Callable[[str], NoiseKey]:
        return lambda block: NoiseKey("library", "dp-sgd", 0, step, block)

    # The loader's side.

    def begin_epoch(self) -> int:
        self._ahead.clear()
        self._epoch += 1
        return self._epoch

    def check_epoch(self, epoch: int) -> None:
        """Only the newest iteration over the loader goes on: its draws are those in order here."""
        if epoch != self._epoch:
            raise Refused(
                "loader",
                "An iteration over the private loader went on after another one was begun: batches"
                " of two at once cannot be told apart; use one at a time.",
            )

    def check_stepped(self) -> None:
        """Before anything more is charged: is a released gradient waiting for its step?"""
        draw = self._current
        if draw is not None and draw.released is not None and not draw.stepped:
            if any(p.grad is not None and p.grad.any() for p in self._parameters().values()):
                raise Refused(
                    "not-zeroed",
                    "The loader was asked for the next batch before optimizer.step(): gradients of"
                    " several draws cannot be accumulated, a larger batch_size draws more at once.",
                )

    def check_ready(self) -> None:
        """Before anything more is charged: could network and optimizer take what is drawn?"""
        if not (self.in_training() and torch.is_grad_enabled()):
            raise Refused(
                "no-draw",
                "The private loader was asked for a batch while the network is in evaluation mode"
                " or gradients are switched off: every batch is paid for, and would be lost; call"
                " model.train() first, and measure on a plain loader.",
            )
        try:
            check_supported(self.module)
        except UserError as error:
            raise Refused("network", str(error)) from None
        if self.optimizer is not None:
            check_parameters(self.module, self.optimizer)

    def draw(self) -> list[int] | None:
        """Charge a step, durably, then draw its batch. None: the budget does not cover it."""
        step = self.account.next_step
        try:
            if self._halted:
                raise BudgetExhausted("this training has halted")
            charged = self.mechanism.charge(
                self.account, 0, step, inputs=None, noise=self._noise, key=self._key(step)
            )
        except BudgetExhausted:
            if not self.spent:
                self.account.halt(0, step)
            self.spent = True
            return None
        indices, unit_of, units = charged.draw(self._records)
        drawn = Draw(charged, indices.tolist(), torch.from_numpy(unit_of), units)
        self._ahead.append(drawn)
        return drawn.indices

    def open(self, batch: Any) -> None:
        """The batch of the oldest draw is handed to the loop."""
        self.begin(self._ahead.popleft(), batch)

    def begin(self, draw: Draw, batch: Any) -> None:
        self._current = draw
        self._shown.show(batch)

    def end_epoch(self) -> None:
        self._current = None

    # The network's side.

    def forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The network's answer in training mode, recorded."""
        draw = self._current
        if draw is None:
            raise Refused(
                "no-draw",
                "The network was called in training mode without a batch of the private loader:"
                " call model.eval() (or use torch.no_grad()) outside the training loop.",
            )
        if draw.released is not None:
            raise Refused(
                "second-backward",
                "The network was called in training mode after this batch's backward pass: one"
                " draw pays for one; call model.eval() (or use torch.no_grad()) to look at it.",
            )
        rows = next((len(t) for t in tensors((args, dict(kwargs))) if t.dim()), None)
        if rows is None or rows != draw.rows:
            raise Refused(
                "other-rows",
                f"The network was given {rows} rows, and {draw.rows} were drawn: give it the whole"
                " batch of the private loader, and nothing else, in training mode.",
            )
        if self._shown.elsewhere((args, dict(kwargs))):
            raise Refused(
                "other-rows",
                "The network was given rows of the loader in other places than they were drawn to"
                " (reordered, repeated, or kept from another batch): give it this batch, each row"
                " in its place.",
            )
        draw.called = True
        if not rows:
            return self._nobody(call, args, kwargs)
        if draw.opened is None:
            draw.opened = self._opened(draw)
            draw.opened.only_if(self._going_back_of(draw))
            draw.outputs = []
            draw.before = Remembered(self.module)
        if rows > 1:
            # In single precision, where no rounding blurs it.
            with no_autocast(next(self.module.parameters()).device):
                self.look_again("network", lambda: check_rows_apart(self.module, args, kwargs))
        with self._parameters_stay("recorded"):
            try:
                answer = self._recorded(draw, call, args, kwargs)
            except UserError as error:
                raise Refused("network", str(error)) from None
        for tensor in tensors(answer):
            if tensor.requires_grad:
                tensor.register_hook(self._going_back_of(draw))  # type: ignore[no-untyped-call]
                # As it is now: the loop may write into the tensor.
                draw.outputs.append(get_gradient_edge(tensor))
        return answer

    def _recorded(
        self,
        draw: Draw,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        assert draw.opened is not None
        if self._at_once is not None and draw.rows > self._at_once:
            if draw.parts is None:
                draw.parts = Parts(self.module, draw.opened.units, draw.rows, self._at_once)
            return draw.parts.forward(call, args, kwargs)
        with draw.opened.recording():
            return call(*args, **kwargs)

    @contextmanager
    def _parameters_stay(self, which: str) -> Iterator[None]:
        """Refuse a pass that writes into parameters, as layers that set themselves by data do.

        They are put back: what was written holds the data, without noise. A copy is compared, since
        what is written through `.data` moves no version; as often as `look_again` looks.
        """
        before: dict[str, Tensor] = {}

        def keep() -> None:
            before.update((n, p.detach().clone()) for n, p in self.module.named_parameters())

        self.look_again(f"parameters, {which}", keep)
        yield
        now = dict(self.module.named_parameters()) if before else {}
        written = [n for n, p in now.items() if n in before and not _same(p, before[n])]
        if written:
            with torch.no_grad():
                for name in written:
                    now[name].data.copy_(before[name])
            self._looked_at.clear()
            raise Refused(
                "network",
                f"The network wrote into its parameter {written[0]!r} in a forward pass: nothing"
                " but released gradients may change it. What it wrote was taken back; set such"
                " layers by public data before make_private, or use ones that keep nothing.",
            )

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A pass that is not recorded: it may leave nothing behind in the network either."""
        for name, part in self.module.named_modules():
            if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
                raise Refused(
                    "network",
                    f"Module {name!r} ({type(part).__name__}) would take statistics from these"
                    " rows, without noise: call model.eval() before looking at anything.",
                )
        before = {name: (b, b._version) for name, b in self.module.named_buffers()}
        with self._parameters_stay("looked at"):
            yield
        for name, now in self.module.named_buffers():
            known, version = before.get(name, (now, now._version))
            if now.shape == known.shape and (now is not known or now._version != version):
                raise Refused(
                    "network",
                    f"The network remembers what it sees (its {name} changed in a pass without"
                    " gradients): nothing but released gradients may change it.",
                )

    def look_again(self, what: str, check: Callable[[], None]) -> None:
        """Make a check after 0, 1, 4, 16, 64 ... steps: it costs as much as two of them."""
        now = f"{what} {(self.taken.bit_length() + 1) // 2}"
        if now not in self._looked_at:
            check()
            self._looked_at.add(now)

    def _opened(self, draw: Draw) -> OpenPass:
        device = next(self.module.parameters()).device
        units = Units(draw.units, draw.unit_of.to(device) if self._by_group else None)
        try:
            return OpenPass(self.module, draw.rows, clip=self.clip, units=units)
        except UserError as error:
            raise Refused("network", str(error)) from None

    def _nobody(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """No rows, with the shapes that a blank row shows: not every network takes none."""

        def blank(t: Tensor) -> Tensor:
            return t.new_zeros(1, *t.shape[1:]) if t.dim() and not len(t) else t

        with torch.no_grad():
            answer = call(*mapped(args, blank), **mapped(dict(kwargs), blank))
        return mapped(answer, lambda t: t[:0])

    @staticmethod
    def _going_back_of(draw: Draw) -> Callable[..., None]:
        def check(*_: Tensor) -> None:
            if not draw.going_back:
                raise Refused(
                    "foreign-loss",
                    "A gradient was asked for of a loss that is not the private criterion's:"
                    " make it with the criterion that make_private returned, and call its"
                    " backward().",
                )

        return check

    # The criterion's side.

    def backward(self, losses: Tensor) -> None:
        """From one loss per row to released gradients in `p.grad`."""
        draw = self._current
        if draw is None or not draw.called:
            raise Refused(
                "no-draw",
                "backward() was called for a loss of no draw: call the network that make_private"
                " returned, in training mode, on a batch of the private loader.",
            )
        if draw.released is not None or (draw.rows and draw.opened is None):
            raise Refused(
                "second-backward",
                "backward() was called a second time for one draw, which pays for one release:"
                " add several losses up before their backward pass.",
            )
        if losses.shape != (draw.rows,):
            raise Refused(
                "reduced-loss",
                f"The criterion gave losses of shape {tuple(losses.shape)} for {draw.rows} samples:"
                " it must give one number per sample and average nothing over them.",
            )
        self._check_zeroed()
        if draw.rows and not losses.requires_grad:
            raise Refused(
                "no-draw",
                "backward() was called for a loss that no parameter leads to: was the network in"
                " evaluation mode, called without gradients, or its output detached?",
            )
        parameters = self._parameters()
        sums = {name: torch.zeros_like(p).detach() for name, p in parameters.items()}
        if draw.rows:
            assert draw.opened is not None and draw.before is not None
            draw.going_back = True
            try:
                apart = partial(
                    draw.opened.check_apart, losses, draw.outputs, seed=self.account.next_step
                )
                apart(inside=False)
                if draw.parts is not None:
                    sums = self._sum_of_parts(draw, losses)
                else:
                    if draw.units > 1:
                        self.look_again("inside", partial(apart, inside=True))
                    sums = draw.opened.finish(losses).gradients
                check_remembers_nothing(self.module, draw.before)
                self._check_nothing_beside()
            except MixedRows as error:
                raise Refused("other-rows", str(error)) from None
            except UserError as error:
                raise Refused("network", str(error)) from None
            finally:
                draw.going_back = False
                draw.opened, draw.outputs, draw.parts = None, [], None
        released = draw.charged.release_tensors("gradient", sums, sensitivity=self.clip)
        draw.released = {
            name: value.div_(self._divisor).to(parameters[name].dtype)
            for name, value in released.tensors.items()
        }
        for name, parameter in parameters.items():
            parameter.grad = draw.released[name].clone()

    def _sum_of_parts(self, draw: Draw, losses: Tensor) -> dict[str, Tensor]:
        """The clipped sum of a draw that went through the network in parts."""
        assert draw.parts is not None
        found: list[ClippedSum] = []
        for opened, own, outputs in draw.parts.again(
            losses, draw.outputs, self.clip, self._going_back_of(draw)
        ):
            if not found and opened.units.count > 1:
                seed = self.account.next_step
                self.look_again(
                    "inside",
                    partial(opened.check_apart, own, outputs, inside=True, seed=seed),
                )
            found.append(opened.finish(own))
        return joined(found).gradients

    def _check_nothing_beside(self) -> None:
        """Refuse a pass that wrote into `p.grad` by itself, and forget what it wrote."""
        beside = [
            n for n, p in self.module.named_parameters() if p.grad is not None and p.grad.any()
        ]
        if beside:
            self.module.zero_grad()
            raise UserError(
                f"The gradient of {beside[0]!r} was computed past the recorded pass (a checkpoint,"
                " or a function with a backward pass of its own): train without it."
            )

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _check_zeroed(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise Refused(
                    "not-zeroed",
                    f"Parameter {name!r} already holds a gradient before this batch's backward"
                    " pass: call optimizer.zero_grad() for every batch.",
                )

    # The optimizer's side.

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer take the released gradient."""
        draw = self._current
        if (draw is None or draw.stepped) and self.spent:
            raise Refused(
                "budget", "The privacy budget is spent: no further step is taken, the loader ended."
            )
        if draw is None or draw.stepped:
            raise Refused(
                "no-draw",
                "optimizer.step() was called without a draw of its own: iterate over the loader"
                " that make_private returned, one step for each batch.",
            )
        if draw.released is None:
            raise Refused(
                "no-backward",
                "optimizer.step() was called before this batch's backward pass: make the loss with"
                " the criterion that make_private returned, and call its backward().",
            )
        check_parameters(self.module, optimizer)
        self._check_unchanged(draw.released)
        draw.stepped = True
        self._stepping = True
        try:
            optimizer.step()
        finally:
            self._stepping = False
        self.taken += 1

    def _check_unchanged(self, all_released: Mapping[str, Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            released = all_released.get(name)
            grad = parameter.grad
            if (grad is None) != (released is None) or (
                grad is not None and released is not None and not torch.equal(grad, released)
            ):
                raise Refused(
                    "changed-gradients",
                    f"The gradient of {name!r} was changed between backward() and"
                    " optimizer.step(): clipping is done by max_grad_norm, anything else cannot be"
                    " told from a gradient that was not released.",
                )

    def guard(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before any step of the optimizer that was handed in, and after all other hooks of it."""
        if not self._stepping:
            raise Refused(
                "unwrapped-optimizer",
                "The optimizer that was handed in was stepped: step the one that make_private"
                " returned.",
            )
        assert self._current is not None and self._current.released is not None
        if len(optimizer._optimizer_step_pre_hooks) > 1 or _global_optimizer_pre_hooks:
            self._check_unchanged(self._current.released)


def _same(now: Tensor, before: Tensor) -> bool:
    alike = now.shape == before.shape
    return alike and torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)


def check_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would train what is not clipped and noised."""
    own = {id(p) for p in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(p) not in own for p in group["params"]):
            raise Refused(
                "foreign-parameters",
                f"Parameter group {number} of the optimizer holds parameters that are not the"
                " module's: give one module that holds all that is trained.",
            )
