"""One-run audits of every method: canaries in, one training, a lower bound on ε out.

Three who look: one sees every step's release (what the guarantee covers; more than the server
gets), one the weights sent after each round (the honest-but-curious server), one only the last
model. Beside each bound stands what could have been found at best.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from xcal.audit.bound import find_epsilon, strongest_bound
from xcal.audit.canaries import (
    CanaryData,
    CanaryEngine,
    Directions,
    GradientWatcher,
    InputWatcher,
    Scores,
    blank_pictures,
    image_losses,
    mislabeled,
    mixture_ratio,
    plant,
    reach,
    toss_coins,
)
from xcal.audit.one_client import RUN, Trained, flat, load_flat, train_one_client
from xcal.config import Experiment
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.dp.accounting import reference_cost
from xcal.dp.clipping import Bound
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger.rows import Charge, charges_of, read_rows
from xcal.dp.noise import SeededNoise
from xcal.errors import UserError
from xcal.federation.aggregation import server_round
from xcal.federation.central import ServerSite, check_rule, server_rule
from xcal.federation.exchange import ClientReport, RoundReply, Weights
from xcal.methods.adaptive_clip import ClipState
from xcal.methods.base import CentralMethod
from xcal.models.model_registry import build_network

IDEAL_AUDITS = 8  # simulated audits of the mechanism as charged
SURPRISE = 1e-4  # right guesses rarer than this under what was charged are a finding


@dataclass(frozen=True)
class Audit:
    """One method, one kind of canary, one view."""

    method: str
    canary: str  # "gradient", "mislabeled" or "client"
    view: str
    canaries: int
    units: int
    steps: int
    epsilon_claimed: float | None  # None: no guarantee, ε = ∞
    delta: float
    confidence: float
    epsilon_found: float
    guesses: int
    correct: int
    accuracy: float  # of guessing every canary
    strongest: float  # ε found if every guess were right
    expected: float | None  # mean ε found by an ideal auditor of what was charged
    p_charged: float | None  # of as many right guesses under what was charged
    noise_floor: float | None  # smallest deviation of a released sum over the one charged
    share_charged: float | None = None  # Σρ/R of the ledger, recomputed by dp-accounting

    @property
    def broken(self) -> bool:
        """Whether it is refuted: by ε, by what was charged, by too little noise, or by the sum."""
        if self.epsilon_claimed is None:
            return False  # nothing was promised
        return (
            self.epsilon_found > self.epsilon_claimed
            or (self.p_charged is not None and self.p_charged < SURPRISE)
            or (self.noise_floor is not None and self.noise_floor < 0.95)
            or (self.share_charged is not None and self.share_charged > 1)
        )


def ideal_audits(
    charges: Sequence[Charge], canaries: int, *, delta: float, confidence: float, seed: int
) -> tuple[float, float]:
    """An ideal auditor against exactly what was charged, simulated.

    Returns the mean ε found, and the accuracy of guessing each canary by the sign of its
    likelihood ratio (an upper confidence limit): no auditor of what was charged does better.
    """
    rng = np.random.default_rng([seed, 0x1DEA1])
    found, right = [], 0
    for _ in range(IDEAL_AUDITS):
        inside = rng.random(canaries) < 0.5
        ratio = np.zeros(canaries)
        for charge in charges:
            z = charge.sigma * rng.standard_normal(canaries)
            z += inside & (rng.random(canaries) < charge.rate)
            # One step: the mixture has two terms.
            exponent = (2 * z - 1) / (2 * charge.sigma**2)
            with np.errstate(divide="ignore"):  # rate 1: log 0 is -inf, as it should be
                ratio += np.logaddexp(np.log1p(-charge.rate), np.log(charge.rate) + exponent)
        found.append(find_epsilon(ratio, inside, delta=delta, confidence=confidence).epsilon)
        right += int(((ratio > 0) == inside).sum())
    total = IDEAL_AUDITS * canaries
    accuracy = right / total
    spread = 3 * float(np.sqrt(accuracy * (1 - accuracy) / total))
    return float(np.mean(found)), min(1.0, accuracy + spread)


def audit_method(
    experiment: Experiment,
    benign: Images,
    classes: int,
    *,
    canary: str,
    canaries: int,
    pictures: Images | None = None,
    confidence: float = 0.95,
) -> list[Audit]:
    """Audit the experiment's method with one kind of canary, in all three views."""
    if experiment.unit != "record":
        raise UserError("The audit plants images, so it needs unit = 'record'.")
    included = toss_coins(canaries, experiment.seed)
    own = _pictures(canary, canaries, benign, pictures, classes, experiment.seed)
    planted = plant(benign, own)
    if canary == "gradient":
        trained, views, floor = _with_gradients(experiment, planted, included, classes)
    else:
        trained, views = _with_inputs(experiment, planted, own, included, classes)
        floor = None
    claimed = None if trained.plan is None else trained.plan.epsilon
    expected = accuracy = None
    if trained.charges:
        expected, accuracy = ideal_audits(
            trained.charges,
            canaries,
            delta=experiment.delta,
            confidence=confidence,
            seed=experiment.seed,
        )
    share = None
    if trained.plan is not None:
        order = trained.plan.order
        # An auditor's own sum: dp-accounting's cost of every row, whatever the row says it cost.
        spent = math.fsum(reference_cost(c.rate, c.sigma, order) for c in trained.charges)
        share = spent / trained.plan.budget
    return audits_of(
        experiment,
        views,
        included,
        confidence,
        accuracy if canary == "gradient" else None,
        floor,
        canary=canary,
        units=len(planted),
        steps=len(trained.trace),
        epsilon_claimed=claimed,
        expected=expected,
        share_charged=share,
    )


