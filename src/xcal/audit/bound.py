"""A lower bound on ε from one training run (Steinke, Nasr and Jagielski 2023).

m canaries are put into the training data, each by a fair coin of its own. Whoever watches the run
guesses, for some of them, whether they were in. If the mechanism is (ε, δ)-DP in each canary (the
neighbor is a null unit that contributes zero), the number of right guesses is bounded as below,
so that too many right guesses refute (ε, δ).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The most probable `correct` or more right guesses can be under (ε, δ)-DP.

    Their Theorem 5.2 for guesses of -1, 0 (abstain) and 1. With W ~ Binomial(r, e^ε/(1 + e^ε)):
    P[right ≥ v] ≤ P[W ≥ v] + 2mδ · max over i = 1 … v of P[v > W ≥ v - i]/i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError("correct guesses, guesses and canaries must not decrease in this order")
    if epsilon < 0 or not 0 <= delta <= 1:
        raise ValueError("ε must not be negative and δ lie in [0, 1]")
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    slack = 0.0
    if correct > 0 and delta > 0:
        below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy)
        slack = float((np.cumsum(below) / np.arange(1, correct + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * slack)


def epsilon_bound(
    canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95
) -> float:
    """The largest ε found that this many right guesses refute; 0 where they refute nothing.

    With probability at least `confidence` the mechanism is not (ε', δ)-DP for any ε' below it.
    """
    allowed = 1 - confidence
    if guesses == 0 or p_value(canaries, guesses, correct, 0.0, delta) >= allowed:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(canaries, guesses, correct, high, delta) < allowed:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if p_value(canaries, guesses, correct, middle, delta) < allowed:
            low = middle
        else:
            high = middle
    return low


def strongest_bound(canaries: int, *, delta: float, confidence: float = 0.95) -> float:
    """What the audit says if every canary is guessed right: it can never say more."""
    return epsilon_bound(canaries, canaries, canaries, delta=delta, confidence=confidence)


@dataclass(frozen=True)
class Found:
    """The best of the guess counts that were tried, at one joint confidence."""

    epsilon: float
    guesses: int
    correct: int
    accuracy_all: float  # right guesses if nobody abstained


def guess_counts(canaries: int) -> tuple[int, ...]:
    """How many guesses are tried: fixed beforehand, few, since each takes a share of the error."""
    wanted = {round(canaries * share) for share in (0.02, 0.05, 0.15, 0.4, 1.0)}
    return tuple(sorted({max(2, count - count % 2) for count in wanted if count >= 2}))


def find_epsilon(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    *,
    delta: float,
    confidence: float = 0.95,
    counts: Sequence[int] | None = None,
) -> Found:
    """Guess the highest scores to be in, the lowest to be out, and bound ε.

    Several numbers of guesses are tried and the best is kept; the error allowed is divided among
    them (Bonferroni), so the confidence holds for the answer. Coins decide no tie.
    """
    m = len(scores)
    if m < 2 or included.shape != scores.shape:
        raise ValueError(
            "an audit needs one score and one inclusion for each of two or more canaries"
        )
    tried = tuple(counts) if counts is not None else guess_counts(m)
    shared = 1 - (1 - confidence) / len(tried)
    order = np.argsort(scores, kind="stable")
    inside = included[order]

    def right(count: int) -> int:
        low = high = count // 2
        return int((~inside[:low]).sum() + inside[m - high :].sum())

    best = Found(0.0, 0, 0, right(m) / (m - m % 2))
    for count in tried:
        correct = right(count)
        epsilon = epsilon_bound(m, count, correct, delta=delta, confidence=shared)
        if epsilon > best.epsilon or best.guesses == 0:
            best = Found(epsilon, count, correct, best.accuracy_all)
    return best
