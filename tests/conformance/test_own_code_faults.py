"""Code of the user's own that fails: one sentence that names it, exit code 2, nothing for nothing.

Each case is what a plug-in's author types: `xcal run`, `xcal plan`, then `xcal run --resume`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import broken
from support import ROOT, TESTS, sets
from xcal.dp.ledger.ledger import create
from xcal.dp.ledger.rows import Terms, charges_of, read_rows, runs_of, verify
from xcal.federation.ledgers_of import find_ledgers

Invoke = Callable[..., tuple[int, str, str]]

QUICK = {
    "rounds": 2,
    "validation_images": 9,
    "clients": 3,
    "road_images": 0,
    "road_test_images": 0,
    "method": "fl-dp",
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    broken.again()
    yield
    broken.again()


def refused(code: int, err: str, name: str, word: str) -> None:
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1, err
    assert f"'broken:{name}'" in err and word in err, err


def paid(folder: Path) -> list[int]:
    """Charges of each ledger, in the clients' order."""
    found = []
    for path in find_ledgers(folder):
        assert verify(path).ok
        rows = read_rows(path)
        found.append(sum(len(charges_of(rows, run)) for run in runs_of(rows)))
    return found


@pytest.mark.parametrize(("name", "word"), broken.METHODS_BEFORE.items())
def test_a_method_that_is_none_is_refused_before_anything(
    name: str, word: str, tmp_path: Path, invoke: Invoke
) -> None:
    keys = sets(**{**QUICK, "method": f"broken:{name}"})
    code, _, err = invoke("run", *keys, "--out", str(tmp_path / "run"))
    refused(code, err, name, word)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["no_begin_round", "a_class", "plan_raises", "plan_of_text"])
def test_a_plan_of_such_a_method_is_refused_alike(name: str, invoke: Invoke) -> None:
    words = ["--method", f"broken:{name}", "--epsilon", "1", "--units", "100", "--batch", "10"]
    code, _, err = invoke("plan", *words)
    refused(code, err, name, broken.METHODS_BEFORE[name])


@pytest.mark.parametrize(("name", "expected"), broken.METHODS_WHILE.items())
def test_a_method_that_fails_on_the_way_says_what_was_charged_and_goes_on_when_repaired(
    name: str, expected: tuple[int, str], tmp_path: Path, invoke: Invoke
) -> None:
    charges, word = expected
    run = tmp_path / "run"
    code, _, err = invoke("run", *sets(**{**QUICK, "method": f"broken:{name}"}), "--out", str(run))
    refused(code, err, name, word)
    assert (
        f"{charges} steps of this run stay" if charges else "nothing was charged or reserved"
    ) in err
    assert paid(run) == [charges, 0, 0]
    rows = read_rows(next(iter(find_ledgers(run))))
    assert len(rows) == (charges + 2 if charges else 1)  # nothing reserved where nothing was paid
    assert invoke("ledger", "analyse", "--no-pld", str(run))[0] == 0

    broken.again(repaired=True)
    code, _, err = invoke("run", "--resume", str(run))
    assert code == 0, err
    assert paid(run) == [2 * steps for steps in broken.STEPS]  # seeded: nothing was charged twice


def test_a_site_that_a_failing_method_was_tried_on_has_its_whole_budget(
    tmp_path: Path, invoke: Invoke
) -> None:
    """The lifetime limit has room for one run: the failed tries must not have reserved it."""
    sites = [tmp_path / f"site{c}" for c in range(3)]
    for site_dir in sites:
        create(site_dir / "ledger.sqlite", Terms("people", "record", 8.0, 1e-3))
    keys = {**QUICK, "sites": json.dumps([str(h) for h in sites]), "public_validation": "true"}
    keys |= {"public_validation_by": "nobody", "method": "broken:raises_at_once"}
    for attempt in range(2):
        code, _, err = invoke("run", *sets(**keys), "--out", str(tmp_path / f"run{attempt}"))
        refused(code, err, "raises_at_once", "nothing was charged or reserved")
    assert [len(read_rows(h / "ledger.sqlite")) for h in sites] == [1, 1, 1]
    broken.again(repaired=True)
    code, _, err = invoke("run", *sets(**keys), "--out", str(tmp_path / "last"))
    assert code == 0, err


