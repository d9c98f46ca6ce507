"""Clients in worker processes: the same run to the bit, however many workers there are."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xcal
from support import TINY, Micro, own_method
from xcal.dp.ledger.ledger import LedgerExhausted
from xcal.dp.ledger.rows import read_rows
from xcal.dp.noise import NoiseKey, SecureNoise
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation import local, rounds
from xcal.federation.coordinator import Diverged
from xcal.federation.memory import RunMemory
from xcal.federation.request_refusals import Refused
from xcal.federation.workers import Leg, share_out, worker_count

QUICK: dict[str, Any] = {**TINY, "road_images": 0, "road_test_images": 0, "validation_images": 9}


def left_by(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind and that may not depend on who trained: bytes and rows."""
    run = json.loads((folder / "run.json").read_text())["run"]
    rounds = [json.loads(x) for x in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in rounds:
        line.pop("seconds")
        line.pop("road_seconds")
        for told in (*line["clients"], line["server"] or {"ledger_hash": ""}):
            told.pop("ledger_hash")  # of rows that hold the run's name and keyed digests
    ledgers = {}
    for site_dir in sorted((folder / "clients").iterdir()):
        rows = [(r.kind, json.dumps(r.body)) for r in read_rows(site_dir / "ledger.sqlite")]
        ledgers[site_dir.name] = [
            (kind, _without_digests(json.loads(text.replace(run, "RUN")))) for kind, text in rows
        ]
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "trace": (folder / "trace.jsonl").read_text(),
        "rounds": rounds,
        "ledgers": ledgers,
    }


def _without_digests(body: dict[str, Any]) -> dict[str, Any]:
    """Digests of inputs are keyed by a secret of each site, made anew for every run."""
    return {k: v for k, v in body.items() if k not in ("digest", "inputs", "time", "created")}


