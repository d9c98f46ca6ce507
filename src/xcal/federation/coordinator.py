"""The server's loop over rounds, without an engine: ask, combine, measure, write down, go on.

Engines differ in how a question reaches a client; everything else is here, once: quorum, timeout,
refusals, the checkpoint of every round, resuming under the same name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from xcal.dp.clipping.named import trainable
from xcal.dp.distributed import BYTES
from xcal.dp.ledger.analysis import spent_text
from xcal.dp.ledger.rows import Head
from xcal.errors import UserError
from xcal.federation.aggregation import ServerRule, averaged, server_round
from xcal.federation.evaluation import PublicImages
from xcal.federation.exchange import (
    Question,
    RoundReply,
    RoundRequest,
    Weights,
    check_weights,
    load_weights,
)
from xcal.federation.folder import RunFolder
from xcal.federation.known_heads import KnownHeads
from xcal.federation.messages import (
    EDITIONS,
    MAX_HEADER,
    VERSION,
    Disclosure,
    Introduction,
    Refusal,
    Reply,
    Request,
    decode_answer,
    edition_of,
    encode_request,
    frozen_digest,
    public_keys,
)
from xcal.federation.outcome import measure_round, public_subset, write_preamble
from xcal.federation.request_refusals import TERMS, Refused
from xcal.federation.setup import Federation
from xcal.methods.base import save_state
from xcal.models.model_registry import build_network


class Progress(Protocol):
    """Who wants to see how a run comes along."""

    def start(self, total_steps: int, done_steps: int) -> None: ...

    def step(self, count: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def measure(self, what: str, done: int, total: int) -> None:
        """After the last round: so many images of `what` are measured."""
        ...


class NullCallback:
    """Nobody does."""

    def start(self, total_steps: int, done_steps: int) -> None: ...

    def step(self, count: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def measure(self, what: str, done: int, total: int) -> None: ...


Answer = RoundReply | Refusal | None  # None: no answer in time


class Transport(Protocol):
    """How questions reach clients."""

    def ask(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> Mapping[str, Answer]:
        """The answers by client, as far as they came within `timeout` seconds."""
        ...

    def late(self) -> list[str]:
        """Clients whose answers to earlier rounds came too late, since this was last asked."""
        ...


class Carrier(Protocol):
    """All that an engine must do: carry bytes to clients and theirs back, in time."""

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> Mapping[str, bytes]:
        """The answers that came within `timeout` seconds, by client."""
        ...

    def late(self) -> list[str]:
        """Clients whose answers to earlier rounds came too late, since this was last asked."""
        ...


Told = TypeVar("Told", Reply, Introduction, Disclosure)


def read_answer(
    kind: type[Told], client: str, run: str, data: bytes, limit: int = 2 * MAX_HEADER
) -> Told | Refusal:
    """An answer as it came, or the refusal it amounts to: a client may send anything."""
    try:
        got = decode_answer(data, limit)
    except Refused as error:
        return Refusal(client, error.code)
    if isinstance(got, Refusal):
        return Refusal(client, got.code, got.version)
    if isinstance(got, kind) and (got.client, got.run) == (client, run):
        return got
    return Refusal(client, "malformed")


class Remote:
    """A transport over a carrier: messages are encoded here, and answers checked before use."""

    def __init__(
        self,
        carrier: Carrier,
        model: nn.Module,
        progress: Progress | None = None,
        heads: KnownHeads | None = None,
    ) -> None:
        self._carrier, self._heads = carrier, heads
        self._model = model
        self._frozen = frozen_digest(model)
        size = sum(p.numel() * max(p.element_size(), BYTES) for p in trainable(model).values())
        self._largest = size + 2 * MAX_HEADER  # no honest answer is longer
        self._progress = progress or NullCallback()
        self._spoken: dict[str, str] = {}  # the edition of clients that are of another

    def ask(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Answer]:
        answers = self._exchange(round_number, questions, timeout)
        # Who says no because of its version is asked again in that version, if it is spoken here.
        again = []
        for question in questions:
            said = answers[question.client]
            if isinstance(said, Refusal) and said.code == "other-version":
                theirs = edition_of(said.version)
                if theirs in EDITIONS and theirs != self._spoken.get(
                    question.client, edition_of(VERSION)
                ):
                    self._spoken[question.client] = theirs
                    again.append(question)
        return {**answers, **self._exchange(round_number, again, timeout)} if again else answers

    def _exchange(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Answer]:
        messages = {
            q.client: encode_request(self._request(q), self._spoken.get(q.client))
            for q in questions
        }
        came = self._carrier.exchange(round_number, messages, timeout)
        found = {
            q.client: self._read(q, came[q.client]) if q.client in came else None for q in questions
        }
        if self._heads is not None:
            told = {c: a.report.head for c, a in found.items() if isinstance(a, RoundReply)}
            self._heads.learn({c: head for c, head in told.items() if head is not None})
        return found

    def late(self) -> list[str]:
        return self._carrier.late()

    def _request(self, question: Question) -> Request:
        asked = question.request
        return Request(
            client=question.client,
            run=asked.run,
            round=asked.round,
            own_rounds=asked.own_rounds,
            experiment=public_keys(asked.experiment),
            initial_seed=asked.experiment.seed,
            frozen=self._frozen,
            head=(
                question.head
                if self._heads is None
                else self._heads.newest(question.client, question.head)
            ),
            weights=question.weights,
            validation_losses=asked.validation_losses,
            sum=asked.sum,
        )

    def introductions(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Introduction | Refusal | None]:
        """The clients' keys for masked sums, and how many units they have."""
        asked = {q.client: replace(self._request(q), keys=True, weights={}) for q in questions}
        messages = {client: encode_request(request) for client, request in asked.items()}
        came = self._carrier.exchange(round_number, messages, timeout)
        return {
            c: read_answer(Introduction, c, r.run, came[c]) if c in came else None
            for c, r in asked.items()
        }

    def _read(self, question: Question, data: bytes) -> Answer:
        asked = question.request
        got = read_answer(Reply, question.client, asked.run, data, self._largest)
        if isinstance(got, Refusal):
            return got
        if got.round != asked.round:
            return Refusal(question.client, "malformed")
        if got.answer.weights is not None:
            try:
                check_weights(self._model, got.answer.weights)
            except Refused as error:
                return Refusal(question.client, error.code)
        self._progress.step(len(got.answer.trace))
        return got.answer


