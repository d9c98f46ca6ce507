"""The local engine: the paper's Algorithm 2 in one process, resumable at any moment."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from xcal.config import Experiment
from xcal.data.images import Images
from xcal.errors import UserError
from xcal.federation.aggregation import averaged, server_round
from xcal.federation.card import card_text
from xcal.federation.central import ServerSite, server_rule
from xcal.federation.files import lock_folder, read_json, write_bytes, write_json, write_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.rounds import (
    RoundReply,
    RoundRequest,
    Weights,
    client_round,
    load_weights,
)
from xcal.federation.setup import DATA_SEED, Federation, prepare
from xcal.federation.site import Site
from xcal.methods.base import Method, nominal_epsilon, save_state
from xcal.models.registry import build_network
from xcal.privacy import ledger
from xcal.privacy.ahead import SecureNoiseAhead
from xcal.privacy.ledger_rows import Head, Terms
from xcal.privacy.noise import NoiseSource, SeededNoise
from xcal.privacy.statement import Situation, make_statement, statement_text
from xcal.training.evaluate import Predictions, explain_road, explanation_metrics, predict
from xcal.training.local import LocalData, trainable


class Progress(Protocol):
    """Who wants to see how a run comes along."""

    def start(self, total_steps: int, done_steps: int) -> None: ...

    def step(self, count: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class Silent:
    """Nobody does."""

    def start(self, total_steps: int, done_steps: int) -> None: ...

    def step(self, count: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


@contextmanager
def _threads(count: int) -> Iterator[int]:
    before = torch.get_num_threads()
    wanted = count or before
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        torch.set_num_threads(before)


def run_experiment(
    folder: RunFolder, progress: Progress | None = None, federation: Federation | None = None
) -> dict[str, Any]:
    """Train what the folder's configuration says, from wherever it stands; return the result."""
    progress = progress or Silent()
    handle = lock_folder(folder.path)
    try:
        finished = folder.result
        if finished is not None:
            return finished
        experiment = folder.experiment
        about = folder.about
        threads = experiment.threads or about.get("threads") or torch.get_num_threads()
        if about.get("threads") != threads:  # a resumed run keeps the count it began with
            write_json(folder.path / "run.json", {**about, "threads": threads})
        with _threads(threads):
            return _run(folder, federation or prepare(experiment, new=False), progress)
    finally:
        os.close(handle)  # releases the lock, as the end of the process would


def _run(folder: RunFolder, federation: Federation, progress: Progress) -> dict[str, Any]:
    started = time.monotonic()
    experiment = federation.experiment
    _write_preamble(folder, federation)
    model = build_network(experiment, len(federation.data.classes)).to(experiment.device)
    weights: Weights = {k: p.detach().clone() for k, p in trainable(model).items()}
    reported = weights
    first, heads, reports = 0, dict[str, Head](), dict[str, dict[str, Any]]()
    losses: list[float] = []  # on public validation images, one a round
    remembered: dict[str, Any] | None = None
    checkpoint = folder.load_checkpoint()
    if checkpoint is not None:
        tensors, state = checkpoint
        weights, reported = (
            {
                k.removeprefix(kind): v.to(experiment.device)
                for k, v in tensors.items()
                if k.startswith(kind)
            }
            for kind in ("global/", "reported/")
        )
        first = state["rounds"]
        heads = {c: Head(**h) for c, h in state["heads"].items()}
        reports = state["reports"]
        losses, remembered = state.get("losses", []), state.get("server")
    for name in ("rounds.jsonl", "trace.jsonl"):
        folder.rewrite_lines(name, first)
    sites = _make_sites(folder, federation, heads)
    rule = server_rule(
        experiment,
        federation.method,
        federation.participants,
        federation.server_plan,
        ServerSite(folder.about["run"], folder.path / "server", _noise(experiment)),
    )
    server = rule.load_state(remembered)

    def planned(rounds: Sequence[tuple[int, ...]]) -> int:
        return sum(federation.steps_of_round(c) for chosen in rounds for c in chosen)

    progress.start(planned(federation.schedule), planned(federation.schedule[:first]))
    validation = public_subset(federation.data.validation, experiment.validation_images)
    explained = public_subset(federation.data.validation, experiment.road_images)
    for t in range(first, experiment.rounds):
        began = time.monotonic()
        replies = [
            client_round(
                RoundRequest(
                    folder.about["run"], t, federation.own_rounds(c), experiment, tuple(losses)
                ),
                weights,
                sites[c],
                progress.step,
            )
            for c in federation.schedule[t]
        ]
        weights, server = server_round(t, weights, replies, rule, server)
        if not all(bool(torch.isfinite(w).all()) for w in weights.values()):
            raise UserError(
                f"Training diverged in round {t + 1}: lower lr (now {experiment.lr:g})."
            )
        reported = averaged(reported, weights, 1.0 if t == 0 else experiment.average)
        load_weights(model, reported)
        for reply in replies:
            reports[reply.report.client] = asdict(reply.report)
            site = sites[int(reply.report.client)]
            site.expected_head = Head(reply.report.ledger_rows, reply.report.ledger_hash)
        due = (t + 1) % experiment.road_every == 0 or t + 1 == experiment.rounds
        shown = explained if due else None
        record = _round_record(t, replies, model, validation, shown, experiment.device)
        if record["validation_loss"] is not None:
            losses.append(record["validation_loss"])
        record["server"] = rule.report(server)
        record["seconds"] = round(time.monotonic() - began, 3)
        folder.append_lines("rounds.jsonl", [record])
        folder.append_lines(
            "trace.jsonl",
            [{"client": r.report.client, **asdict(s)} for r in replies for s in r.trace],
        )
        folder.save_checkpoint(
            {f"global/{k}": v for k, v in weights.items()}
            | {f"reported/{k}": v for k, v in reported.items()},
            {
                "rounds": t + 1,
                "reports": reports,
                "heads": {s.client: asdict(s.expected_head) for s in sites if s.expected_head},
                "losses": losses,
                "server": save_state(server),
            },
        )
        progress.round(record)
    load_weights(model, reported)
    seconds = time.monotonic() - started
    return _finish(folder, federation, model, reports, rule.report(server), seconds)


