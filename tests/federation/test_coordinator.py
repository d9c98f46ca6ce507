"""The server's loop: the same result over any engine; who is missing, late or refusing is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from made_sites import tiny_site
from support import TINY
from xcal.config import Experiment
from xcal.dp.ledger.rows import read_rows, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.answer import answer
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.setup import prepare_remote

KEYS = {**TINY, "method": "xcal-steered"}
NAMES = ("0", "1", "2")


class Post:
    """A carrier that hands bytes to sites in this process, and can lose them on the way."""

    def __init__(self, sites: Mapping[str, Path]) -> None:
        self.sites = sites
        self.silent: dict[int, set[str]] = {}  # asked, and their answers lost, by round
        self.lies: dict[str, bytes] = {}
        self.came_late: list[str] = []
        self.sent: list[bytes] = []

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        answers = {c: self.lies.get(c) or answer(self.sites[c], m) for c, m in messages.items()}
        self.sent += answers.values()
        lost = self.silent.get(round_number, set())
        self.came_late = [c for c in answers if c in lost]
        return {c: a for c, a in answers.items() if c not in lost}

    def late(self) -> list[str]:
        return self.came_late


def sites_in(folder: Path, experiment: Experiment, **policy: Any) -> dict[str, Path]:
    return {n: tiny_site(folder, int(n), experiment=experiment, **policy) for n in NAMES}


def start(out: Path, experiment: Experiment) -> RunFolder:
    return RunFolder.create(out, experiment, sorted(KEYS))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return found[0]


@pytest.mark.parametrize("method", ["xcal-steered", "fl-dp"])
def test_clients_behind_messages_give_the_local_engines_result(tmp_path: Path, method: str) -> None:
    keys = {**KEYS, "method": method}
    expected = xcal.run(tmp_path / "local", **keys)
    experiment = make_experiment(keys)
    post = Post(sites_in(tmp_path, experiment))
    folder = start(tmp_path / "remote", experiment)
    result = run_experiment(folder, None, prepare_remote(experiment, NAMES), post)
    first, second = model_of(tmp_path / "local"), model_of(tmp_path / "remote")
    assert all(torch.equal(first[k], second[k]) for k in first)
    for key in ("macro_f1", "clients", "mean_sigma", "epsilon_target", "unit", "noise", "road"):
        assert result[key] == expected[key], key
    local = json.loads((tmp_path / "local" / "statement.json").read_text())
    remote = json.loads((tmp_path / "remote" / "statement.json").read_text())
    assert remote["clients"] == local["clients"]
    for name in NAMES:
        assert verify(post.sites[name] / "ledger.sqlite").ok


def test_who_does_not_answer_in_time_is_told_and_left_out(tmp_path: Path) -> None:
    experiment = make_experiment({**KEYS, "quorum": 2, "round_timeout": 5.0})
    post = Post(sites_in(tmp_path, experiment))
    post.silent = {1: {"2"}}
    folder = start(tmp_path / "run", experiment)
    result = run_experiment(folder, None, prepare_remote(experiment, NAMES), post)
    told = records(tmp_path / "run")
    assert [r["missing"] for r in told] == [[], ["2"], []]
    assert told[1]["late"] == ["2"]
    assert [r["answered"] for r in told] == [3, 2, 3]
    # each client's own ε, with the lost round's steps in it
    assert [c["steps"] for c in result["clients"]] == [18, 18, 15]
    assert all(c["share_spent"] <= 1 for c in result["clients"])


def test_below_the_quorum_the_run_stops_and_resumes_without_new_charges(tmp_path: Path) -> None:
    experiment = make_experiment({**KEYS, "quorum": 3})
    whole = xcal.run(tmp_path / "local", **KEYS)
    post = Post(sites_in(tmp_path, experiment))
    post.silent = {1: {"0", "2"}}
    folder = start(tmp_path / "run", experiment)
    federation = prepare_remote(experiment, NAMES)
    with pytest.raises(UserError, match="got 1 of the 3 answers it needs: no answer from 0, 2"):
        run_experiment(folder, None, federation, post)
    paid = {n: len(read_rows(post.sites[n] / "ledger.sqlite")) for n in NAMES}
    post.silent = {}
    result = run_experiment(RunFolder.find(folder.path), None, federation, post)
    first, second = model_of(tmp_path / "local"), model_of(tmp_path / "run")
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert result["clients"] == whole["clients"]
    steps = [c["steps"] // 3 for c in result["clients"]]
    for name, own in zip(NAMES, steps, strict=True):  # one more round of charges, no more
        assert len(read_rows(post.sites[name] / "ledger.sqlite")) == paid[name] + own


def test_a_refusal_is_logged_on_both_sides(tmp_path: Path) -> None:
    experiment = make_experiment({**KEYS, "quorum": 2})
    sites = sites_in(tmp_path, experiment)
    path = sites["1"] / "policy.toml"
    path.write_text(path.read_text().replace("epsilon_run = 8.0", "epsilon_run = 1.0"))
    folder = start(tmp_path / "run", experiment)
    run_experiment(folder, None, prepare_remote(experiment, NAMES), Post(sites))
    assert all(r["refused"] == {"1": "epsilon-run"} for r in records(tmp_path / "run"))
    logged = [json.loads(x) for x in (tmp_path / "run/refusals.jsonl").read_text().splitlines()]
    assert logged == [{"round": t, "client": "1", "code": "epsilon-run"} for t in range(3)]
    assert len((sites["1"] / "refusals.jsonl").read_text().splitlines()) == 3


def test_after_a_refusal_of_epsilon_the_hint_is_a_new_run(tmp_path: Path) -> None:
    """Resuming would ask for the same ε again."""
    experiment = make_experiment({**KEYS, "quorum": 3})
    sites = sites_in(tmp_path, experiment)
    path = sites["1"] / "policy.toml"
    path.write_text(path.read_text().replace("epsilon_run = 8.0", "epsilon_run = 1.0"))
    folder = start(tmp_path / "run", experiment)
    with pytest.raises(UserError, match=r"1 refused \(epsilon-run\).*submit a new run") as told:
        run_experiment(folder, None, prepare_remote(experiment, NAMES), Post(sites))
    assert "resume" not in str(told.value)


@pytest.mark.parametrize("lie", [b"", b"nonsense", b"\xff" * 4000])
def test_an_answer_that_is_none_spoils_nothing(tmp_path: Path, lie: bytes) -> None:
    experiment = make_experiment({**KEYS, "quorum": 2, "rounds": 1})
    post = Post(sites_in(tmp_path, experiment))
    post.lies = {"1": lie or b"\0"}
    folder = start(tmp_path / "run", experiment)
    run_experiment(folder, None, prepare_remote(experiment, NAMES), post)
    assert records(tmp_path / "run")[0]["refused"] == {"1": "malformed"}


def test_another_clients_answer_is_not_taken(tmp_path: Path) -> None:
    experiment = make_experiment({**KEYS, "quorum": 2, "rounds": 1})
    post = Post(sites_in(tmp_path, experiment))
    folder = start(tmp_path / "first", experiment)
    run_experiment(folder, None, prepare_remote(experiment, NAMES), post)
    again = Post(sites_in(tmp_path / "again", experiment))
    again.lies = {"1": post.sent[0]}
    folder = start(tmp_path / "second", experiment)
    run_experiment(folder, None, prepare_remote(experiment, NAMES), again)
    assert records(tmp_path / "second")[0]["refused"] == {"1": "malformed"}


def test_names_and_clients_must_agree() -> None:
    with pytest.raises(UserError, match="they must agree"):
        prepare_remote(make_experiment(KEYS), ("a", "b"))


def head_of(site_dir: Path) -> dict[str, Any]:
    last = read_rows(site_dir / "ledger.sqlite")[-1]
    return {"count": last.seq, "hash": last.hash}


def swap(site_dir: Path, copy: Path) -> None:
    """The whole directory, ledger and all, as its owner might put it back."""
    shutil.rmtree(site_dir)
    shutil.copytree(copy, site_dir)


def test_a_whole_site_put_back_is_noticed_by_the_next_run(tmp_path: Path) -> None:
    experiment = make_experiment({**KEYS, "rounds": 1})
    sites, heads = sites_in(tmp_path / "sites", experiment), tmp_path / "heads.json"
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(sites["1"], before)

    def run(name: str) -> None:
        folder = RunFolder.find(tmp_path / name) if (tmp_path / name).exists() else None
        folder = folder or start(tmp_path / name, experiment)
        federation = prepare_remote(experiment, NAMES)
        run_experiment(folder, None, federation, Post(sites), heads=heads)

    run("one")
    assert json.loads(heads.read_text()) == {c: head_of(path) for c, path in sites.items()}
    shutil.copytree(sites["1"], after)
    swap(sites["1"], before)
    with pytest.raises(UserError, match=r"1 refused \(ledger-older\)"):
        run("two")
    assert head_of(sites["1"])["count"] == 1  # nothing was reserved, nothing paid
    swap(sites["1"], after)
    run("two")
    assert json.loads(heads.read_text())["1"] == head_of(sites["1"])
    heads.write_text('{"1": {"count": "many"}}')
    with pytest.raises(UserError, match=r"heads\.json cannot be read"):
        run("three")


def test_a_site_put_back_after_a_round_that_failed_is_noticed(tmp_path: Path) -> None:
    """The server has no checkpoint of that round, and knows what the site paid for it."""
    experiment = make_experiment({**KEYS, "rounds": 1})
    sites = sites_in(tmp_path / "sites", experiment)
    shutil.copytree(sites["0"], tmp_path / "before")
    folder, post = start(tmp_path / "run", experiment), Post(sites)
    post.silent = {0: {"2"}}
    federation = prepare_remote(experiment, NAMES)
    with pytest.raises(UserError, match="no answer from 2"):
        run_experiment(folder, None, federation, post)
    assert not folder.load_checkpoint()
    swap(sites["0"], tmp_path / "before")
    post.silent = {}
    with pytest.raises(UserError, match=r"0 refused \(ledger-older\)"):
        run_experiment(folder, None, federation, post)
    assert head_of(sites["0"])["count"] == 1
