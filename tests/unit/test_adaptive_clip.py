"""The clipping norm follows the quantile, from both sides, and pays for what it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xcal
from support import TINY
from xcal.dp.accounting import joint_sigma
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.methods.adaptive_clip import (
    ADAPTIVE_CLIP,
    LARGEST_CLIP,
    SMALLEST_CLIP,
    QuantileRule,
    centered_count,
)


def simulated(rule: QuantileRule, steps: int, sigma: float, seed: int = 0) -> list[float]:
    """C step by step where norms are log-normal around 1, drawn by Poisson around 64."""
    rng = np.random.default_rng(seed)
    clip, seen = rule.start, []
    _, sigma_count = rule.multipliers(sigma)
    for _ in range(steps):
        norms = np.exp(rng.normal(0.0, 0.5, rng.poisson(64)))
        centered = centered_count(norms, clip, np.ones(len(norms), dtype=bool))
        clip = rule.following(clip, 0.5 + (centered + sigma_count * rng.normal()) / 64)
        seen.append(clip)
    return seen


@pytest.mark.parametrize("start", [0.01, 100.0])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("sigma", [0.8, 4.2])
def test_it_converges_to_the_quantile(start: float, quantile: float, sigma: float) -> None:
    seen = simulated(QuantileRule(quantile, start=start), 800, sigma)
    wanted = {0.2: math.exp(-0.4208), 0.5: 1.0, 0.8: math.exp(0.4208)}[quantile]
    settled = seen[300:]
    assert math.exp(np.mean(np.log(settled))) == pytest.approx(wanted, rel=0.12)
    # It went there in one direction, not by luck: a wrong sign runs away to an end.
    assert (seen[20] > start) == (start < 1)
    assert min(settled) > SMALLEST_CLIP * 10
    assert max(settled) < LARGEST_CLIP / 10


def test_too_many_within_lowers_the_norm() -> None:
    rule = QuantileRule(0.5, rate=0.2)
    assert rule.following(1.0, 1.0) == pytest.approx(math.exp(-0.1))
    assert rule.following(1.0, 0.0) == pytest.approx(math.exp(0.1))
    assert rule.following(1.0, 0.5) == 1.0
    # However wild the noise, C stays a number.
    assert rule.following(1.0, -1e300) == LARGEST_CLIP
    assert rule.following(1.0, 1e300) == SMALLEST_CLIP


@pytest.mark.parametrize("fixed", [None, 3.2])
@pytest.mark.parametrize("kappa_b", [0.1, 5.0])
def test_both_releases_together_cost_what_is_charged(fixed: float | None, kappa_b: float) -> None:
    rule = QuantileRule(kappa_b=kappa_b, fixed_noise=fixed)
    sigma, sigma_count = rule.multipliers(0.85)
    assert joint_sigma(sigma, sigma_count / 0.5) == pytest.approx(0.85, rel=1e-12)
    assert 2 * sigma_count > 0.85  # z < 2σ_b, which κ_b keeps by itself
    assert sigma > 0.85


def test_too_little_noise_on_the_count_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must exceed 0\.\d+.*leave it out and set kappa_b"):
        xcal.run(tmp_path / "r", method="adaptive-clip", **{**TINY, "count_noise": 0.1})
    assert not (tmp_path / "r").exists()
    with pytest.raises(UserError, match="count_noise"):
        QuantileRule(fixed_noise=0.5).multipliers(1.0)  # 2σ_b = z is one too few


QUICK = {**TINY, "clip": 0.01, "rounds": 6, "road_images": 0, "road_test_images": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "adaptive"
    result = xcal.run(folder, method="adaptive-clip", **QUICK)
    return folder, result


def test_a_step_clips_to_what_earlier_counts_say(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    trace = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    rows = read_rows(folder / "clients" / "0" / "ledger.sqlite")
    (run,) = runs_of(rows).values()
    charges = charges_of(rows, run.run)
    own = [t for t in trace if t["client"] == "0"]
    assert own[0]["clip"] == 0.01
    assert own[-1]["clip"] > 0.05  # far too small a start has been left behind, over rounds
    for step, charge in zip(own, charges, strict=True):
        gradient, count = charge.releases
        assert (gradient.name, count.name) == ("gradient", "count")
        assert gradient.sensitivity == step["clip"]
        assert gradient.noise == pytest.approx(step["sigma"] * step["clip"])
        assert count.sensitivity == 0.5
        assert count.noise == pytest.approx(5 * step["sigma"])
    assert result["epsilon_target"] == 8.0
    assert all(c["share_spent"] > 0.99 for c in result["clients"])


def test_the_plan_shows_what_the_count_costs() -> None:
    plan = xcal.plan(method="adaptive-clip", epsilon=0.5, units=3332, batch=32, rounds=30)
    assert plan.sigma_static == pytest.approx(3.885, rel=5e-3)
    assert plan.sigma_ref == pytest.approx(plan.sigma_static * math.sqrt(1.01))
    assert plan.sigma_count == pytest.approx(5 * plan.sigma_ref)
    given = ADAPTIVE_CLIP.plan(
        make_experiment({"epsilon": 0.5, "batch": 32, "count_noise": 10.0, "unit": "record"}),
        3332,
        30,
    )
    assert given.sigma_count == 10.0
    assert given.sigma_ref > plan.sigma_ref
