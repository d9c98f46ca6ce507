"""The local engine: the paper's Algorithm 2 on one machine, resumable at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xcal.config import Experiment
from xcal.dp.calibration import Plan
from xcal.dp.noise import NoiseSource, SeededNoise
from xcal.dp.noise_ahead import SecureNoiseAhead
from xcal.federation.admission import check_same_data, to_the_user
from xcal.federation.answer import respond
from xcal.federation.central import ServerSite, server_rule
from xcal.federation.coordinator import (
    Answer,
    Carrier,
    Coordinator,
    NullCallback,
    Progress,
    Remote,
    Transport,
)
from xcal.federation.exchange import Question, RoundRequest
from xcal.federation.files import lock_folder, write_json
from xcal.federation.folder import RunFolder
from xcal.federation.known_heads import FILE, KnownHeads
from xcal.federation.loaded_site import Held, LoadedSite, keep_freed_memory, torch_threads
from xcal.federation.loggers import Logged, Logger, make_logger
from xcal.federation.masked import (
    MaskedRounds,
    announcements,
    introduce,
    introduced,
    roster_of,
)
from xcal.federation.masks import Announcement, MaskKeys, Roster
from xcal.federation.messages import Refusal
from xcal.federation.outcome import finish as _finish
from xcal.federation.outcome import public_subset, write_preamble
from xcal.federation.request_refusals import Refused
from xcal.federation.rounds import OnStep
from xcal.federation.setup import Federation, ask_sites, prepare
from xcal.federation.simulated import make_ledger
from xcal.federation.site_directory import Owner, read_owner
from xcal.federation.site_identity import site_key
from xcal.federation.workers import Responder, Workers, worker_count
from xcal.methods.client_data import LocalData
from xcal.methods.feature_store import FeatureStore
from xcal.methods.loss import loss_of
from xcal.methods.registry import checked_plan
from xcal.models.model_registry import build_network

__all__ = ["InProcess", "NullCallback", "Progress", "public_subset", "run_experiment"]


@dataclass(frozen=True)
class LocalClient:
    """A client of this very process: its part of the experiment's data stays in memory."""

    name: str
    owner: Owner
    held: Held
    part: int
    threads: int = 0  # as many as the process has

    def hold(self, experiment: Experiment) -> Held:
        check_same_data(self.owner, experiment, self.part)
        return self.held


class InProcess:
    """A transport to clients of this very process, one after the other.

    Server and clients are one user here, so a client's refusal is shown with its reason.
    """

    def __init__(self, clients: Sequence[LocalClient], on_step: OnStep) -> None:
        self._clients = {client.name: client for client in clients}
        self._on_step = on_step

    def ask(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Answer]:
        return {q.client: answer_of(self._clients[q.client], q, self._on_step) for q in questions}

    def late(self) -> list[str]:
        return []

    def close(self) -> None:
        """There is nobody to end."""


def answer_of(client: LocalClient, question: Question, on_step: OnStep) -> Answer:
    try:
        with to_the_user(client.owner):
            return respond(client, question, on_step)
    except Refused as refusal:
        if refusal.code != "diverged":  # which ends the run wherever its clients are
            raise
        return Refusal(client.name, refusal.code)


def in_worker(clients: Sequence[LocalClient], experiment: Experiment) -> Responder:
    """What answers for these clients in a worker process: their noise is made there, by it."""
    own = {
        c.name: replace(
            c, held=c.held._replace(site=replace(c.held.site, noise=_noise(experiment)))
        )
        for c in clients
    }
    return lambda question, on_step: answer_of(own[question.client], question, on_step)


