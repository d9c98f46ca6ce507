"""Files among the results that are none: one sentence, nothing copied, nothing called done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from commands import reproduce_process
from made_up import made_up_cell
from reproduce.__main__ import app
from reproduce.declared import declare
from reproduce.report import gather
from reproduce.store import Results, TestSet, merge
from xcal.errors import UserError
from xcal.studies.store import pack

GROUP = np.repeat(np.arange(20), 3)
TEST = TestSet("smear-32px", ("a", "b", "c"), "picture", GROUP % 3, GROUP)
CELLS = declare("privacy-utility", "smoke").cells


def folder(path: Path) -> Results:
    results = Results(path)
    for cell in CELLS:
        results.write("smoke", made_up_cell(cell, TEST), TEST)
    return results


def path_of(results: Results) -> Path:
    return results.path / "cells" / "smoke" / f"{CELLS[0].id}.json"


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    values = made_up_cell(CELLS[0], TEST)
    return json.dumps(change(values) or values)


WRONG = {
    "nothing": "",
    "half a file": changed(lambda v: v)[:200],
    "deep": "[" * 100_000,
    "an empty object": "{}",
    "a list": "[]",
    "no keys": changed(lambda v: v.pop("keys") and v),
    "keys of another kind": changed(lambda v: v | {"keys": [1]}),
    "no method": changed(lambda v: v["keys"].pop("method") and v),
    "an unknown status": changed(lambda v: v | {"status": "half"}),
    "text for a number": changed(lambda v: v | {"macro_f1": "0.5"}),
    "no versions": changed(lambda v: v.pop("versions") and v),
    "another's keys": changed(lambda v: v["keys"].update(seed=9)),
    "rounds of nothing": changed(lambda v: v | {"rounds": {}}),
    "rounds of text": changed(lambda v: v["rounds"].update(f1=["a", "b"])),
    "clients of text": changed(lambda v: v | {"clients": ["a"]}),
    "predicted of nonsense": changed(lambda v: v | {"predicted": "|u1:###"}),
    "predicted of no kind": changed(lambda v: v | {"predicted": "what:eJwDAAAAAAE="}),
    "too few predicted": changed(lambda v: v | {"predicted": pack(np.zeros(2, np.uint8))}),
    "unknown classes": changed(lambda v: v | {"predicted": pack(np.full(60, 7, np.uint8))}),
    "bad ranks": changed(lambda v: v | {"ranks": pack(np.zeros(7, np.uint16))}),
    "bad scores": changed(lambda v: v | {"road_scores": pack(np.zeros(7, np.int16))}),
    "bad images": changed(lambda v: v | {"road_images": pack(np.full(15, 999, np.int32))}),
    "a set elsewhere": changed(lambda v: v | {"test_set": "../../sets/smear-32px"}),
    "a bad map": changed(lambda v: v | {"maps": [{"image": 0}]}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_damaged_cell_is_named_with_what_to_do(tmp_path: Path, kind: str) -> None:
    results, other = folder(tmp_path / "r"), Results(tmp_path / "new")
    path_of(results).write_text(WRONG[kind])
    for use in (
        lambda: Results(results.path).of_grid(declare("privacy-utility", "smoke")),
        lambda: gather([results.path], panels=False),
        lambda: merge(other, [Results(results.path)]),
    ):
        with pytest.raises(
            UserError, match=r"is not a cell's result \(.*\): remove it, and"
        ) as caught:
            use()
        assert str(path_of(results)) in str(caught.value)
    assert not other.path.exists()  # nothing was copied, of the good ones neither


@pytest.mark.parametrize("text", ["{}", "[]", '{"name": "../x"}', ""])
def test_a_damaged_set_is_named(tmp_path: Path, text: str) -> None:
    results = folder(tmp_path / "r")
    (results.path / "sets" / "smear-32px.json").write_text(text)
    with pytest.raises(UserError, match=r"smear-32px.json describes no test set"):
        Results(results.path).all("smoke")
    (results.path / "sets" / "smear-32px.json").unlink()
    with pytest.raises(UserError, match=r"smear-32px.json describes no test set \(it is missing"):
        Results(results.path).all("smoke")


@pytest.mark.slow
def test_a_damaged_cell_ends_the_commands_with_2(tmp_path: Path) -> None:
    results = folder(tmp_path / "r")
    path_of(results).write_text("{}")
    where = ["--results", str(results.path), "--work", str(tmp_path / "w")]
    for words in (
        ["study", "privacy-utility", *where],
        ["study", "privacy-utility", "--plan", *where],
        ["merge", str(results.path), "--results", str(tmp_path / "new")],
        ["report", str(results.path), "--out", str(tmp_path / "r.html")],
    ):
        done = reproduce_process(*words)
        said = done.stdout + done.stderr
        assert done.returncode == 2, said
        assert "Traceback" not in said and "done " not in said and CELLS[0].id in said
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("name", ["../../../escaped", "0123456789abcdef"])
def test_merging_writes_nothing_outside_its_folder(tmp_path: Path, name: str) -> None:
    theirs, ours = folder(tmp_path / "a" / "b" / "theirs"), Results(tmp_path / "a" / "b" / "ours")
    path_of(theirs).write_text(changed(lambda v: v | {"id": name}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="its id is not the digest of its keys"):
        merge(ours, [theirs])
    # Under a name that fits what it says of itself it is no better.
    shutil.move(path_of(theirs), path_of(theirs).with_name("0123456789abcdef.json"))
    with pytest.raises(UserError, match="its id is not the digest of its keys"):
        merge(ours, [theirs])
    assert len(before) == len(sorted(tmp_path.rglob("*"))) and not ours.path.exists()


def test_cells_measured_on_other_images_are_not_merged(tmp_path: Path) -> None:
    ours, theirs = folder(tmp_path / "ours"), Results(tmp_path / "theirs")
    other = TestSet(TEST.name, TEST.classes, TEST.group_name, TEST.labels[::-1], TEST.groups)
    theirs.write("smoke", made_up_cell(declare("ablation", "smoke").cells[2], other), other)
    kept = ours.test_set(TEST.name).labels
    for into, others in ((ours, [theirs]), (Results(tmp_path / "new"), [ours, theirs])):
        with pytest.raises(UserError, match="were measured on other images"):
            merge(into, others)
    assert (Results(ours.path).test_set(TEST.name).labels == kept).all()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--epsilons", "0,-1", "ε is a number above 0"),
        ("--epsilons", "5,nan", "ε is a number above 0"),
        ("--epsilons", "inf", "ε is a number above 0"),
        ("--epsilons", "five", "takes numbers"),
        *((o, v, f"{o} names nothing") for o in ("--epsilons", "--data", "--methods", "--network",
          "--variants") for v in ("", " , ")),
        ("--data", "nowhere", "no data set called 'nowhere'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_said_or_done(
    tmp_path: Path, option: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "site"))
    where = ["--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")]
    done = CliRunner().invoke(app, ["study", "privacy-utility", option, value, *where])
    assert isinstance(done.exception, UserError) and said in str(done.exception)
    assert "cells" not in done.output
    assert not (tmp_path / "r").exists() and not (tmp_path / "w").exists()
