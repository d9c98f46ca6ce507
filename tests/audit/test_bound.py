"""The theorem behind the one-run audit, against what is known of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from xcal.audit.bound import (
    epsilon_bound,
    find_epsilon,
    guess_counts,
    p_value,
    strongest_bound,
)


def test_pure_dp_is_a_binomial_tail():
    """δ = 0: right guesses are at most those of randomized response."""
    for epsilon in (0.0, 0.7, 3.0):
        accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
        expected = binom.sf(59, 80, accuracy)
        assert p_value(100, 80, 60, epsilon, 0.0) == pytest.approx(expected, rel=1e-12)


def test_the_slack_of_delta_by_hand():
    """r = 2, v = 2: W is 0, 1, 2 with (1-a)², 2a(1-a), a²; the maximum is over two terms."""
    epsilon, delta, m = 1.0, 1e-3, 10
    a = math.e / (1 + math.e)
    one, none = 2 * a * (1 - a), (1 - a) ** 2
    slack = max(one / 1, (one + none) / 2)
    assert p_value(m, 2, 2, epsilon, delta) == pytest.approx(a**2 + 2 * m * delta * slack)


@pytest.mark.parametrize("m", [10, 100, 1000])
def test_all_right_is_the_known_maximum(m):
    """P[all right] = (1 + e^-ε)^-m, so ε = -ln(0.05^(-1/m) - 1): about ln(m/3)."""
    known = -math.log(0.05 ** (-1 / m) - 1)
    assert strongest_bound(m, delta=0.0) == pytest.approx(known, abs=1e-6)
    assert strongest_bound(m, delta=1e-9) == pytest.approx(known, abs=1e-3)
    assert strongest_bound(m, delta=1e-5) <= known


def test_the_example_of_the_paper():
    """ε-DP randomized response with many guesses is found nearly tight (their Figure 1)."""
    epsilon, m = 2.0, 100_000
    right = round(m * math.exp(epsilon) / (1 + math.exp(epsilon)))
    found = epsilon_bound(m, m, right, delta=0.0)
    assert 1.95 < found < 2.0


def test_chance_finds_nothing():
    rng = np.random.default_rng(1)
    found = [
        find_epsilon(rng.standard_normal(1000), rng.random(1000) < 0.5, delta=1e-5).epsilon
        for _ in range(40)
    ]
    assert np.mean(np.array(found) > 0) <= 0.1  # 95 % confidence
    assert max(found) < 0.5


def test_a_perfect_auditor_finds_the_maximum_of_its_share_of_the_error():
    inside = np.random.default_rng(2).random(500) < 0.5
    found = find_epsilon(inside.astype(float), inside, delta=1e-5)
    # Guessing everybody needs as many in as out; the coins may differ.
    assert found.epsilon > 3.5
    assert found.epsilon <= strongest_bound(500, delta=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_bounds_move_as_they_should(data):
    m = data.draw(st.integers(4, 300))
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(0, r))
    delta = data.draw(st.sampled_from([0.0, 1e-6, 1e-3]))
    bound = epsilon_bound(m, r, v, delta=delta)
    assert 0 <= bound <= strongest_bound(m, delta=0.0)
    assert epsilon_bound(m, r, v, delta=delta, confidence=0.99) <= bound + 1e-9
    if bound > 0:
        assert p_value(m, r, v, bound, delta) <= 0.05 + 1e-9
    if v < r:
        assert epsilon_bound(m, r, v + 1, delta=delta) >= bound - 1e-9


def test_the_claim_holds_for_mechanisms_that_keep_it():
    """Randomized response at ε = 1.5: the bound is above ε in at most 5 % of audits."""
    rng, epsilon = np.random.default_rng(3), 1.5
    over = 0
    for _ in range(100):
        inside = rng.random(200) < 0.5
        honest = rng.random(200) < 1 / (1 + math.exp(-epsilon))
        scores = np.where(inside == honest, 1.0, 0.0) + 1e-6 * rng.random(200)
        over += find_epsilon(scores, inside, delta=0.0, counts=(60, 200)).epsilon > epsilon
    assert over <= 11  # P[Binomial(100, 0.05) > 11] < 1 %; always the same draws


def test_nonsense_is_refused():
    for wrong in ((10, 5, 6, 1.0, 0.0), (10, 11, 3, 1.0, 0.0), (10, 5, 3, -1.0, 0.0)):
        with pytest.raises(ValueError, match="must"):
            p_value(*wrong)
    with pytest.raises(ValueError, match="two or more"):
        find_epsilon(np.zeros(1), np.ones(1, dtype=bool), delta=0.0)
    assert guess_counts(10) == tuple(sorted(set(guess_counts(10))))