def run_experiment(
    folder: RunFolder,
    progress: Progress | None = None,
    federation: Federation | None = None,
    carrier: Carrier | None = None,
    workers: int | None = None,
    logger: str | Logger | None = None,
    heads: Path | None = None,
) -> dict[str, Any]:
    """Train what the folder's configuration says, from wherever it stands; return the result.

    `carrier`: an engine that carries messages to clients elsewhere; without one the clients are
    simulated on this machine, by as many `workers` as the configuration says if not given here.
    `logger`: a name or an object, instead of the configuration's `log`.
    `heads`: where a server that outlives its runs keeps what it was told of its clients' ledgers.
    """
    progress, made = progress or NullCallback(), None
    handle = lock_folder(folder.path)
    try:
        finished = folder.result
        if finished is not None:
            return finished
        experiment = folder.experiment
        keep_freed_memory()
        with torch_threads(threads_of(folder)):
            federation = federation or prepare(experiment, new=False)
            if logger is None or isinstance(logger, str):
                name = experiment.log if logger is None else logger
                made = logger = make_logger(name, folder.path, folder.about["run"])
            if logger is None:
                return _run(folder, federation, progress, carrier, workers, heads)
            logged = Logged(progress, logger)
            result = _run(folder, federation, logged, carrier, workers, heads)
            logged.result(result, experiment.rounds)
            return result
    finally:
        if made is not None:
            with suppress(Exception):  # a logger that cannot end does not take the result with it
                made.close()
        os.close(handle)  # releases the lock, as the end of the process would


def threads_of(folder: RunFolder) -> int:
    """How many threads the run computes with: a resumed run keeps the count it began with."""
    about = folder.about
    threads: int = folder.experiment.threads or about.get("threads") or torch.get_num_threads()
    if about.get("threads") != threads:
        write_json(folder.path / "run.json", {**about, "threads": threads})
    return threads


def _run(
    folder: RunFolder,
    federation: Federation,
    progress: Progress,
    carrier: Carrier | None,
    workers: int | None,
    heads: Path | None,
) -> dict[str, Any]:
    started = time.monotonic()
    experiment = federation.experiment
    rule = server_rule(
        experiment,
        federation.method,
        federation.participants,
        federation.server_plan,
        ServerSite(folder.about["run"], folder.path / "server", server_noise(federation)),
    )
    _tell_unmeasured(folder, federation, progress)
    coordinator = Coordinator(folder, federation, rule, progress)
    state = coordinator.state
    write_preamble(folder, federation, state.reports)
    if carrier is None:
        clients = make_clients(folder, federation, set(state.heads))
        if state.rounds < experiment.rounds:
            ask_sites(federation, folder.about["run"])
        with closing(_transport(clients, federation, workers, progress.step)) as transport:
            if experiment.trust == "masked":
                model = _run_masked(coordinator, transport, clients)
            else:
                model = coordinator.run(transport)
    else:
        known = KnownHeads(heads or folder.path / FILE)
        remote = Remote(carrier, coordinator.model, progress, known)
        masked = experiment.trust == "masked"
        model = _run_masked_elsewhere(coordinator, remote) if masked else coordinator.run(remote)
    seconds = time.monotonic() - started
    server = rule.report(state.server)
    return _finish(folder, federation, model, state.reports, server, seconds, progress.measure)


def _run_masked(
    coordinator: Coordinator, transport: Transport, clients: Sequence[LocalClient]
) -> nn.Module:
    """All rounds that are left, by sums under masks: every client with a key of its own."""
    folder, federation = coordinator.folder, coordinator.federation
    run, identities = folder.about["run"], {c.name: site_key(c.owner.site_dir) for c in clients}
    public = {name: key.public_key().public_bytes_raw() for name, key in identities.items()}
    roster = Roster(public, federation.experiment.honest_sites)
    keys = {
        c.name: MaskKeys(c.held.site.folder(run), run, c.name, identities[c.name], roster)
        for c in clients
    }
    introduce(keys)
    for client in clients:
        client.held.site.masks = keys[client.name]
    model = coordinator.run(_masked_rounds(coordinator, transport, roster, federation.plans))
    for key in keys.values():
        key.forget()
    return model


def _run_masked_elsewhere(coordinator: Coordinator, remote: Remote) -> nn.Module:
    """The same with clients that have their keys, and rosters by their owners' word."""
    folder, federation = coordinator.folder, coordinator.federation
    experiment, run = federation.experiment, folder.about["run"]
    owns = {name: federation.own_rounds(c) for c, name in enumerate(federation.names)}

    def asked(number: int) -> list[Question]:
        return [
            Question(name, RoundRequest(run, number, own, experiment), {})
            for name, own in owns.items()
        ]

    told = introduced(remote, asked(0), folder.path, experiment.round_timeout)
    plans = [
        checked_plan(federation.method, experiment, told[name].units, len(own))
        for name, own in owns.items()
    ]
    roster = roster_of(run, told, experiment.honest_sites)
    rounds = _masked_rounds(coordinator, remote, roster, plans, announcements(told))
    model = coordinator.run(rounds)
    remote.introductions(experiment.rounds, asked(experiment.rounds), experiment.round_timeout)
    return model


