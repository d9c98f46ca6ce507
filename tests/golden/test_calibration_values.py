"""Noise multipliers and plans against printed values.

Setting of method.md §3: Blood Cells, three clients, n = 3,332 units each, expected batch B = 32,
30 rounds of one epoch, δ = 1e-5, Rényi accounting.
"""

from __future__ import annotations

import pytest

import xcal
from xcal.dp.accounting import epsilon_rdp, joint_sigma, step_cost
from xcal.dp.calibration import Plan, PlanShape, calibrate, plan_paper
from xcal.dp.pld import epsilon_pld

UNITS, BATCH, ROUNDS, DELTA = 3332, 32, 30, 1e-5
RATE = BATCH / UNITS
STEPS = 3150  # 30 · ⌈3332/32⌉

EXACT = 0.005  # printed values hold to half a per cent


def shape(epsilon: float) -> PlanShape:
    return PlanShape(epsilon, DELTA, UNITS, BATCH, ROUNDS)


def published(epsilon: float) -> Plan:
    return plan_paper(shape(epsilon), rho=0.1, band=0.2)


@pytest.mark.parametrize(
    ("epsilon", "lowest", "highest", "order"),
    # method.md §3, table, second column: static σ and its best order.
    [
        (0.05, 34.7, 35.0, 225),
        (0.5, 4.23, 4.23, 32),
        (5.0, 0.845, 0.845, 4.5),
        (50.0, 0.409, 0.409, 1.46),
    ],
)
def test_static_multiplier(epsilon, lowest, highest, order):
    found = calibrate(epsilon, DELTA, RATE, STEPS)
    assert lowest * (1 - EXACT) <= found.sigma <= highest * (1 + EXACT)
    assert found.order == pytest.approx(order, rel=0.05)


@pytest.mark.parametrize(
    ("epsilon", "sigma_ref", "price", "sigma_signal"),
    # method.md §3, table, third and fourth columns: the published split of ε and δ, ρ = 0.1.
    [
        (0.05, 40.4, 0.16, 300.0),
        (0.5, 4.83, 0.14, 36.6),
        (5.0, 0.898, 0.06, 4.40),
        (50.0, 0.425, 0.04, 0.86),
    ],
)
def test_published_multipliers(epsilon, sigma_ref, price, sigma_signal):
    plan = published(epsilon)
    assert plan.steps == STEPS
    assert plan.sigma_ref == pytest.approx(sigma_ref, rel=EXACT)
    assert plan.signal_price == pytest.approx(price, abs=0.005)
    # A finer list of orders may find a lower σ_s, never a higher one.
    assert sigma_signal * 0.99 <= plan.sigma_signal <= sigma_signal * (1 + EXACT)
    assert plan.sigma_min == pytest.approx(0.8 * plan.sigma_ref)
    assert plan.sigma_max == pytest.approx(1.2 * plan.sigma_ref)


@pytest.mark.parametrize(
    ("epsilon", "joint"),
    # method.md §3 (b): what the published calibration really costs when gradient and signal come
    # from one batch. At 50 the published guarantee fails.
    [(0.5, 0.435), (5.0, 4.54), (50.0, 64.0)],
)
def test_joint_epsilon_of_the_published_calibration(epsilon, joint):
    plan = published(epsilon)
    sigma = joint_sigma(plan.sigma_ref, plan.sigma_signal)
    assert epsilon_rdp(RATE, sigma, STEPS, DELTA) == pytest.approx(joint, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "lowest", "highest"),
    # method.md §3 (b), by privacy-loss distributions: 0.40, 4.1, 55–57 (printed to two digits).
    [(0.5, 0.39, 0.405), (5.0, 4.05, 4.15), (50.0, 55.0, 57.0)],
)
def test_joint_epsilon_of_the_published_calibration_by_pld(epsilon, lowest, highest):
    plan = published(epsilon)
    sigma = joint_sigma(plan.sigma_ref, plan.sigma_signal)
    assert lowest <= epsilon_pld(RATE, sigma, STEPS, DELTA) <= highest


