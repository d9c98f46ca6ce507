"""What a run measures by default, how sure it is, and that long work shows how far it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xcal
from conftest import Invoke
from support import TINY, sets
from xcal.config import to_toml
from xcal.data.synthetic import smear, watched
from xcal.experiments import load_experiment, make_experiment, read_pinned
from xcal.explain.interval import mean_interval
from xcal.federation.local import NullCallback


class Watch(NullCallback):
    """What was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def measure(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))


def test_a_sample_by_default_and_all_by_choice(tmp_path: Path) -> None:
    assert make_experiment({}).road_test_images == 200
    made, _ = load_experiment(None, ["road_test_images=all"])
    assert made.road_test_images is None
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(made.resolved()))
    assert read_pinned(path) == made  # as in the folders of runs from before there was a sample


def test_results_carry_how_many_images_and_the_interval(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**TINY, "method": "fl", "rounds": 1, "road_images": 0}
    del keys["road_test_images"]
    seen = Watch()
    few = xcal.run(tmp_path / "few", progress=seen, **keys, road_test_images=12)
    assert few["road_images"] == few["explanations"]["road"]["images"] == 12
    low, high = few["road_interval"]
    assert low <= few["road"] <= high
    assert few["road_interval"] == few["explanations"]["road"]["interval"]
    for name in ("insertion", "deletion"):
        low, high = few["explanations"][f"{name}_interval"]
        assert low <= few["explanations"][f"{name}_auc"] <= high
    every = xcal.run(tmp_path / "all", **keys, road_test_images="all")
    assert every["road_images"] == 45
    assert seen.told[0] == ("test images", 45, 45)
    explained = [t for t in seen.told if t[0] == "explanations"]
    assert explained[-1] == ("explanations", 12, 12)
    assert [t[1] for t in explained] == sorted(t[1] for t in explained)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    groups, hits = np.arange(200) // 4, 0
    for _ in range(400):
        shared = rng.normal(0, 1, 50)[groups]  # images of one patient are alike
        between = mean_interval(shared + rng.normal(0, 0.3, 200), groups)
        assert between is not None
        hits += between[0] <= 0 <= between[1]
    assert 0.90 <= hits / 400 <= 0.98
    assert mean_interval([0.5, 0.6], [1, 1]) is None
    assert mean_interval([], []) is None
    assert mean_interval([1.0, float("nan"), 0.0], [1, 2, 3]) == mean_interval([1.0, 0.0], [1, 3])


def test_drawing_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    with watched(lambda done, total: told.append((done, total))):
        smear(pixels=16, train=80, validation=20, test=10)
    assert told[-1] == (110, 110)
    assert told == sorted(told)
    count = len(told)
    smear(pixels=16, train=8, validation=0, test=0)
    assert len(told) == count


def test_the_commands_say_it(tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "run"
    keys = {"method": "fl", "rounds": 1, "road_images": 0, "road_test_images": 12}
    code, told, _ = invoke("run", *sets(**keys), "--out", str(out))
    assert code == 0
    assert "on 12 test images" in " ".join(told.split())
    assert "95 %" in (out / "card.md").read_text()
    code, told, _ = invoke("evaluate", str(out), "--json")
    assert code == 0
    found = json.loads(told)  # nothing but the object, whatever is shown meanwhile
    assert found["explanations"]["road"]["interval"] is not None
    code, told, _ = invoke("evaluate", str(out))
    assert code == 0
    code, _, _ = invoke("explain", str(out), "test:3", "--out", str(tmp_path / "maps"))
    assert code == 0


@pytest.mark.parametrize("words", [["--workers", "0"], ["--workers", "many"]])
def test_a_number_of_workers_that_is_none(words: list[str], tmp_path: Path, invoke: Invoke) -> None:
    code, _, err = invoke("run", *sets(), "--out", str(tmp_path / "run"), *words)
    assert code == 2
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
