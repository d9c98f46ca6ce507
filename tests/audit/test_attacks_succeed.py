"""Where nothing protects, the attacks must succeed: else their failure elsewhere says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from xcal.audit.inversion import Settings, experiment_for, invert, update_of
from xcal.audit.onerun import audit_clients, audit_method
from xcal.audit.suite import Effort, Suite
from xcal.cli.app import app
from xcal.data import catalog
from xcal.data.images import Images
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.methods.base import CentralMethod
from xcal.methods.registry import method_of


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pictures(first: int, count: int, pixels: int = 16) -> Images:
    images = catalog.load("smear", pixels=pixels, seed=0, train=120).train
    return images.take(np.arange(first, first + count))


def test_canaries_are_found_without_privacy() -> None:
    keys = {"method": "fl", "pixels": 16, "batch": 16, "rounds": 15, "lr": 0.3, "clients": 1}
    made = make_experiment({**keys, "unit": "record"}, "the test")
    audits = audit_method(
        made, pictures(0, 8), 8, canary="mislabeled", canaries=48, pictures=pictures(8, 48)
    )
    final = audits[-1]
    assert final.view == "final"
    assert final.epsilon_claimed is None
    assert not final.broken  # nothing was promised
    assert final.accuracy > 0.8
    assert final.epsilon_found > 1


def test_channels_without_noise_are_found() -> None:
    """AGP spares some channels: its nominal ε is none."""
    keys = {"method": "agp", "pixels": 16, "batch": 100, "rounds": 2, "epsilon": 1.0, "clients": 1}
    made = make_experiment({**keys, "unit": "record"}, "the test")
    steps, *_ = audit_method(made, pictures(0, 60), 8, canary="gradient", canaries=1000)
    assert steps.epsilon_claimed is None
    assert steps.epsilon_found > 1.0


def test_one_picture_is_recovered_from_a_plain_step_and_not_from_a_private_one() -> None:
    one = pictures(0, 1, pixels=32)
    base = make_experiment({"pixels": 32, "lr": 0.001, "clients": 1, "unit": "record"}, "the test")
    found = {}
    for epsilon in (None, 50.0):
        network = "xcal.audit.networks:lenet32"
        made = experiment_for(base, network=network, epsilon=epsilon, batch=1)
        result = invert(
            update_of(made, one, 8),
            attack="dlg",
            setting="one step",
            network=network,
            epsilon=epsilon,
            settings=Settings(dlg_steps=80),
        )
        found[epsilon] = result.psnr[0]
    assert found[None] >= 20
    assert found[50.0] < 12


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "dp-fedavg"},
        # its norm moves by a fifth a round: the noise has to be measured against each round's own
        {"method": "adaptive-clip", "level": "client", "clip_rate": 0.4},
    ],
    ids=lambda keys: keys["method"],
)
def test_canary_clients_are_bounded_by_the_servers_noise(keys: dict[str, Any]) -> None:
    shared = {"pixels": 16, "rounds": 3, "epsilon": 4.0, "clients": 1, "unit": "record"}
    made = make_experiment({**shared, **keys}, "the test")
    method = method_of(made)
    assert isinstance(method, CentralMethod)
    rounds, final = audit_clients(made, method, 8, canaries=60)
    assert not rounds.broken
    assert not final.broken
    assert rounds.noise_floor is not None
    assert rounds.noise_floor > 0.97


TINY = Effort(
    gradient_canaries=60,
    benign=40,
    input_canaries=20,
    input_benign=20,
    models=4,
    pool=40,
)


def test_a_suite_writes_what_it_found(tmp_path: Path) -> None:
    keys = {"pixels": 16, "rounds": 1, "batch": 20}
    said = []
    suite = Suite(keys, ["fl-dp"], TINY, lambda *told: said.append(told))
    result = suite.run(["one-run", "membership"], tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert saved["one-run"] == result["one-run"]
    assert {r["view"] for r in saved["one-run"]} == {"steps", "rounds", "final"}
    assert {r["attack"] for r in saved["membership"]} == {"loss", "lira"}
    assert all(r["share_charged"] <= 1 for r in saved["one-run"])
    assert saved["broken"] == []
    assert said
    assert all(0 <= done <= total for _, _, done, total in said)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nonsense"], "Unknown attack"),
        (["one-run", "--method", "fl-db"], "Did you mean"),
        (["one-run", "--set", "method=fl"], "--method"),
        (["one-run", "--confidence", "1.5"], "confidence"),
        (["one-run", "--canaries", "0"], "canaries"),
        (["membership", "--models", "5", "--method", "fl"], "even number"),
        (["inversion", "--set", "pixels=48"], "32 or 64"),
        (["inversion", "--level", "much"], "level"),
        (["one-run", "--method", "fl-dp", "--set", "unit=group"], "unit"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], part: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", *words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError)
    assert part in str(result.exception)
    assert not (tmp_path / "out").exists()
