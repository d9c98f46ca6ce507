"""The audit itself, short enough for every day: what holds must not be refuted.

Run under the mutants of `mutants.py`, each of these must fail for those that name it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from audit.mutants import BY_NAME, MUTANTS
from support import ROOT
from xcal.audit.one_client import train_one_client
from xcal.audit.onerun import audit_method
from xcal.config import Experiment
from xcal.data import catalog
from xcal.data.images import Images
from xcal.dp.accounting import joint_sigma, reference_cost
from xcal.experiments import make_experiment
from xcal.methods.client_data import LocalData


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def experiment(**keys: Any) -> Experiment:
    base = {"pixels": 16, "clients": 1, "batch": 100, "rounds": 2, "epsilon": 4.0}
    base |= {"unit": "record"}
    return make_experiment(base | keys, "the test")


def pictures(count: int) -> Images:
    return catalog.load("smear", pixels=16, seed=0, train=120).train.take(np.arange(count))


def gradient_audit(method: str) -> Any:
    made = experiment(method=method)
    return audit_method(made, pictures(60), 8, canary="gradient", canaries=1000)


@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered", "agp-dp"])
def test_gradient_canaries_find_no_more_than_was_charged(method: str) -> None:
    steps, rounds, final = gradient_audit(method)
    assert not any(a.broken for a in (steps, rounds, final))
    assert steps.noise_floor > 0.97
    assert steps.p_charged > 1e-3
    # It is an audit that could have found something: canaries stand out, and more was possible.
    assert steps.accuracy > 0.55
    assert steps.strongest > 4.0 > steps.expected > 0.3


def test_half_the_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    BY_NAME["half-noise"].plant(monkeypatch)
    steps, *_ = gradient_audit("fl-dp")
    assert steps.broken
    assert steps.noise_floor < 0.6
    assert steps.p_charged < 1e-9


def loud(count: int) -> Images:
    """Half black, half white, with the label of something else: gradients far longer than C."""
    some = pictures(count)
    pixels = np.zeros_like(some.pixels)
    for i, picture in enumerate(pixels):
        picture[:, :: 2 + i % 5] = 255
        picture[i % 16] = 255
    return Images(pixels, some.labels, some.groups, some.ids)


def test_loud_pictures_are_not_found() -> None:
    """Clipping binds here: without it these canaries drown the noise."""
    made = experiment(method="fl-dp", batch=30, epsilon=0.5, rounds=4, lr=0.1)
    steps, *_ = audit_method(
        made, pictures(20), 8, canary="mislabeled", canaries=60, pictures=loud(60)
    )
    assert not steps.broken
    assert steps.epsilon_found <= 0.5


@pytest.mark.parametrize("method", ["xcal-steered", "xcal-paper", "adaptive-clip"])
def test_every_release_of_a_step_was_charged(method: str) -> None:
    made = experiment(method=method, batch=20, signal_every=1)
    data = LocalData(pictures(60), unit="record", images_per_unit=1)
    trained = train_one_client(made, data, 8)
    assert len(trained.charges) >= len(trained.trace) > 0
    for charge, step in zip(trained.charges, trained.trace, strict=False):
        names = {r.name for r in charge.releases}
        assert ("signal" in names) == (step.signal is not None)
        # One draw, one Gaussian: all that was released together, and no less noise than that.
        joint = joint_sigma(*(r.noise / r.sensitivity for r in charge.releases))
        assert charge.sigma == pytest.approx(joint, rel=1e-9)
        gradient = next(r for r in charge.releases if r.name == "gradient")
        assert step.sigma >= gradient.noise / gradient.sensitivity * (1 - 1e-12)


@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered"])
def test_charges_stay_within_the_budget_over_all_rounds(method: str) -> None:
    made = experiment(method=method, batch=20, rounds=4)
    data = LocalData(pictures(60), unit="record", images_per_unit=1)
    trained = train_one_client(made, data, 8)
    assert trained.plan is not None
    order = trained.plan.order
    spent = math.fsum(reference_cost(c.rate, c.sigma, order) for c in trained.charges)
    assert spent <= trained.plan.budget


def test_the_drawn_size_is_not_given_away() -> None:
    """A handful of units: the noise of every release is the same however many were drawn."""
    made = experiment(method="fl-dp", batch=4, rounds=8)
    deviations: list[float] = []
    data = LocalData(pictures(8), unit="record", images_per_unit=1)
    trained = train_one_client(
        made, data, 8, observe=lambda _, released: deviations.append(float(released.std()))
    )
    ratios = [
        d / (r.sigma * made.max_grad_norm) for d, r in zip(deviations, trained.trace, strict=True)
    ]
    assert max(abs(r - 1) for r in ratios) < 0.03


def test_every_mutant_has_a_name_of_its_own_and_was_noticed_when_last_planted() -> None:
    found = json.loads((ROOT / "benchmarks/results/audit/mutants.json").read_text())
    assert found["sound"]
    rows = {row["mutant"]: row["caught"] for row in found["mutants"]}
    assert len(BY_NAME) == len(MUTANTS)
    assert {m.name: set(m.checks) for m in MUTANTS} == {n: set(c) for n, c in rows.items()}
    assert all(caught and all(caught.values()) for caught in rows.values())
