"""Averages over steps, views and feature cache come back to the bit after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import xcal
from support import TINY, micro
from xcal.dp.account import Account
from xcal.federation.files import read_tensors
from xcal.methods.context import StepAverage


def killed_after_charge(count: int, out: Path, keys: dict[str, Any] | None = None) -> None:
    """Run, or resume, in a forked process that kills itself after the count-th payment."""
    child = os.fork()
    if child == 0:
        pay, calls = Account.pay, [0]

        def deadly(*args: Any, **charge: Any) -> None:
            pay(*args, **charge)
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)

        Account.pay = deadly  # type: ignore[method-assign]
        try:
            xcal.run(out, resume=keys is None, **(keys or {}))
        finally:
            os._exit(1)  # it should have died before
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return found[0]


def test_a_killed_run_with_averages_and_views_ends_as_the_whole_one(tmp_path: Path) -> None:
    keys = {
        **TINY,
        "method": "xcal-steered",
        "rounds": 2,
        "average_steps": 0.6,
        "views": 3,
        "optimizer": "momentum",
        "lr": 0.1,
        "road_images": 0,
        "road_test_images": 0,
    }
    whole = xcal.run(tmp_path / "whole", **keys)
    killed_after_charge(4, tmp_path / "cut", keys)
    killed_after_charge(9, tmp_path / "cut")
    result = xcal.run(tmp_path / "cut", resume=True)
    assert result["macro_f1"] == whole["macro_f1"]
    first, second = model_of(tmp_path / "whole"), model_of(tmp_path / "cut")
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_kept_activations_come_back_too(tmp_path: Path) -> None:
    keys = {
        **TINY,
        "network": "resnet18",
        "pixels": 32,
        "train": "head",
        "method": "fl-dp",
        "rounds": 1,
        "clients": 1,
        "road_images": 0,
        "road_test_images": 0,
    }
    xcal.run(tmp_path / "whole", **keys)
    killed_after_charge(7, tmp_path / "cut", keys)
    xcal.run(tmp_path / "cut", resume=True)
    first, second = model_of(tmp_path / "whole"), model_of(tmp_path / "cut")
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_the_average_is_that_of_the_last_steps() -> None:
    model = micro(3)
    tail = StepAverage(model, 5, 0.5)  # the last three of five
    seen = []
    for step in range(5):
        with torch.no_grad():
            model.head.weight.fill_(float(step))
        tail.add(step)
        seen.append(tail.weights()["head.weight"][0, 0].item())
    assert seen == [0.0, 1.0, 2.0, 2.5, 3.0]
    again = StepAverage(model, 5, 0.5)
    again.load(tail.state())
    assert torch.equal(again.weights()["head.weight"], tail.weights()["head.weight"])
    none = StepAverage(model, 5, 0.0)
    none.add(4)
    assert none.weights()["head.weight"][0, 0] == 4.0
    assert not none.state()


def test_the_answer_is_the_average(tmp_path: Path) -> None:
    """A share of one step in all is that step's weights, as without averaging."""
    keys = {**TINY, "method": "fl-dp", "rounds": 1, "clients": 1, "batch": 150, "road_images": 0}
    keys["road_test_images"] = 0
    models = []
    for name, share in (("last", 0.0), ("one", 1.0)):
        xcal.run(tmp_path / name, **keys, average_steps=share)
        models.append(model_of(tmp_path / name))
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])
