"""Nothing leaves a step at floating-point noise's full precision: all lies on a public grid."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from support import ROOT, TINY
from xcal.dp import noise as noises
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of
from xcal.federation.ledgers_of import find_ledgers
from xcal.methods.context import Optimizer
from xcal.methods.registry import METHODS

KEYS = {**TINY, "rounds": 1, "clients": 2, "signal_every": 1, "road_images": 0}


class TapeRecorder:
    """Every release of a run with its noise's deviation, as the one function that makes it saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[tuple[dict[str, torch.Tensor], float]] = []
        self.scalars: list[tuple[float, float]] = []
        self.steps: list[dict[str, torch.Tensor]] = []
        self._spy(monkeypatch, "release_tensors", self._tensors)
        self._spy(monkeypatch, "release_scalar", self._scalars)
        original = Optimizer.step

        def step(optimizer: Optimizer, gradient: Any) -> None:
            tensors = getattr(gradient, "tensors", gradient)
            self.steps.append({name: value.clone() for name, value in tensors.items()})
            original(optimizer, gradient)

        monkeypatch.setattr(Optimizer, "step", step)

    def _spy(self, monkeypatch: pytest.MonkeyPatch, name: str, record: Callable[..., Any]) -> None:
        original = getattr(noises, name)

        def spying(value: Any, scale: float, *rest: Any) -> Any:
            released = original(value, scale, *rest)
            record(released, scale)
            return released

        for module in [m for n, m in sys.modules.items() if n.startswith("xcal")]:
            if getattr(module, name, None) is original:
                monkeypatch.setattr(module, name, spying)

    def _tensors(self, released: dict[str, torch.Tensor], scale: float) -> None:
        self.tensors.append(({k: v.clone() for k, v in released.items()}, scale))

    def _scalars(self, released: float, scale: float) -> None:
        self.scalars.append((released, scale))


def on_grid(values: torch.Tensor, scale: float) -> bool:
    grid = noises.release_grid(scale)
    assert math.log2(grid).is_integer()
    assert scale * 2.0**-13 < grid <= scale * 2.0**-12
    multiples = values.double() / grid
    return bool(torch.equal(multiples, multiples.round()))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.private])
def test_every_released_coordinate_lies_on_the_grid(
    method: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = TapeRecorder(monkeypatch)
    xcal.run(tmp_path / "run", **{**KEYS, "method": method, "noise": source})
    assert seen.tensors
    for released, scale in seen.tensors:
        assert scale > 0
        assert all(on_grid(value, scale) for value in released.values())
    for scalar, scale in seen.scalars:
        assert scale > 0
        assert on_grid(torch.tensor(scalar, dtype=torch.float64), scale)
    # Every charge of the ledgers is one of these releases, and there is no other.
    paid = []
    for path in find_ledgers(tmp_path / "run"):
        rows = read_rows(path)
        paid += [r for run in runs_of(rows) for c in charges_of(rows, run) for r in c.releases]
    assert len(paid) == len(seen.tensors) + len(seen.scalars)


@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered", "xcal-paper"])
def test_the_optimiser_sees_the_rounded_sum_over_b_and_nothing_else(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = TapeRecorder(monkeypatch)
    xcal.run(tmp_path / "run", **{**KEYS, "method": method})
    assert len(seen.steps) == len(seen.tensors)
    for used, (released, _) in zip(seen.steps, seen.tensors, strict=True):
        assert set(used) == set(released)
        assert all(torch.equal(used[k], released[k] / KEYS["batch"]) for k in used)


def test_noise_is_drawn_only_where_it_is_rounded() -> None:
    """A method that took noise from its source by itself would release all of its bits."""
    allowed = {
        "dp/noise.py",  # the releases themselves
        "dp/noise_ahead.py",  # prepares a source's noise, which is released by the former
        "audit/canaries.py",  # an auditor's source around another, for attacks
        "dp/distributed.py",  # whole numbers on a public grid
    }
    found = set()
    for path in (ROOT / "src" / "xcal").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("normals", "scalar", "discrete_normals"):
                    found.add(path.relative_to(ROOT / "src" / "xcal").as_posix())
    assert found <= allowed