@dataclass
class State:
    """The server between two rounds: all of it is in the checkpoint."""

    weights: Weights
    reported: Weights
    rounds: int = 0  # complete ones
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # on public validation images, one a round
    server: Any = None  # the rule's


class Diverged(UserError):
    """Training left the range of finite numbers."""


class TooFewAnswers(UserError):
    """A round got fewer answers than its quorum; `refused`: whether somebody said no."""

    def __init__(self, text: str, refused: bool) -> None:
        super().__init__(text)
        self.refused = refused


def load_state(folder: RunFolder, first: Weights, rule: ServerRule, device: str) -> State:
    """Where the run stands: after its last complete round, or at the beginning."""
    found = folder.load_checkpoint()
    if found is None:
        return State(first, first, server=rule.load_state(None))
    tensors, about = found
    kinds = [
        {k.removeprefix(kind): v.to(device) for k, v in tensors.items() if k.startswith(kind)}
        for kind in ("global/", "reported/")
    ]
    return State(
        weights=kinds[0],
        reported=kinds[1],
        rounds=about["rounds"],
        reports=about["reports"],
        heads={c: Head(**h) for c, h in about["heads"].items()},
        losses=about.get("losses", []),
        server=rule.load_state(about.get("server")),
    )


def save_checkpoint(folder: RunFolder, state: State) -> None:
    folder.save_checkpoint(
        {f"global/{k}": v for k, v in state.weights.items()}
        | {f"reported/{k}": v for k, v in state.reported.items()},
        {
            "rounds": state.rounds,
            "reports": state.reports,
            "heads": {c: asdict(h) for c, h in state.heads.items()},
            "losses": state.losses,
            "server": save_state(state.server),
        },
    )


