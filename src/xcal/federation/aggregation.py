"""What the server makes of a round's answers: the average, a robust one, or a private one.

A rule sees the weights that were sent out and the answers, and returns the next global weights and
its own state: plain values that depend on releases and public constants only, checkpointed with the
round, so that a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from xcal.config import Experiment
from xcal.dp.clipping.precision import double
from xcal.errors import UserError
from xcal.federation.exchange import RoundReply, Weights


class ServerRule(Protocol):
    """How answers become the next global weights."""

    def load_state(self, saved: dict[str, Any] | None) -> Any:
        """A state from its checkpointed form (`save_state`); the initial one from None."""
        ...

    def combine(
        self, round_number: int, weights: Weights, answers: Sequence[RoundReply], state: Any
    ) -> tuple[Weights, Any]:
        """The next weights and state. Every answer holds weights; there may be none."""
        ...

    def report(self, state: Any) -> dict[str, Any] | None:
        """What the round's record tells of the rule; None where there is nothing to tell."""
        ...


def server_round(
    round_number: int, weights: Weights, replies: Sequence[RoundReply], rule: ServerRule, state: Any
) -> tuple[Weights, Any]:
    """The next global weights and the rule's next state.

    Clients that trained nothing are left out; the answers keep the clients' order.
    """
    answers = [r for r in replies if r.weights is not None]
    return rule.combine(round_number, weights, answers, state)


@dataclass(frozen=True)
class _Stateless(ABC):
    """A rule that remembers nothing: where nobody trained, the weights stay."""

    def load_state(self, saved: dict[str, Any] | None) -> None:
        return None

    def report(self, state: None) -> None:
        return None

    def combine(
        self, round_number: int, weights: Weights, answers: Sequence[RoundReply], state: None
    ) -> tuple[Weights, None]:
        if not answers:
            return {name: value.clone() for name, value in weights.items()}, None
        return {name: self.one(name, value, answers) for name, value in weights.items()}, None

    @abstractmethod
    def one(self, name: str, old: Tensor, answers: Sequence[RoundReply]) -> Tensor:
        """The next value of one parameter, from at least one answer."""


@dataclass(frozen=True)
class Mean(_Stateless):
    """The average weighted by declared units, summed in the clients' order.

    One client that sends what it likes moves it wherever it likes.
    """

    def one(self, name: str, old: Tensor, answers: Sequence[RoundReply]) -> Tensor:
        total = sum(r.report.units for r in answers)
        accumulated = double(torch.zeros_like(old))
        for reply in answers:
            assert reply.weights is not None
            accumulated += double(reply.weights[name].to(old.device)) * (reply.report.units / total)
        return accumulated.to(old)


@dataclass(frozen=True)
class TrimmedMean(_Stateless):
    """By coordinate: drop the k lowest and the k highest answers, average the rest.

    k = ⌈trim · n⌉ of n answers, at most (n − 1)/2 rounded down, where this is the median.
    Guarantee: while at most k answers are poisoned, every coordinate lies between the lowest and
    the highest honest one. Answers count alike: a poisoner would declare as many units as it likes.
    A value that is not a number counts as the highest.
    """

    trim: float

    def dropped(self, answers: int) -> int:
        """k, at each end."""
        return min(math.ceil(self.trim * answers - 1e-9), (answers - 1) // 2)

    def one(self, name: str, old: Tensor, answers: Sequence[RoundReply]) -> Tensor:
        stacked = torch.stack(
            [double(r.weights[name].to(old.device)) for r in answers if r.weights]
        )
        k = self.dropped(len(stacked))
        ordered = torch.sort(stacked, dim=0).values  # NaN last
        return ordered[k : len(stacked) - k].mean(dim=0).to(old)


@dataclass(frozen=True)
class Median(TrimmedMean):
    """By coordinate: the middle answer, or the mean of the middle two.

    Guarantee: as for the trimmed mean, with k = (n − 1)/2 rounded down: any minority.
    """

    trim: float = 0.5


def plain_rule(experiment: Experiment, participants: int) -> ServerRule:
    """The rule that the experiment names, for rounds of `participants` clients."""
    if experiment.aggregation == "mean":
        return Mean()
    if participants < 3:
        raise UserError(
            f"aggregation = {experiment.aggregation!r} withstands nobody among {participants}"
            " clients a round: take at least 3, or aggregation = 'mean'."
        )
    return Median() if experiment.aggregation == "median" else TrimmedMean(experiment.trim)


def averaged(reported: Weights, weights: Weights, share: float) -> Weights:
    """The running average of released models that is reported; clients go on from `weights`."""
    return {name: (1 - share) * reported[name] + share * weights[name] for name in weights}