@pytest.mark.parametrize("name", ["plan_raises_later", "begin_round_raises_later"])
def test_what_was_sound_when_looked_at_may_fail_in_a_round(
    name: str, tmp_path: Path, invoke: Invoke
) -> None:
    keys = sets(**{**QUICK, "method": f"broken:{name}"})
    code, _, err = invoke("run", *keys, "--out", str(tmp_path / "run"))
    refused(code, err, name, "LookupError: no such ward")
    for path in find_ledgers(tmp_path / "run"):
        rows = read_rows(path)
        assert all(charges_of(rows, run) for run in runs_of(rows))  # no bare reservation
    broken.again(repaired=True)
    code, _, err = invoke("run", "--resume", str(tmp_path / "run"))
    assert code == 0, err


@pytest.mark.parametrize("name", ["server_raises", "server_forgets"])
def test_a_server_of_ones_own_that_fails(name: str, tmp_path: Path, invoke: Invoke) -> None:
    run = tmp_path / "run"
    code, _, err = invoke("run", *sets(**{**QUICK, "method": f"broken:{name}"}), "--out", str(run))
    refused(code, err, name, "1 step of this run stay charged")
    broken.again(repaired=True)
    code, _, err = invoke("run", "--resume", str(run))
    assert code == 0, err
    assert len([r for r in read_rows(run / "server" / "ledger.sqlite") if r.kind == "charge"]) == 2


@pytest.mark.parametrize(("name", "word"), broken.NETWORKS.items())
def test_a_network_that_cannot_be_trained_is_refused_before_anything(
    name: str, word: str, tmp_path: Path, invoke: Invoke
) -> None:
    keys = sets(**{**QUICK, "network": f"broken:{name}"})
    code, _, err = invoke("run", *keys, "--out", str(tmp_path / "run"))
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1, err
    assert word in err and f"'broken:{name}'" in err, err
    assert not (tmp_path / "run").exists()


def test_a_network_that_fails_on_the_way_is_named(tmp_path: Path, invoke: Invoke) -> None:
    run = tmp_path / "run"
    keys = sets(**{**QUICK, "network": "broken:tires_out"})
    code, _, err = invoke("run", *keys, "--out", str(run))
    refused(code, err, "tires_out", "LookupError: no such ward")
    assert "of broken.py" in err  # the line it came from
    broken.again(repaired=True)
    code, _, err = invoke("run", "--resume", str(run))
    assert code == 0, err
    assert paid(run) == [2 * steps for steps in broken.STEPS]


def installed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: the current folder is not on Python's path."""
    path = os.pathsep.join([str(ROOT / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-P", "-m", "xcal", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


PLAN = ("plan", "--epsilon", "1", "--units", "100", "--batch", "10", "--method")


def test_modules_of_the_current_folder_are_found_and_shadow_none(tmp_path: Path) -> None:
    sound = "from xcal.methods.fl_dp import StaticNoise\nimport beside\nmine = StaticNoise('mine')"
    (tmp_path / "my_method.py").write_text(sound)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "torch.py").write_text("raise SystemExit('shadowed')")
    done = installed(tmp_path, *PLAN, "my_method:mine")
    assert done.returncode == 0, done.stderr
    done = installed(tmp_path, *PLAN, "torch:mine")
    assert done.returncode == 2 and "torch has no 'mine'" in done.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import not_there_at_all", "not_there_at_all"),
        ("raise SystemExit(0)", "SystemExit"),
        ("other = 3", "has no 'mine'"),
    ],
)
def test_a_module_that_cannot_be_imported(
    text: str,
    word: str,
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"module_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(*PLAN, f"{name}:mine")
    assert code == 2 and word in err and f"'{name}:mine'" in err, err
    assert len(err.strip().splitlines()) == 1
    with contextlib.suppress(KeyError):
        del sys.modules[name]


def test_code_of_ones_own_stands_under_what_is_assumed(tmp_path: Path, invoke: Invoke) -> None:
    run = tmp_path / "run"
    keys = sets(**{**QUICK, "method": "support:own_method"})
    assert invoke("run", *keys, "--out", str(run))[0] == 0
    assumed = json.loads((run / "statement.json").read_text())["assumptions"]
    text = (run / "statement.txt").read_text()
    part = " ".join(text.partition("Assumed:")[2].partition("Not protected:")[0].split())
    for name in ("method support:own_method", "network support:micro", "data set support:tiny"):
        assert any(name in item and "author's word" in item for item in assumed)
        assert name in part
    assert "Plug-ins:" not in text  # said once
