"""The one-run audit at client level, for methods whose noise a trusted server adds.

The canaries are whole clients: each answers with an update of norm C in a direction of its own, or,
where its coin said no, with no change at all. Nothing is trained; clipping, noise, ledger and
filter are the server's real ones. Seen is what clients receive: the global model of every round.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binom

from xcal.audit.canaries import Directions, toss_coins
from xcal.audit.canary_reading import mixture_ratio
from xcal.audit.one_client import RUN, flat
from xcal.audit.onerun import Audit, audit_of, ideal_audits
from xcal.config import Experiment
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger.rows import charges_of, read_rows
from xcal.dp.noise import SeededNoise
from xcal.federation.aggregation import server_round
from xcal.federation.central import ServerSite, check_rule, server_rule
from xcal.federation.exchange import ClientReport, RoundReply, Weights
from xcal.methods.adaptive_clip import ClipState
from xcal.methods.base import CentralMethod
from xcal.models.model_registry import build_network


def audit_clients(
    experiment: Experiment,
    method: CentralMethod,
    classes: int,
    *,
    canaries: int,
    confidence: float = 0.95,
) -> list[Audit]:
    """Audit a central method with canary clients, from every round's model and from the last."""
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
            clip = _norm(method.load_server_state(state.method, experiment), experiment)
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
    audits = []
    for view, scores in views.items():
        right = int(((scores > 0) == included).sum())
        first = view == "rounds"
        audits.append(
            audit_of(
                experiment,
                scores,
                included,
                confidence,
                canary="client",
                view=view,
                units=canaries,
                steps=len(readings),
                epsilon_claimed=plan.epsilon,
                expected=expected,
                p_charged=float(binom.sf(right - 1, canaries, accuracy)) if first else None,
                noise_floor=min(floors) if first else None,
            )
        )
    return audits


def _norm(state: object, experiment: Experiment) -> float:
    """What updates are clipped to in a round that begins with this state."""
    adapted = state.clip if isinstance(state, ClipState) else None
    return experiment.max_grad_norm if adapted is None else adapted


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