def _masked_rounds(
    coordinator: Coordinator,
    transport: Transport,
    roster: Roster,
    plans: Sequence[Plan | None],
    announced: Sequence[Announcement] = (),
) -> MaskedRounds:
    known = [plan for plan in plans if plan is not None]
    return MaskedRounds(
        transport,
        roster,
        coordinator.federation.experiment,
        coordinator.model,
        sigma=max(plan.sigma_static for plan in known),
        units=max(plan.units for plan in known),
        folder=coordinator.folder.path,
        announced=announced,
    )


def _transport(
    clients: Sequence[LocalClient], federation: Federation, workers: int | None, on_step: OnStep
) -> InProcess | Workers:
    """How questions reach the clients of this machine: here, or in processes side by side."""
    experiment = federation.experiment
    count = worker_count(
        workers or experiment.workers, torch.get_num_threads(), federation.participants
    )
    if count == 1 or experiment.trust == "masked":  # whose keys stay in one process
        return InProcess(clients, on_step)
    steps = {name: federation.steps_of_round(c) for c, name in enumerate(federation.names)}
    return Workers(lambda: in_worker(clients, experiment), steps, count, on_step)


def _tell_unmeasured(folder: RunFolder, federation: Federation, progress: Progress) -> None:
    """Say and write down what the run will not be able to measure, before its first step."""
    about, found = folder.about, list(federation.warnings)
    if about.get("unmeasured", []) != found:
        write_json(folder.path / "run.json", {**about, "unmeasured": found})
    for text in found:
        progress.say(text)


def server_noise(federation: Federation) -> NoiseSource:
    """A trusted server's own noise.

    To clients elsewhere it sends the experiment's seed: noise that could be made of it would hide
    nothing from them.
    """
    return SecureNoiseAhead() if federation.parts is None else _noise(federation.experiment)


def _noise(experiment: Experiment) -> NoiseSource:
    if experiment.noise_source == "secure":
        return SecureNoiseAhead()
    return SeededNoise(experiment.seed, paired=experiment.paired)


def network_builder(experiment: Experiment, classes: int) -> Callable[[], nn.Module]:
    """What gives a round its network. Every round loads the weights that it is sent into it.

    A network of this package is built once a process, since nothing else of it changes. One of the
    user's own is built for every round: whatever it keeps must not outlive that.
    """

    def build() -> nn.Module:
        return build_network(experiment, classes).to(experiment.device)

    return build if ":" in experiment.network else cache(build)


def make_clients(folder: RunFolder, federation: Federation, known: set[str]) -> list[LocalClient]:
    """The clients. A simulated site is made once; a site given by path must have a ledger.

    `known`: clients that have answered before, whose ledgers must be there.
    """
    experiment, classes = federation.experiment, len(federation.data.classes)
    assert federation.parts is not None
    build = network_builder(experiment, classes)
    clients = []
    for client, shard in enumerate(federation.parts.shards):
        name = str(client)
        if experiment.sites is not None:
            owner = read_owner(Path(experiment.sites[client]))
        else:
            owner = Owner(folder.client_dir(name))
            if not owner.ledger_path.exists() and name not in known:
                make_ledger(owner.ledger_path, federation, client)
        site = LoadedSite(
            client=name,
            site_dir=owner.site_dir,
            data=LocalData(
                federation.data.train.take(shard.indices),
                unit=experiment.privacy_unit,
                images_per_unit=experiment.images_per_unit,
                brightness=shard.brightness,
                device=experiment.device,
                views=experiment.views,
                augment=experiment.augment,
                declared_units=federation.declared[client] if federation.declared else None,
                store=FeatureStore.of_environment() if experiment.sites is None else None,
            ),
            noise=_noise(experiment),
            dealt=federation.dealt,
            partition=None if experiment.sites is None else federation.partition(client),
            build_model=build,
            loss=loss_of(experiment),
        )
        side = federation.data.train.pixels.shape[1]
        clients.append(LocalClient(name, owner, Held(site, classes, side), client))
    return clients
