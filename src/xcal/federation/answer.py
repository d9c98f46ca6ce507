"""A client's one entry: what it answers is decided here, whatever engine asks.

`respond` takes a question and gives an answer or refuses; the local engine calls it with clients of
its own process. `answer` is the same for engines that carry bytes: it decodes, encodes, and lets
nothing out but a reply made of releases or a fixed code.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import torch

from xcal.config import Experiment
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import charges_of, read_rows
from xcal.errors import UserError
from xcal.federation.admission import admit_run
from xcal.federation.disclosure import answer_statistics
from xcal.federation.exchange import (
    ClientReport,
    Question,
    RoundReply,
    RoundRequest,
    check_weights,
)
from xcal.federation.loaded_site import Held, keep_freed_memory, torch_threads
from xcal.federation.logbook import note
from xcal.federation.masked import under_masks
from xcal.federation.messages import (
    Introduction,
    Refusal,
    Reply,
    Request,
    StatisticsRequest,
    decode_request,
    encode_disclosure,
    encode_introduction,
    encode_refusal,
    encode_reply,
    fields_of,
    frozen_digest,
)
from xcal.federation.policy import admit_experiment, filtered
from xcal.federation.preflight import check_network
from xcal.federation.request_refusals import Refused, naming, paid_so_far
from xcal.federation.rounds import OnStep, client_round, run_terms
from xcal.federation.site_directory import Owner, SiteDirectory, logged
from xcal.federation.site_identity import mask_keys, read_roster
from xcal.methods.base import CentralMethod
from xcal.methods.registry import checked_plan, method_of
from xcal.plugins import OwnCodeError, blamed


class Client(Protocol):
    """Whom a question is put to: who decides for it, and what it has."""

    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> Owner: ...

    @property
    def threads(self) -> int:
        """To compute with; 0: as many as the process has."""
        ...

    def hold(self, experiment: Experiment) -> Held:
        """Its data at what is asked for. Raises `UserError` where they cannot be had."""
        ...


def answer(site_dir: Path, message: bytes, on_step: OnStep | None = None) -> bytes:
    """A client's answer to a server's request, encoded. Never raises; never tells a secret.

    Guarantee: nothing is released that the site's ledger has not recorded as paid; a refusal
    releases and charges nothing beyond steps already made; no text of an error leaves.
    """
    opened: SiteDirectory | None = None
    client, about = site_dir.name[:100], dict[str, str | int]()
    try:
        with logged(site_dir, about):
            with naming("site"):
                opened = SiteDirectory.open(site_dir)
            client = opened.name
            with naming("malformed"):
                asked = decode_request(message, opened.policy.max_message)
            about |= {"run": asked.run}
            if isinstance(asked, StatisticsRequest) or asked.final:
                return _disclosed(opened, asked)
            about |= {"round": asked.round}
            with naming("experiment-invalid"):
                experiment = opened.experiment(asked.experiment, asked.initial_seed)
            if asked.keys or asked.sum is not None:
                with naming("site"):
                    roster = read_roster(site_dir)
                with naming("experiment-invalid"):
                    experiment = under_masks(experiment, roster)
            if asked.keys:
                return _introduced(opened, asked, experiment)
        request = RoundRequest(
            asked.run, asked.round, asked.own_rounds, experiment, asked.validation_losses, asked.sum
        )
        question = Question(asked.client, request, asked.weights, asked.head, asked.frozen)
        reply = Reply(client, asked.run, asked.round, respond(opened, question, on_step))
        with logged(site_dir, about):
            data = encode_reply(reply)
        _sent(opened, "reply", data)
        note(site_dir, "answered", halted=reply.answer.report.halted, **about)
        if opened.about.evaluate == "each":
            from xcal.federation.local_evaluation import after_round  # which builds on this one

            after_round(opened, experiment, asked)
        return data
    except Refused as refusal:
        code = refusal.code
    except Exception:
        code = "internal"
    data = encode_refusal(Refusal(client, code))
    return data if opened is None else _sent(opened, "refusal", data)


def _sent(site: SiteDirectory, kind: str, data: bytes) -> bytes:
    """An answer, as it leaves."""
    site.log_message("sent", kind, fields_of(data))
    return data


def _introduced(site: SiteDirectory, asked: Request, experiment: Experiment) -> bytes:
    """The keys of a site that would take part in a run's masked sums; nothing is reserved.

    After the last round it forgets the run's secret: nobody can take its masks off any more.
    """
    if asked.client != site.name:
        raise Refused("wrong-client", f"The request is for {asked.client!r}.")
    admit_experiment(site.policy, experiment)
    with naming("data"):
        held = site.hold(experiment).site
    with naming("site"):
        keys = mask_keys(site.path, held.folder(asked.run), asked.run, site.name)
        told = keys.announce()
        if asked.round >= experiment.rounds:
            keys.forget()
    made = Introduction(
        site.name,
        asked.run,
        held.data.units,
        keys.roster.keys[site.name].hex(),
        told.key.hex(),
        told.signature.hex(),
    )
    return _sent(site, "introduction", encode_introduction(made))


def _disclosed(site: SiteDirectory, asked: Request | StatisticsRequest) -> bytes:
    """An answer that trains nothing for the server: counts by class, or to a final model."""
    from xcal.federation.local_evaluation import answer_final  # which builds on this one

    if isinstance(asked, StatisticsRequest):
        made = answer_statistics(site, asked)
    else:
        made = answer_final(site, asked)
    data = _sent(site, "disclosure", encode_disclosure(made))
    exact = {} if made.floor is None else {"exact_counts_from": made.floor}
    note(site.path, "disclosed", run=made.run, tables=sorted(made.tables), **exact)
    return data


def respond(client: Client, question: Question, on_step: OnStep | None = None) -> RoundReply:
    """A client's answer. Raises `Refused`; what is refused or fails is in the site's log.

    Policy, data, plan, network, weights and ledger are checked before any charge.
    """
    about = {"run": question.request.run, "round": question.request.round}
    with logged(client.owner.site_dir, about), torch_threads(client.threads):
        try:
            return _respond(client, question, on_step)
        except Exception as error:
            told = str(error) if isinstance(error.__cause__, OwnCodeError) else None
            if told is None and not isinstance(error, UserError):
                told = blamed(error)
            if told is None:
                raise
            paid = paid_so_far(f"client {client.name}", _charges(client, question.request.run))
            code = error.code if isinstance(error, Refused) else "internal"
            raise Refused(code, f"{told} {paid}") from error


def _charges(client: Client, run: str) -> int:
    """How many steps the run has paid for until now."""
    path = client.owner.ledger_path
    return len(charges_of(read_rows(path), run)) if path.exists() else 0


def _respond(client: Client, question: Question, on_step: OnStep | None) -> RoundReply:
    owner, asked, experiment = client.owner, question.request, question.request.experiment
    if question.client != client.name:
        raise Refused("wrong-client", f"The request is for {question.client!r}.")
    with naming("experiment-invalid"):
        if owner.policy is not None:
            admit_experiment(owner.policy, experiment)
        method = method_of(experiment)
    if asked.round not in asked.own_rounds or asked.own_rounds[-1] >= experiment.rounds:
        raise Refused("round-not-own", f"Round {asked.round} is not one of this client's own.")
    keep_freed_memory()
    with naming("data"):
        site, classes, side = client.hold(experiment)
    units = site.data.units
    if experiment.expected_batch_size > units:
        raise Refused(
            "plan-refused", f"The batch {experiment.expected_batch_size} exceeds {units} units."
        )
    with naming("plan-refused"):
        plan = checked_plan(method, experiment, units, len(asked.own_rounds))
    with naming("network-not-allowed"):
        check_network(experiment, classes, side)  # in every round, but looked at once
        model = site.build_model()
    if question.frozen is not None and frozen_digest(model) != question.frozen:
        raise Refused("frozen-mismatch", "The parts that do not train differ: check weights.")
    check_weights(model, question.weights)
    run = run_terms(asked.run, site.data.unit, site.noise.name, method, plan, experiment)

    def admit(ledger: Ledger) -> None:
        admit_run(owner, ledger, run, plan, units, experiment, site.partition)

    ready = replace(
        site,
        build_model=lambda: model,
        expected_head=question.head,
        sigma_floor=0.0 if owner.policy is None else owner.policy.sigma_min,
        admit=admit,
    )
    with naming("ledger"):
        reply = client_round(asked, question.weights, ready, on_step)
    weights = reply.weights
    if weights is not None and not all(bool(torch.isfinite(w).all()) for w in weights.values()):
        # Where a server's noise hides whole clients, a run that one of them could stop would not.
        if not isinstance(method, CentralMethod):
            raise Refused("diverged", "Training left the range of finite numbers: lower lr.")
        weights = dict(question.weights)  # an update of 0, as a server makes of one without numbers
    if owner.policy is None:
        return replace(reply, weights=weights)
    report = ClientReport(**filtered(owner.policy, asdict(reply.report)))
    trace = reply.trace if "trace" in owner.policy.report else ()
    return replace(reply, report=report, weights=weights, trace=trace)
