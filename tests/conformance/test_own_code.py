"""Code of the user's own that breaks the promise: refused before training, or ended as it goes on.

Each case is what a user types: `xcal run` with a method or a network by `package.module:name`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import misbehaving
import xcal
from commands import xcal_forked
from support import TINY, sets
from xcal.dp.batch_invariance import DependentNetwork
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.dp.mechanism import UnchargedRelease
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.ledgers_of import find_ledgers
from xcal.federation.request_refusals import Refused
from xcal.federation.setup import prepare

QUICK = {**TINY, "unit": "record", "rounds": 2, "road_images": 0, "road_test_images": 0}


def left_by(folder: Path) -> set[str]:
    """What of a run's results stands in a folder."""
    results = ("result.json", "model.safetensors", "predictions.npz", "checkpoint.safetensors")
    replies = [p.name for p in folder.glob("clients/*/runs/*/reply*")]
    return {n for n in results if (folder / n).exists()} | set(replies)


@pytest.mark.parametrize("name", misbehaving.STEPS)
def test_a_step_that_its_charge_does_not_cover_ends_the_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refusal:
        xcal.run(tmp_path / "run", **{**QUICK, "method": f"misbehaving:{name}"})
    assert refusal.value.code == "uncharged"
    assert left_by(tmp_path / "run") == set()  # nothing of the round left the client
    with pytest.raises(Refused) as refusal:
        xcal.run(tmp_path / "run", resume=True)
    assert refusal.value.code == "uncharged"
    for path in find_ledgers(tmp_path / "run"):
        assert verify(path).ok


def test_a_server_that_charges_nothing_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UnchargedRelease):
        xcal.run(tmp_path / "run", **{**QUICK, "method": "misbehaving:free_server"})
    assert "result.json" not in left_by(tmp_path / "run")


@pytest.mark.parametrize("name", misbehaving.PLANS)
def test_a_plan_that_promises_more_than_it_pays_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        xcal.run(tmp_path / "run", **{**QUICK, "method": f"misbehaving:{name}"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", misbehaving.NETWORKS)
def test_a_network_that_remembers_or_mixes_is_refused(name: str, tmp_path: Path) -> None:
    for method in ("fl-dp", "xcal-steered"):
        keys = {**QUICK, "method": method, "network": f"misbehaving:{name}"}
        with pytest.raises(DependentNetwork):
            xcal.run(tmp_path / "run", **keys)
        assert not (tmp_path / "run").exists()


def test_a_network_that_begins_to_remember_ends_the_run(tmp_path: Path) -> None:
    misbehaving._CALLS[0] = 0
    keys = {**QUICK, "method": "fl-dp", "network": "misbehaving:later"}
    prepare(make_experiment(keys))  # it looks well
    with pytest.raises(Refused) as refusal:
        xcal.run(tmp_path / "run", **keys)
    assert refusal.value.code == "network-dependent"
    assert "result.json" not in left_by(tmp_path / "run")


def test_an_honest_method_of_ones_own_trains_and_its_ledger_verifies(tmp_path: Path) -> None:
    result = xcal.run(tmp_path / "run", **{**QUICK, "method": "support:own_method"})
    assert result["epsilon_target"] == 8.0
    for path in find_ledgers(tmp_path / "run"):
        assert verify(path).ok
        rows = read_rows(path)
        assert all(charges_of(rows, run) for run in runs_of(rows))


def test_the_command_says_it_in_one_sentence(tmp_path: Path) -> None:
    words = sets(method="misbehaving:never_pays", unit="record")
    ended = xcal_forked("run", *words, "--out", str(tmp_path / "run"))
    assert ended.returncode == 2
    assert "charges where one is due" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
