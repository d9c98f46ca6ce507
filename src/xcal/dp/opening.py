"""What (ε, δ) means for one person, in words and numbers that need no other knowledge.

With L the logarithm of how much more likely what was seen is where the data were used, (ε, δ) says
E[(1 − e^{ε−L})₊] ≤ δ. So L passes ε + t with a chance of at most δ/(1 − e^{−t}), and else Bayes
bounds every suspicion; by ε alone it would be passed with a chance of many δ. For tests of fixed
error the bound holds as it is, δ included.
"""

from __future__ import annotations

import math

PRIORS = (0.01, 0.5)
FALSE_POSITIVES = 0.01
MARGIN = 0.1  # t: what is promised of a suspicion fails with a chance of about 10.5 δ
LITTLE, NEXT_TO_NOTHING = 0.5, 0.9  # what the first prior may grow to before it is said plainly


def posterior(prior: float, epsilon: float) -> float:
    """What a suspicion grows to by evidence e^ε times as likely: pe^ε/(1 − p + pe^ε)."""
    return 1 / (1 + (1 - prior) / prior * math.exp(-epsilon))


def largest_posterior(prior: float, epsilon: float) -> float:
    """The most that a suspicion can grow to, apart from a chance of `beyond(δ)`."""
    return posterior(prior, epsilon + MARGIN)


def beyond(delta: float) -> float:
    """The chance that a suspicion grows further than `largest_posterior`."""
    return min(1.0, delta / -math.expm1(-MARGIN))


def true_positives(false_positives: float, epsilon: float, delta: float) -> float:
    """The highest true positive rate of any test with this false positive rate."""
    # Both directions of the definition; the second is the tighter one where ε is large.
    first = math.exp(min(epsilon, 700.0)) * false_positives + delta
    second = 1 - math.exp(-epsilon) * (1 - delta - false_positives)
    return min(1.0, first, second)


def percent(share: float) -> str:
    """Rounded up to a tenth: what is printed is still a bound."""
    return f"{math.ceil(1000 * share - 1e-9) / 10:g} %"


def chance(delta: float) -> str:
    return f"1 in {math.floor(1 / delta * (1 + 1e-9)):,}"


def worth(epsilon: float) -> str | None:
    """What is to be said of an ε that lets a small suspicion grow far; None: nothing."""
    grown = largest_posterior(PRIORS[0], epsilon)
    if grown < LITTLE:
        return None
    return "next to nothing" if grown >= NEXT_TO_NOTHING else "little"


def what_can_be_learnt(what: str, seen: str, epsilon: float, delta: float) -> str:
    """One sentence: how far a suspicion that `what` can grow; where it is far, it says so first."""
    grown = [percent(largest_posterior(prior, epsilon)) for prior in PRIORS]
    first, second = f"a suspicion of {percent(PRIORS[0])} that {what}", percent(PRIORS[1])
    told = f"can raise {first} to at most {grown[0]}, and one of {second} to at most {grown[1]}"
    if grown[1] == "100 %":
        told = f"can raise {first} to at most {grown[0]}"
    if grown[0] == "100 %":
        told = f"can turn {first} into certainty"
    judged = f"epsilon {epsilon:g} promises {worth(epsilon)}: " if worth(epsilon) else ""
    sentence = (
        f"{judged}whoever sees {seen} {told}; apart from a chance of {chance(beyond(delta))}, for"
        " which nothing is promised."
    )
    return sentence[:1].upper() + sentence[1:]


def in_terms_of_tests(epsilon: float, delta: float) -> str:
    """The same for statisticians, with δ in the number."""
    found = percent(true_positives(FALSE_POSITIVES, epsilon, delta))
    return (
        f"A test for whether one unit's data were used that is wrong for {percent(FALSE_POSITIVES)}"
        " of those whose data were not used"
        f" {'may be right for all' if found == '100 %' else f'is right for at most {found}'} of"
        " those whose data were."
    )
