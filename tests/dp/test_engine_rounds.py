"""A training over rounds: each an engine of its own, all of them one run in one ledger."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import xcal
import xcal.dp.fix
import xcal.dp.ledger.reading
import xcal.federation.admission
from commands import xcal_environment, xcal_forked
from private_loop import N, data, network, private, train
from xcal.dp.calibration import calibrate_fixed
from xcal.dp.ledger.rows import read_rows, verify
from xcal.dp.refusals import Refused
from xcal.errors import UserError
from xcal.federation import request_refusals as refusals

EPOCH = 5  # steps: 40 records, 8 at a time
PATIENTS = [i // 2 for i in range(N)]


def site(path: Path, *, epsilon: float = 8.0, unit: str = "record", **policy: Any) -> Path:
    """A ledger and a policy, as a site's owner makes them."""
    xcal.Ledger.create(path, population=path.name, unit=unit, epsilon=epsilon, delta=3e-3)
    limits = {"epsilon_total": epsilon, "delta_total": 3e-3, "epsilon_run": 5.0, "delta_run": 1e-3}
    values = {**limits, "methods": ["dp-sgd"], "unit": unit, **policy}
    (path / "policy.toml").write_text("".join(f"{k} = {v!r}\n" for k, v in values.items()))
    return path


def one_round(
    path: Path, *, most: int | None = None, **keys: Any
) -> tuple[int, xcal.PrivacyEngine]:
    """A round as a client does it, with an engine of its own; its steps."""
    engine_keys = {k: keys.pop(k) for k in ("policy", "accountant") if k in keys}
    with xcal.PrivacyEngine(ledger=path, **engine_keys) as engine:
        made = private(engine, **{"epochs": 1, "rounds": 3, "run": "study", **keys})
        return train(made, most=most), engine


def run_of(path: Path) -> Any:
    (found,) = xcal.Ledger(path).runs()
    return found


@pytest.mark.parametrize("module", [xcal.dp.fix, xcal.dp.ledger.reading, xcal.federation.admission])
def test_the_docstrings_tell_the_truth(module: Any) -> None:
    found = doctest.testmod(module)
    assert (found.attempted > 2, found.failed) == (True, 0)


def test_rounds_are_one_run_that_ends_with_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "ward-7"
    for number in range(1, 4):
        steps, engine = one_round(path)
        assert (steps, engine.steps, engine.steps_left) == (EPOCH, number * EPOCH, 15 - number * 5)
        assert engine.get_epsilon(1e-3) <= 5.0
    assert engine.noise_multiplier == calibrate_fixed(5.0, 1e-3, 0.2, 3 * EPOCH).sigma
    for _ in range(2):  # asked again, a site does nothing more
        with pytest.warns(UserWarning, match="budget is spent after 15 steps"):
            steps, engine = one_round(path)
        assert (steps, engine.steps, engine.steps_left) == (0, 15, 0)
    assert (run_of(path).charges, run_of(path).planned, run_of(path).halted) == (15, 15, True)
    spent = xcal.Ledger(path).spent()
    assert (spent.epsilon, spent.epsilon_limit, spent.steps) == (5.0, 5.0, 15)
    assert verify(path / "ledger.sqlite").ok
    assert xcal_forked("ledger", "verify", str(path)).returncode == 0


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_round_done_again_is_paid_for_again_and_comes_off_the_last(
    tmp_path: Path, accountant: str
) -> None:
    path = tmp_path / "ward-7"
    made = [one_round(path, most=most, accountant=accountant)[0] for most in (5, 2, 5)]
    with pytest.warns(UserWarning, match="budget is spent"):
        made += [one_round(path, accountant=accountant)[0] for _ in range(2)]
    assert made == [5, 2, 5, 3, 0]
    assert run_of(path).charges == 15
    assert verify(path / "ledger.sqlite").ok


def test_one_round_that_takes_all_leaves_nothing(tmp_path: Path) -> None:
    with xcal.PrivacyEngine(ledger=tmp_path) as engine:
        made = private(engine, epochs=1, rounds=3, run="study")
        with pytest.warns(UserWarning, match="budget is spent"):
            assert train(made, epochs=9) == 15
    with pytest.warns(UserWarning, match="budget is spent"):
        assert one_round(tmp_path)[0] == 0
    assert verify(tmp_path / "ledger.sqlite").ok


