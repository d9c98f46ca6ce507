"""What the server makes of answers, and what one poisoning client of five can do to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from made_sites import make_sites
from support import TINY
from xcal.dp.clipping.named import trainable
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.aggregation import Mean, Median, ServerRule, TrimmedMean, server_round
from xcal.federation.evaluation import predict
from xcal.federation.exchange import ClientReport, RoundReply, RoundRequest, Weights, load_weights
from xcal.federation.folder import RunFolder
from xcal.federation.rounds import client_round
from xcal.federation.setup import prepare

RULES: dict[str, ServerRule] = {
    "mean": Mean(),
    "median": Median(),
    "trimmed-mean": TrimmedMean(0.2),
}


def reply(client: int, weights: Weights | None, units: int = 10) -> RoundReply:
    report = ClientReport(
        str(client), units, 1, weights is None, None, None, None, None, None, None, 1, "0" * 64
    )
    return RoundReply(report, weights)


def replies(*values: list[float]) -> list[RoundReply]:
    return [reply(k, {"w": torch.tensor(v)}) for k, v in enumerate(values)]


def combined(rule: ServerRule, answers: list[RoundReply], old: Weights) -> Weights:
    return server_round(0, old, answers, rule, rule.load_state(None))[0]


def test_mean_weighs_by_units_and_leaves_out_who_trained_nothing() -> None:
    old = {"w": torch.zeros(2)}
    answers = [
        reply(0, {"w": torch.tensor([1.0, 0.0])}, units=30),
        reply(1, None),
        reply(2, {"w": torch.tensor([0.0, 4.0])}, units=10),
    ]
    assert combined(Mean(), answers, old)["w"].tolist() == [0.75, 1.0]


@pytest.mark.parametrize("name", RULES)
def test_without_answers_the_weights_stay(name: str) -> None:
    old = {"w": torch.tensor([3.0, 4.0])}
    kept = combined(RULES[name], [reply(0, None)], old)
    assert torch.equal(kept["w"], old["w"])
    assert kept["w"] is not old["w"]


def test_median_and_trimmed_mean_by_coordinate() -> None:
    old = {"w": torch.zeros(2)}
    five = replies([0.0, 9.0], [1.0, 8.0], [2.0, 0.0], [3.0, 6.0], [100.0, 7.0])
    assert combined(Median(), five, old)["w"].tolist() == [2.0, 7.0]
    assert combined(TrimmedMean(0.2), five, old)["w"].tolist() == [2.0, 7.0]
    assert combined(TrimmedMean(0.1), five, old)["w"].tolist() == [2.0, 7.0]  # rounded up
    four = replies([0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [30.0, 0.0])
    assert combined(Median(), four, old)["w"].tolist() == [1.5, 0.0]


@pytest.mark.parametrize("answers", range(1, 12))
def test_what_is_dropped_never_empties_the_rest(answers: int) -> None:
    for trim in (0.01, 0.2, 0.3, 0.49):
        k = TrimmedMean(trim).dropped(answers)
        assert 2 * k < answers
        assert k >= min(math.floor(trim * answers), (answers - 1) // 2)


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_one_of_five_cannot_leave_the_honest_range(name: str, value: float) -> None:
    rng = np.random.default_rng(3)
    honest = torch.from_numpy(rng.normal(size=(4, 50))).float()
    for place in range(5):
        rows = [*honest[:place], torch.full((50,), value), *honest[place:]]
        answers = [reply(k, {"w": row}) for k, row in enumerate(rows)]
        found = combined(RULES[name], answers, {"w": torch.zeros(50)})["w"]
        assert (found >= honest.min(dim=0).values - 1e-6).all()
        assert (found <= honest.max(dim=0).values + 1e-6).all()


# --- a real federation of five, one of which poisons ----------------------------------------------

FIVE: dict[str, Any] = {
    **TINY,
    "data": "support:colored",
    "clients": 5,
    "rounds": 5,
    "batch": 10,
    "method": "fl",
    "road_images": 0,
    "road_test_images": 0,
}


def poisoned(kind: str, weights: Weights, answer: RoundReply) -> RoundReply:
    """What the last client sends instead of its own answer."""
    assert answer.weights is not None
    generator = torch.Generator().manual_seed(answer.report.steps)
    sent = {}
    for name, old in weights.items():
        update = answer.weights[name] - old
        if kind == "flip":
            sent[name] = old - 10 * update
        else:
            sent[name] = old + 3 * torch.randn(old.shape, generator=generator)
    return RoundReply(answer.report, sent)


def learnt(kinds: list[str], folder: Path, rule: ServerRule) -> float:
    """Test macro F1 of a federation of five whose last clients poison, round by round."""
    experiment = make_experiment(FIVE)
    federation = prepare(experiment)
    sites = make_sites(RunFolder.create(folder, experiment, []), federation)
    model = sites[0].build_model()
    weights: Weights = {k: p.detach().clone() for k, p in trainable(model).items()}
    state = rule.load_state(None)
    for t in range(experiment.rounds):
        answers = []
        for client, site in enumerate(sites):
            request = RoundRequest("r", t, federation.own_rounds(client), experiment)
            answer = client_round(request, weights, site)
            place = client - (5 - len(kinds))
            answers.append(answer if place < 0 else poisoned(kinds[place], weights, answer))
        weights, state = server_round(t, weights, answers, rule, state)
    load_weights(model, weights)
    return predict(model, federation.data.test).macro_f1()


@pytest.mark.parametrize("kind", ["flip", "random"])
def test_one_poisoner_of_five(kind: str, tmp_path: Path) -> None:
    """The mean breaks, both robust rules hold."""
    found = {name: learnt([kind], tmp_path / name, rule) for name, rule in RULES.items()}
    assert found["mean"] < 0.7
    assert found["median"] > 0.95
    assert found["trimmed-mean"] > 0.95


def test_where_the_robust_rules_end(tmp_path: Path) -> None:
    """Two of five pass a trim of one at each end but no median; three of five pass both."""
    assert learnt(["flip"] * 2, tmp_path / "a", Median()) > 0.95
    assert learnt(["flip"] * 2, tmp_path / "b", TrimmedMean(0.2)) < 0.5
    assert learnt(["flip"] * 3, tmp_path / "c", Median()) < 0.5


@pytest.mark.parametrize("name", RULES)
def test_without_poisoners_every_rule_learns(name: str, tmp_path: Path) -> None:
    """Through the real engine, chosen by its name."""
    result = xcal.run(tmp_path / "run", **{**FIVE, "aggregation": name})
    assert result["macro_f1"] > 0.95


def test_a_robust_rule_needs_three_clients() -> None:
    for keys in ({"clients": 2}, {"clients": 5, "participants": 2}):
        with pytest.raises(UserError, match="withstands nobody among 2"):
            prepare(make_experiment({**TINY, **keys, "method": "fl", "aggregation": "median"}))
    # all data at one client: there is nothing to aggregate
    prepare(make_experiment({**TINY, "method": "centralized", "aggregation": "median"}))
