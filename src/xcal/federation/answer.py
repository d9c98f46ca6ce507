"""A client's one entry point: bytes of a request in, bytes of an answer out.

Every engine calls `answer` and nothing else of a client. Whatever happens, what leaves is a reply
made of releases or a fixed code; the detail goes to the home's refusal log.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from xcal.config import Experiment
from xcal.errors import UserError
from xcal.federation.exchange import ClientReport, RoundReply, RoundRequest, check_weights
from xcal.federation.home import ClientHome, log_refusal
from xcal.federation.messages import (
    Refusal,
    Reply,
    Request,
    decode_request,
    encode_refusal,
    encode_reply,
    fields_of,
    frozen_digest,
)
from xcal.federation.policy import admit_experiment, admit_plan, filtered
from xcal.federation.refusals import Refused
from xcal.federation.rounds import OnStep, client_round
from xcal.federation.setup import check_network
from xcal.federation.site import keep_freed_memory, torch_threads
from xcal.methods.base import CentralMethod, clips_units
from xcal.methods.registry import checked_plan, method_of
from xcal.models.registry import build_network
from xcal.privacy.account import NoiseTooLow
from xcal.privacy.ledger_rows import LedgerBusy, LedgerRefusal, read_rows, runs_of, terms_of


def answer(home: Path, message: bytes, on_step: OnStep | None = None) -> bytes:
    """A client's answer to a server's request, encoded. Never raises; never tells a secret.

    Guarantee: nothing is released that the home's ledger has not recorded as paid; a refusal
    releases and charges nothing beyond steps already made; no text of an error leaves.
    """
    opened: ClientHome | None = None
    client, about = home.name[:100], dict[str, str | int]()
    try:
        with _naming("home"):
            opened = ClientHome.open(home)
        client = opened.about.client
        with _naming("malformed"):
            request = decode_request(message, opened.policy.max_message)
        about = {"run": request.run, "round": request.round}
        reply = Reply(client, request.run, request.round, respond(opened, request, on_step))
        data = encode_reply(reply)
        opened.log_message("sent", "reply", fields_of(data))
        return data
    except Refused as refusal:
        code, detail = refusal.code, str(refusal)
    except Exception:
        code, detail = "internal", traceback.format_exc()
    log_refusal(home, code, detail, **about)
    data = encode_refusal(Refusal(client, code))
    if opened is not None:
        opened.log_message("sent", "refusal", fields_of(data))
    return data


@contextmanager
def _naming(code: str) -> Iterator[None]:
    """Within: what a user could have caused becomes a refusal of this code."""
    try:
        yield
    except Refused:
        raise
    except LedgerBusy as error:
        raise Refused("busy", str(error)) from error
    except LedgerRefusal as error:
        raise Refused("ledger", str(error)) from error
    except NoiseTooLow as error:
        raise Refused("sigma-too-low", str(error)) from error
    except UserError as error:
        raise Refused(code, str(error)) from error


def respond(home: ClientHome, request: Request, on_step: OnStep | None = None) -> RoundReply:
    """The answer itself: policy, data, plan, network and weights are checked before any charge."""
    if request.client != home.about.client:
        raise Refused("wrong-client", f"The request is for {request.client!r}.")
    with _naming("experiment-invalid"):
        experiment = home.experiment(request.experiment, request.initial_seed)
        admit_experiment(home.policy, experiment)
        method = method_of(experiment)
    if request.round not in request.own_rounds or request.own_rounds[-1] >= experiment.rounds:
        raise Refused("round-not-own", f"Round {request.round} is not one of this client's own.")
    with _naming("ledger"):
        rows = read_rows(home.ledger_path)
        runs, terms = runs_of(rows), terms_of(rows)
    if terms.population != home.about.population:
        raise Refused(
            "ledger",
            f"The ledger is that of the population {terms.population!r}, and home.toml says"
            f" {home.about.population!r}: put the right ledger back.",
        )
    if not method.private and terms.epsilon is not None:
        raise Refused("no-guarantee", f"The method {experiment.method!r} has no guarantee.")
    keep_freed_memory()
    with torch_threads(home.about.threads), _naming("data"):
        own = home.images(experiment)
        network: list[nn.Module] = []
        site = home.site(experiment, own, network.pop, request.head)
    if experiment.batch > site.data.units:
        raise Refused(
            "plan-refused", f"The batch {experiment.batch} exceeds {site.data.units} units."
        )
    with torch_threads(home.about.threads):
        with _naming("plan-refused"):
            plan = checked_plan(method, experiment, site.data.units, len(request.own_rounds))
        admit_plan(home.policy, request.run, plan, runs.values())
        with _naming("network-not-allowed"):
            model = _network(experiment, own.classes)
            if clips_units(method):
                _check_once(experiment, own.classes, own.images.pixels.shape[1])
        if frozen_digest(model) != request.frozen:
            raise Refused("frozen-mismatch", "The parts that do not train differ: check weights.")
        check_weights(model, request.weights)
        network.append(model)
        asked = RoundRequest(
            request.run,
            request.round,
            request.own_rounds,
            experiment,
            request.validation_losses,
        )
        with _naming("ledger"):
            reply = client_round(asked, request.weights, site, on_step)
    weights = reply.weights
    if weights is not None and not all(bool(torch.isfinite(w).all()) for w in weights.values()):
        # Where a server's noise hides whole clients, a run that one of them could stop would not.
        if not isinstance(method, CentralMethod):
            raise Refused("diverged", "Training left the range of finite numbers: lower lr.")
        weights = dict(request.weights)  # an update of 0, as a server makes of one without numbers
    report = ClientReport(**filtered(home.policy, asdict(reply.report)))
    trace = reply.trace if "trace" in home.policy.report else ()
    return RoundReply(report, weights, trace)


@lru_cache(maxsize=16)
def _check_once(experiment: Experiment, classes: int, pixels: int) -> None:
    """Refuse a network that cannot be clipped: in every run and round, but looked at once."""
    other = _network(experiment, classes)  # a look must not change the one that trains
    check_network(experiment, other, pixels)


def _network(experiment: Experiment, classes: int) -> nn.Module:
    return build_network(experiment, classes).to(experiment.device)