def _noise(experiment: Experiment) -> NoiseSource:
    return (
        SeededNoise(experiment.seed) if experiment.noise_source == "seeded" else SecureNoiseAhead()
    )


def _make_sites(folder: RunFolder, federation: Federation, heads: dict[str, Head]) -> list[Site]:
    """One site a client. A simulated home is made once; a home given by path must have a ledger."""
    experiment = federation.experiment
    sites = []
    for client, shard in enumerate(federation.parts.shards):
        name = str(client)
        plan = federation.plans[client]
        if experiment.homes is not None:
            home = Path(experiment.homes[client])
        else:
            home = folder.client_home(name)
            path = home / "ledger.sqlite"
            if not path.exists() and name not in heads:
                ledger.create(
                    path,
                    Terms(
                        population=f"simulated client {name}",
                        unit=experiment.unit,
                        epsilon=None if plan is None else plan.epsilon,
                        delta=None if plan is None else plan.delta,
                        simulated=True,
                    ),
                )
        sites.append(
            Site(
                client=name,
                home=home,
                data=LocalData(
                    federation.data.train.take(shard.indices),
                    unit=experiment.unit,
                    images_per_unit=experiment.images_per_unit,
                    brightness=shard.brightness,
                    device=experiment.device,
                    views=experiment.views,
                    augment=experiment.augment,
                ),
                noise=_noise(experiment),
                build_model=lambda: build_network(experiment, len(federation.data.classes)).to(
                    experiment.device
                ),
                expected_head=heads.get(name),
            )
        )
    return sites


def public_subset(images: Images, wanted: int | None) -> Images | None:
    """A fixed subset of a public split, the same for every seed; None where it is empty."""
    count = len(images) if wanted is None else min(wanted, len(images))
    if count == 0:
        return None
    chosen = np.random.default_rng([DATA_SEED, 11]).permutation(len(images))[:count]
    return images.take(np.sort(chosen))


def _round_record(
    t: int,
    replies: Sequence[RoundReply],
    model: nn.Module,
    validation: Images | None,
    explained: Images | None,
    device: str,
) -> dict[str, Any]:
    measured = predict(model, validation, device=device) if validation is not None else None
    found = explain_road(model, explained, device=device) if explained is not None else {}
    return {
        "round": t,
        "validation_macro_f1": None if measured is None else measured.macro_f1(),
        "validation_loss": None if measured is None else measured.loss(),
        "road_validation": found.get("road"),
        "road_logit_percent_validation": found.get("road_logit_percent"),
        "road_seconds": found.get("seconds"),
        "answered": sum(r.weights is not None for r in replies),
        "exhausted": [r.report.client for r in replies if r.report.halted],
        "clients": [asdict(r.report) for r in replies],
    }


