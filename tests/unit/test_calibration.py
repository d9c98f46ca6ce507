"""Plans: what is refused, what is warned of, and what every plan promises."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError

import pytest

import xcal
from xcal.dp.accounting import epsilon_rdp, step_cost
from xcal.dp.calibration import (
    PlanShape,
    calibrate,
    plan_paper,
    plan_static,
    plan_xcal,
)
from xcal.dp.filter import RenyiFilter
from xcal.errors import UserError

GOOD = {"epsilon": 2.0, "delta": 1e-5, "units": 400, "batch": 16, "rounds": 3}


def shape(**changes) -> PlanShape:
    return PlanShape(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"units": 0}, "units"),
        ({"batch": 0}, "batch"),
        ({"batch": 401}, "exceeds the number of units"),
        ({"rounds": 0}, "rounds"),
        ({"local_epochs": 0}, "local_epochs"),
    ],
)
def test_nonsense_is_refused_in_one_line(changes, word):
    with pytest.raises(UserError, match=word) as caught:
        shape(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "word"),
    [({"band": 1.5}, "band"), ({"band": -0.1}, "band"), ({"band": 1.0}, "band")],
)
def test_bands_outside_their_range_are_refused(keys, word):
    with pytest.raises(UserError, match=word):
        plan_paper(shape(), rho=0.1, **keys)


@pytest.mark.parametrize("rho", [-0.1, 1.0, math.nan])
def test_shares_of_the_signal_outside_their_range_are_refused(rho):
    with pytest.raises(UserError, match="rho"):
        plan_paper(shape(), rho=rho, band=0.2)


@pytest.mark.parametrize(
    "keys", [{"kappa": 0.0, "w": 0.5}, {"kappa": 5.0, "w": 1.0}, {"kappa": 5.0, "w": -0.1}]
)
def test_our_constants_outside_their_range_are_refused(keys):
    with pytest.raises(UserError):
        plan_xcal(shape(), **keys)


def test_an_impossible_target_is_refused():
    with pytest.raises(UserError, match=r"no noise reaches|leaves no budget"):
        calibrate(1e-7, 1e-30, 1.0, 10_000)


def test_a_method_without_a_guarantee_has_no_plan():
    with pytest.raises(UserError, match="nothing to plan"):
        xcal.plan(method="fl", units=400, batch=16, rounds=3)


@pytest.mark.parametrize(("delta", "warned"), [(1e-5, 0), (1 / 400, 1), (0.01, 1)])
def test_a_delta_that_allows_publishing_a_unit_is_warned_of(delta, warned):
    plan = plan_static(shape(delta=delta))
    assert len(plan.warnings) == warned
    assert all("1/units" in warning for warning in plan.warnings)


def test_steps_and_rate():
    long = shape(rounds=7, local_epochs=2, units=401)
    assert long.steps == 7 * 2 * 26
    assert long.sample_rate == 16 / 401


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_a_static_plan_takes_all_its_steps_and_hardly_leaves_anything(epsilon):
    plan = plan_static(shape(epsilon=epsilon))
    cost = step_cost(plan.sample_rate, plan.sigma_ref, plan.order)
    now = RenyiFilter(plan.order, plan.budget)
    for _ in range(plan.steps):
        now = now.after(cost)
    assert now.share_spent > 0.999
    assert not now.admits(cost)
    assert epsilon_rdp(plan.sample_rate, plan.sigma_ref, plan.steps, plan.delta) <= epsilon


def test_less_epsilon_or_more_steps_take_more_noise():
    sigmas = [plan_static(shape(epsilon=e)).sigma_ref for e in (0.2, 1.0, 4.0)]
    assert sigmas == sorted(sigmas, reverse=True)
    sigmas = [plan_static(shape(rounds=t)).sigma_ref for t in (1, 3, 10)]
    assert sigmas == sorted(sigmas)


def test_our_signal_costs_what_kappa_says():
    static, ours = plan_static(shape()), plan_xcal(shape(), kappa=5.0, w=0.5)
    assert ours.sigma_static == static.sigma_ref
    assert ours.sigma_ref == pytest.approx(static.sigma_ref * math.sqrt(1.04))
    assert ours.signal_price == pytest.approx(math.sqrt(1.04) - 1)
    assert ours.sigma_signal == pytest.approx(5 * 0.5 * ours.sigma_ref)
    assert ours.sigma_min < ours.sigma_ref < ours.sigma_max
    without = plan_xcal(shape(), kappa=5.0, w=0.5, signal=False)
    assert (without.sigma_signal, without.sigma_ref) == (None, static.sigma_ref)


def test_without_a_signal_the_paper_s_split_is_the_static_plan():
    static, paper = plan_static(shape()), plan_paper(shape(), rho=0.0, band=0.2)
    assert paper.sigma_signal is None
    assert paper.sigma_ref == static.sigma_ref
    assert paper.signal_price == 0


def test_the_grid_reaches_from_an_eighth_to_a_hundred_times_the_static_multiplier():
    plan = plan_xcal(shape(), kappa=5.0, w=0.5)
    table = plan.table()
    assert table.sigmas[0] <= plan.sigma_static / 8 * (1 + 1e-9)
    assert table.sigmas[-1] >= plan.sigma_static * 100 * (1 - 1e-9)
    assert table is plan.table()  # equal clients share it


def test_the_odometer_starts_at_zero_and_stops_at_the_target():
    plan = plan_static(shape())
    assert plan.odometer(0.0) == 0
    readings = [plan.odometer(plan.budget * share) for share in (1e-6, 0.3, 0.6, 1.0, 2.0)]
    assert readings == sorted(readings)
    assert readings[0] > 0
    assert readings[-1] == plan.epsilon
    # what converts to the target is the budget: at the end the odometer reads just that
    assert plan.odometer(plan.budget * (1 - 1e-9)) == pytest.approx(plan.epsilon)
    # the tight conversion is lower by ln(α)/(α−1) + ln(α/(α−1)) all the way
    loose = plan.budget * 0.3 + math.log(1 / plan.delta) / (plan.order - 1)
    assert readings[1] < loose - 0.1


def test_a_plan_is_frozen_and_plain():
    plan = plan_xcal(shape(unit="group"), kappa=5.0, w=0.5)
    with pytest.raises(FrozenInstanceError):
        plan.budget = 100.0
    values = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert values["unit"] == "group"
    assert values["steps"] == plan.steps == 75
    needed = (
        "method epsilon delta units batch rounds steps sample_rate order sigma_static sigma_ref"
        " sigma_min sigma_max sigma_signal signal_price"
    )
    assert set(needed.split()) <= set(values)
