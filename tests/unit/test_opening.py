"""The statement's first three sentences: who, against whom, and what can be learnt, in numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, special

import xcal
from support import TINY
from xcal.config import Experiment
from xcal.data.images import ImageData
from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.opening import (
    beyond,
    chance,
    largest_posterior,
    percent,
    posterior,
    true_positives,
    what_can_be_learnt,
)
from xcal.dp.statement import Measured, Situation, make_statement, statement_text
from xcal.federation import outcome

SHAPE = PlanShape(2.0, 1e-5, units=3332, batch=32, rounds=30)
QUICK = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 0}


def situation(epsilon: float = 2.0, **changes: Any) -> Situation:
    unit = changes.get("unit", "record")
    plan = plan_static(replace(SHAPE, epsilon=epsilon, unit=unit))
    base = {"method": "fl-dp", "unit": unit, "noise": "secure", "plans": {"0": plan}}
    return Situation(**{**base, **changes})


def worst_pair(epsilon: float, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """The (ε, δ)-indistinguishable pair that every other one is a post-processing of."""
    high, low = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    used = np.array([delta, (1 - delta) * high, (1 - delta) * low, 0.0])
    return used, used[::-1].copy()


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0, 5.0, 8.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-3])
def test_the_numbers_are_those_of_the_worst_pair(epsilon: float, delta: float) -> None:
    used, unused = worst_pair(epsilon, delta)
    for prior in (0.01, 0.5):
        # Apart from the outputs that only one of the two can give, which have probability δ.
        seen = prior * used[1:3] / (prior * used[1:3] + (1 - prior) * unused[1:3])
        assert posterior(prior, epsilon) == pytest.approx(seen.max(), rel=1e-12)
        assert largest_posterior(prior, epsilon) > seen.max()
    assert used[0] == unused[3] == delta < beyond(delta)
    # Neyman and Pearson: accuse by likelihood ratio, at random on the edge.
    for wrong in (0.001, 0.01, 0.3):
        left, right = wrong, 0.0
        for p, q in zip(used, unused, strict=True):  # ratios fall from left to right
            share = 1.0 if q <= left else left / q
            left, right = left - share * q, right + share * p
        assert true_positives(wrong, epsilon, delta) == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-7, 1e-5, 1e-3])
def test_a_gaussian_keeps_to_what_is_said_of_suspicions(mu: float, delta: float) -> None:
    """Exactly: L ~ N(μ²/2, μ²), and ε follows from δ. By ε alone the sentence would be false."""

    def delta_at(epsilon: float) -> float:
        over = [(mu / 2 - epsilon / mu), (-mu / 2 - epsilon / mu)]
        return float(special.ndtr(over[0]) - math.exp(epsilon) * special.ndtr(over[1]))

    epsilon = float(optimize.brentq(lambda e: delta_at(e) - delta, 0.0, 100.0))

    def chance_above(loss: float) -> float:
        return float(special.ndtr((mu**2 / 2 - loss) / mu))

    for prior in (0.01, 0.5):
        bound = largest_posterior(prior, epsilon)
        loss = math.log(bound / (1 - bound)) - math.log(prior / (1 - prior))
        assert chance_above(loss) <= beyond(delta)
    assert chance_above(epsilon) > 2 * delta


def test_extremes() -> None:
    assert posterior(0.01, 0.0) == pytest.approx(0.01)
    assert posterior(0.01, 1e6) == 1.0
    assert true_positives(0.01, 1e6, 1e-5) == 1.0
    assert true_positives(0.01, 0.0, 0.0) == pytest.approx(0.01)
    assert (percent(0.069438), percent(0.01), percent(0.99991)) == ("7 %", "1 %", "100 %")
    assert (chance(1e-5), chance(1e-3), chance(3e-6)) == (
        "1 in 100,000",
        "1 in 1,000",
        "1 in 333,333",
    )


def test_printed_bounds_are_never_below_the_bound() -> None:
    for share in np.random.default_rng(0).random(1000):
        assert float(percent(share).split()[0]) / 100 >= share - 1e-9


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [
        (0.5, "to at most 1.9 %, and one of 50 % to at most 64.6 %"),
        (2.0, "to at most 7.7 %, and one of 50 % to at most 89.1 %"),
        (5.0, "Epsilon 5 promises little"),
        (8.0, "Epsilon 8 promises next to nothing"),
        (50.0, "into certainty"),
    ],
)
def test_what_a_target_means_is_said_plainly(epsilon: float, words: str) -> None:
    told = what_can_be_learnt("it was used", "all that a site sends", epsilon, 1e-5)
    assert words in told
    assert "1 in 9,516" in told
    assert ("promises" in told.split(":")[0]) == (epsilon >= 5)
    if epsilon == 50.0:
        assert told.startswith("Epsilon 50 promises next to nothing")


def test_a_run_per_image_says_first_what_it_means_for_a_person() -> None:
    first, second, third = make_statement(situation(0.5, group_name="patient"))["opening"]
    assert first.startswith("A patient with 2 images is protected only at epsilon 1.06, one with 4")
    assert "one with 12 images at epsilon 9.66 (which promises next to nothing)" in first
    assert first.endswith("protected is each single image, not the patient.")
    assert "the server, the other sites, anyone who gets the model" in second
    assert "one single image was used" in third


def test_where_a_person_has_no_guarantee_it_says_so() -> None:
    statement = make_statement(situation(2.0, group_name="patient"))
    assert "one with 12 images not at all" in statement["opening"][0]
    assert [p["epsilon"] is None for p in statement["persons"]] == [False, False, True]
    worse = make_statement(situation(20.0, group_name="patient", group_cap=30))["opening"][0]
    assert worse.startswith("A patient with 30 images is not protected at all")
    assert "at most 30 images of one patient are used" in worse


def test_where_nobody_knows_whose_images_they_are_a_cap_bounds_nothing() -> None:
    for cap in (None, 1, 3):
        statement = make_statement(situation(0.5, group_cap=cap))
        assert [p["images"] for p in statement["persons"]] == [2, 4, 12]
        assert statement["opening"][0].startswith("A person with 2 images is protected only at")
        assert "which images belong to one person is not known" in statement["opening"][0]
    one = make_statement(situation(0.5, group_cap=1, group_name="patient"))["opening"][0]
    assert one == "Protected is every patient, of whom at most 1 image is used."


def test_a_run_per_group_protects_the_person() -> None:
    grouped = situation(unit="group", group_name="lesion")
    statement = make_statement(grouped)
    assert statement["opening"][0].startswith("Protected is every lesion: all images of one lesion")
    assert "declared" not in statement["opening"][0]
    assert statement["persons"] == []
    by_hand = make_statement(replace(grouped, groups_declared=True, group_name="person"))
    assert "was declared by the data's owner" in by_hand["opening"][0]


def test_a_simulation_protects_nobody_who_knows_the_seed_and_says_so_at_once() -> None:
    assert "seed" in make_statement(situation(noise="seeded"))["opening"][1]
    assert "seed" not in make_statement(situation())["opening"][1]


def test_without_a_guarantee_nobody_is_protected() -> None:
    opening = make_statement(situation(method="fl", plans={}))["opening"]
    assert len(opening) == 3
    assert opening[0] == "Nobody is protected."


def test_the_text_opens_with_the_three_sentences() -> None:
    statement = make_statement(situation(group_name="patient"))
    text = " ".join(statement_text(statement).split())
    assert text.startswith("Privacy statement: fl-dp " + " ".join(statement["opening"]))


def test_the_accounting_line_follows_the_plan() -> None:
    plan = plan_static(SHAPE)
    pld = SimpleNamespace(**{**plan.as_dict(), "accountant": "pld", "warnings": ()})
    shorter = SimpleNamespace(**{**vars(pld), "steps": 7})
    persons = {"unit": "group", "group_name": "patient"}
    one = make_statement(situation(plans={"0": pld}, **persons))["accounting"]
    assert one == (
        "privacy-loss distributions (dp-accounting, pessimistic) for a plan fixed beforehand,"
        f" {plan.steps} steps at most"
    )
    two = make_statement(situation(plans={"0": pld, "1": shorter}, **persons))["accounting"]
    assert two.endswith(f", 7 to {plan.steps} steps at most")
    assert make_statement(situation())["accounting"].startswith("Rényi filter of one fixed order")
    mixed = make_statement(situation(plans={"0": pld, "1": plan}, **persons))["accounting"]
    assert mixed.startswith("at client 0 privacy-loss distributions")
    assert "; at client 1 Rényi filter of one fixed order" in mixed


def test_neighbors_are_named_client_by_client() -> None:
    plan = plan_static(SHAPE)
    plans = {"a": plan, "b": plan, "c": plan}
    for known, parts in (
        ((), {"which would change either, is not covered": 1, "filled up": 0}),
        (("a", "b", "c"), {"adding or removing one unit is covered too": 1, "counted": 0}),
        (("a", "c"), {"at clients a, c it is declared": 1, "at client b it is counted": 1}),
    ):
        statement = make_statement(situation(plans=plans, add_remove=frozenset(known)))
        told = statement["neighboring_relation"]
        assert told.startswith("zero-out")
        for words, count in parts.items():
            assert told.count(words) == count
        assert [c["client"] for c in statement["clients"] if c["add_remove"]] == list(known)


def test_which_images_no_guarantee_covers_and_who_agreed() -> None:
    def told(found: Measured | None) -> tuple[str, list[str], str]:
        statement = make_statement(situation(measured=found))
        return statement["public_images"], statement["not_protected"], statement_text(statement)

    public, listed, _ = told(Measured("ward 7", 500, 90, "Dr. Moreau"))
    assert public == (
        "the 500 validation and 90 test images of the data set ward 7, which are treated as"
        " public, as Dr. Moreau agreed"
    )
    assert public in listed
    public, listed, _ = told(Measured("ward 7", 0, 90, lead=True))
    assert public.startswith("the 90 test images of the lead's own data set ward 7")
    assert "agreed" not in public
    public, listed, text = told(Measured("ward 7", 0, 0))
    assert public == "no validation or test images are used"
    assert not any("validation" in item for item in listed)
    assert "Measured on: no validation or test images are used." in text
    assert "validation and test images, which are treated as public" in told(None)[1]


def test_plug_ins_are_named_with_whose_word_counts(tmp_path: Path) -> None:
    xcal.run(tmp_path / "own", **{**QUICK, "method": "support:own_method"})
    statement = json.loads((tmp_path / "own" / "statement.json").read_text())
    found = statement["plugins"]
    assert [text.split(" is a plug-in")[0] for text in found] == [
        "the method support:own_method",
        "the network support:micro",
        "the data set support:tiny",
    ]
    assert "its author's word that each step charges for all it releases" in found[0]
    assert "no step without a charge reaches the model" in found[0]
    assert "made-up images only" in found[1]
    card = (tmp_path / "own" / "card.md").read_text()
    text = " ".join((tmp_path / "own" / "statement.txt").read_text().split())
    for plugin in found:
        assert plugin[1:] in card and plugin in text
    for sentence in statement["opening"]:
        assert sentence in card and sentence in text


def test_what_is_part_of_this_software_has_no_such_line() -> None:
    statement = make_statement(situation())
    assert statement["plugins"] == []
    assert "Plug-ins" not in statement_text(statement)
    bare = make_statement(situation(plans={}, method="fl", plugins={"network": "a.b:c"}))
    assert bare["plugins"] == ["the network a.b:c is a plug-in and not part of this software"]


def test_a_person_in_training_and_in_test_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "Some patients have images in training and in validation or test"
    xcal.run(tmp_path / "apart", method="fl-dp", **QUICK)
    assert words not in (tmp_path / "apart" / "card.md").read_text()
    monkeypatch.setattr(ImageData, "shared_groups", 4, raising=False)
    xcal.run(tmp_path / "run", method="fl-dp", **QUICK)
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert sum(words in warning for warning in statement["warnings"]) == 1
    assert words in (tmp_path / "run" / "card.md").read_text()


def test_who_agreed_to_public_images_stands_in_statement_and_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "public_validation_by" in Experiment.model_fields:
        keys = {"public_validation": True, "public_validation_by": "Dr. Moreau"}
    else:
        keys = {}
        monkeypatch.setattr(Experiment, "public_validation_by", "Dr. Moreau", raising=False)
    xcal.run(tmp_path / "run", method="fl-dp", **{**QUICK, "validation_images": 12, **keys})
    told = "the 12 validation and 45 test images of the data set tiny, which are treated as public"
    for name in ("statement.txt", "card.md"):
        text = " ".join((tmp_path / "run" / name).read_text().split())
        assert f"{told}, as Dr. Moreau agreed" in text


def test_the_command_shows_the_three_sentences(tmp_path: Path, invoke: Any) -> None:
    words = [w for k, v in QUICK.items() for w in ("--set", f"{k}={v}")]
    code, out, _ = invoke("run", "--out", str(tmp_path / "r"), *words, "--set", "method=fl-dp")
    assert code == 0
    shown = " ".join(out.split())
    for sentence in json.loads((tmp_path / "r" / "statement.json").read_text())["opening"]:
        assert sentence in shown


def test_groups_that_are_not_known_of_every_image_are_no_persons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from support import tiny

    assert outcome._group_name(tiny()) == "patient"
    monkeypatch.setattr(ImageData, "groups_known", False, raising=False)
    assert outcome._group_name(tiny()) == "record"
