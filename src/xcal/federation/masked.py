"""Rounds whose answers can be read only as a sum (`trust = "masked"`): one step a round.

The server asks all sites for their part of one sum, adds up what came, and makes the step that the
sum allows. Where somebody is missing the attempt is void, and the rest are asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xcal.config import Experiment
from xcal.dp.distributed import DistributedGrid, Part
from xcal.errors import UserError
from xcal.federation.exchange import (
    Question,
    RoundReply,
    SumRequest,
    Weights,
    sum_terms,
)
from xcal.federation.files import read_json, write_json
from xcal.federation.masks import Attempt, Masked, MaskKeys, Roster, masked_sum
from xcal.methods.base import Method

if TYPE_CHECKING:
    from xcal.federation.coordinator import Answer, Transport

ATTEMPT = "attempt.json"


def check_masked(experiment: Experiment, method: Method) -> None:
    """Refuse, in one sentence, what masked sums cannot carry; nothing where trust is the site's."""
    if experiment.trust != "masked":
        if experiment.honest is not None:
            raise UserError(
                "honest says how many sites shared noise counts on, and trust = 'site' shares none:"
                " leave it out, or set trust = 'masked'."
            )
        return
    if not getattr(method, "sums_under_masks", False):
        raise UserError(
            f"trust = 'masked' adds up one sum a round, and {experiment.method} releases something"
            " else: choose fl-dp, or trust = 'site'."
        )
    clients, honest = experiment.clients, experiment.honest_sites
    if clients < 3 or not clients / 2 < honest < clients:
        raise UserError(
            f"trust = 'masked' needs at least 3 clients, of which more than half and not all are"
            f" assumed honest, not honest = {honest} of {clients}."
        )
    if experiment.sites is not None:
        raise UserError(
            "trust = 'masked' is for simulations: leave out sites, or trust = 'masked'."
        )
    for key, allowed in (
        ("participants", (None, clients)),
        ("quorum", (None, clients)),
        ("local_epochs", (1,)),
        ("average_steps", (0.0,)),
        ("optimizer", ("sgd",)),
        ("aggregation", ("mean",)),
    ):
        if getattr(experiment, key) not in allowed:
            raise UserError(
                f"trust = 'masked' makes one plain step a round of all clients' sum, which"
                f" {key} = {getattr(experiment, key)!r} is not: leave {key} out."
            )


def refuse_masked(experiment: Experiment) -> None:
    """Refuse masks where an engine carries messages: it does not carry theirs."""
    if experiment.trust == "masked":
        raise UserError(
            "trust = 'masked' is simulated by the local engine only: run it with `xcal run`, or set"
            " trust = 'site'."
        )


class MaskedRounds:
    """A transport that asks for parts of a sum and answers with the step that the sum makes.

    It reads no single part: what it hands on is the same for every client.
    """

    def __init__(
        self,
        inner: Transport,
        roster: Roster,
        experiment: Experiment,
        *,
        sigma: float,
        units: int,
        folder: Path,
    ) -> None:
        self._inner, self._roster, self._experiment = inner, roster, experiment
        self._sigma, self._units = sigma, units
        self._path = folder / ATTEMPT

    def late(self) -> list[str]:
        return self._inner.late()

    def ask(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Answer]:
        number, sites = self._begun(round_number, [q.client for q in questions])
        answers: dict[str, Answer] = {q.client: None for q in questions}
        while len(sites) >= self._roster.honest:
            attempt = self._attempt(questions[0], number, sites)
            write_json(self._path, {"round": round_number, "number": number, "sites": list(sites)})
            asked = [
                replace(
                    q,
                    request=replace(q.request, sum=SumRequest(attempt, self._sigma, self._units)),
                )
                for q in questions
                if q.client in sites
            ]
            answers |= self._inner.ask(round_number, asked, timeout)
            sent = {
                client: answer.masked
                for client, answer in answers.items()
                if client in sites and isinstance(answer, RoundReply) and answer.masked is not None
            }
            if set(sent) == set(sites):
                weights = self._step(questions[0].weights, attempt, sent)
                return answers | {
                    client: replace(answer, weights=weights)
                    for client, answer in answers.items()
                    if client in sites and isinstance(answer, RoundReply)
                }
            number, sites = number + 1, tuple(sorted(sent))
        return answers  # nobody trained: too few are left for a sum

    def _begun(self, round_number: int, clients: Sequence[str]) -> tuple[int, tuple[str, ...]]:
        """Where this round stands: at its first attempt, or at the one that was cut off."""
        if self._path.exists():
            known = read_json(self._path)
            if known["round"] == round_number:
                return int(known["number"]), tuple(known["sites"])
        return 0, tuple(sorted(clients))

    def _attempt(self, question: Question, number: int, sites: tuple[str, ...]) -> Attempt:
        asked = question.request
        terms = sum_terms(asked.experiment, question.weights, self._sigma, self._units)
        return Attempt(asked.run, asked.round, number, sites, terms)

    def _step(self, weights: Weights, attempt: Attempt, sent: Mapping[str, Masked]) -> Weights:
        """Plain SGD on the sum over the expected batches of those who gave a part."""
        experiment, sites = self._experiment, len(attempt.sites)
        size = sum(w.numel() for w in weights.values())
        grid = DistributedGrid(
            (Part("gradient", size, experiment.max_grad_norm, self._sigma),),
            sites,
            self._roster.check(attempt),
            self._units,
        )
        total = grid.decode(masked_sum(self._roster, attempt, grid, sent))["gradient"]
        flat = torch.from_numpy(total / (sites * experiment.expected_batch_size))
        pieces = torch.split(flat, [weights[name].numel() for name in sorted(weights)])
        moved = dict(zip(sorted(weights), pieces, strict=True))  # in the order that sites sum in
        return {
            name: torch.add(w, moved[name].view_as(w).to(w), alpha=-experiment.lr)
            for name, w in weights.items()
        }


def introduce(keys: Mapping[str, MaskKeys]) -> None:
    """Have simulated sites of one machine exchange their keys."""
    announced = {name: key.announce() for name, key in keys.items()}
    for key in keys.values():
        key.meet(announced)