def killed_in_a_round(path: Path) -> int:
    """A process that takes three steps of a round and is killed; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            made = private(xcal.PrivacyEngine(ledger=path), epochs=1, rounds=3, run="study")
            train(made, most=3)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_round_stays_paid_for_in_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "ward-7"
    for _ in range(2):
        assert killed_in_a_round(path) == -signal.SIGKILL
    assert run_of(path).charges == 6
    made = [one_round(path)[0]]
    with pytest.warns(UserWarning, match="budget is spent"):
        made += [one_round(path)[0]]
    assert made == [5, 4]
    assert verify(path / "ledger.sqlite").ok


@pytest.mark.parametrize(
    "keys",
    [
        {"rounds": 4},
        {"epochs": 2},
        {"target_epsilon": 4.0},
        {"target_delta": 1e-4},
        {"groups": PATIENTS},
        {"loader": DataLoader(data(), batch_size=10)},
    ],
)
def test_another_plan_under_the_same_name_is_refused(tmp_path: Path, keys: Any) -> None:
    path = tmp_path / "ward-7"
    one_round(path)
    before = (path / "ledger.sqlite").read_bytes()
    with pytest.raises(UserError, match="other terms"):
        one_round(path, **keys)
    assert (path / "ledger.sqlite").read_bytes() == before
    assert one_round(path)[0] == EPOCH


def test_two_engines_cannot_take_a_round_at_once(tmp_path: Path) -> None:
    with xcal.PrivacyEngine(ledger=tmp_path) as engine:
        private(engine, epochs=1, rounds=3, run="study")
        with pytest.raises(UserError, match="in use"):
            one_round(tmp_path)
    assert one_round(tmp_path)[0] == EPOCH


def test_a_saved_round_is_resumed_within_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "ward-7"
    one_round(path)
    with xcal.PrivacyEngine(ledger=path) as engine:
        made = private(engine, epochs=1, rounds=3, run="study")
        train(made, most=2)
        engine.save(tmp_path / "saved.pt")
    module = network(seed=77)
    engine, made = xcal.PrivacyEngine.resume(
        tmp_path / "saved.pt",
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=8),
    )
    with engine:
        assert train(made) == 3
        assert engine.steps == 10
    assert one_round(path)[0] == 5
    assert run_of(path).charges == 15


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ({}, {"rounds": 3}),  # no ledger
        ({}, {"run": "study"}),
        ({"ledger": "x"}, {"rounds": 3}),  # no name
        ({"ledger": "x"}, {"rounds": 0, "run": "study"}),
        ({"ledger": "x"}, {"rounds": 2.5, "run": "study"}),
        ({"ledger": "x"}, {"run": " "}),
        ({"ledger": "x"}, {"run": "s" * 101}),
    ],
)
def test_rounds_that_could_not_be_counted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, keys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused) as refused:
        private(xcal.PrivacyEngine(**engine), **keys)
    assert refused.value.code == "option"
    assert os.listdir(tmp_path) == []


# What a site allows.


def test_a_site_that_allows_it_is_trained_at(tmp_path: Path) -> None:
    path = site(tmp_path / "ward-7", unit="group")
    for _ in range(3):
        assert one_round(path, policy=xcal.policy(path), groups=PATIENTS)[0] == EPOCH
    assert run_of(path).charges == 15
    assert not (path / "refusals.jsonl").exists()


@pytest.mark.parametrize(
    ("allowed", "keys", "code"),
    [
        ({"epsilon_run": 2.0}, {}, "epsilon-run"),
        ({"delta_run": 1e-4}, {}, "delta-run"),
        ({"epsilon_total": 4.0, "epsilon_run": 4.0}, {}, "epsilon-run"),
        ({"methods": ["fl-dp"]}, {}, "method-not-allowed"),
        ({"sigma_min": 50.0}, {}, "sigma-too-low"),
        ({"max_steps": 14}, {}, "too-many-steps"),
        ({"max_batch": 7}, {}, "batch-too-large"),
        ({"unit": "group"}, {}, "unit-not-allowed"),
        ({"delta_run": 3e-3, "delta_total": 1.0}, {"target_delta": 2e-3}, None),
        ({"delta_run": 0.5, "delta_total": 1.0}, {"target_delta": 0.03}, "delta-too-large"),
    ],
)
def test_what_a_policy_does_not_allow_is_refused_before_any_charge(
    tmp_path: Path, allowed: Any, keys: Any, code: str | None
) -> None:
    path = site(tmp_path / "ward-7", **allowed)
    before = read_rows(path / "ledger.sqlite")
    if code is None:
        assert one_round(path, policy=xcal.policy(path), **keys)[0] == EPOCH
        return
    with pytest.raises(refusals.Refused) as refused:
        one_round(path, policy=xcal.policy(path), **keys)
    assert refused.value.code == code
    assert read_rows(path / "ledger.sqlite") == before
    assert code in (path / "refusals.jsonl").read_text()
    with xcal.PrivacyEngine(ledger=path):
        pass  # it was let go of


def test_all_runs_together_stay_within_the_policy(tmp_path: Path) -> None:
    path = site(tmp_path / "ward-7", epsilon_total=7.0, epsilon=8.0)
    one_round(path, policy=xcal.policy(path))
    with pytest.raises(refusals.Refused) as refused:
        one_round(path, policy=xcal.policy(path), run="another")
    assert refused.value.code == "epsilon-total"
    assert one_round(path, policy=xcal.policy(path))[0] == EPOCH  # the first goes on
    # An owner who thinks again is heard in the next round.
    text = (path / "policy.toml").read_text()
    (path / "policy.toml").write_text(text.replace("epsilon_run = 5.0", "epsilon_run = 1.0"))
    with pytest.raises(refusals.Refused) as refused:
        one_round(path, policy=xcal.policy(path))
    assert refused.value.code == "epsilon-run"
    assert run_of(path).charges == 10


def test_under_a_policy_a_missing_ledger_is_not_made_anew(tmp_path: Path) -> None:
    path = site(tmp_path / "ward-7")
    one_round(path, policy=xcal.policy(path))
    for name in ("ledger.sqlite", "ledger.head"):
        (path / name).unlink()
    with pytest.raises(UserError, match="does not exist"):
        one_round(path, policy=xcal.policy(path))
    with pytest.raises(Refused):
        xcal.PrivacyEngine(policy=xcal.policy(path))
    with pytest.raises(UserError, match="is missing"):
        xcal.policy(tmp_path / "nobody" / "policy.toml")


# xcal.Ledger and xcal.fix


def test_a_ledger_is_read_beside_a_training_and_notices_an_edit(tmp_path: Path) -> None:
    path = site(tmp_path / "ward-7")
    with xcal.PrivacyEngine(ledger=path) as engine:
        train(private(engine), most=2)
        looked_at = xcal.Ledger(path / "ledger.sqlite")
        assert (looked_at.verify().ok, looked_at.spent().steps) == (True, 2)
        assert looked_at.terms.population == "ward-7"
    (path / "ledger.head").write_text("99 " + "0" * 64 + "\n")
    assert not xcal.Ledger(path).verify().ok
    with pytest.raises(UserError, match="exists already"):
        xcal.Ledger.create(path, population="x", unit="record", epsilon=1.0, delta=1e-3)
    with pytest.raises(UserError, match="does not exist"):
        xcal.Ledger(tmp_path / "nobody")


def test_what_is_exported_is_there_and_imported_only_when_asked_for() -> None:
    code = "import sys, xcal; assert 'torch' not in sys.modules; xcal.Ledger.create"
    code += "; assert 'torch' not in sys.modules; xcal.fix, xcal.policy, xcal.PrivacyEngine"
    subprocess.run([sys.executable, "-c", code], check=True, env=xcal_environment())
    assert set(xcal.__all__) >= {"Ledger", "PrivacyEngine", "fix", "policy"}
    with pytest.raises(AttributeError):
        _ = xcal.nothing
