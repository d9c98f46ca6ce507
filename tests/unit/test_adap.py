"""adap-dpfl: what moves its clipping norm and its noise, and that the filter holds all the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from support import TINY
from xcal.dp.accounting import step_cost
from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.filter import BudgetExhausted, RenyiFilter
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation import rounds
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.setup import prepare
from xcal.methods.adap_dpfl import AdapParameters, AdapState, admissible_sigma, decays, next_clip

QUICK = {**TINY, "method": "adap-dpfl", "road_images": 0, "road_test_images": 0}
PLAN = plan_static(PlanShape(8.0, 1e-3, units=50, batch=10, rounds=3), "adap-dpfl")


def rule(**changes: Any) -> AdapParameters:
    return AdapParameters(**{"max_grad_norm": 1.0, "clip_factor": 2.0, **changes})


def test_noise_falls_after_three_falls_in_a_row_and_again_with_each_further_one() -> None:
    assert decays([]) == 0
    assert decays([3.0, 2.0, 1.0]) == 0  # two falls
    assert decays([4.0, 3.0, 2.0, 1.0]) == 1
    assert decays([5.0, 4.0, 3.0, 2.0, 1.0]) == 2
    assert decays([4.0, 3.0, 3.0, 2.0, 1.0]) == 0  # a round without a fall begins anew
    assert decays([4.0, 3.0, 2.0, 1.0, 5.0, 4.0, 3.0, 2.0]) == 2
    assert decays([4.0, math.nan, 2.0, 1.0, 0.5]) == 0


def test_clipping_norm_follows_the_released_norm_unless_noise_hides_it() -> None:
    assert next_clip(AdapState(), rule()) == 1.0
    seen = AdapState(round=0, clip=1.0, steps=10, squares=2.5, doubt=1e-4)
    assert next_clip(seen, rule()) == pytest.approx(1.0)  # 2 · √(2.5/10)
    assert next_clip(seen, rule(clip_factor=3.0)) == pytest.approx(1.5)
    assert next_clip(seen, rule(clip_factor=0.0)) == 1.0
    hidden = AdapState(round=0, clip=0.7, steps=10, squares=2.5, doubt=4.0)
    assert next_clip(hidden, rule()) == 0.7
    huge = AdapState(round=0, clip=0.7, steps=1, squares=1e9, doubt=1.0)
    assert next_clip(huge, rule()) == 10.0
    tiny = AdapState(round=0, clip=0.7, steps=10, squares=1e-9, doubt=0.0)
    assert next_clip(tiny, rule()) == 0.1


def test_sigma_is_the_smallest_admissible_and_never_above_the_first() -> None:
    fresh = RenyiFilter(PLAN.order, PLAN.budget)
    wanted = PLAN.sigma_static * 0.9**3
    assert admissible_sigma(PLAN, PLAN.sigma_static, fresh)[0] == PLAN.sigma_static
    lowered, _ = admissible_sigma(PLAN, wanted, fresh)
    cheap, cost = (step_cost(PLAN.sample_rate, s, PLAN.order) for s in (PLAN.sigma_static, lowered))
    assert lowered == wanted
    # room for a step at σ_0 and not for one at 0.9³ σ_0: something in between
    tight = RenyiFilter(PLAN.order, PLAN.budget, PLAN.budget - (cheap + cost) / 2)
    between, table = admissible_sigma(PLAN, wanted, tight)
    assert lowered < between < PLAN.sigma_static
    assert table is not None
    assert tight.admits(float(table.costs[table.at_least(between)]))
    with pytest.raises(BudgetExhausted):
        admissible_sigma(
            PLAN, wanted, RenyiFilter(PLAN.order, PLAN.budget, PLAN.budget - cheap / 2)
        )


def trace(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def test_with_both_parts_off_it_is_static_noise(tmp_path: Path) -> None:
    """Same σ, same draws; only the method's name in the noise key differs, so that is patched."""
    xcal.run(tmp_path / "a", **{**QUICK, "clip_factor": 0.0, "sigma_decay": 1.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "method_of", lambda e: _renamed())
        xcal.run(tmp_path / "b", **{**QUICK, "method": "fl-dp", "accountant": "renyi"})
    first, _ = read_tensors(tmp_path / "a" / "model.safetensors")  # type: ignore[misc]
    second, _ = read_tensors(tmp_path / "b" / "model.safetensors")  # type: ignore[misc]
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert [t["sigma"] for t in trace(tmp_path / "a")] == [
        t["sigma"] for t in trace(tmp_path / "b")
    ]


def _renamed() -> Any:
    from xcal.methods.fl_dp import StaticNoise

    return StaticNoise(name="adap-dpfl")


# One shape for the runs below, so that it is calibrated once.
MOVING = {**QUICK, "data": "support:colored", "rounds": 5, "epsilon": 30.0, "sigma_decay": 0.8}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, xcal.run(folder, **MOVING)


def test_a_run_moves_both_and_stays_within_its_budget(moved: Any) -> None:
    folder, result = moved
    path = folder / "clients" / "0" / "ledger.sqlite"
    assert verify(path).ok
    rows = read_rows(path)
    (run,) = runs_of(rows).values()
    charges = charges_of(rows, run.run)
    norms = [c.releases[0].sensitivity for c in charges]
    by_round = {c.round: n for c, n in zip(charges, norms, strict=True)}
    assert len(set(by_round.values())) > 1
    assert by_round[0] == 1.0
    assert len(set(zip((c.round for c in charges), norms, strict=True))) == len(by_round)
    # the loss fell, so the noise did, and the budget ended before the last step: refused, not over
    sigmas = [c.sigma for c in charges]
    assert sigmas[-1] < sigmas[0]
    assert all(c["halted"] and c["epsilon_spent"] <= 30.0 for c in result["clients"])


def test_without_public_images_it_is_refused() -> None:
    with pytest.raises(UserError, match="follows the loss on public validation images"):
        prepare(make_experiment({**QUICK, "validation_images": 0}))


def test_a_resumed_run_is_the_same(moved: Any, tmp_path: Path) -> None:
    save, calls = RunFolder.save_checkpoint, [0]

    def deadly(self: RunFolder, weights: Any, about: Any) -> None:
        save(self, weights, about)
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", deadly)
        with pytest.raises(KeyboardInterrupt):
            xcal.run(tmp_path / "cut", **MOVING)
    xcal.run(tmp_path / "cut", resume=True)
    first, _ = read_tensors(moved[0] / "model.safetensors")  # type: ignore[misc]
    second, _ = read_tensors(tmp_path / "cut" / "model.safetensors")  # type: ignore[misc]
    assert all(torch.equal(first[k], second[k]) for k in first)