class Coordinator:
    """One run's rounds, from wherever its folder stands to the last."""

    def __init__(
        self,
        folder: RunFolder,
        federation: Federation,
        rule: ServerRule,
        progress: Progress | None = None,
    ) -> None:
        experiment = federation.experiment
        self.folder, self.federation, self.rule = folder, federation, rule
        self.progress = progress or NullCallback()
        self.model = build_network(experiment, len(federation.data.classes)).to(experiment.device)
        first: Weights = {k: p.detach().clone() for k, p in trainable(self.model).items()}
        self.state = load_state(folder, first, rule, experiment.device)
        for name in ("rounds.jsonl", "trace.jsonl"):
            folder.rewrite_lines(name, self.state.rounds)
        validation = federation.data.validation
        judged = public_subset(validation, experiment.validation_images)
        self._validation = (
            None
            if judged is None
            else PublicImages(judged, experiment.device, experiment.feature_cache_mb)
        )
        self._explained = (
            public_subset(validation, experiment.road_images) if federation.explains else None
        )

    def run(self, transport: Transport) -> nn.Module:
        """All rounds that are left; the reported model, whose state is checkpointed."""
        federation = self.federation

        def planned(rounds: Sequence[tuple[int, ...]]) -> int:
            return sum(federation.steps_of_round(c) for chosen in rounds for c in chosen)

        schedule, done = federation.schedule, self.state.rounds
        self.progress.start(planned(schedule), planned(schedule[:done]))
        for t in range(done, federation.experiment.rounds):
            self._round(t, transport)
        load_weights(self.model, self.state.reported)
        return self.model

    def _round(self, t: int, transport: Transport) -> None:
        began, state, experiment = time.monotonic(), self.state, self.federation.experiment
        run = self.folder.about["run"]
        questions = [
            Question(
                self.federation.names[c],
                RoundRequest(
                    run, t, self.federation.own_rounds(c), experiment, tuple(state.losses)
                ),
                state.weights,
                state.heads.get(self.federation.names[c]),
            )
            for c in self.federation.schedule[t]
        ]
        answers = transport.ask(t, questions, experiment.round_timeout)
        asked = [q.client for q in questions]
        replies = [a for a in map(answers.get, asked) if isinstance(a, RoundReply)]
        no = {c: a for c in asked if isinstance(a := answers.get(c), Refusal)}
        refused = {client: refusal.code for client, refusal in no.items()}
        missing = [c for c in asked if answers.get(c) is None]
        if no:
            told = [
                {"round": t, "client": client, "code": said.code, **_versions({client: said})}
                for client, said in no.items()
            ]
            self.folder.append_lines("refusals.jsonl", told)
        if "diverged" in refused.values():
            self._diverged(t)
        self._check_quorum(t, len(replies), len(asked), missing, no)
        state.weights, state.server = server_round(
            t, state.weights, replies, self.rule, state.server
        )
        if not all(bool(torch.isfinite(w).all()) for w in state.weights.values()):
            self._diverged(t)
        state.reported = averaged(
            state.reported, state.weights, 1.0 if t == 0 else experiment.average
        )
        load_weights(self.model, state.reported)
        for reply in replies:
            state.reports[reply.report.client] = asdict(reply.report)
            if reply.report.head is not None:
                state.heads[reply.report.client] = reply.report.head
        due = (t + 1) % experiment.road_every == 0 or t + 1 == experiment.rounds
        explained = self._explained if due else None
        record = {
            "round": t,
            **measure_round(self.model, self._validation, explained, experiment.device),
            "answered": sum(r.weights is not None for r in replies),
            "exhausted": [r.report.client for r in replies if r.report.halted],
            "missing": missing,
            "refused": refused,
            **_versions(no),
            "late": transport.late(),
            "clients": [asdict(r.report) for r in replies],
            "server": self.rule.report(state.server),
        }
        if record["validation_loss"] is not None:
            state.losses.append(record["validation_loss"])
        record["seconds"] = round(time.monotonic() - began, 3)
        self.folder.append_lines("rounds.jsonl", [record])
        self.folder.append_lines(
            "trace.jsonl",
            [{"client": r.report.client, **asdict(s)} for r in replies for s in r.trace],
        )
        state.rounds = t + 1
        if self.federation.parts is None:  # only now the clients' declared units are known
            write_preamble(self.folder, self.federation, state.reports)
        save_checkpoint(self.folder, state)
        self.progress.round(record)

    def _diverged(self, t: int) -> None:
        raise Diverged(
            f"Training diverged in round {t + 1}: lower lr (now {self.federation.experiment.lr:g})."
        )

    def _check_quorum(
        self,
        t: int,
        answered: int,
        asked: int,
        missing: list[str],
        refused: Mapping[str, Refusal],
    ) -> None:
        experiment = self.federation.experiment
        # A sum is made of all who take part in it; who may be missing, its sites decide.
        least = experiment.honest_sites if experiment.trust == "masked" else asked
        needed = min(experiment.quorum or least, asked)
        if answered >= needed:
            return
        why = [f"no answer from {', '.join(missing)}"] if missing else []
        why += [f"{client} refused ({no.text()})" for client, no in refused.items()]
        terms = any(no.code in TERMS for no in refused.values())
        raise TooFewAnswers(
            f"Round {t + 1} got {answered} of the {needed} answers it needs: {'; '.join(why)}."
            + (
                " A run's terms do not change on the way: submit a new run that the sites allow."
                if terms
                else " Nothing is lost: set it right and resume the run."
            ),
            refused=bool(refused),
        )


def _versions(refused: Mapping[str, Refusal]) -> dict[str, dict[str, str]]:
    """The numbers of who is of another version, beside the server's."""
    others = {c: no.version for c, no in refused.items() if no.code == "other-version"}
    return {"versions": {"server": VERSION, **others}} if others else {}


def round_line(record: Mapping[str, Any], total: int | None = None) -> str:
    """One round in one line: public measurements and what the clients released."""
    parts = [f"round {record['round'] + 1}" + (f"/{total}" if total else "")]
    parts.append(f"{record['answered']} answered")
    if record.get("validation_macro_f1") is not None:
        parts.append(f"macro F1 {record['validation_macro_f1']:.3f}")
    if record.get("road_validation") is not None:
        parts.append(f"ROAD {record['road_validation']:+.3f}")
    for client in record.get("clients", []):
        epsilon, share = client.get("epsilon_spent"), client.get("share_spent")
        if epsilon is not None or share is not None:
            parts.append(f"{client['client']} spent {spent_text(epsilon, share)}")
    for kind in ("missing", "exhausted"):
        if record.get(kind):
            parts.append(f"{kind}: {', '.join(record[kind])}")
    versions = record.get("versions", {})
    for client, code in record.get("refused", {}).items():
        told = (
            f": server {versions['server']}, site {versions[client]}" if client in versions else ""
        )
        parts.append(f"{client} refused ({code}{told})")
    return ", ".join(parts)
