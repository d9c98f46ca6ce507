"""The statement says what holds, what is assumed and what is not protected, never more."""

from __future__ import annotations

import json

import pytest

from xcal.dp.calibration import PlanShape, plan_static
from xcal.dp.statement import Situation, make_statement, statement_text

SHAPE = PlanShape(2.0, 1e-5, units=400, batch=16, rounds=3)


def situation(**changes) -> Situation:
    plans = {"0": plan_static(SHAPE), "1": plan_static(SHAPE)}
    base = {"method": "fl-dp", "unit": "record", "noise": "secure", "plans": plans}
    return Situation(**{**base, **changes})


def test_what_a_private_run_states():
    statement = json.loads(json.dumps(make_statement(situation())))
    assert "(2, 1e-05)-differentially private for one image (record)" in statement["promise"]
    assert statement["neighboring_relation"].startswith("zero-out")
    assert "Poisson" in statement["sampling"]
    assert "one fixed order" in statement["accounting"]
    assert statement["noise"] == "secure"
    assert [c["client"] for c in statement["clients"]] == ["0", "1"]
    assert statement["clients"][0]["order"] == plan_static(SHAPE).order
    assert any("timing" in item for item in statement["not_protected"])
    assert any("tuned" in item for item in statement["not_protected"])
    assert any("validation" in item for item in statement["not_protected"])
    assert statement["warnings"] == []


def test_the_text_says_all_that_the_values_say():
    statement = make_statement(situation(noise="seeded"))
    text = "".join(statement_text(statement).split())  # lines may break at a hyphen
    for part in (
        statement["promise"],
        statement["neighboring_relation"],
        statement["sampling"],
        statement["accounting"],
        statement["server_sees"],
        *statement["assumptions"],
        *statement["not_protected"],
        *statement["warnings"],
    ):
        assert "".join(part.split()) in text
    assert all(len(line) <= 100 for line in statement_text(statement).split("\n"))


def test_a_run_without_a_guarantee_says_so_and_promises_nothing():
    statement = make_statement(situation(method="fl", plans={}, noise="seeded"))
    assert "no differential-privacy guarantee: epsilon is infinite" in statement["promise"]
    for key in ("unit", "neighboring_relation", "sampling", "noise", "accounting"):
        assert statement[key] is None
    assert statement["assumptions"] == []
    assert statement["clients"] == []
    assert statement["not_protected"] == ["anything"]
    assert "no differential-privacy guarantee" in statement_text(statement)


def test_a_group_is_named():
    plans = {"0": plan_static(PlanShape(2.0, 1e-5, 400, 16, 3, unit="group"))}
    statement = make_statement(situation(unit="group", plans=plans, group_name="patient"))
    assert "for all images of one patient (group)" in statement["promise"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": "seeded"}, "this is a simulation"),
        ({"shared_units": True}, "stand at several clients"),
        ({"group_name": "patient"}, "unit = 'group' protects the patient"),
        ({"group_name": "patient", "groups_split": True}, "Images of one patient stand at several"),
        (
            {"plans": {"0": plan_static(PlanShape(2.0, 0.01, units=400, batch=16, rounds=3))}},
            "is not below 1/units",
        ),
    ],
)
def test_whoever_should_beware_is_told(changes, words):
    warnings = make_statement(situation(**changes))["warnings"]
    assert sum(words in warning for warning in warnings) == 1
    assert words not in " ".join(make_statement(situation())["warnings"])


def test_under_masks_a_unit_at_several_clients_does_not_pay_just_the_sum():
    masked = make_statement(situation(shared_units=True, sites=3, honest=2))
    (warning,) = (w for w in masked["warnings"] if "stand at several clients" in w)
    assert "more than the sum" in warning and "pays the sum" not in warning
    assert any("nobody stands at two of the sites" in a for a in masked["assumptions"])
