"""What a server and a client say to each other in one round, whatever carries it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger.rows import Head
from xcal.experiments import travels
from xcal.federation.masks import Announcement, Attempt, Masked
from xcal.federation.request_refusals import Refused
from xcal.methods.context import StepRecord, digest_tensors

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class SumRequest:
    """One attempt at a sum that only shows as a whole (`trust = "masked"`)."""

    attempt: Attempt
    sigma: float  # the multiplier of the honest sites' noise together: the largest of any plan
    units: int  # at most, at one site
    clip: float  # C of this round: the configured one, or one that follows earlier sums
    announced: tuple[Announcement, ...] = ()  # of all sites, where they are elsewhere


@dataclass(frozen=True)
class RoundRequest:
    """What the server asks of one client."""

    run: str
    round: int  # from 0
    own_rounds: tuple[int, ...]  # the client's rounds by the published schedule
    experiment: Experiment
    validation_losses: tuple[float, ...] = ()  # of earlier rounds, on public images
    sum: SumRequest | None = None


@dataclass(frozen=True)
class Question:
    """What the server asks of one client, and what goes with it."""

    client: str
    request: RoundRequest
    weights: Weights
    head: Head | None = None  # the client's ledger as last seen: a shorter one is noticed
    frozen: str | None = None  # digest of what does not train; None: asked in this very process


@dataclass(frozen=True)
class ClientReport:
    """What a client tells about a round: functions of its releases and of public constants.

    None where there is no such thing, or where the client's policy does not allow it to be sent.
    """

    client: str
    units: int
    steps: int | None  # made so far in all rounds
    halted: bool
    order: float | None
    epsilon_spent: float | None
    epsilon_paper: float | None
    share_spent: float | None
    mean_sigma: float | None
    mean_signal: float | None
    ledger_rows: int | None
    ledger_hash: str | None
    noise: str | None = None  # what it comes from: secure, or seeded in a simulation
    add_remove: bool = False  # whether adding or removing one unit is covered like zeroing it

    @property
    def head(self) -> Head | None:
        """The client's ledger as it stood after the round."""
        if self.ledger_rows is None or self.ledger_hash is None:
            return None
        return Head(self.ledger_rows, self.ledger_hash)


@dataclass(frozen=True)
class RoundReply:
    """A client's answer. `weights = None`: exhausted, nothing was trained; or `masked`."""

    report: ClientReport
    weights: Weights | None
    trace: tuple[StepRecord, ...] = ()
    masked: Masked | None = None  # its part of a sum


def request_digest(request: RoundRequest, client: str, weights: Weights) -> str:
    """A request is known by run, round, client and weights, and by the sum it is for."""
    text = f"{request.run}\n{request.round}\n{client}\n{digest_tensors(sorted(weights.items()))}"
    if request.sum is not None:
        text += f"\n{request.sum.attempt.context}"
    return hashlib.sha256(text.encode()).hexdigest()


# Of what a request does not carry, what shapes an answer: seeds, units, loss ...
_OWN_SHAPE = frozenset(("seed", "paired", "group_cap", "loss", "precision", "trust", "honest"))
# ... and in which order floats are summed, so to the bit only.
_ORDER_OF_SUMS = frozenset(("device", "chunk", "pass_rows"))


def shape_of(experiment: Experiment, *, to_the_bit: bool = False) -> str:
    """All of an experiment that shapes a client's answer, whatever engine asks for it.

    Only what differs from the default stands in it, so that keys of later versions change nothing.
    """
    kept = _OWN_SHAPE | (_ORDER_OF_SUMS if to_the_bit else frozenset())
    kind = type(experiment)
    defaults = {k: f.get_default() for k, f in kind.model_fields.items()}
    found = experiment.resolved()
    if experiment.trust == "masked":  # however it was said
        found["honest"] = experiment.honest_sites
    return repr(
        sorted(
            (k, v) for k, v in found.items() if v != defaults[k] and (k in kept or travels(kind, k))
        )
    )


def sum_terms(
    experiment: Experiment, weights: Weights, sigma: float, units: int, clip: float
) -> str:
    """Digest of all that is public of a sum beside who takes part in it: the same at all sites."""
    sent = {k: v for k, v in experiment.resolved().items() if travels(type(experiment), k)}
    public = json.dumps(sent, sort_keys=True, default=list)
    known = repr((digest_tensors(sorted(weights.items())), sigma, units, clip, public))
    return hashlib.sha256(known.encode()).hexdigest()


def check_weights(model: nn.Module, weights: Weights) -> None:
    """Refuse weights whose names, shapes or types are not the model's, or that are not finite."""
    parameters = trainable(model)
    if set(parameters) != set(weights):
        raise Refused(
            "weights-mismatch",
            "The weights received do not belong to this network: names differ.",
        )
    for name, parameter in parameters.items():
        value = weights[name]
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise Refused(
                "weights-mismatch",
                f"The weights received for {name} have the wrong shape or type.",
            )
        if not bool(torch.isfinite(value).all()):
            raise Refused("weights-not-finite", f"The weights received for {name} are not finite.")


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Put received weights into the model, after checking names, shapes, types and values."""
    check_weights(model, weights)
    parameters = trainable(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
