"""What a record-level guarantee is worth to a person with several images (method.md §5)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import xcal
from support import TINY
from xcal.dp.group_privacy import group_epsilon

SETTING = {"method": "fl-dp", "epsilon": 0.5, "delta": 1e-5, "batch": 32, "rounds": 30}


@pytest.mark.parametrize(
    ("images", "expected"), [(1, 0.5), (2, 1.07), (4, 2.3), (12, 9.7), (36, None)]
)
def test_published_values(images: int, expected: float | None) -> None:
    plan = xcal.plan(units=3332, accountant="renyi", **SETTING)
    found = group_epsilon(plan, images)
    if expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("images", "expected"), [(1, 0.5), (2, 1.17), (4, 2.54), (12, 9.98)])
def test_a_fixed_plan_at_the_best_order(images: int, expected: float) -> None:
    """8 % less noise protects a person with several images less: it is the noise that counts."""
    plan = xcal.plan(units=3332, **SETTING)
    assert plan.accountant == "pld"
    assert group_epsilon(plan, images) == pytest.approx(expected, rel=0.01)


def test_the_cap_is_enforced_and_stated(tmp_path: Path) -> None:
    keys = {**TINY, "method": "xcal-steered", "group_cap": 2}
    result = xcal.run(tmp_path / "run", **keys)
    assert sum(c["units"] for c in result["clients"]) == 100  # 50 patients, two images each
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert [p["images"] for p in statement["persons"]] == [2]
    text = " ".join((tmp_path / "run" / "statement.txt").read_text().split())
    assert "at most 2 images of one patient are used" in text
