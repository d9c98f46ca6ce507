"""What a private training promises: in words, for whoever is asked to trust it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from xcal.dp.calibration import Plan
from xcal.dp.group_privacy import group_epsilon
from xcal.dp.opening import in_terms_of_tests, what_can_be_learnt

_PERSONS = (2, 4, 12)  # records of one person, as examples: how many there are is private


@dataclass(frozen=True)
class Promise:
    """What a statement is made of. `plan` None: noise without a budget."""

    plan: Plan | None
    unit: str
    units: int
    rate: float
    sigma: float
    clip: float
    noise: str
    ledger: str | None
    steps: int
    epsilon_so_far: float
    delta: float


def promise_text(promise: Promise) -> str:
    """The promise, its unit, its neighbors, what it rests on and what it does not cover."""
    by_group = promise.unit == "group"
    unit = "all records that share one id in `groups`" if by_group else "one record of the data set"
    what = "the records of one group were used" if by_group else "one single record was used"
    paragraphs = [f"Privacy statement: DP-SGD; the unit is {unit}."]
    plan = promise.plan
    if plan is None:
        paragraphs.append(
            "No budget was set, so nothing stops this training. The"
            f" {promise.steps} steps charged so far are ({promise.epsilon_so_far:.4g},"
            f" {promise.delta:g})-differentially private for {unit}, if their number was not chosen"
            " by what the data showed."
        )
    else:
        paragraphs += [
            f"All that the optimizer is given, and every model made of it, is ({plan.epsilon:g},"
            f" {plan.delta:g})-differentially private for {unit}, wherever the training stops; it"
            f" takes at most {plan.steps} steps, and {promise.steps} are charged so far.",
            what_can_be_learnt(what, "every model of this training", plan.epsilon, plan.delta),
            in_terms_of_tests(plan.epsilon, plan.delta),
        ]
        if not by_group:
            told = [(k, group_epsilon(plan, k)) for k in _PERSONS]
            paragraphs.append(
                "A person with several records is protected less: "
                + ", ".join(
                    f"with {k} at epsilon {e:.3g}" if e is not None else f"with {k} not at all"
                    for k, e in told
                )
                + ". Give `groups` to protect persons."
            )
    paragraphs.append(
        "Neighbors: two data sets where one unit's data are replaced by a null unit that"
        f" contributes zero to everything (zero-out). The numbers of units ({promise.units}) and of"
        " records are the same on both sides and public; adding or removing a unit is not covered."
    )
    paragraphs.append(
        f"Mechanism: each step draws every unit independently with probability {promise.rate:.6g},"
        f" clips its gradient (of the mean loss of its records) to norm {promise.clip:g}, and adds"
        f" Gaussian noise of {promise.sigma:.6g} times that norm to every coordinate of the sum."
        f" Noise: {promise.noise}."
        + (
            f" Each step was charged in the ledger {promise.ledger} before its batch was drawn."
            if promise.ledger is not None
            else " Steps are charged in memory: other trainings on the same data are not counted."
        )
    )
    if plan is not None and plan.delta >= 1 / promise.units:
        paragraphs.append(
            f"Beware: delta = {plan.delta:g} is not below 1/units = {1 / promise.units:g}. Such a"
            " delta would allow one unit to be published outright."
        )
    if promise.noise == "seeded":
        paragraphs.append(
            "Beware: noise and draws come from a seed. This is an experiment, private against"
            " nobody who knows or guesses the seed."
        )
    assumed = [
        "the draws stay secret, and one unit's records stand under one id",
        "network, criterion and data set treat every record by itself: no value computed from one"
        " changes what another contributes. Gradients that would are found at every step; values"
        " are looked at in network, criterion and collate function only, not in a data set whose"
        " item is made of others (or stands in for them), nor in what the network keeps outside of"
        " its buffers and attributes",
        "the training loop gives the network the rows of the private loader's newest batch, changed"
        " at most each by itself (no mixing of inputs, no number of the batch such as loss.item()"
        " as a weight), and lets nothing else of the data out",
        "code that is handed in does not set out to get around the engine",
        "floating point behaves as the reals up to the stated margins: in single precision units"
        " are clipped to the norm over 1 + 10⁻³, releases are rounded to a public grid; how one"
        " record's numbers are rounded does not depend on who else was drawn",
    ]
    open_ = [
        "losses, outputs and metrics on training data, and the sizes of batches: they carry no"
        " noise",
        "timing, and what the machine's operator, its memory or its files give away",
        "the choice of hyper-parameters by looking at several trainings",
    ]
    lines = [
        textwrap.fill(text, 92, break_on_hyphens=False, break_long_words=False) + "\n"
        for text in paragraphs
    ]
    for title, items in (("Assumed:", assumed), ("Not protected:", open_)):
        lines.append(title)
        lines += [
            textwrap.fill(
                item, 92, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
            )
            for item in items
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
