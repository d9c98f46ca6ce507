"""A method whose special part is switched off is its base method, fed the base's σ.

The parts of `xcal`, `agp-dp` and `adaptive-clip` at record level are in `test_parts.py`,
`adap-dpfl` in `tests/unit/test_adap.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from step_tools import FreeAccount
from support import TINY
from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.noise import NoiseKey, SeededNoise
from xcal.federation.aggregation import Mean, Median, TrimmedMean, server_round
from xcal.federation.exchange import ClientReport, RoundReply
from xcal.federation.files import read_tensors
from xcal.methods import agp
from xcal.methods.dp_fedavg import ServerContext, private_mean

# One accountant for all: bases differ from what is built on them in nothing else.
QUICK = {**TINY, "accountant": "renyi", "road_images": 0, "road_test_images": 0}


@pytest.fixture(autouse=True, scope="module")
def same_noise_for_every_method() -> Iterator[None]:
    """The method's name is part of a noise key, so that no two share noise; here they must."""
    stream = SeededNoise._stream

    def nameless(self: SeededNoise, key: NoiseKey) -> int:
        return stream(self, replace(key, method=""))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeededNoise, "_stream", nameless)
        yield


def trained(folder: Path, **keys: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The model a run comes to, and its multipliers step by step."""
    xcal.run(folder, **{**QUICK, **keys})
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    lines = (folder / "trace.jsonl").read_text().splitlines()
    return found[0], [json.loads(line)["sigma"] for line in lines]


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float) -> bool:
    return all(torch.allclose(one[k], other[k], rtol=0.0, atol=atol) for k in one)


@pytest.fixture(scope="module")
def static(same_noise_for_every_method: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`fl-dp` under the accountant of all, the base of most."""
    return trained(tmp_path_factory.mktemp("static") / "run", method="fl-dp", accountant="renyi")


def test_the_published_rule_without_signal_and_band_is_static_noise(
    static: Any, tmp_path: Path
) -> None:
    model, sigmas = trained(tmp_path / "run", method="xcal-paper", rho=0.0, band=0.0)
    assert sigmas == pytest.approx(static[1], rel=1e-6)  # no step was refused
    assert close(model, static[0], 1e-5)


def test_agp_that_spares_nothing_is_static_noise(
    static: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fed the base's σ, client by client."""

    def base_sigma(shape: PlanShape, rho: float, band: float) -> float:
        return plan_static(shape).sigma_static

    monkeypatch.setattr(agp, "band_mean", base_sigma)
    model, sigmas = trained(tmp_path / "run", method="agp", protected=0.0)
    assert sigmas == static[1]
    assert close(model, static[0], 0.0)
    spared, _ = trained(tmp_path / "spared", method="agp", protected=0.5)
    assert not close(spared, static[0], 1e-6)


def test_client_quantile_that_does_not_follow_is_dp_fedavg(tmp_path: Path) -> None:
    central, _ = trained(tmp_path / "a", method="dp-fedavg")
    keys = {"method": "adaptive-clip", "level": "client", "clip_rate": 1e-12, "kappa_b": 1e6}
    same, _ = trained(tmp_path / "b", **keys)
    assert close(same, central, 1e-5)
    moving, _ = trained(tmp_path / "c", **{**keys, "clip_rate": 0.5})
    assert not close(moving, central, 1e-3)


def _answers(count: int) -> tuple[dict[str, torch.Tensor], list[RoundReply]]:
    rng = np.random.default_rng(2)
    old = {"w": torch.from_numpy(rng.normal(size=30)).float()}
    found = []
    for client in range(count):
        sent = {"w": old["w"] + torch.from_numpy(rng.normal(size=30)).float()}
        report = ClientReport(
            str(client), 10, 1, False, None, None, None, None, None, None, 1, "0" * 64
        )
        found.append(RoundReply(report, sent))
    return old, found


def test_dp_fedavg_without_noise_and_clipping_is_the_mean_of_equal_clients() -> None:
    old, answers = _answers(4)
    plain, _ = server_round(0, old, answers, Mean(), None)
    context = ServerContext("m", 0, SeededNoise(0), FreeAccount(), 4)  # type: ignore[arg-type]
    updates = [{"w": r.weights["w"].double() - old["w"].double()} for r in answers if r.weights]
    mean = private_mean(context, updates, clip=1e6, sigma=1e-30).mean
    assert torch.allclose(old["w"].double() + mean["w"], plain["w"].double(), atol=1e-6)


def test_robust_rules_on_answers_that_agree_are_the_mean() -> None:
    old, answers = _answers(1)
    same = [answers[0]] * 5
    plain, _ = server_round(0, old, same, Mean(), None)
    for rule in (Median(), TrimmedMean(0.2)):
        found, _ = server_round(0, old, same, rule, None)
        assert torch.allclose(found["w"], plain["w"], atol=1e-7)
