"""One round at a client, without an engine: what it does with a request.

Every engine calls `client_round` here and `aggregation.server_round`, and nothing else, so all of
them give the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.federation.files import read_json, read_tensors, write_json, write_tensors
from xcal.federation.refusals import Refused
from xcal.federation.site import Pace, Site
from xcal.methods.base import SIGNAL_KEYS, Method, clips_units, save_state
from xcal.methods.registry import method_of
from xcal.models.split import Split, split_frozen
from xcal.privacy.account import Account
from xcal.privacy.calibration import Plan
from xcal.privacy.filter import BudgetExhausted
from xcal.privacy.ledger import Ledger
from xcal.privacy.ledger_rows import Head, RunTerms
from xcal.training.clipping import kept_alike, rows_apart
from xcal.training.local import (
    Bench,
    Optimiser,
    StepAverage,
    StepRecord,
    digest_tensors,
    trainable,
)

Weights = dict[str, Tensor]
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class RoundRequest:
    """What the server asks of one client."""

    run: str
    round: int  # from 0
    own_rounds: tuple[int, ...]  # the client's rounds by the published schedule
    experiment: Experiment
    validation_losses: tuple[float, ...] = ()  # of earlier rounds, on public images


@dataclass(frozen=True)
class ClientReport:
    """What a client tells about a round: functions of its releases and of public constants.

    None where there is no such thing, or where the client's policy does not let it out.
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

    @property
    def head(self) -> Head | None:
        """The client's ledger as it stood after the round."""
        if self.ledger_rows is None or self.ledger_hash is None:
            return None
        return Head(self.ledger_rows, self.ledger_hash)


@dataclass(frozen=True)
class RoundReply:
    """A client's answer. `weights = None`: exhausted, nothing was trained."""

    report: ClientReport
    weights: Weights | None
    trace: tuple[StepRecord, ...] = ()


def request_digest(request: RoundRequest, client: str, weights: Weights) -> str:
    """A request is known by run, round, client and weights."""
    text = f"{request.run}\n{request.round}\n{client}\n{digest_tensors(sorted(weights.items()))}"
    return hashlib.sha256(text.encode()).hexdigest()


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


def run_terms(run: str, unit: str, noise: str, method: Method, plan: Plan | None) -> RunTerms:
    return RunTerms(
        noise=noise,
        run=run,
        method=method.name,
        unit=unit,
        epsilon=None if plan is None else plan.epsilon,
        delta=None if plan is None else plan.delta,
        order=None if plan is None else plan.order,
        budget=None if plan is None else plan.budget,
        steps=0 if plan is None else plan.steps,
    )


def client_round(
    request: RoundRequest, weights: Weights, site: Site, on_step: OnStep | None = None
) -> RoundReply:
    """Train one round at one client.

    The same request again gives the stored reply, with no new charge; other weights under the same
    run and round are refused. A round that was cut off is taken up at its last saved step.
    """
    digest = request_digest(request, site.client, weights)
    with Ledger(site.ledger_path, expected=site.expected_head) as ledger:
        remembered = site.remembered_head()
        if remembered is not None:
            ledger.check_holds(remembered, "this home")
        finished = _last_reply(site, request)
        if finished is not None:
            tensors, about = finished
            if about["round"] > request.round:
                raise Refused(
                    "round-past",
                    f"Round {request.round} lies before the last one answered: refused.",
                )
            if about["round"] == request.round:
                if about["request"] != digest:
                    raise Refused(
                        "round-other-weights",
                        f"Round {request.round} was answered already, for other weights: refused.",
                    )
                return _reply_from(tensors, about)
        previous = finished[1] if finished is not None else None
        return _train(request, weights, site, ledger, digest, previous, on_step or _ignore)


def _ignore(count: int) -> None:
    """Nobody watches."""


def _last_reply(site: Site, request: RoundRequest) -> tuple[Weights, dict[str, Any]] | None:
    path = site.folder(request.run) / "reply.safetensors"
    found = read_tensors(path)
    if path.exists() and not (found is not None and _is_reply(*found)):
        raise Refused("home", f"{path} cannot be read: it is damaged. Restore it from a backup.")
    return found


def _is_reply(tensors: Weights, about: dict[str, Any]) -> bool:
    """Whether a file that could be read says what a stored reply says."""
    try:
        _reply_from(tensors, about)
        return {"round", "request", "state"} <= about.keys()
    except (TypeError, KeyError, AttributeError):
        return False


