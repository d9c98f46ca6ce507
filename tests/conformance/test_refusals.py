"""Whatever is refused, by whichever method: weights and ledger stay as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from made_sites import make_sites
from support import TINY
from xcal.dp.account import Account
from xcal.dp.clipping.named import trainable
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.rows import Row, charges_of, read_rows
from xcal.dp.noise import SeededNoise
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.aggregation import server_round
from xcal.federation.central import ServerSite, server_rule
from xcal.federation.exchange import RoundReply, RoundRequest, Weights
from xcal.federation.folder import RunFolder
from xcal.federation.loaded_site import LoadedSite
from xcal.federation.rounds import client_round
from xcal.federation.setup import Federation, prepare
from xcal.methods.base import CentralMethod
from xcal.methods.registry import METHODS

ALL = sorted(METHODS)
PRIVATE = [name for name in ALL if METHODS[name].private]
CENTRAL = [name for name in ALL if isinstance(METHODS[name], CentralMethod)]


class Scene:
    """One method's federation before its first round, and its first client."""

    def __init__(self, method: str, folder: Path) -> None:
        experiment = make_experiment({**TINY, "method": method})
        self.federation: Federation = prepare(experiment)
        self.folder = RunFolder.create(folder, experiment, [])
        self.sites: list[LoadedSite] = make_sites(self.folder, self.federation)
        self.weights: Weights = {
            k: p.detach().clone() for k, p in trainable(self.sites[0].build_model()).items()
        }

    def ask(self, weights: Weights, round_number: int = 0, client: int = 0) -> RoundReply:
        request = RoundRequest(
            "r",
            round_number,
            self.federation.own_rounds(client),
            self.federation.experiment,
        )
        return client_round(request, weights, self.sites[client])

    def rows(self, client: int = 0) -> list[Row]:
        return read_rows(self.sites[client].ledger_path)


def refusing_after(admitted: int, patch: pytest.MonkeyPatch) -> None:
    """The filter admits so many steps and then none."""
    pay, calls = Account.pay, [0]

    def limited(self: Account, *args: Any, **kwargs: Any) -> None:
        if calls[0] == admitted:
            raise BudgetExhausted("no room")
        calls[0] += 1
        pay(self, *args, **kwargs)

    patch.setattr(Account, "pay", limited)


@pytest.mark.parametrize("method", ALL)
def test_a_refused_request_changes_nothing(method: str, tmp_path: Path) -> None:
    scene = Scene(method, tmp_path / "run")
    before = scene.rows()
    name = next(iter(scene.weights))
    broken = {**scene.weights, name: torch.full_like(scene.weights[name], torch.nan)}
    short = {k: v for k, v in scene.weights.items() if k != name}
    for weights in (broken, short):
        with pytest.raises(UserError):
            scene.ask(weights)
    with pytest.raises(UserError, match="not one of this client's own"):
        scene.ask(scene.weights, round_number=99)
    assert scene.rows() == before
    assert not list(scene.sites[0].site_dir.glob("runs/*/*.safetensors"))


@pytest.mark.parametrize("method", PRIVATE)
def test_a_refused_step_releases_nothing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(method, tmp_path / "run")
    with monkeypatch.context() as patch:
        refusing_after(0, patch)
        reply = scene.ask(scene.weights)
    assert reply.weights is None
    assert reply.report.halted
    assert reply.report.epsilon_spent == 0.0
    assert [r.kind for r in scene.rows()] == ["create", "run", "halt"]
    # halted for good: the next round trains nothing either and pays nothing
    later = scene.ask(scene.weights, round_number=1)
    assert later.weights is None
    assert charges_of(scene.rows(), "r") == []


@pytest.mark.parametrize("method", PRIVATE)
def test_what_was_admitted_before_the_refusal_is_all_that_moved(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(method, tmp_path / "run")
    with monkeypatch.context() as patch:
        refusing_after(2, patch)
        reply = scene.ask(scene.weights)
    assert len(reply.trace) == 2
    assert len(charges_of(scene.rows(), "r")) == 2
    assert reply.weights is not None
    again = scene.ask(scene.weights)  # the stored answer, for the same price
    assert again.weights is not None
    assert all(torch.equal(reply.weights[k], again.weights[k]) for k in reply.weights)
    assert len(charges_of(scene.rows(), "r")) == 2


@pytest.mark.parametrize("method", CENTRAL)
def test_a_server_that_may_not_release_leaves_the_weights(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(method, tmp_path / "run")
    federation = scene.federation
    site = ServerSite("r", tmp_path / "server", SeededNoise(0))
    rule = server_rule(
        federation.experiment,
        federation.method,
        federation.participants,
        federation.server_plan,
        site,
    )
    state = rule.load_state(None)
    replies = [scene.ask(scene.weights, client=c) for c in range(3)]
    with monkeypatch.context() as patch:
        refusing_after(0, patch)
        weights, state = server_round(0, scene.weights, replies, rule, state)
    assert all(torch.equal(weights[k], scene.weights[k]) for k in weights)
    assert state.halted
    assert state.releases == 0
    assert charges_of(read_rows(site.ledger_path), "r") == []
    json.dumps(rule.report(state))