def _write_preamble(folder: RunFolder, federation: Federation) -> None:
    """Schedule, plans and statement: all of it known before the first step."""
    experiment = federation.experiment
    plans = {str(c): p for c, p in enumerate(federation.plans) if p is not None}
    central = {} if federation.server_plan is None else {"server": federation.server_plan}
    write_json(folder.path / "schedule.json", [list(r) for r in federation.schedule])
    write_json(folder.path / "plans.json", {c: p.as_dict() for c, p in (plans | central).items()})
    statement = make_statement(
        Situation(
            method=experiment.method,
            unit=experiment.unit,
            noise=experiment.noise_source,
            plans=plans,
            shared_units=federation.parts.shared_units,
            groups_split=federation.parts.groups_split,
            group_name=federation.data.group_name,
            group_cap=experiment.group_cap,
            server_plan=federation.server_plan,
            epsilon_nominal=nominal_epsilon(federation.method, experiment),
            preset=experiment.preset,
        )
    )
    write_json(folder.path / "statement.json", statement)
    write_bytes(folder.path / "statement.txt", statement_text(statement).encode())


def _finish(
    folder: RunFolder,
    federation: Federation,
    model: nn.Module,
    reports: dict[str, dict[str, Any]],
    server: dict[str, Any] | None,
    seconds: float,
) -> dict[str, Any]:
    """Measure on the whole test set and write the result, last of all."""
    experiment, about = federation.experiment, folder.about
    test = predict(model, federation.data.test, device=experiment.device)
    _save_predictions(folder.path / "predictions.npz", federation.data.test, test)
    write_tensors(
        folder.path / "model.safetensors",
        model.state_dict(),
        {"network": experiment.network, "classes": list(federation.data.classes)},
    )
    subset = public_subset(federation.data.test, experiment.road_test_images)
    explanations = (
        explanation_metrics(model, subset, device=experiment.device) if subset is not None else None
    )
    road = (explanations or {}).get("road", {})
    private = any(p is not None for p in federation.plans)
    central = federation.server_plan  # its unit is the client: a column of its own
    nominal = nominal_epsilon(federation.method, experiment)
    paper = [r["epsilon_paper"] for r in reports.values() if r["epsilon_paper"] is not None]
    result = {
        "method": experiment.method,
        "data": experiment.data,
        "network": experiment.network,
        "macro_f1": test.macro_f1(),
        "road": road.get("road"),
        "road_logit_percent": road.get("road_logit_percent"),
        "epsilon_target": experiment.epsilon if private else None,
        "epsilon_nominal": nominal,
        "epsilon_paper": max(paper) if paper else None,
        "epsilon_client": central.epsilon if central is not None else None,
        "delta": experiment.delta if private or central is not None else None,
        "unit": central.unit if central is not None else experiment.unit if private else None,
        "noise": None if nominal is None and central is None else experiment.noise_source,
        "mean_sigma": _mean_sigma(folder) if nominal is not None else None,
        "seed": experiment.seed,
        "clients": [
            {
                "id": r["client"],
                "units": r["units"],
                "epsilon_spent": r["epsilon_spent"],
                "epsilon_paper": r["epsilon_paper"],
                "share_spent": r["share_spent"],
                "order": r["order"],
                "steps": r["steps"],
                "halted": r["halted"],
            }
            for _, r in sorted(reports.items(), key=lambda item: int(item[0]))
        ],
        "server": server,
        "classification": test.metrics(),
        "explanations": explanations,
        "rounds": experiment.rounds,
        "threads": about["threads"],
        "seconds": round(seconds, 1),
        "unused": unused_keys(federation.method, about["given"]),
        "commit": about["commit"],
        "versions": about["versions"],
        "command": about["command"],
    }
    card = card_text(experiment, federation.data, read_json(folder.path / "statement.json"), result)
    write_bytes(folder.path / "card.md", card.encode())
    write_json(folder.path / "result.json", result)
    return result


def unused_keys(method: Method, given: Sequence[str]) -> list[str]:
    """Keys that were given and make no difference to the method."""
    return sorted(k for k in given if k not in method.uses)


def _mean_sigma(folder: RunFolder) -> float | None:
    sigmas = [line["sigma"] for line in folder.read_lines("trace.jsonl")]
    return float(np.mean(sigmas)) if sigmas else None


def _save_predictions(path: Path, images: Images, found: Predictions) -> None:
    packed = io.BytesIO()
    np.savez_compressed(
        packed,
        id=images.ids,
        group=images.groups,
        label=found.labels,
        predicted=found.predicted,
        confidence=found.confidence,
        probabilities=found.probabilities,
    )
    write_bytes(path, packed.getvalue())
