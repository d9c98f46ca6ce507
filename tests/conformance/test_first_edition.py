"""What the first edition wrote still opens, verifies and resumes, to the same bits.

Bits are those of a processor: torch rounds in another order on another kind. There the models are
the same to the first digits, and a step that was paid for before the kill is not replayed.

The archive was written by version 0.1.0 before names changed: an experiment file, a finished run, a
run and a federation of two client folders killed in the middle of a round, and two bare ledgers.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import xcal_forked
from support import ROOT

ARCHIVE = ROOT / "tests" / "fixtures" / "first_edition.tar.xz"
MODELS = {  # as version 0.1.0 itself resumed them
    "half-xcal": "1e2e2b5a8ec1caaf13b1dba818d10bf614b165d646f6be5cd628627936796713",
    "half-sites": "2127e6954a4c22f9316fb5835503e11a8e3983c9600d0af082e984ee2f364f68",
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for settings in tmp_path.glob("site-*/home.toml"):
        settings.write_text(settings.read_text().replace("@HERE@", str(tmp_path)))
    return tmp_path


def trained_again(old: Path) -> bool:
    """The archive's experiment file, trained here: whether this processor gives the same bits.

    Of all its words one has another meaning today: `xcal` moved noise in time then.
    """
    words = ["--set", "method=xcal", "--set", "steering=signal"]
    done = xcal_forked("run", "trial.toml", *words, "--out", "again", cwd=old)
    assert done.returncode == 0, done.stdout + done.stderr
    was, now = (old / name / "model.safetensors" for name in ("done-xcal", "again"))
    first, second = load_file(was), load_file(now)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.allclose(value, second[name], rtol=0.0, atol=0.05)
    return was.read_bytes() == now.read_bytes()


@pytest.mark.parametrize("run", sorted(MODELS))
def test_a_run_killed_in_mid_round_goes_on_to_the_same_model(old: Path, run: str) -> None:
    same_bits = trained_again(old)
    done = xcal_forked("run", "--resume", run, cwd=old)
    if not same_bits and done.returncode:  # a step that was paid for is not replayed otherwise
        assert done.returncode == 2
        assert "paid for with other inputs" in done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
    if same_bits:
        model = (old / run / "model.safetensors").read_bytes()
        assert hashlib.sha256(model).hexdigest() == MODELS[run]
    for ledger in ["site-0", "site-1"] if run == "half-sites" else [run]:
        done = xcal_forked("ledger", "verify", ledger, cwd=old)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("words", [["ledger", "verify", "bare"], ["ledger", "show", "bare-sum"]])
def test_ledgers_open(old: Path, words: list[str]) -> None:
    done = xcal_forked(*words, cwd=old)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_finished_run_opens(old: Path) -> None:
    for words in (["run", "--resume", "done-xcal"], ["ledger", "verify", "done-xcal"]):
        done = xcal_forked(*words, cwd=old)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_bare_ledger_still_refuses_what_it_cannot_pay(old: Path) -> None:
    done = xcal_forked(
        *("run", "trial.toml", "--set", "clients=1", "--set", 'sites=["bare-sum"]'),
        *("--set", "epsilon=8.0", "--out", "too-much"),
        cwd=old,
    )
    assert done.returncode == 2
    assert "6" in done.stderr + done.stdout  # ε that is left
