"""One engine is killed in mid-round, another goes on: the same model, each step paid for once."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import xcal
from commands import die_at, xcal_environment, xcal_process
from support import TINY, sets
from xcal.dp.account import Account
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.experiments import make_experiment
from xcal.federation.answer import answer
from xcal.federation.exchange import shape_of
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment, threads_of
from xcal.federation.messages import public_keys
from xcal.federation.setup import prepare
from xcal.federation.simulated import make_sites
from xcal.federation.site_directory import SiteDirectory

KEYS = {**TINY, "method": "xcal-steered", "rounds": 3, "road_images": 0, "road_test_images": 0}
KILLED_AT = 17  # a charge in the middle of a round


class Bytes:
    """An engine that carries bytes, as Flower and FLARE do, to sites of this very process."""

    def __init__(self, sites: Path) -> None:
        self._sites = sites

    def exchange(
        self, _: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        assert timeout is None
        return {client: answer(self._sites / client, data) for client, data in messages.items()}

    def late(self) -> list[str]:
        return []


def run(engine: str, out: Path) -> None:
    """Begin the run in `out`, or go on with it."""
    if not out.exists():
        RunFolder.create(out, prepare(make_experiment(KEYS)).experiment, sorted(KEYS))
    folder = RunFolder.find(out)
    if engine == "bytes":
        federation = prepare(folder.experiment, new=False)
        make_sites(folder, federation, threads_of(folder))
        run_experiment(folder, None, federation, Bytes(out.resolve() / "clients"))
    else:
        run_experiment(folder, workers={"local": 1, "workers": 2}[engine])


def killed(engine: str, out: Path, count: int = KILLED_AT) -> None:
    child = os.fork()
    if child == 0:
        try:
            die_at(Account, "pay", count)
            run(engine, out)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def model_of(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def steps_paid(out: Path) -> dict[str, list[tuple[int, int]]]:
    found = {}
    for site_dir in sorted((out / "clients").iterdir()):
        rows = read_rows(site_dir / "ledger.sqlite")
        (name,) = runs_of(rows)
        found[site_dir.name] = [(c.round, c.step) for c in charges_of(rows, name)]
        assert verify(site_dir / "ledger.sqlite").ok
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run("local", out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("progress", [True, False], ids=["saved-step", "replayed"])
@pytest.mark.parametrize(
    ("before", "after"), [("local", "bytes"), ("bytes", "local"), ("bytes", "workers")]
)
def test_any_engine_goes_on_in_mid_round(
    tmp_path: Path, whole: Path, before: str, after: str, progress: bool
) -> None:
    out = tmp_path / "run"
    killed(before, out)
    kept = list(out.glob("clients/*/runs/*/progress.safetensors"))
    if not progress:  # every step since the round began is done again, and recognized
        for path in kept:
            path.unlink()
    paid = steps_paid(out)
    assert sum(map(len, paid.values())) == KILLED_AT - 1
    run(after, out)
    assert model_of(out) == model_of(whole)
    now = steps_paid(out)
    assert now == steps_paid(whole)
    for client, steps in now.items():
        assert len(steps) == len(set(steps))
        assert steps[: len(paid[client])] == paid[client]


def test_a_client_is_asked_for_the_same_by_every_engine(tmp_path: Path) -> None:
    """What shapes an answer is the same, though noise, threads and the server's keys differ."""
    federation = prepare(make_experiment(KEYS))
    folder = RunFolder.create(tmp_path / "run", federation.experiment, sorted(KEYS))
    make_sites(folder, federation, threads=1)
    ours = federation.experiment
    theirs = SiteDirectory.open(folder.client_dir("0")).experiment(public_keys(ours), ours.seed)
    assert theirs.resolved() != ours.resolved()
    for to_the_bit in (True, False):
        assert shape_of(theirs, to_the_bit=to_the_bit) == shape_of(ours, to_the_bit=to_the_bit)
    for key, value in {"lr": 0.3, "seed": 9, "epsilon": 3.0, "max_grad_norm": 0.5}.items():
        assert shape_of(ours.model_copy(update={key: value})) != shape_of(ours), key
    chunked = ours.model_copy(update={"chunk": 7})
    assert shape_of(chunked) == shape_of(ours)
    assert shape_of(chunked, to_the_bit=True) != shape_of(ours, to_the_bit=True)


@pytest.mark.slow
def test_another_query_under_the_same_noise_is_still_refused(tmp_path: Path) -> None:
    """What is dropped from the digest does not shape an answer; what does is refused as ever."""
    out = tmp_path / "run"
    killed("local", out)
    for path in out.glob("clients/*/runs/*/progress.safetensors"):
        path.unlink()
    kept = steps_paid(out)
    text = (out / "experiment.toml").read_text()
    assert "chunk = 256" in text
    (out / "experiment.toml").write_text(text.replace("chunk = 256", "chunk = 8"))
    told = json.loads((out / "run.json").read_text())
    told.pop("digest", None)
    (out / "run.json").write_text(json.dumps(told))
    done = xcal_process("run", "--resume", str(out))
    assert done.returncode == 2, done.stdout + done.stderr
    assert steps_paid(out) == kept


# --- with Flower and Ray themselves ---------------------------------------------------------------

with_flower = pytest.mark.skipif(
    find_spec("flwr") is None
    or find_spec("ray") is None
    or "XCAL_TEST_FEDERATION" not in os.environ,
    reason="`make test-federation` runs it",
)


def charges(out: Path) -> int:
    return sum(map(len, steps_paid(out).values())) if (out / "rounds.jsonl").exists() else 0


def started(out: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "xcal", "run", *words, "--engine", "flower"],
        env=xcal_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@with_flower
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flower_killed_in_mid_round_goes_on_anywhere(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "method": "xcal-steered",
        "rounds": 12,
        "road_images": 0,
        "road_test_images": 0,
    }
    xcal.run(tmp_path / "whole", **{**TINY, **changes})
    out = tmp_path / "run"
    process = started(out, *sets(**changes), "--out", str(out))
    try:
        while not (out / "rounds.jsonl").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    complete = len((out / "rounds.jsonl").read_text().splitlines())
    assert complete < 12
    # on the local engine, killed in its turn, and then on Flower again
    child = os.fork()
    if child == 0:
        try:
            die_at(Account, "pay", 11)
            run_experiment(RunFolder.find(out), workers=1)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    for path in out.glob("clients/*/runs/*/progress.safetensors"):
        path.unlink()  # so that Flower's client has to recognize every step
    process = started(out, "--resume", str(out))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    assert model_of(out) == model_of(tmp_path / "whole")
    assert steps_paid(out) == steps_paid(tmp_path / "whole")