def _train(
    request: RoundRequest,
    weights: Weights,
    site: Site,
    ledger: Ledger,
    digest: str,
    previous: dict[str, Any] | None,
    on_step: OnStep,
) -> RoundReply:
    experiment = request.experiment
    method = method_of(experiment)
    if request.round not in request.own_rounds:
        raise Refused(
            "round-not-own", f"Round {request.round} is not one of this client's own: refused."
        )
    plan = method.plan(experiment, site.data.units, len(request.own_rounds))
    if experiment.unit != site.data.unit:
        raise Refused(
            "unit-not-allowed",
            f"The request protects a {experiment.unit}, this client a {site.data.unit}: refused.",
        )
    model = site.build_model()
    rows, keep_mb = _passes(model, experiment) if clips_units(method) else (0, experiment.keep_mb)
    load_weights(model, weights)  # before anything is reserved: bad weights must cost nothing
    if site.admit is not None:  # once more, now that no other run can reserve in between
        site.admit(request.run, plan, ledger.runs.values())
    terms = run_terms(request.run, site.data.unit, site.noise.name, method, plan)
    seeded = site.noise.name == "seeded"
    account = (
        Account(ledger, terms, replayable=seeded, floor=site.sigma_floor)
        if plan is not None
        else None
    )
    if account is None:
        ledger.reserve(terms)
        ledger.record_unbounded(request.run, request.round)
    else:
        _check_memory(site, request, account, previous["round"] if previous else -1)

    optimiser = Optimiser(model, experiment.optimizer, experiment.lr, experiment.momentum)
    steps = experiment.local_epochs * -(-site.data.units // experiment.batch)
    tail = StepAverage(model, steps, experiment.average_steps)
    split = _worth_keeping(site, model, method, keep_mb)
    kept = site.data.keep_activations(split, keep_mb, rows)
    state = method.load_state(previous["state"] if previous else None)
    state = method.begin_round(state)
    trace: list[StepRecord] = []
    first = 0
    saved = read_tensors(site.folder(request.run) / "progress.safetensors")
    if saved is not None and saved[1]["request"] == digest:
        first, state, trace = _take_up(saved, method, model, optimiser, tail)
    if account is not None:
        account.rewind(request.round, first)

    engine = None
    if clips_units(method):
        engine = site.make_engine(model, chunk=experiment.chunk, rows=rows)
    bench = Bench(
        client=site.client,
        method=method.name,
        round=request.round,
        first_step=request.own_rounds.index(request.round) * steps,
        model=model,
        engine=engine,
        data=site.data,
        noise=site.noise,
        account=account,
        optimiser=optimiser,
        batch=experiment.batch,
        clip=experiment.clip,
        replay=site.replay_key(experiment),
        validation_losses=request.validation_losses,
        own_rounds=len(request.own_rounds),
        split=split if kept else None,
        chunk=experiment.chunk,
        rows=rows,
    )
    model.train()
    halted = account is not None and account.halted_before(request.round)
    pace = Pace()
    for step in range(first, steps):
        if halted:
            break
        try:
            state, record = method.step(bench, step, experiment, plan, state)
        except BudgetExhausted as refusal:
            assert account is not None
            state = refusal.state or state
            account.halt(request.round, step)
            halted = True
            break
        trace.append(record)
        tail.add(step)
        on_step(1)
        if pace.due():
            _save_progress(site, request, digest, model, optimiser, tail, state, trace)
            pace.done()
    report = _report(
        site, method, experiment, plan, account, state, trace, previous, halted, ledger
    )
    reply = RoundReply(report, tail.weights() if trace else None, tuple(trace))
    site.remember(ledger.head)  # before the answer can leave: what it cost is not forgotten
    _save_reply(site, request, digest, state, reply)
    (site.folder(request.run) / "progress.safetensors").unlink(missing_ok=True)
    return reply


def _passes(model: nn.Module, experiment: Experiment) -> tuple[int, int]:
    """Images in every pass (0: any number), and megabytes for what a frozen beginning makes.

    So that nobody's numbers depend on who else was drawn, or on how many images others have.
    """
    image = (3, experiment.pixels, experiment.pixels)
    rows = rows_apart(model, image, min(experiment.rows, experiment.chunk))
    return rows, experiment.keep_mb if kept_alike(model, image, rows) else 0


def _worth_keeping(site: Site, model: nn.Module, method: Method, megabytes: int) -> Split | None:
    """The split whose beginning's activations are kept.

    For a method with a signal it lies before the explained map, if that fits: the images would
    else go through the beginning once more to be explained.
    """
    if method.uses >= SIGNAL_KEYS and hasattr(model, "cam_layer"):
        explained = split_frozen(model, seen=str(model.cam_layer))
        if explained is not None and site.data.fits(explained, megabytes):
            return explained
    return split_frozen(model)


def _check_memory(site: Site, request: RoundRequest, account: Account, remembered: int) -> None:
    """Refuse where the ledger knows rounds that the home has forgotten.

    A round that was begun and never answered, because the client died in it and the server went on
    without, is no such round: the home wrote down that it began it, and after which answer.
    """
    path = site.folder(request.run) / "begun.json"
    begun: dict[str, Any] = {"round": remembered, "after": remembered, "given_up": []}
    if path.exists():
        begun = read_json(path)
    given_up = list(begun["given_up"]) if begun["after"] == remembered else []
    if begun["after"] == remembered and remembered < begun["round"] < request.round:
        given_up.append(begun["round"])
    forgotten = (
        r > request.round or (remembered < r < request.round and r not in given_up)
        for r in account.rounds_paid
    )
    if any(forgotten) or remembered not in (begun["after"], begun["round"]):
        raise Refused(
            "home",
            f"The ledger {site.ledger_path} knows rounds of this run that its home does not"
            " remember: restore the home, or start a new run.",
        )
    now = {"round": request.round, "after": remembered, "given_up": given_up}
    if now != begun or not path.exists():
        write_json(path, now)


def _weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def _save_progress(
    site: Site,
    request: RoundRequest,
    digest: str,
    model: nn.Module,
    optimiser: Optimiser,
    tail: StepAverage,
    state: Any,
    trace: Sequence[StepRecord],
) -> None:
    tensors = {f"model/{k}": v for k, v in _weights_of(model).items()}
    tensors |= {f"optimiser/{k}": v for k, v in optimiser.state().items()}
    tensors |= {f"tail/{k}": v for k, v in tail.state().items()}
    about = {
        "request": digest,
        "state": save_state(state),
        "trace": [asdict(r) for r in trace],
    }
    write_tensors(site.folder(request.run) / "progress.safetensors", tensors, about, sync=False)


def _take_up(
    saved: tuple[Weights, dict[str, Any]],
    method: Method,
    model: nn.Module,
    optimiser: Optimiser,
    tail: StepAverage,
) -> tuple[int, Any, list[StepRecord]]:
    tensors, about = saved

    def part(kind: str) -> Weights:
        return {k.removeprefix(kind): v for k, v in tensors.items() if k.startswith(kind)}

    load_weights(model, part("model/"))
    optimiser.load(part("optimiser/"))
    tail.load(part("tail/"))
    trace = [StepRecord(**r) for r in about["trace"]]
    return len(trace), method.load_state(about["state"]), trace


def _save_reply(
    site: Site, request: RoundRequest, digest: str, state: Any, reply: RoundReply
) -> None:
    about = {
        "run": request.run,
        "round": request.round,
        "request": digest,
        "state": save_state(state),
        "report": asdict(reply.report),
        "trace": [asdict(r) for r in reply.trace],
    }
    write_tensors(site.folder(request.run) / "reply.safetensors", reply.weights or {}, about)


def _reply_from(tensors: Weights, about: dict[str, Any]) -> RoundReply:
    return RoundReply(
        ClientReport(**about["report"]),
        tensors or None,
        tuple(StepRecord(**r) for r in about["trace"]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _report(
    site: Site,
    method: Method,
    experiment: Experiment,
    plan: Plan | None,
    account: Account | None,
    state: Any,
    trace: Sequence[StepRecord],
    previous: dict[str, Any] | None,
    halted: bool,
    ledger: Ledger,
) -> ClientReport:
    before = previous["report"]["steps"] if previous else 0
    private = plan is not None and account is not None
    return ClientReport(
        client=site.client,
        units=site.data.units,
        steps=before + len(trace),
        halted=halted,
        order=plan.order if plan is not None else None,
        epsilon_spent=plan.odometer(account.spent) if private else None,  # type: ignore[union-attr]
        epsilon_paper=method.epsilon_paper(experiment, plan, state),
        share_spent=account.filter.share_spent if account is not None else None,
        mean_sigma=_mean([r.sigma for r in trace if r.sigma > 0]),
        mean_signal=_mean([r.signal for r in trace if r.signal is not None]),
        ledger_rows=ledger.head.count,
        ledger_hash=ledger.head.hash,
        noise=site.noise.name,
    )
