"""Network, criterion and optimizer of a private training loop, in the place of the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xcal.dp.apart import check_losses_apart
from xcal.dp.batch_invariance import Remembered
from xcal.dp.clipping.precision import single
from xcal.dp.refusals import Refused
from xcal.dp.steps import PrivateSteps


class PrivateModule(nn.Module):
    """A network whose passes in training mode are recorded; in evaluation mode it is the network.

    The network itself is `_module`, as with Opacus; its attributes are reached as if they were
    this one's.

    Args:
        module: the network that was handed in.
        steps: what the objects of one training share.

    Guarantee: in training mode it answers batches of the private loader only, one draw at a time,
    and nothing that it gives leads to `p.grad` but through the private criterion.
    """

    def __init__(self, module: nn.Module, steps: PrivateSteps) -> None:
        super().__init__()
        self._module = module
        self._steps = steps
        self.training = module.training
        steps.in_training = lambda: self.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's answer, recorded in training mode.

        Args:
            *args, **kwargs: what the network takes; in training mode the whole batch of the loader.

        Raises:
            Refused: for rows that were not drawn, or a second pass after the backward pass.
        """
        if self.training and torch.is_grad_enabled():
            return self._steps.forward(self._module, args, kwargs)
        with self._steps.looking(), _parameters_at_rest(self._module):
            return self._module(*args, **kwargs)


@contextmanager
def _parameters_at_rest(module: nn.Module) -> Iterator[None]:
    """A pass whose answers lead back to inputs and maps, for explanations, and to no parameter."""
    trained = [p for p in module.parameters() if p.requires_grad and torch.is_grad_enabled()]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class PrivateLoss:
    """One loss per sample, shown as their mean (or sum). `backward()` clips, noises and releases.

    May be multiplied by numbers and added to other losses of the same batch. What `item()` shows is
    computed from the data without noise: it is for the eyes of whoever may see the data.

    Args:
        steps: what the objects of one training share.
        per_sample: one loss per sample.
        reduction: "mean" or "sum", of what is shown.

    Guarantee: `backward` releases the clipped sum once for each draw, with the noise that was
    charged for; nothing else reaches `p.grad`.
    """

    def __init__(self, steps: PrivateSteps, per_sample: Tensor, reduction: str) -> None:
        self.per_sample = per_sample
        self._steps, self._reduction = steps, reduction

    def backward(self) -> None:
        """Fill `p.grad` with the noisy mean (or sum) of clipped gradients, once for each draw.

        Raises:
            Refused: a second time, without a draw, or where one row's loss depends on others.

        Guarantee: as the class says.
        """
        self._steps.backward(self.per_sample)

    def detach(self) -> Tensor:
        """The mean (or sum), without its graph."""
        losses = self.per_sample.detach()
        return losses.mean() if self._reduction == "mean" else losses.sum()

    def item(self) -> float:
        """The mean (or sum) as a number."""
        return float(self.detach())

    __float__ = item

    def _no_reduction(self, *_: object, **__: object) -> PrivateLoss:
        raise Refused(
            "reduced-loss",
            "The private criterion's loss was averaged by hand: it is the mean (or sum) already;"
            " call its backward(), or item() for its value.",
        )

    mean = sum = _no_reduction

    def _made(self, per_sample: Tensor) -> PrivateLoss:
        return PrivateLoss(self._steps, per_sample, self._reduction)

    def _other(self, other: object) -> Tensor | float:
        if isinstance(other, PrivateLoss):
            if other._reduction != self._reduction or len(other.per_sample) != len(self.per_sample):
                raise Refused("reduced-loss", "Two losses of other batches or reductions add up.")
            return other.per_sample
        return self._number(other)

    @staticmethod
    def _number(other: object) -> float:
        if isinstance(other, int | float):
            return other
        raise Refused(
            "reduced-loss",
            f"A private loss was combined with a {type(other).__name__}: multiply it by numbers and"
            " add it to losses of the same criterion; all else belongs into the criterion, which"
            " gives one number per sample.",
        )

    def __mul__(self, other: object) -> PrivateLoss:
        return self._made(self.per_sample * self._number(other))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> PrivateLoss:
        return self._made(self.per_sample / self._number(other))

    def __add__(self, other: object) -> PrivateLoss:
        return self._made(self.per_sample + self._other(other))

    __radd__ = __add__

    def __sub__(self, other: object) -> PrivateLoss:
        return self._made(self.per_sample - self._other(other))

    def __neg__(self) -> PrivateLoss:
        return self._made(-self.per_sample)

    def __repr__(self) -> str:
        return f"PrivateLoss({self.item():.4f}, reduction={self._reduction!r})"