def audits_of(
    experiment: Experiment,
    views: Mapping[str, Scores],
    included: NDArray[np.bool_],
    confidence: float,
    accuracy: float | None,
    floor: float | None,
    **about: Any,
) -> list[Audit]:
    """What guessing by each view's scores who was in says, beside what is known of the training.

    The first view is the one that sees all: it alone is held to the `accuracy` of an ideal auditor
    and to the `floor` of the noise.
    """
    audits: list[Audit] = []
    delta = experiment.delta
    for view, scores in views.items():
        found = find_epsilon(scores, included, delta=delta, confidence=confidence)
        right = int(((scores > 0) == included).sum())
        first = not audits
        held = first and accuracy is not None
        audits.append(
            Audit(
                method=experiment.method,
                view=view,
                canaries=len(included),
                delta=delta,
                confidence=confidence,
                epsilon_found=found.epsilon,
                guesses=found.guesses,
                correct=found.correct,
                accuracy=found.accuracy_all,
                strongest=strongest_bound(len(included), delta=delta, confidence=confidence),
                p_charged=float(binom.sf(right - 1, len(included), accuracy)) if held else None,
                noise_floor=floor if first else None,
                **about,
            )
        )
    return audits


def _pictures(
    canary: str, count: int, benign: Images, given: Images | None, classes: int, seed: int
) -> Images:
    side = benign.pixels.shape[1]
    if canary == "gradient":
        return blank_pictures(count, side)
    if canary == "mislabeled":
        if given is None or len(given) < count:
            raise UserError(f"{count} canaries need as many pictures that are not in training.")
        return mislabeled(given.take(np.arange(count)), classes, seed)
    raise UserError(f"Unknown canary {canary!r}: choose gradient or mislabeled.")


def _with_gradients(
    experiment: Experiment, planted: Images, included: NDArray[np.bool_], classes: int
) -> tuple[Trained, dict[str, Scores], float | None]:
    parameters = sum(p.numel() for p in trainable(build_network(experiment, classes)).values())
    if len(included) > parameters:
        raise UserError(
            f"{len(included)} gradient canaries do not fit into {parameters} parameters."
        )
    directions = Directions(parameters, len(included), experiment.seed)
    data = CanaryData(planted, included, in_gradient=True)
    bounds: list[Bound] = []
    engine = partial(CanaryEngine, data=data, directions=directions, bounds=bounds)
    watcher = GradientWatcher(directions, bounds)
    trained = train_one_client(experiment, data, classes, observe=watcher, make_engine=engine)
    rate = experiment.expected_batch_size / data.units
    sigmas = [r.sigma for r in trained.trace]
    floor = min(d / s for d, s in zip(watcher.deviations, sigmas, strict=True)) if sigmas else None
    per_step, per_round, total = (np.zeros(len(included)) for _ in range(3))
    for number in range(experiment.rounds):
        mine = [i for i, r in enumerate(trained.trace) if r.round == number]
        if not mine:
            continue
        spreads: list[float | Scores] = []
        for i in mine:
            own = watcher.own_spread[i]
            # The noise as it is seen, not as it is claimed: a claim is what is being tried.
            spreads.append(watcher.deviations[i] if own is None else own)
            per_step += mixture_ratio(
                watcher.readings[i], steps=1, rate=rate, deviation=spreads[-1]
            )
        # The server reads the sum of a round's releases off two models.
        summed = np.sum([watcher.readings[i] for i in mine], axis=0)
        spread = np.sqrt(sum(np.square(np.broadcast_to(s, summed.shape)) for s in spreads))
        per_round += mixture_ratio(summed, steps=len(mine), rate=rate, deviation=spread)
        total += summed
    return trained, {"steps": per_step, "rounds": per_round, "final": total}, floor


