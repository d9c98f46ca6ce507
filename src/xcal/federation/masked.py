"""Rounds whose answers can be read only as a sum (`trust = "masked"`): one step a round.

The server asks all sites for their part of one sum, adds up what came, and makes the step that the
sum allows. Where somebody is missing the attempt is void, and the rest are asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from xcal.config import Experiment
from xcal.dp.distributed import DistributedGrid
from xcal.errors import UserError
from xcal.federation.exchange import (
    Question,
    RoundReply,
    SumRequest,
    Weights,
    load_weights,
    sum_terms,
)
from xcal.federation.files import read_json, write_json
from xcal.federation.masks import Announcement, Attempt, Masked, MaskKeys, Roster, masked_sum
from xcal.federation.messages import Introduction, Refusal
from xcal.methods.base import Method
from xcal.methods.registry import SUMMING, check_discrete, method_of, sums_once

if TYPE_CHECKING:
    from xcal.federation.coordinator import Answer, Remote, Transport

ATTEMPT, INTRODUCED = "attempt.json", "masks.json"


def check_masked(experiment: Experiment, method: Method) -> None:
    """Refuse, in one sentence, what masked sums or discrete noise of a site's own cannot carry."""
    check_discrete(experiment, method)
    if experiment.trust != "masked":
        if experiment.honest is not None:
            raise UserError(
                "honest says how many sites shared noise counts on, and trust = 'site' shares none:"
                " leave it out, or set trust = 'masked'."
            )
        return
    if not sums_once(method):
        raise UserError(
            f"trust = 'masked' adds up one sum a round, and {experiment.method} releases something"
            f" else: choose {SUMMING}, or trust = 'site'."
        )
    if experiment.noise_kind == "discrete":
        raise UserError("Noise that sites share is discrete as it is: leave noise_kind out.")
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
        ("quorum", (None, *range(honest, clients + 1))),
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


def under_masks(experiment: Experiment, roster: Roster) -> Experiment:
    """A request's experiment at a site: it says of itself on how many honest ones it counts."""
    known = {"trust": "masked", "honest": roster.honest, "clients": len(roster.keys)}
    made = experiment.model_copy(update=known)
    check_masked(made, method_of(made))
    return made