class PrivateCriterion(nn.Module):
    """A loss function taken per sample: a torch loss, or any function that gives one per sample.

    A torch loss that gives several numbers per sample (several findings, pixels) is averaged over
    them, or summed where its reduction is "sum".

    Args:
        criterion: the loss that was handed in.
        reduction: "mean" or "sum".
        steps: what the objects of one training share.

    Guarantee: losses of which one depends on another sample's are refused, as far as every other
    row by itself shows it.
    """

    def __init__(
        self, criterion: Callable[..., Tensor], reduction: str, steps: PrivateSteps
    ) -> None:
        super().__init__()
        self.reduction, self._steps = reduction, steps
        self.torchs = hasattr(criterion, "reduction")
        if self.torchs:
            criterion = copy.copy(criterion)
            criterion.reduction = "none"  # type: ignore[attr-defined]
        self.criterion = criterion

    def forward(self, *args: Any, **kwargs: Any) -> PrivateLoss:
        """The losses of a batch.

        Args:
            *args, **kwargs: what the criterion takes: outputs, targets.

        Returns:
            One loss per sample, to call `backward()` of.

        Raises:
            Refused: for a criterion that averages over the batch, mixes samples or remembers them.
        """
        own = self.criterion if isinstance(self.criterion, nn.Module) else None
        before = Remembered(own) if own is not None else None
        losses = self._per_sample(*args, **kwargs)
        if own is not None and before is not None and before.first_change(own) is not None:
            raise Refused(
                "criterion",
                f"The criterion {type(own).__name__} remembers what it sees: a running value of its"
                " own lets one unit move what others contribute later. Use one that keeps nothing.",
            )
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise Refused(
                "reduced-loss",
                f"The criterion gave {found}, and not one number per sample: let it average over"
                " nothing (the private optimizer divides by the expected batch size).",
            )
        if len(losses) > 1:
            check_losses_apart(self._per_sample, args, kwargs, losses)
        return PrivateLoss(self._steps, single(losses), self.reduction)

    def _per_sample(self, *args: Any, **kwargs: Any) -> Any:
        losses = self.criterion(*args, **kwargs)
        if isinstance(losses, Tensor) and self.torchs and losses.dim() > 1:
            flat = losses.flatten(1)
            return flat.mean(1) if self.reduction == "mean" else flat.sum(1)
        return losses


def check_criterion(criterion: Callable[..., Tensor], reduction: str) -> None:
    """Refuse a criterion that trains, or that was built for another reduction."""
    if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
        raise Refused(
            "criterion",
            f"The criterion {type(criterion).__name__} trains parameters of its own, which nothing"
            " would clip: make them part of the module.",
        )
    if not callable(criterion):
        raise Refused("criterion", f"The criterion is {criterion!r}: give a loss that is called.")
    if isinstance(criterion, PrivateCriterion):
        raise Refused("criterion", "The criterion is private already: give the plain one.")
    own = getattr(criterion, "reduction", reduction)
    if own not in (reduction, "none"):
        raise Refused(
            "criterion",
            f"The criterion's reduction is {own!r} and loss_reduction is {reduction!r}: give both"
            " the same.",
        )


class PrivateOptimizer(torch.optim.Optimizer):
    """The optimizer that was handed in, given released gradients only.

    Parameter groups, state and hooks are those of the optimizer inside (`original_optimizer`), so
    schedulers of torch work on it.

    Args:
        optimizer: the optimizer that was handed in.
        steps: what the objects of one training share.

    Guarantee: it steps once for each draw, with the gradient that was released for it, unchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: PrivateSteps) -> None:
        # Not torch's own __init__: groups and state belong to the optimizer inside.
        self.original_optimizer = optimizer
        self._steps = steps
        steps.optimizer = optimizer
        self._guard = optimizer.register_step_pre_hook(steps.guard)

    def __reduce_ex__(self, _: object) -> Any:
        raise Refused(
            "option",
            "A private optimizer cannot be copied or pickled: copy its state_dict(), or use the"
            " engine's save().",
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the released gradient of the current draw.

        Args:
            closure: called once beforehand, where the loop has its passes in one.

        Raises:
            Refused: without a draw and its backward pass, or with gradients changed by hand.

        Guarantee: as the class says.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        # Last of all hooks, so that none changes gradients after they were looked at.
        hooks: Any = self.original_optimizer._optimizer_step_pre_hooks
        if self._guard.id in hooks:
            hooks.move_to_end(self._guard.id)
        else:
            hooks[self._guard.id] = self._steps.guard
        self._steps.step(self.original_optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all trained parameters.

        Args:
            set_to_none: whether they become None, or zeros.
        """
        self._steps.module.zero_grad(set_to_none)
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer inside a state.

        Args:
            state_dict: as `state_dict()` gave it.
        """
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Have the optimizer inside train more of the module's parameters.

        Args:
            param_group: as torch takes it; parameters that are not the module's are refused at the
                next step.
        """
        self.original_optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"
