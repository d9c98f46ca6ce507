"""What may stand in the signal's place costs what the signal costs, and spends the same budget."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xcal
from support import TINY
from xcal.dp.calibration import PlanShape, plan_xcal
from xcal.dp.filter import RenyiFilter
from xcal.dp.ledger.rows import charges_of, read_rows
from xcal.explain.signal import SignalSettings
from xcal.federation.folder import RunFolder
from xcal.methods.xcal_steered import SteeredRule, SteeredState, next_effective_sigma

SOURCES = ("model", "constant", "noise", "decay", "rise")


@pytest.mark.parametrize("epsilon", [0.5, 5.0])
@pytest.mark.parametrize(("source", "slope"), [("decay", 0.5), ("rise", -0.5)])
def test_a_schedule_spends_the_budget_on_its_line(
    epsilon: float, source: str, slope: float
) -> None:
    plan = plan_xcal(PlanShape(epsilon, 1e-5, units=1000, batch=64, rounds=10), kappa=5.0, w=0.5)
    rule = SteeredRule(plan, SignalSettings(), source=source)
    now, costs = RenyiFilter(plan.order, plan.budget), []
    for number in range(plan.steps):
        _, cost = next_effective_sigma(
            SteeredState(), rule, now.spent, plan.steps - number, plan.table()
        )
        now = now.after(cost)
        costs.append(cost)
    assert sum(map(Fraction, costs)) <= Fraction(plan.budget)
    assert now.spent >= 0.99 * plan.budget
    even = plan.budget / plan.steps
    line = 1 + slope * (2 * (np.arange(plan.steps) + 0.5) / plan.steps - 1)
    np.testing.assert_allclose(np.array(costs) / even, line, rtol=0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sources")
    keys: dict[str, Any] = {**TINY, "method": "xcal-steered", "signal_every": 1, "tau": 0.5}
    keys |= {"road_images": 0, "road_test_images": 0}
    for source in SOURCES:
        xcal.run(base / source, signal_source=source, **keys)
    return {source: base / source for source in SOURCES}


def test_every_source_is_charged_for_the_same_releases(runs: dict[str, Path]) -> None:
    said = {}
    for source, folder in runs.items():
        rows = read_rows(folder / "clients" / "0" / "ledger.sqlite")
        charges = charges_of(rows, RunFolder.find(folder).about["run"])
        assert len(charges) == 18
        said[source] = [tuple(r.name for r in c.releases) for c in charges]
    assert all(said[source] == said["model"] for source in SOURCES)


def test_only_the_model_and_noise_move_the_share(runs: dict[str, Path]) -> None:
    traces = {s: RunFolder.find(f).read_lines("trace.jsonl") for s, f in runs.items()}
    assert {line["signal"] for line in traces["constant"]} == {0.5}
    sigmas = {s: [line["sigma"] for line in t if line["client"] == "0"] for s, t in traces.items()}
    assert np.ptp(sigmas["constant"]) < 0.01 * np.mean(sigmas["constant"])
    assert np.ptp(sigmas["noise"]) > 0.02 * np.mean(sigmas["noise"])
    assert sigmas["decay"] == sorted(sigmas["decay"], reverse=True)
    assert sigmas["rise"] == sorted(sigmas["rise"])
