"""What decides *where* and *how much*: each part off is its base method; all of them together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from step_tools import tiny_bench
from support import TINY, micro
from xcal.dp.account import Account
from xcal.dp.accounting import joint_sigma
from xcal.dp.calibration import Plan
from xcal.dp.ledger import ledger
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import RunTerms, Terms, charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.explain.signal import SignalSettings
from xcal.federation.files import read_tensors
from xcal.methods.adaptive_clip import ClipState, QuantileRule, quantile_step
from xcal.methods.agp_dp import AGP_DP, ChannelRule, cam_layer_of, released_importance
from xcal.methods.context import Optimizer, ReplayKey, StepContext
from xcal.methods.fl_dp import FL_DP
from xcal.methods.registry import plan_for
from xcal.methods.step_parts import dp_step
from xcal.methods.xcal_steered import SteeredRule, SteeredState, steered_step
from xcal.models.resnet import resnet18

KEYS = {"epsilon": 8.0, "delta": 1e-3, "batch": 20, "rounds": 4}
STEPS = 4

# Nothing here looks at explanations of the finished model.
QUICK = {**TINY, "road_images": 0, "road_test_images": 0}


@contextmanager
def account(path: Path, plan: Plan) -> Iterator[Account]:
    if not path.exists():
        ledger.create(path, Terms("p", "record", 8.0, 1e-3, simulated=True))
    terms = RunTerms("r", "m", "record", 8.0, 1e-3, plan.order, plan.budget, plan.steps, "seeded")
    with Ledger(path) as book:
        yield Account(book, terms, replayable=True)


def bench_with(book: Account) -> StepContext:
    model = micro(3, seed=1)
    return tiny_bench(
        model,
        method="same",
        account=book,
        optimizer=Optimizer(model, "sgd", 0.1, 0.9),
        clip=0.3,
        replay=ReplayKey(b"secret", "context"),
    )


def trained(tmp_path: Path, name: str, plan: Plan, step: Callable[..., Any]) -> dict[str, Any]:
    """Some real steps on one and the same noise; the weights they lead to."""
    with account(tmp_path / f"{name}.sqlite", plan) as book:
        context = bench_with(book)
        state = None
        for number in range(STEPS):
            state, _ = step(context, number, state)
    return dict(context.model.state_dict())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def static(tmp_path: Path) -> tuple[Plan, dict[str, Any]]:
    experiment = make_experiment({"method": "fl-dp", **KEYS})
    plan = plan_for(experiment, 150)

    def step(context: StepContext, number: int, state: None) -> Any:
        return FL_DP.step(context, number, experiment, plan, state)

    return plan, trained(tmp_path, "static", plan, step)


@pytest.mark.parametrize(
    ("off", "equal"),
    [({"protection": 1.0}, True), ({"protected": 0.0}, True), ({}, False)],
)
def test_agp_dp_without_protection_is_static_noise(
    static: Any, tmp_path: Path, off: dict[str, Any], equal: bool
) -> None:
    plan, weights = static
    experiment = make_experiment({"method": "agp-dp", **KEYS, **off})

    def step(context: StepContext, number: int, state: Any) -> Any:
        state = state or AGP_DP.load_state(None)
        return AGP_DP.step(context, number, experiment, plan, state)

    assert same(trained(tmp_path, "mine", plan, step), weights) == equal


@pytest.mark.parametrize(("rate", "equal"), [(0.0, True), (0.2, False)])
def test_adaptive_clip_that_does_not_follow_is_static_noise(
    static: Any, tmp_path: Path, rate: float, equal: bool
) -> None:
    plan, weights = static
    # A count that costs nothing, so that the gradient has the base's σ.
    rule = QuantileRule(rate=rate, start=0.3, kappa_b=1e12)

    def step(context: StepContext, number: int, state: Any) -> Any:
        return quantile_step(
            context, number, rule, state or ClipState(), sigma_eff=plan.sigma_static
        )

    # κ_b so large would make C a random walk: it is read, not obeyed, at rate 0.
    assert same(trained(tmp_path, "mine", plan, step), weights) == equal


def test_xcal_without_signal_and_reach_is_static_noise_of_its_own_sigma(
    static: Any, tmp_path: Path
) -> None:
    plan, _ = static
    rule = SteeredRule(plan, SignalSettings(), w=0.0, with_signal=False, channels=ChannelRule(0.0))
    used: list[float] = []

    def ours(context: StepContext, number: int, state: Any) -> Any:
        state, record = steered_step(context, number, rule, state or SteeredState())
        used.append(record.sigma)
        return state, record

    def base(context: StepContext, number: int, state: Any) -> Any:
        return None, dp_step(context, number, sigma=used[number])

    mine = trained(tmp_path, "mine", plan, ours)
    assert all(abs(sigma / plan.sigma_static - 1) < 0.003 for sigma in used)
    assert same(mine, trained(tmp_path, "base", plan, base))


def test_the_geometry_moves_noise_and_makes_none() -> None:
    model = micro(3, seed=1)
    layer = cam_layer_of(model)
    rule = ChannelRule(0.25, 4.0)
    channels = rule.choose(model)
    geometry = rule.geometry(layer, channels)
    assert set(geometry.weights) == {"conv.weight", "conv.bias", "norm.weight", "norm.bias"}
    for weights in geometry.weights.values():
        d = torch.tensor(weights)
        assert float((1 / d.square()).mean()) == pytest.approx(1.0)  # summed variance unchanged
        assert float(d.max() / d.min()) == pytest.approx(4.0)
        assert tuple(torch.nonzero(d == d.max()).squeeze(1).tolist()) == channels
    # The most important channels are those in which the classes' head weights differ most.
    with torch.no_grad():
        model.head.weight.fill_(3.0)  # type: ignore[union-attr,operator]
        model.head.weight[1, 5] += 1.0  # type: ignore[union-attr,operator,index]
    assert int(released_importance(model).argmax()) == 5
    assert 5 in rule.choose(model)


COMBINATIONS = list(product(["none", "importance"], ["fixed", "quantile"]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """One finished run of every combination."""
    base = tmp_path_factory.mktemp("runs")
    folders = {}
    for geometry, clipping in COMBINATIONS:
        folder = base / f"{geometry}-{clipping}"
        keys = {"geometry": geometry, "clipping": clipping, "signal_every": 2}
        xcal.run(folder, method="xcal-steered", **{**QUICK, **keys})
        folders[geometry, clipping] = folder
    return folders


@pytest.mark.parametrize(("geometry", "clipping"), COMBINATIONS)
def test_xcal_with_any_parts_is_one_joint_release(
    finished: dict[tuple[str, str], Path], geometry: str, clipping: str
) -> None:
    folder = finished[geometry, clipping]
    result = json.loads((folder / "result.json").read_text())
    assert result["epsilon_target"] == 8.0
    for client in result["clients"]:
        assert not client["halted"]
        assert 0.99 < client["share_spent"] <= 1
        path = folder / "clients" / client["id"] / "ledger.sqlite"
        assert verify(path).ok
        rows = read_rows(path)
        (run,) = runs_of(rows).values()
        for charge in charges_of(rows, run.run):
            names = {r.name for r in charge.releases}
            assert ("count" in names) == (clipping == "quantile")
            joint = joint_sigma(*(r.noise / r.sensitivity for r in charge.releases))
            assert charge.sigma == pytest.approx(joint, rel=1e-9)
    plan = json.loads((folder / "plans.json").read_text())["0"]
    assert (plan["sigma_count"] is not None) == (clipping == "quantile")


def test_each_part_changes_what_is_learnt_and_off_it_changes_nothing(
    finished: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    def weights(folder: Path) -> dict[str, Any]:
        found = read_tensors(folder / "model.safetensors")
        assert found is not None
        return found[0]

    for one, other in pairwise(COMBINATIONS):
        assert not same(weights(finished[one]), weights(finished[other]))
    # Protection 1 spares nobody: to the bit the same as no geometry.
    keys = {"geometry": "importance", "protection": 1.0, "signal_every": 2}
    xcal.run(tmp_path / "off", method="xcal-steered", **{**QUICK, **keys})
    assert same(weights(tmp_path / "off"), weights(finished["none", "fixed"]))


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "agp-dp"},
        {"method": "adaptive-clip"},
        {"method": "xcal-steered", "geometry": "importance", "clipping": "quantile"},
    ],
)
def test_a_round_taken_up_in_the_middle_ends_the_same(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C and the spared channels are remembered, not made anew from weights that have moved."""
    xcal.run(tmp_path / "whole", **{**QUICK, **keys})
    calls = {"count": 0}
    real = Optimizer.step

    def fails(self: Optimizer, gradient: Any) -> None:
        calls["count"] += 1
        if calls["count"] == 21:  # in the second round of a client
            raise RuntimeError("power cut")
        real(self, gradient)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", fails)
        patch.setattr("xcal.federation.loaded_site.Pace.due", lambda self: True)
        with pytest.raises(RuntimeError, match="power cut"):
            xcal.run(tmp_path / "cut", **{**QUICK, **keys})
    xcal.run(tmp_path / "cut", resume=True)
    for name in ("model.safetensors", "trace.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_geometry_is_another_query(tmp_path: Path) -> None:
    """The digest of a step's inputs holds D: seeded noise never serves two of them."""
    plan = plan_for(make_experiment({"method": "fl-dp", **KEYS}), 150)

    def one_step(protection: float) -> None:
        experiment = make_experiment({"method": "agp-dp", **KEYS, "protection": protection})
        with account(tmp_path / "one.sqlite", plan) as book:
            book.rewind(0, 0)
            AGP_DP.step(bench_with(book), 0, experiment, plan, AGP_DP.load_state(None))

    one_step(2.0)
    one_step(2.0)  # the same again is the same release
    with pytest.raises(UserError, match="other inputs"):
        one_step(2.0000001)


def test_a_network_whose_map_is_frozen_and_has_no_head_is_refused(tmp_path: Path) -> None:
    frozen = {**QUICK, "network": "misbehaving:frozen_map"}
    for keys in ({"method": "agp-dp"}, {"method": "xcal-steered", "geometry": "importance"}):
        with pytest.raises(UserError, match="does not train here"):
            xcal.run(tmp_path / "r", **{**frozen, **keys})
    assert not (tmp_path / "r").exists()


def test_where_only_a_head_trains_its_columns_carry_the_weights() -> None:
    model = resnet18(3, norm="group", trainable="head", seed=0)
    rule = ChannelRule(0.25, 4.0)
    geometry = rule.geometry(cam_layer_of(model), rule.choose(model))
    (weights,) = geometry.inputs.values()
    assert set(geometry.inputs) == {"fc.weight"} and len(weights) == 512
    low, high = sorted(set(weights))
    assert high / low == pytest.approx(4.0) and weights.count(high) == 128
    assert sum(w**-2 for w in weights) == pytest.approx(512)  # the noise in all is what it was
