"""Killed at any moment, a run comes back: nothing under-counted, nothing lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from commands import xcal_environment
from support import TINY, sets
from xcal.dp.account import Account
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation import local
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.memory import RunMemory

# Where a process can be killed: what is called there, and whether before or after the call.
PLACES: dict[str, tuple[Any, str, bool]] = {
    "before-charge": (Account, "pay", True),
    "after-charge": (Account, "pay", False),
    "before-progress": (RunMemory, "save_progress", True),
    "after-progress": (RunMemory, "save_progress", False),
    "after-reply": (RunMemory, "save_reply", False),
    "before-checkpoint": (RunFolder, "save_checkpoint", True),
    "after-checkpoint": (RunFolder, "save_checkpoint", False),
    "before-result": (local, "_finish", True),
}


def die(where: str, count: int, out: Path, keys: dict[str, Any] | None = None) -> None:
    """Run, or resume, in a forked process that kills itself (-9) at the count-th such place."""
    child = os.fork()
    if child == 0:
        try:
            _arm(where, count)
            if keys is None:
                xcal.run(out, resume=True)
            else:
                xcal.run(out, **keys)
        finally:
            os._exit(1)  # it should have died before
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the run ended before it could be killed {where}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def _arm(where: str, count: int) -> None:
    owner, name, before = PLACES[where]
    original, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if before and calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def model_of(run_folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(run_folder / "model.safetensors")
    assert found is not None
    return found[0]


def charges(run_folder: Path, client: str) -> list[tuple[int, int]]:
    rows = read_rows(run_folder / "clients" / client / "ledger.sqlite")
    (run,) = runs_of(rows)
    return [(c.round, c.step) for c in charges_of(rows, run)]


DEATHS = [
    ("before-charge", 4),
    ("after-charge", 7),
    ("before-progress", 1),
    ("after-progress", 1),
    ("after-reply", 2),
    ("before-checkpoint", 1),
    ("after-checkpoint", 1),
    ("before-result", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["xcal-steered", "xcal-paper"])
def test_killed_everywhere_and_resumed_is_the_same_run(method: str, tmp_path: Path) -> None:
    keys = {**TINY, "method": method, "optimizer": "momentum", "lr": 0.1}
    expected = xcal.run(tmp_path / "whole", **keys)
    die(*DEATHS[0], tmp_path / "cut", keys)
    for place in DEATHS[1:]:
        die(*place, tmp_path / "cut")
    result = xcal.run(tmp_path / "cut", resume=True)
    assert result["macro_f1"] == expected["macro_f1"]
    first, second = model_of(tmp_path / "whole"), model_of(tmp_path / "cut")
    assert all(torch.equal(first[k], second[k]) for k in first)
    for client in ("0", "1", "2"):
        # redone steps were the same releases: each was paid for exactly once
        assert charges(tmp_path / "cut", client) == charges(tmp_path / "whole", client)
        assert verify(tmp_path / "cut" / "clients" / client / "ledger.sqlite").ok
    for name in ("rounds.jsonl", "trace.jsonl"):
        lines = [json.loads(x) for x in (tmp_path / "cut" / name).read_text().splitlines()]
        whole = [json.loads(x) for x in (tmp_path / "whole" / name).read_text().splitlines()]
        assert len(lines) == len(whole)
    assert result["clients"] == expected["clients"]


def test_redone_steps_under_secure_noise_are_charged_again(tmp_path: Path) -> None:
    keys = {**TINY, "method": "xcal-steered", "noise": "secure"}
    die("after-charge", 3, tmp_path / "run", keys)  # client 0, round 0: the third step in flight
    before = charges(tmp_path / "run", "0")
    assert before == [(0, 0), (0, 1), (0, 2)]
    xcal.run(tmp_path / "run", resume=True)
    counted = Counter(charges(tmp_path / "run", "0"))
    assert counted[(0, 2)] == 2  # the lost one stays paid, the new draw was paid anew
    assert all(1 <= n <= 2 for n in counted.values())
    assert verify(tmp_path / "run" / "clients" / "0" / "ledger.sqlite").ok


def test_a_finished_round_is_not_paid_twice_under_secure_noise(tmp_path: Path) -> None:
    die("after-reply", 1, tmp_path / "run", {**TINY, "method": "fl-dp", "noise": "secure"})
    xcal.run(tmp_path / "run", resume=True)
    assert set(Counter(charges(tmp_path / "run", "0")).values()) == {1}


def test_resume_works_from_the_first_instant(tmp_path: Path) -> None:
    keys = {**TINY, "method": "xcal-steered"}
    RunFolder.create(tmp_path / "run", make_experiment(keys), sorted(keys))
    result = xcal.run(tmp_path / "run", resume=True)
    assert result["method"] == "xcal-steered"
    # on a finished run it gives the result again
    assert xcal.run(tmp_path / "run", resume=True) == result


def test_other_inputs_under_the_same_noise_are_refused(tmp_path: Path) -> None:
    keys = {**TINY, "method": "fl-dp"}
    die("before-checkpoint", 1, tmp_path / "run", keys)
    # Forget the saved replies and change what the steps are made of: the noise must not be reused.
    for name in ("reply.safetensors", "begun.json"):
        for kept in (tmp_path / "run" / "clients").glob(f"*/runs/*/{name}"):
            kept.unlink()
    path, about = tmp_path / "run" / "experiment.toml", tmp_path / "run" / "run.json"
    original = path.read_text()
    path.write_text(original.replace("max_grad_norm = 1.0", "max_grad_norm = 2.0"))
    rows = len(charges(tmp_path / "run", "0"))
    with pytest.raises(UserError, match="was changed since the run began"):
        xcal.run(tmp_path / "run", resume=True)
    # … and one who also forges the record of what it was is stopped by the ledger.
    values = json.loads(about.read_text())
    values["experiment"] = hashlib.sha256(path.read_bytes()).hexdigest()
    about.write_text(json.dumps(values))
    with pytest.raises(UserError, match="other inputs"):
        xcal.run(tmp_path / "run", resume=True)
    assert len(charges(tmp_path / "run", "0")) == rows


def test_a_site_that_forgot_its_rounds_is_refused(tmp_path: Path) -> None:
    die("before-checkpoint", 3, tmp_path / "run", {**TINY, "method": "xcal-steered"})
    for reply in (tmp_path / "run" / "clients").glob("0/runs/*/reply.safetensors"):
        reply.unlink()
    with pytest.raises(UserError, match="does not remember"):
        xcal.run(tmp_path / "run", resume=True)
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    with pytest.raises(UserError, match=r"lies before the last|does not remember"):
        xcal.run(tmp_path / "run", resume=True)


def test_a_missing_or_older_ledger_is_refused_on_resume(tmp_path: Path) -> None:
    keys = {**TINY, "method": "xcal-steered"}
    die("before-checkpoint", 2, tmp_path / "run", keys)
    site_dir = tmp_path / "run" / "clients" / "0"
    for name in ("ledger.sqlite", "ledger.head", "ledger.sqlite-wal", "ledger.sqlite-shm"):
        (site_dir / name).unlink(missing_ok=True)
    next(site_dir.glob("runs/*/reply.safetensors")).unlink()
    with pytest.raises(UserError, match="does not exist"):
        xcal.run(tmp_path / "run", resume=True)


def test_two_processes_cannot_work_on_one_run(tmp_path: Path) -> None:
    from xcal.federation.files import lock_folder

    keys = {**TINY, "method": "xcal-steered"}
    die("before-checkpoint", 1, tmp_path / "run", keys)
    handle = lock_folder(tmp_path / "run")
    try:
        with pytest.raises(UserError, match="another process"):
            xcal.run(tmp_path / "run", resume=True)
    finally:
        os.close(handle)


@pytest.mark.slow
def test_control_c_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["run", *sets(method="xcal-steered", rounds=60), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "xcal", *words],
        env=xcal_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs us in the background lets its children ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (out / "rounds.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "xcal run --resume" in " ".join(printed.split())
    assert "Traceback" not in errors
    for site_dir in (out / "clients").iterdir():
        assert verify(site_dir / "ledger.sqlite").ok
    assert xcal.run(out, resume=True)["rounds"] == 60