def _with_inputs(
    experiment: Experiment,
    planted: Images,
    own: Images,
    included: NDArray[np.bool_],
    classes: int,
) -> tuple[Trained, dict[str, Scores]]:
    images, labels = to_tensor(own.pixels), torch.from_numpy(own.labels)
    watcher = InputWatcher(images, labels)
    data = CanaryData(planted, included, in_gradient=False)
    trained = train_one_client(experiment, data, classes, observe=watcher)
    rate = experiment.expected_batch_size / data.units
    sigmas = [r.sigma for r in trained.trace]
    per_step = np.zeros(len(included))
    for reading, norm, sigma in zip(watcher.readings, watcher.norms, sigmas, strict=True):
        z = (
            reading - np.median(reading)
        ) / experiment.max_grad_norm  # others' gradients move all alike
        shift = np.minimum(norm / experiment.max_grad_norm, 1.0)
        if sigma > 0:
            per_step += mixture_ratio(z, steps=1, rate=rate, deviation=sigma, shift=shift)
        else:
            per_step += z
    per_round = np.zeros(len(included))
    before, model = trained.first, trained.model
    for after in trained.rounds:
        load_flat(model, before)
        slope, norm = reach(model, images, labels, before - after)
        z = slope / np.maximum(norm, 1e-12)
        per_round += z - np.median(z)
        before = after
    load_flat(model, trained.first)
    start = image_losses(model, images, labels)
    load_flat(model, trained.final)
    views = {
        "steps": per_step,
        "rounds": per_round,
        "final": start - image_losses(model, images, labels),
    }
    return trained, views


# --- canary clients, for methods whose noise a trusted server adds --------------------------------


def audit_clients(
    experiment: Experiment,
    method: CentralMethod,
    classes: int,
    *,
    canaries: int,
    confidence: float = 0.95,
) -> list[Audit]:
    """Audit a central method with canary clients, from every round's model and from the last.

    Each answers with an update of norm C in a direction of its own, or, where its coin said no,
    with no change at all. Nothing is trained; clipping, noise, ledger and filter are the server's
    real ones. Seen is what clients receive: the global model of every round.
    """
    included = toss_coins(canaries, experiment.seed)
    model = build_network(experiment, classes)
    weights: Weights = {k: p.detach().clone() for k, p in trainable(model).items()}
    directions = Directions(flat(weights).numel(), canaries, experiment.seed)
    plan = check_rule(experiment, method, canaries)
    assert plan is not None
    spread = plan.sigma_ref
    readings, floors = [], []
    with tempfile.TemporaryDirectory(prefix="xcal-audit-") as folder:
        site = ServerSite(RUN, Path(folder), SeededNoise(experiment.seed))
        rule = server_rule(experiment, method, canaries, plan, site)
        state = rule.load_state(None)
        for number in range(experiment.rounds):
            # The norm of this round follows from earlier releases, so a canary may know it.
            begun = method.load_server_state(state.method, experiment)
            adapted = begun.clip if isinstance(begun, ClipState) else None
            clip = experiment.max_grad_norm if adapted is None else adapted
            replies = [
                _answer(i, weights, directions, clip if included[i] else 0.0)
                for i in range(canaries)
            ]
            after, state = server_round(number, weights, replies, rule, state)
            # The mean over a fixed number of clients, so times it is the sum.
            released = (flat(after).double() - flat(weights).double()) * canaries
            readings.append(directions.read(released / clip))
            floors.append(float(released.std()) / clip / spread)
            weights = after
        charges = charges_of(read_rows(site.ledger_path), RUN)
    expected, accuracy = ideal_audits(
        charges, canaries, delta=experiment.delta, confidence=confidence, seed=experiment.seed
    )
    views = {
        "rounds": sum(
            (mixture_ratio(z, steps=1, rate=1.0, deviation=spread) for z in readings),
            np.zeros(canaries),
        ),
        "final": np.sum(readings, axis=0),
    }
    return audits_of(
        experiment,
        views,
        included,
        confidence,
        accuracy,
        min(floors),
        canary="client",
        units=canaries,
        steps=len(readings),
        epsilon_claimed=plan.epsilon,
        expected=expected,
    )


def _answer(client: int, weights: Weights, directions: Directions, length: float) -> RoundReply:
    moved = flat(weights)
    if length > 0:
        moved = moved + length * directions.sum_of(np.array([client]))
    pieces = torch.split(moved, [w.numel() for w in weights.values()])
    report = ClientReport(
        client=str(client),
        units=1,
        steps=1,
        halted=False,
        order=None,
        epsilon_spent=None,
        epsilon_paper=None,
        share_spent=None,
        mean_sigma=None,
        mean_signal=None,
        ledger_rows=0,
        ledger_hash="",
    )
    answered = {k: p.view_as(w) for (k, w), p in zip(weights.items(), pieces, strict=True)}
    return RoundReply(report, answered)