class MaskedRounds:
    """A transport that asks for parts of a sum and answers with the step that the sum makes.

    It reads no single part: what it hands on is the same for every client.
    """

    def __init__(
        self,
        inner: Transport,
        roster: Roster,
        experiment: Experiment,
        model: nn.Module,
        *,
        sigma: float,
        units: int,
        folder: Path,
        announced: Sequence[Announcement] = (),
    ) -> None:
        self._inner, self._roster, self._experiment = inner, roster, experiment
        self._model, self._sigma, self._units = model, sigma, units
        self._path = folder / ATTEMPT
        self._announced = tuple(announced)  # told to sites that cannot tell one another

    def late(self) -> list[str]:
        return self._inner.late()

    def ask(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Answer]:
        number, sites, clip = self._begun(round_number, [q.client for q in questions])
        answers: dict[str, Answer] = {q.client: None for q in questions}
        while len(sites) >= max(self._roster.honest, self._experiment.quorum or 0):
            attempt = self._attempt(questions[0], number, sites, clip)
            begun = {"round": round_number, "number": number, "sites": list(sites), "clip": clip}
            write_json(self._path, begun)
            asked_sum = SumRequest(attempt, self._sigma, self._units, clip, self._announced)
            asked = [
                replace(q, request=replace(q.request, sum=asked_sum))
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
                weights, following = self._step(questions[0].weights, attempt, clip, sent)
                write_json(self._path, {**begun, "following": following})
                return answers | {
                    client: replace(answer, weights=weights)
                    for client, answer in answers.items()
                    if client in sites and isinstance(answer, RoundReply)
                }
            number, sites = number + 1, tuple(sorted(sent))
        return answers  # nobody trained: too few are left for a sum

    def _begun(
        self, round_number: int, clients: Sequence[str]
    ) -> tuple[int, tuple[str, ...], float]:
        """Where this round stands (at its first attempt, or at the one that was cut off), and C."""
        clip = self._experiment.max_grad_norm
        if self._path.exists():
            known = read_json(self._path)
            clip = float(known.get("clip", clip))
            if known["round"] == round_number:
                return int(known["number"]), tuple(known["sites"]), clip
            clip = float(known.get("following", clip))  # a round that made no sum left C as it was
        return 0, tuple(sorted(clients)), clip

    def _attempt(
        self, question: Question, number: int, sites: tuple[str, ...], clip: float
    ) -> Attempt:
        asked = question.request
        terms = sum_terms(asked.experiment, question.weights, self._sigma, self._units, clip)
        return Attempt(asked.run, asked.round, number, sites, terms)

    def _step(
        self, weights: Weights, attempt: Attempt, clip: float, sent: Mapping[str, Masked]
    ) -> tuple[Weights, float]:
        """Plain SGD on the sum over the expected batches of those who gave a part; the next C."""
        experiment, method = self._experiment, method_of(self._experiment)
        assert sums_once(method)
        load_weights(self._model, weights)
        shared = method.shared_sum(experiment, self._model, self._sigma, clip)
        expected = len(attempt.sites) * experiment.expected_batch_size
        grid = DistributedGrid(
            shared.parts, len(attempt.sites), self._roster.check(attempt), self._units
        )
        found = grid.decode(masked_sum(self._roster, attempt, grid, sent))
        flat = torch.from_numpy(found.pop("gradient") / expected)
        pieces = torch.split(flat, [weights[name].numel() for name in sorted(weights)])
        moved = {  # in the order that sites sum in
            name: piece.view_as(weights[name])
            for name, piece in zip(sorted(weights), pieces, strict=True)
        }
        shared.bound.geometry.undo(moved)
        stepped = {
            name: torch.add(w, moved[name].to(w), alpha=-experiment.lr)
            for name, w in weights.items()
        }
        beside = {name: float(value[0]) / expected for name, value in found.items()}
        return stepped, method.following_clip(experiment, clip, beside)


def introduce(keys: Mapping[str, MaskKeys]) -> None:
    """Have simulated sites of one machine exchange their keys."""
    announced = {name: key.announce() for name, key in keys.items()}
    for key in keys.values():
        key.meet(announced)


def introduced(
    remote: Remote, questions: Sequence[Question], folder: Path, timeout: float | None
) -> dict[str, Introduction]:
    """The keys and units of sites elsewhere, asked for once in a run's life.

    All of it is public, and signed: the server can pass it on and not change it.
    """
    path = folder / INTRODUCED
    if path.exists():
        return {name: Introduction(**told) for name, told in read_json(path).items()}
    found = remote.introductions(0, questions, timeout)
    made = {name: told for name, told in found.items() if isinstance(told, Introduction)}
    if len(made) < len(questions):
        why = [
            f"{name} refused ({told.text()})" if isinstance(told, Refusal) else f"none from {name}"
            for name, told in found.items()
            if not isinstance(told, Introduction)
        ]
        raise UserError(
            f"trust = 'masked' needs a key of every site: {'; '.join(why)}. Nothing was charged:"
            " set it right and resume the run."
        )
    write_json(path, {name: asdict(told) for name, told in made.items()})
    return made


def roster_of(run: str, told: Mapping[str, Introduction], honest: int) -> Roster:
    """As the sites told it. Refuses where one of them has another: its masks would not cancel."""
    roster = Roster({name: bytes.fromhex(t.identity) for name, t in told.items()}, honest)
    others = [a.site for a in announcements(told) if not roster.knows(run, a)]
    if others:
        raise UserError(
            f"The roster.toml of {', '.join(others)} names other sites or keys than take part, or"
            f" another number than the {honest} honest ones of the run: nothing was charged; make"
            " them agree and start a new run."
        )
    return roster


def announcements(told: Mapping[str, Introduction]) -> list[Announcement]:
    return [
        Announcement(name, bytes.fromhex(t.key), bytes.fromhex(t.signature))
        for name, t in sorted(told.items())
    ]