def reaches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of workers of each run that is made from here on."""
    found: list[int] = []
    made = local.Workers.__init__

    def noted(self: Any, *args: Any) -> None:
        made(self, *args)
        found.append(len(self.pids))

    monkeypatch.setattr(local.Workers, "__init__", noted)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "xcal-steered", "optimizer": "momentum", "lr": 0.1},
        {"method": "xcal-steered", "clipping": "quantile", "average_steps": 0.5, "epsilon": 0.9},
        pytest.param({"method": "fl"}, marks=pytest.mark.slow),
        {"method": "dp-fedavg", "optimizer": "adam", "lr": 0.01},
        pytest.param({"method": "adap-dpfl"}, marks=pytest.mark.slow),
        {"method": "fl-dp", "clients": 5, "participants": 3, "partition": "label", "batch": 4},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_the_run_is_the_same_with_1_2_and_3_workers(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reaches(monkeypatch)
    found = {}
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        xcal.run(folder, **{**QUICK, **changes, "workers": workers})
        found[workers] = left_by(folder)
    assert made == [2, 3]
    assert found[2] == found[1]
    assert found[3] == found[1]


def test_nobody_is_left_and_every_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    made = local.Workers.__init__

    def noted(self: Any, *args: Any) -> None:
        made(self, *args)
        pids.extend(self.pids)

    monkeypatch.setattr(local.Workers, "__init__", noted)

    class Counted(local.NullCallback):
        total = steps = 0

        def start(self, total_steps: int, done_steps: int) -> None:
            self.total = total_steps

        def step(self, count: int) -> None:
            self.steps += count

    seen = Counted()
    xcal.run(tmp_path / "run", progress=seen, **{**QUICK, "workers": 2, "method": "fl-dp"})
    assert seen.steps == seen.total > 0
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_by_default_there_are_as_many_as_cores_and_the_key_shapes_no_digest(tmp_path: Path) -> None:
    free = len(os.sched_getaffinity(0))
    assert worker_count(None, 1, 1000) == free
    assert worker_count(None, 1, 2) == min(free, 2)
    assert worker_count(7, 1, 3) == 3
    assert worker_count(4, 2, 8) == 1  # threads do not live on in a fork
    plain, given_ = make_experiment({}), make_experiment({"workers": 3})
    assert plain.threads == 1
    assert "workers" not in plain.resolved()
    assert plain.identity() == given_.identity()


def test_a_run_with_one_number_of_workers_is_resumed_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**QUICK, "method": "xcal-steered"}
    xcal.run(tmp_path / "whole", **keys)

    class Enough(Exception):
        pass

    def stop(self: Any, record: dict[str, Any]) -> None:
        raise Enough

    monkeypatch.setattr(local.NullCallback, "round", stop)
    with pytest.raises(Enough):
        xcal.run(tmp_path / "cut", **{**keys, "workers": 2})
    monkeypatch.undo()
    made = reaches(monkeypatch)
    xcal.run(tmp_path / "cut", resume=True, workers=3)
    assert made == [3]
    assert left_by(tmp_path / "cut") == left_by(tmp_path / "whole")
    with pytest.raises(UserError):
        xcal.run(tmp_path / "cut", resume=True, workers=0)


# --- who trains whom ------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=60),
    st.integers(1, 9),
)
def test_work_is_shared_out_whole_and_evenly(sizes: list[int], workers: int) -> None:
    work = {str(c): n for c, n in enumerate(sizes)}
    plan = share_out(work, workers)
    shortest = max(-(-sum(sizes) // workers), *sizes)
    ends: dict[str, int] = {}  # of first legs: when they are over
    loads = []
    for legs in plan:
        now = 0
        for place, leg in enumerate(legs):
            if leg.steps is not None:
                assert place == 0 and 0 < leg.steps < work[leg.client]
                ends[leg.client] = leg.steps
            now += leg.steps or 0
    for legs in plan:
        now = 0
        for leg in legs:
            if leg.steps is not None:
                now += leg.steps
            elif leg.client in ends:
                rest = work[leg.client] - ends[leg.client]
                assert leg is legs[-1]
                now = max(now, ends[leg.client]) + rest
            else:
                now += work[leg.client]
        loads.append(now)
    assert max(loads) <= 1.1 * shortest
    whole = [leg.client for legs in plan for leg in legs if leg.steps is None]
    assert sorted(whole) == sorted(work)


def test_three_equal_clients_take_two_workers_half_the_time() -> None:
    assert share_out({"0": 4, "1": 4, "2": 4}, 2) == [
        [Leg("0"), Leg("1")],
        [Leg("1", 2), Leg("2")],
    ]
    fifty = share_out({str(c): 4 for c in range(50)}, 2)
    assert [len(legs) for legs in fifty] == [25, 25]


def test_a_round_that_cannot_be_set_aside_is_ended_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for a saved step: nothing may be trained, and paid for, a second time."""
    keys = {**QUICK, "method": "xcal-steered", "noise": "secure"}
    monkeypatch.setattr(RunMemory, "save_progress", lambda *args: False)
    result = xcal.run(tmp_path / "run", **{**keys, "workers": 2})
    steps = [c["steps"] for c in result["clients"]]
    for client, count in enumerate(steps):
        rows = read_rows(tmp_path / "run" / "clients" / str(client) / "ledger.sqlite")
        assert sum(r.kind == "charge" for r in rows) == count


def test_secure_steps_are_paid_for_once_where_a_client_changes_its_worker(tmp_path: Path) -> None:
    keys = {**QUICK, "method": "xcal-steered", "noise": "secure", "workers": 2}
    result = xcal.run(tmp_path / "run", **keys)
    for client, told in enumerate(result["clients"]):
        rows = read_rows(tmp_path / "run" / "clients" / str(client) / "ledger.sqlite")
        paid = [(r.body["round"], r.body["step"]) for r in rows if r.kind == "charge"]
        assert len(paid) == len(set(paid)) == told["steps"] > 0


# --- noise ----------------------------------------------------------------------------------------


