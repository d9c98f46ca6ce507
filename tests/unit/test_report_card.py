"""The model card beside a run's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import xcal
from support import TINY, tiny
from xcal.experiments import make_experiment
from xcal.federation.card import INTENDED_USE, LIMITS, card_text

QUICK = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 6}


@pytest.fixture(scope="module")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("card") / "run"
    xcal.run(out, method="fl-dp", **QUICK)
    return out


def test_a_finished_run_has_a_card_that_says_what_its_files_say(private_run: Path) -> None:
    card = (private_run / "card.md").read_text()
    result = json.loads((private_run / "result.json").read_text())
    statement = json.loads((private_run / "statement.json").read_text())
    assert INTENDED_USE in card and all(limit in card for limit in LIMITS)
    assert statement["promise"] in card
    assert "ε = 8, δ = 0.001, per record" in card
    assert f"| macro F1 | {result['macro_f1']:.3f} |" in card
    assert f"| ROAD | {result['road']:.3f} |" in card
    assert "Classes: left, middle, right." in card
    assert "License: none." in card
    assert "51 + 51 + 48 units (one unit: one image)" in card
    assert result["command"] in card and result["versions"]["torch"] in card


def test_the_card_tells_of_private_images_only_their_declared_number(private_run: Path) -> None:
    card = (private_run / "card.md").read_text()
    assert "secret" not in card
    # 150 training images of 50 patients: no count of theirs beyond the units of each client.
    assert "Training: 51 + 51 + 48 units" in card
    assert "Test: 45 images of 15 patients." in card
    assert card.count("patients") == 2  # of the validation and of the test split


def test_a_card_without_guarantee_says_so_and_promises_nothing(tmp_path: Path) -> None:
    xcal.run(tmp_path / "run", method="fl", **QUICK)
    card = (tmp_path / "run" / "card.md").read_text()
    assert "no differential-privacy guarantee" in card
    assert "Guaranteed:" not in card


def test_names_from_outside_stay_in_their_cell(private_run: Path) -> None:
    result = json.loads((private_run / "result.json").read_text())
    statement = json.loads((private_run / "statement.json").read_text())
    data = tiny()
    object.__setattr__(data, "classes", ("a|b", "<script>", "two\nlines"))
    card = card_text(make_experiment(QUICK), data, statement, result)
    assert "a\\|b" in card and "<script>" not in card and "two lines" in card


def test_undefined_metrics_and_missing_explanations_are_said(private_run: Path) -> None:
    result = json.loads((private_run / "result.json").read_text())
    statement = json.loads((private_run / "statement.json").read_text())
    result["explanations"] = None
    result["classification"]["auroc"] = None
    result["clients"][1]["halted"] = True
    card = card_text(make_experiment(QUICK), tiny(), statement, result)
    assert "| undefined |" in card and "ROAD" not in card
    assert "The budget of client 1 ended before the last round." in card
