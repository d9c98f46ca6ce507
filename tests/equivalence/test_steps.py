"""Without noise and clipping a private step is a plain one; odd units change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from step_tools import charged
from support import micro, tiny
from xcal.data.images import Images
from xcal.dp.account import Account
from xcal.dp.calibration import Plan
from xcal.dp.clipping import Bound, ClippingEngine
from xcal.dp.ledger import ledger
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import RunTerms, Terms
from xcal.dp.noise import NoiseKey, NoiseSource, SeededNoise
from xcal.experiments import make_experiment
from xcal.explain.signal import SignalSettings
from xcal.methods import xcal_paper as paper
from xcal.methods import xcal_steered as steps_with_signal
from xcal.methods.client_data import Batch, LocalData
from xcal.methods.context import Optimizer, ReplayKey, StepContext, digest_tensors
from xcal.methods.registry import plan_for
from xcal.methods.step_parts import clipped_sum, dp_step, release_gradient, sgd_step


class Fixed(LocalData):
    """Always draws the batch it was given."""

    def __init__(self, images: Images, batch: Batch) -> None:
        super().__init__(images, unit="record", images_per_unit=1)
        self.batch = batch

    def draw(self, rate: float, noise: NoiseSource, key: NoiseKey) -> Batch:
        return self.batch


def bench_with(
    data: LocalData, *, clip: float = 1.0, account: Account | None = None, kind: str = "sgd"
) -> StepContext:
    model = micro(3, seed=1)
    return StepContext(
        client="0",
        method="test",
        round=0,
        first_step=0,
        model=model,
        engine=ClippingEngine(model),
        data=data,
        noise=SeededNoise(3),
        account=account,
        optimizer=Optimizer(model, kind, 0.1, 0.9),
        batch=20,
        clip=clip,
        replay=ReplayKey(b"secret", "context"),
    )


@pytest.mark.parametrize("unit", ["record", "group"])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_no_noise_and_no_clipping_is_plain_sgd(unit: str, kind: str) -> None:
    def fresh() -> StepContext:
        data = LocalData(tiny().train, unit=unit, images_per_unit=2)
        return bench_with(data, clip=1e6, kind=kind)

    plain, private = fresh(), fresh()
    for step in range(4):
        sgd_step(plain, step)
        sums = clipped_sum(private, private.draw(step))
        release_gradient(private, charged(private, step, 1e-15), sums)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(private.model.state_dict()[name], value, rtol=2e-4, atol=2e-5)


@pytest.fixture
def account(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A plan and its account: of the test's `method`, or of ours."""
    called = getattr(request.node, "callspec", None)
    method = "xcal-steered" if called is None else called.params.get("method", "xcal-steered")
    plan = plan_for(
        make_experiment({"method": method, "epsilon": 8.0, "delta": 1e-3, "batch": 20}), 150
    )
    path = tmp_path / "ledger.sqlite"
    ledger.create(path, Terms("p", "record", 8.0, 1e-3, simulated=True))
    terms = RunTerms(
        "r", method, "record", 8.0, 1e-3, plan.order, plan.budget, plan.steps, "seeded"
    )
    with Ledger(path) as book:
        yield plan, Account(book, terms, replayable=True)


def with_nan(batch: Batch, unit: int) -> Batch:
    images = batch.images.clone()
    images[batch.units == unit] = float("nan")
    return Batch(images, batch.labels, batch.units, batch.n_units)


@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered", "xcal-paper"])
def test_a_record_of_nans_changes_nothing(method: str, account: Any, tmp_path: Path) -> None:
    """A unit that is not finite contributes exactly what a null unit does: zero, everywhere."""
    plan, book = account
    images = tiny().train
    whole = LocalData(images, unit="record", images_per_unit=1).draw(
        0.1, SeededNoise(0), NoiseKey("0", "m", 0, 0, "draw")
    )
    bad = torch.zeros(whole.n_units, dtype=torch.bool)
    bad[1] = True
    digests = []
    for batch in (with_nan(whole, 1), whole.without(bad)):
        context = bench_with(Fixed(images, batch), account=book)
        one_step(method, context, plan, book)
        digests.append(digest_tensors(context.model.state_dict().items()))
    assert digests[0] == digests[1]


def one_step(method: str, context: StepContext, plan: Plan, book: Account) -> None:
    book.rewind(0, 0)
    book._recorded.clear()  # the same step again, on purpose, to compare its two outcomes
    book._charges.clear()
    book._last = (-1, -1)
    if method == "fl-dp":
        dp_step(context, 0, sigma=plan.sigma_static)
    elif method == "xcal-steered":
        rule = steps_with_signal.SteeredRule(plan, SignalSettings())
        steps_with_signal.steered_step(context, 0, rule, steps_with_signal.SteeredState())
    else:
        rule_p = paper.PaperRule(plan, SignalSettings(positive_only=False))
        paper.paper_step(context, 0, rule_p, paper.PaperState())


def test_nan_units_contribute_zero_to_the_signal(account: Any) -> None:
    plan, _ = account
    images = tiny().train
    whole = LocalData(images, unit="record", images_per_unit=1).draw(
        0.1, SeededNoise(0), NoiseKey("0", "m", 0, 0, "draw")
    )
    rule = steps_with_signal.SteeredRule(plan, SignalSettings())
    bad = torch.zeros(whole.n_units, dtype=torch.bool)
    bad[2] = True
    context = bench_with(Fixed(images, whole))

    def centered(batch: Batch) -> float:
        return steps_with_signal._gradient_and_scores(context, 0, batch, rule, Bound(1.0))[1]

    broken, everyone = centered(with_nan(whole, 2)), centered(whole)
    alone = centered(whole.without(~bad))
    assert everyone - broken == pytest.approx(alone, abs=1e-6)


def test_an_empty_draw_is_a_noise_only_step(account: Any) -> None:
    plan, book = account
    images = tiny().train
    empty = Batch(
        torch.zeros(0, 3, 16, 16),
        torch.zeros(0, dtype=torch.long),
        torch.zeros(0, dtype=torch.long),
        0,
    )
    context = bench_with(Fixed(images, empty), account=book)
    before = {k: v.clone() for k, v in context.model.state_dict().items()}
    spent = book.filter.spent
    rule = steps_with_signal.SteeredRule(plan, SignalSettings())
    state, record = steps_with_signal.steered_step(
        context, 0, rule, steps_with_signal.SteeredState()
    )
    assert book.filter.spent > spent
    assert state.signals == 1
    assert record.signal is not None
    for name, value in context.model.state_dict().items():
        assert bool((value != before[name]).any()), name  # noise on every parameter
    assert np.isfinite(record.sigma)