def test_the_first_secure_draws_of_all_workers_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with one stream would add the same noise to two clients' sums."""
    parents: list[SecureNoise] = []
    made, words = SecureNoise.__init__, SecureNoise._words

    def keyed(self: SecureNoise) -> None:
        made(self)
        words(self, 64)  # in use before the fork, as nothing should be
        parents.append(self)

    def told(self: SecureNoise, count: int) -> Any:
        found = words(self, count)
        line = f"{os.getpid()} {' '.join(str(w) for w in found[:8])}\n"
        with open(tmp_path / "draws.txt", "a") as file:
            file.write(line)
        return found

    monkeypatch.setattr(SecureNoise, "__init__", keyed)
    monkeypatch.setattr(SecureNoise, "_words", told)
    keys = {**QUICK, "method": "fl-dp", "noise": "secure", "rounds": 1, "workers": 3}
    xcal.run(tmp_path / "run", **keys)
    for source in parents:  # what the parent's copies would say next
        told(source, 8)
    lines = [line.split() for line in (tmp_path / "draws.txt").read_text().splitlines()]
    drawn = [word for _, *found in lines for word in found]
    assert len({pid for pid, *_ in lines}) == 4
    assert len(set(drawn)) == len(drawn)


def test_a_child_with_its_maker_s_number_repeats_nothing() -> None:
    """Process numbers are used again: the hook at the fork does not look at them."""
    source = SecureNoise()
    key = NoiseKey("", "", 0, 0, "draw")
    read, write = os.pipe()
    real = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.getpid = lambda: real  # only ever in this fork
            os.write(write, source.uniforms(key, 16).tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 1024)
    os.close(read)
    os.close(write)
    assert len(theirs) == 128
    assert theirs != source.uniforms(key, 16).tobytes()


# --- errors ---------------------------------------------------------------------------------------


class OwnError(Exception):
    """With a signature that pickle cannot call."""

    def __init__(self, client: str, *, why: str) -> None:
        super().__init__(f"{client}: {why}")
        self.why = why


class Failing(type(own_method)):  # type: ignore[misc]
    """Static noise that fails at client 1, as the environment says."""

    def step(self, context: Any, *args: Any) -> Any:
        if context.client == "1":
            raise FAILURES[os.environ["XCAL_TEST_FAILURE"]]()
        return super().step(context, *args)


FAILURES = {
    "user": lambda: UserError("Client 1 has something to say: listen."),
    "refused": lambda: Refused("site", "The site is not in order: look."),
    "exhausted": lambda: LedgerExhausted("There is no more.", ("epsilon",)),
    "own": lambda: OwnError("1", why="because"),
    "local": lambda: type("Made", (Exception,), {})("here"),
    "system": lambda: FileNotFoundError(2, "No such file", "somewhere"),
}
failing = Failing(name="failing")


@pytest.mark.parametrize("what", list(FAILURES))
def test_errors_arrive_as_what_they_are(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_TEST_FAILURE", what)
    keys = {**QUICK, "method": f"{__name__}:failing"}
    found = []
    for workers in (1, 2):
        try:
            xcal.run(tmp_path / str(workers), **{**keys, "workers": workers})
        except Exception as error:
            found.append(error)
    here, there = found
    if what == "local":  # a class that nobody else could import
        assert "here" in str(there)
        return
    assert type(there) is type(here)
    assert str(there) == str(here)
    assert getattr(there, "code", None) == getattr(here, "code", None)
    assert getattr(there, "why", None) == getattr(here, "why", None)


def test_divergence_is_told_as_by_one_worker(tmp_path: Path) -> None:
    told = []
    for workers in (1, 2):
        with pytest.raises(Diverged) as caught:
            xcal.run(
                tmp_path / str(workers),
                **{**QUICK, "method": "fl", "lr": 1e30, "workers": workers},
            )
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_when_one_fails_the_others_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under secure noise a step that is lost is paid for again."""
    monkeypatch.setenv("XCAL_TEST_FAILURE", "user")
    monkeypatch.setattr(rounds.Pace, "due", lambda self: False)  # nothing else saves a step

    def slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return micro_forward(*args)

    micro_forward = Micro.forward
    monkeypatch.setattr(Micro, "forward", slowly)
    keys = {**QUICK, "method": f"{__name__}:failing", "noise": "secure", "workers": 3}
    with pytest.raises(UserError, match="something to say"):
        xcal.run(tmp_path / "run", **keys)
    kept = list((tmp_path / "run" / "clients").glob("*/runs/*/progress.safetensors"))
    assert {path.parents[2].name for path in kept} == {"0", "2"}
