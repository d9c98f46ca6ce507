"""One round at a client, without an engine: what it does with a request that it admitted.

Engines come here only through `answer.respond`, which decides for the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from xcal.config import Experiment
from xcal.dp.account import Account
from xcal.dp.calibration import Plan
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import RunTerms
from xcal.federation.exchange import (
    ClientReport,
    RoundReply,
    RoundRequest,
    Weights,
    load_weights,
    request_digest,
    sum_terms,
)
from xcal.federation.loaded_site import LoadedSite, Pace, remember_head, remembered_head
from xcal.federation.masks import MaskKeys, MaskRefusal
from xcal.federation.memory import RunMemory, StoredReply
from xcal.federation.preflight import check_findings
from xcal.federation.request_refusals import Refused, naming
from xcal.federation.site_identity import mask_keys
from xcal.methods.adaptive_clip import LARGEST_CLIP, SMALLEST_CLIP
from xcal.methods.base import SIGNAL_KEYS, Method, clips_units
from xcal.methods.context import (
    Optimizer,
    Sharing,
    StepAverage,
    StepContext,
    StepRecord,
)
from xcal.methods.guard import StepGuard
from xcal.methods.passes import is_batch_invariant, is_cache_exact
from xcal.methods.registry import checked_plan, method_of
from xcal.models.backbone import Split, split_at_map, split_backbone

OnStep = Callable[[int], None]


class SetAside(BaseException):
    """Raised by who watches the steps: keep what was done, and stop here.

    No error, so nobody logs it. The same request takes the round up where it was left, in this
    process or another.
    """


def run_terms(
    run: str,
    unit: str,
    noise: str,
    method: Method,
    plan: Plan | None,
    experiment: Experiment | None = None,
) -> RunTerms:
    masked = experiment is not None and experiment.trust == "masked"
    return RunTerms(
        honest=experiment.honest_sites if masked and experiment is not None else None,
        noise_kind="gaussian" if masked or experiment is None else experiment.noise_kind,
        noise=noise,
        run=run,
        method=method.name,
        unit=unit,
        epsilon=None if plan is None else plan.epsilon,
        delta=None if plan is None else plan.delta,
        order=None if plan is None else plan.order,
        budget=None if plan is None else plan.budget,
        steps=0 if plan is None else plan.steps,
        **({} if plan is None else plan.fixed),
    )


def add_remove_holds(declared: bool, dealt: bool, experiment: Experiment) -> bool:
    """Whether adding or removing one unit is covered as zeroing it is: where units are declared.

    Not under a cap, where another image of the same group takes the place of one that goes; nor
    where the images are `dealt` out to clients or chosen at random, which one unit less reshuffles.
    """
    capped = experiment.unit == "record" and experiment.group_cap is not None
    return declared and not dealt and not capped


def client_round(
    request: RoundRequest, weights: Weights, site: LoadedSite, on_step: OnStep | None = None
) -> RoundReply:
    """Train one round at one client.

    The same request again gives the stored reply, with no new charge; other weights under the same
    run and round are refused. A round that was cut off is taken up at its last saved step.
    """
    digest = request_digest(request, site.client, weights)
    with Ledger(site.ledger_path, expected=site.expected_head) as ledger:
        remembered = remembered_head(site.site_dir)
        if remembered is not None:
            ledger.check_holds(remembered, "this site")
        if site.admit is not None:  # now that no other run can reserve in between
            site.admit(ledger)
        memory = RunMemory(site.folder(request.run), request, digest)
        previous = memory.last_reply()
        number = 0 if request.sum is None else request.sum.attempt.number
        asked = (request.round, number)
        if previous is not None and (previous.round, previous.attempt) > asked:
            raise Refused(
                "round-past",
                f"Round {request.round} lies before the last one answered: refused.",
            )
        if previous is not None and (previous.round, previous.attempt) == asked:
            if previous.request != digest:
                raise Refused(
                    "round-other-weights",
                    f"Round {request.round} was answered already, for other weights: refused.",
                )
            return previous.reply
        return _train(request, weights, site, ledger, memory, previous, on_step or (lambda _: None))


def _train(
    request: RoundRequest,
    weights: Weights,
    site: LoadedSite,
    ledger: Ledger,
    memory: RunMemory,
    previous: StoredReply | None,
    on_step: OnStep,
) -> RoundReply:
    experiment = request.experiment
    method = method_of(experiment)
    if request.round not in request.own_rounds:
        raise Refused(
            "round-not-own", f"Round {request.round} is not one of this client's own: refused."
        )
    plan = checked_plan(method, experiment, site.data.units, len(request.own_rounds))
    masks, sharing = _sharing(request, weights, site, plan)
    if experiment.unit != site.data.unit:
        raise Refused(
            "unit-not-allowed",
            f"The request protects a {experiment.unit}, this client a {site.data.unit}: refused.",
        )
    with naming("data"):
        check_findings(method, site.data.multi_label)
    model = site.build_model()
    rows, feature_cache_mb = (
        _passes(model, experiment, site.data.multi_label)
        if clips_units(method)
        else (0, experiment.feature_cache_mb)
    )
    load_weights(model, weights)  # before anything is reserved: bad weights must cost nothing
    # Also before: a method of the user's own may fail here.
    state = method.begin_round(method.load_state(previous.state if previous else None))
    terms = run_terms(request.run, site.data.unit, site.noise.name, method, plan, experiment)
    if site.partition is not None and ledger.terms.of_real_people:
        site.partition.remember(site.site_dir, charged=bool(ledger.runs))  # before a charge
    seeded = site.noise.name == "seeded"
    account = None
    if plan is None:
        ledger.reserve(terms)
        if not ledger.recorded_unbounded(request.run, request.round):
            ledger.record_unbounded(request.run, request.round)
    else:
        account = Account(ledger, terms, replayable=seeded, floor=site.sigma_floor)
        memory.begin(
            site.ledger_path,
            account.rounds_paid,
            -1 if previous is None else previous.round,
            account.last_paid,
        )

    optimizer = Optimizer(
        model,
        experiment.optimizer,
        experiment.lr,
        experiment.momentum,
        private=account is not None,
    )
    steps = experiment.local_epochs * -(-site.data.units // experiment.expected_batch_size)
    if request.sum is not None:  # one step a round, by the number of the attempt
        steps = request.sum.attempt.number + 1
    # Where an answer could not be kept, nothing is to be paid for it.
    # A sum is one step, whatever number a server gives its attempt.
    memory.hold_room(weights, steps if request.sum is None else 1)
    remember_head(site.site_dir, ledger.head)
    tail = StepAverage(model, steps, experiment.average_steps)
    split = _worth_keeping(site, model, method, experiment, feature_cache_mb)
    kept = site.data.cache_features(split, feature_cache_mb, rows)
    if kept and _covers_cells(method, experiment):
        site.data.cache_maps(split_at_map(model), feature_cache_mb, rows)
    trace: list[StepRecord] = []
    # The one step of a sum is done whole or not at all.
    taken_up = None if sharing is not None else memory.restore(method, model, optimizer, tail)
    if taken_up is not None:
        state, trace = taken_up
    first = len(trace) if request.sum is None else request.sum.attempt.number
    if account is not None:
        account.rewind(request.round, first)

    engine = None
    if clips_units(method):
        half = half_of(experiment)
        engine = site.make_engine(
            model, chunk=experiment.chunk, rows=rows, **({} if half is None else {"half": half})
        )
    context = StepContext(
        client=site.client,
        method=method.name,
        round=request.round,
        first_step=request.own_rounds.index(request.round) * (steps if sharing is None else 1),
        model=model,
        engine=engine,
        data=site.data,
        noise=site.noise,
        account=account,
        optimizer=optimizer,
        batch=experiment.expected_batch_size,
        clip=experiment.max_grad_norm,
        replay=site.replay_key(experiment, () if account is None else account.charges),
        validation_losses=request.validation_losses,
        own_rounds=len(request.own_rounds),
        split=split if kept else None,
        chunk=experiment.chunk,
        rows=rows,
        loss=site.loss,
        half=half_of(experiment),
        sharing=sharing,
        discrete=experiment.noise_kind == "discrete",
    )
    model.train()
    halted = account is not None and account.halted_before(request.round)
    guard = StepGuard(context, own_method=":" in experiment.method)
    pace = Pace()
    for step in range(first, steps):
        if halted:
            break
        try:
            state, record = method.step(context, step, experiment, plan, state)
        except BudgetExhausted as refusal:
            assert account is not None
            state = refusal.state or state
            guard.check_halted(step)
            account.halt(request.round, step)
            halted = True
            break
        guard.check(step)
        trace.append(record)
        tail.add(step)
        try:
            on_step(1)
        except SetAside:
            # Where it cannot be kept it goes on: under secure noise it would be paid for again.
            if sharing is None and memory.save_progress(model, optimizer, tail, state, trace):
                raise
        if sharing is None and pace.due():
            memory.save_progress(model, optimizer, tail, state, trace)
            pace.done()
    report = _report(
        site, method, experiment, plan, account, state, trace, previous, halted, ledger
    )
    # Before the answer can leave: what it cost is not forgotten.
    remember_head(site.site_dir, ledger.head)
    if masks is not None and sharing is not None and request.sum is not None and sharing.given:
        ((grid, numbers),) = sharing.given
        hidden = RoundReply(report, None, tuple(trace))
        masked = masks.mask(
            request.sum.attempt,
            grid,
            numbers,
            lambda message: memory.save_reply(state, replace(hidden, masked=message)),
        )
        return replace(hidden, masked=masked)
    trained = sharing is None and bool(trace)
    reply = RoundReply(report, tail.weights() if trained else None, tuple(trace))
    memory.save_reply(state, reply)
    return reply


def _sharing(
    request: RoundRequest, weights: Weights, site: LoadedSite, plan: Plan | None
) -> tuple[MaskKeys | None, Sharing | None]:
    """The masks and the public constants of the sum that is asked for; none of either is asked.

    Refuses, before anything is reserved, what would leave this site with less noise than planned.
    """
    asked = request.sum
    if (request.experiment.trust == "masked") != (asked is not None):
        raise Refused("experiment-invalid", "A masked sum is asked for where trust says otherwise.")
    if asked is None:
        return None, None
    attempt = asked.attempt
    if plan is None or attempt.round != request.round:
        raise Refused("experiment-invalid", "This client takes no part in masked sums.")
    masks = site.masks
    if masks is None:
        masks = mask_keys(site.site_dir, site.folder(request.run), request.run, site.client)
        masks.meet({told.site: told for told in asked.announced})
    if masks.roster.honest != request.experiment.honest_sites:
        raise MaskRefusal(
            f"The run counts on {request.experiment.honest_sites} honest sites, and this site's"
            f" roster on {masks.roster.honest}."
        )
    if not plan.sigma_static <= asked.sigma < math.inf or site.data.units > asked.units:
        raise Refused(
            "plan-refused",
            f"A sum with a multiplier of {asked.sigma:g} for at most {asked.units} units a site is"
            f" less than the {plan.sigma_static:g} that this client plans for its"
            f" {site.data.units}.",
        )
    if not SMALLEST_CLIP <= asked.clip <= LARGEST_CLIP:
        raise Refused("experiment-invalid", f"A clipping norm of {asked.clip} is none.")
    terms = sum_terms(request.experiment, weights, asked.sigma, asked.units, asked.clip)
    if attempt.terms != terms:
        raise Refused("experiment-invalid", "The sum asked for is not that of these weights.")
    honest = masks.roster.check(attempt)
    sites = len(attempt.sites)
    sharing = Sharing(
        asked.sigma,
        sites,
        honest,
        asked.units,
        asked.clip,
        lambda grid: masks.check(attempt, grid),
    )
    return masks, sharing


def half_of(experiment: Experiment) -> torch.dtype | None:
    """What products are rounded to in passes; None: nothing is."""
    return torch.bfloat16 if experiment.precision == "bf16" else None


def _passes(model: nn.Module, experiment: Experiment, multi_label: bool) -> tuple[int, int]:
    """Images in every pass (0: any number), and megabytes for what a frozen backbone makes.

    So that nobody's numbers depend on who else was drawn, or on how many images others have.
    """
    image = (3, experiment.pixels, experiment.pixels)
    wanted = min(experiment.rows, experiment.chunk)
    half = half_of(experiment)
    rows = is_batch_invariant(model, image, wanted, multi_label=multi_label, half=half)
    if half is not None:
        return rows, 0  # what is kept would be in another precision than what is not
    return rows, experiment.feature_cache_mb if is_cache_exact(model, image, rows) else 0


def _covers_cells(method: Method, experiment: Experiment) -> bool:
    """Whether the method takes a signal from cells of the map that the head reads."""
    return method.uses >= SIGNAL_KEYS and experiment.cover == "cells"  # type: ignore[attr-defined]


def _worth_keeping(
    site: LoadedSite, model: nn.Module, method: Method, experiment: Experiment, megabytes: int
) -> Split | None:
    """The split whose beginning's activations are kept.

    For a method whose signal needs passes it lies before the explained map, if that fits: the
    images would else go through the beginning once more to be explained.
    """
    signal = method.uses >= SIGNAL_KEYS and not _covers_cells(method, experiment)
    if signal and getattr(model, "cam_layer", None) is not None:
        explained = split_backbone(model, seen=str(model.cam_layer))
        if explained is not None and site.data.fits(explained, megabytes):
            return explained
    return split_backbone(model)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _report(
    site: LoadedSite,
    method: Method,
    experiment: Experiment,
    plan: Plan | None,
    account: Account | None,
    state: Any,
    trace: Sequence[StepRecord],
    previous: StoredReply | None,
    halted: bool,
    ledger: Ledger,
) -> ClientReport:
    before = (previous.reply.report.steps or 0) if previous else 0
    spent = None if plan is None or account is None else plan.odometer(account.spent)
    return ClientReport(
        client=site.client,
        units=site.data.units,
        steps=before + len(trace),
        halted=halted,
        order=plan.order if plan is not None else None,
        epsilon_spent=spent,
        epsilon_paper=method.epsilon_paper(experiment, plan, state),
        share_spent=account.filter.share_spent if account is not None else None,
        mean_sigma=_mean([r.sigma for r in trace if r.sigma > 0]),
        mean_signal=_mean([r.signal for r in trace if r.signal is not None]),
        ledger_rows=ledger.head.count,
        ledger_hash=ledger.head.hash,
        noise=site.noise.name,
        add_remove=add_remove_holds(site.data.declared, site.dealt, experiment),
    )