@pytest.mark.parametrize(
    ("epsilon", "steps_worth"),
    # method.md §3 (e): one step at 0.8 of the static σ costs this many steps at the static σ.
    [(0.5, 1.6), (5.0, 14.0), (50.0, 5.0)],
)
def test_a_band_in_sigma_is_lopsided_in_cost(epsilon, steps_worth):
    static = calibrate(epsilon, DELTA, RATE, STEPS)
    ratio = step_cost(RATE, 0.8 * static.sigma, static.order) / step_cost(
        RATE, static.sigma, static.order
    )
    assert ratio == pytest.approx(steps_worth, rel=0.05)


def test_cost_of_a_run_at_another_order():
    # method.md §4.7: a run planned for ε = 5 costs Σρ = 55,530 at α = 32.
    static = calibrate(5.0, DELTA, RATE, STEPS)
    assert STEPS * step_cost(RATE, static.sigma, 32.0) == pytest.approx(55_530, rel=1e-3)


def test_epsilon_of_a_thousand_steps():
    # method.md §4, "more golden values": q = 0.02, σ = 1, 1,000 steps, δ = 1e-5.
    assert epsilon_rdp(0.02, 1.0, 1000, DELTA) == pytest.approx(4.324, rel=1e-3)
    assert epsilon_pld(0.02, 1.0, 1000, DELTA) == pytest.approx(3.90, abs=0.005)


def test_one_shared_draw_costs_more_than_two():
    # method.md §3 (b): q = 0.01, σ_s = σ_g = 1, 1,000 steps.
    assert epsilon_rdp(0.01, joint_sigma(1.0, 1.0), 1000, DELTA) == pytest.approx(5.26, rel=1e-3)
    assert epsilon_rdp(0.01, 1.0, 2000, DELTA) == pytest.approx(2.87, rel=2e-3)


def test_plan_of_our_method():
    # The figures a user is promised for this command line, to half a per cent.
    plan = xcal.plan(
        method="xcal-steered", epsilon=0.5, delta=DELTA, units=UNITS, batch=BATCH, rounds=ROUNDS
    )
    assert (plan.steps, plan.sample_rate) == (STEPS, RATE)
    assert plan.sigma_static == pytest.approx(4.23, rel=EXACT)
    assert plan.sigma_ref == pytest.approx(4.31, rel=EXACT)
    assert plan.sigma_min < plan.sigma_ref < plan.sigma_max
    # method.md §4.2: κ = 5 prices the signal at 2 % of noise, and its mean then has noise 0.34.
    assert plan.signal_price == pytest.approx(0.02, abs=0.0005)
    assert plan.sigma_signal / BATCH == pytest.approx(0.34, abs=0.005)


def test_plan_of_the_published_method():
    plan = xcal.plan(
        method="xcal-paper", epsilon=0.5, delta=DELTA, units=UNITS, batch=BATCH, rounds=ROUNDS
    )
    assert plan.sigma_static == pytest.approx(4.23, rel=EXACT)
    assert plan.sigma_ref == pytest.approx(4.83, rel=EXACT)
    assert plan.sigma_signal == pytest.approx(36.6, rel=EXACT)


@pytest.mark.parametrize("target", [0.5, 5.0, 50.0])
def test_whole_orders_only_ever_count_more(target: float) -> None:
    """What noise in whole numbers may claim: never less than the best of all orders."""
    sigma = calibrate(target, DELTA, RATE, STEPS, whole_orders=True).sigma
    whole = epsilon_rdp(RATE, sigma, STEPS, DELTA, whole_orders=True)
    assert epsilon_rdp(RATE, sigma, STEPS, DELTA) <= whole
    assert whole == pytest.approx(target, rel=1e-2) and whole <= target * (1 + 1e-9)
