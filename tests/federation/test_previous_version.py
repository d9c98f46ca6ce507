"""Messages that earlier versions wrote, kept as bytes, and the last state of 0.1, kept whole.

No later edit adapts them. 0.1 runs in processes of its own, as a site and as a server. The table in
docs/deploy.md ("Upgrades") says what these tests hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from made_sites import tiny_site
from support import ROOT
from wire import KEYS, a_request, ask
from xcal.dp.ledger.rows import read_rows, verify
from xcal.experiments import load_experiment, make_experiment
from xcal.federation import messages
from xcal.federation.answer import answer
from xcal.federation.coordinator import Answer, Remote
from xcal.federation.exchange import Question, RoundReply, RoundRequest
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.messages import VERSION, Edition, Refusal, Reply, decode_answer, public_keys
from xcal.federation.setup import prepare_remote
from xcal.federation.site_directory import SiteDirectory
from xcal.models.model_registry import build_network

KEPT = ROOT / "tests" / "fixtures" / "messages"


def kept(name: str) -> bytes:
    return (KEPT / name).read_bytes()


def header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["xcal"])
    return found


class Recorded:
    """A carrier to a site that answers as an earlier version did, by the edition it is asked in."""

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self._answers, self.asked = answers, list[dict[str, Any]]()

    def exchange(self, _: int, asked: Mapping[str, bytes], __: float | None) -> dict[str, bytes]:
        ((client, data),) = asked.items()
        self.asked.append(header(data))
        return {client: self._answers[self.asked[-1]["edition"]]}

    def late(self) -> list[str]:
        return []


def served(carrier: Recorded) -> Answer:
    """What a server of today makes of a site's answers to the request that was kept."""
    experiment = make_experiment({**KEYS, "method": "xcal", "steering": "signal"})
    asked = RoundRequest("trial", 0, (0, 1, 2), experiment, ())
    remote = Remote(carrier, build_network(experiment, 3))
    return remote.ask(0, [Question("0", asked, a_request().weights, None)], None)["0"]


def test_a_site_of_today_answers_a_server_of_0_1(tmp_path: Path) -> None:
    said, then = (
        ask(tiny_site(tmp_path), kept("request-0.1")),
        decode_answer(kept("answer-0.1"), 1 << 24),
    )
    assert isinstance(said, Reply)
    assert isinstance(then, Reply)
    now, before = said.answer, then.answer
    assert now.weights is not None
    assert before.weights is not None
    # not to the bit: another kind of processor rounds in another order
    torch.testing.assert_close(dict(now.weights), dict(before.weights), rtol=0, atol=5e-5)
    # the ledger's hash is of a ledger of its own
    assert asdict(now.report) | {"ledger_hash": ""} == asdict(before.report) | {"ledger_hash": ""}


def test_a_server_of_today_goes_on_with_a_site_of_0_1() -> None:
    carrier = Recorded({"0.2": kept("refusal-0.1-to-0.2"), "0.1": kept("answer-0.1")})
    said = served(carrier)
    assert isinstance(said, RoundReply)
    assert said.report.steps == 6
    assert [asked["edition"] for asked in carrier.asked] == ["0.2", "0.1"]
    # and asks it for just what it was asked for then
    same = {"version": ""}
    assert carrier.asked[-1] | same == header(kept("request-0.1")) | same


def test_a_site_that_does_not_speak_0_1_says_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "EDITIONS", {"0.2": Edition()})
    site_dir = tiny_site(tmp_path)
    said = ask(site_dir, kept("request-0.1"))
    assert said == Refusal("0", "other-version")
    assert isinstance(said, Refusal)
    assert said.version == VERSION
    (entry,) = SiteDirectory.open(site_dir).refusals()
    assert "0.1.0" in entry["detail"]
    assert VERSION in entry["detail"]


def test_todays_xcal_is_not_asked_of_a_site_that_would_steer() -> None:
    """What 0.1 calls xcal is another method: it gets the key that it does not know, and refuses."""
    experiment = make_experiment({**KEYS, "method": "xcal"})
    assert messages._carried(public_keys(experiment), "0.1")["steering"] == "none"
    assert "steering" not in messages._carried(public_keys(experiment), "0.2")
    static = make_experiment({**KEYS, "method": "fl-dp"})
    assert not {"steering", "whiten"} & set(messages._carried(public_keys(static), "0.1"))


def test_who_named_no_version_is_told_so(tmp_path: Path) -> None:
    said = ask(tiny_site(tmp_path), kept("request-unnamed"))
    assert said == Refusal("0", "other-version")
    assert isinstance(said, Refusal)
    assert said.version == VERSION
    assert served(Recorded({"0.2": kept("refusal-unnamed-to-0.1")})) == Refusal(
        "0", "key-not-allowed"
    )


# --- the last state of 0.1, whole -----------------------------------------------------------------

# Of keys that both versions know by the same name and default.
EXPERIMENT = """
method = "fl-dp"
data = "smear"
pixels = 32
train_images = 300
unit = "record"
clients = 2
rounds = 2
expected_batch_size = 20
epsilon = 8.0
delta = 1e-3
lr = 0.5
validation_images = 20
road_images = 0
road_test_images = 0
seed = 5
"""
FRAMES = """
import os, sys
from pathlib import Path

out, back = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
os.dup2(2, 1)  # what is printed is no message

def give(data):
    out.write(len(data).to_bytes(8, "little") + data)
    out.flush()

def take():
    return back.read(int.from_bytes(back.read(8), "little"))
"""
SITE = (
    FRAMES
    + """
from xcal.federation.answer import answer
from xcal.federation.messages import VERSION

give(VERSION.encode())
while message := take():
    give(answer(Path(sys.argv[1]), message))
"""
)
SERVER = (
    FRAMES
    + """
from xcal.experiments import load_experiment
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.messages import VERSION
from xcal.federation.setup import prepare_remote, settled

class Post:
    def exchange(self, number, messages, timeout):
        found = {}
        for client, message in messages.items():
            give(client.encode())
            give(message)
            found[client] = take()
        return found

    def late(self):
        return []

give(VERSION.encode())
made, given = load_experiment(Path(sys.argv[1]), [])
folder = RunFolder.create(Path(sys.argv[2]), settled(made), sorted(given))
run_experiment(folder, None, prepare_remote(folder.experiment, ("0", "1")), Post())
give(b"")
"""
)


def give(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def take(pipe: IO[bytes]) -> bytes:
    return pipe.read(int.from_bytes(pipe.read(8), "little"))


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which `xcal` is the last state of 0.1."""
    place = tmp_path_factory.mktemp("former")
    with tarfile.open(ROOT / "tests" / "fixtures" / "xcal-0.1.0.tar.xz") as archive:
        archive.extractall(place, filter="data")
    kept_out = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {**kept_out, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@contextmanager
def speaking(script: str, *words: Path, env: dict[str, str]) -> Iterator[tuple[IO[bytes], ...]]:
    """The script in a process of the former version; where to write to it and read from it."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert take(process.stdout) == b"0.1.0"
        yield process.stdin, process.stdout
    finally:
        process.kill()
        process.communicate()


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return found[0]


def check_run(folder: Path, all_of_today: Path, sites: Mapping[str, Path]) -> None:
    """Both sites answered every round; the model is that of two sites of today, to the bit."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [(r["answered"], r["refused"]) for r in rounds] == [(2, {}), (2, {})]
    one, other = model_in(folder), model_in(all_of_today)
    assert all(torch.equal(one[k], other[k]) for k in other)
    for site in sites.values():
        assert verify(site / "ledger.sqlite").ok
        assert sum(r.kind == "charge" for r in read_rows(site / "ledger.sqlite")) > 4


class Post:
    """To sites of this process; messages to others go where `others` says."""

    def __init__(self, sites: Mapping[str, Path], **others: tuple[IO[bytes], ...]) -> None:
        self.sites, self.others = sites, others
        self.editions: dict[str, list[str]] = {}

    def exchange(
        self, _: int, asked: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        found = {}
        for client, message in asked.items():
            self.editions.setdefault(client, []).append(header(message)["edition"])
            if client in self.others:
                into, out_of = self.others[client]
                give(into, message)
                found[client] = take(out_of)
            else:
                found[client] = answer(self.sites[client], message)
        return found

    def late(self) -> list[str]:
        return []


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


def run_today(out: Path, file: Path, post: Post) -> Path:
    experiment, given = load_experiment(file, [])
    folder = RunFolder.create(out, experiment, sorted(given))
    run_experiment(folder, None, prepare_remote(experiment, ("0", "1")), post)
    return out


def sites_today(folder: Path, file: Path) -> dict[str, Path]:
    experiment, _ = load_experiment(file, [])
    return {name: tiny_site(folder, int(name), experiment=experiment) for name in ("0", "1")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Path:
    place = tmp_path_factory.mktemp("whole")
    return run_today(place / "run", file, Post(sites_today(place / "sites", file)))


@pytest.mark.slow
def test_a_site_of_the_previous_minor_version_takes_part(
    tmp_path: Path, former: dict[str, str], file: Path, whole: Path
) -> None:
    """Made by 0.1, answering as 0.1, beside a site of today; asked by a server of today."""
    sites = sites_today(tmp_path / "sites", file) | {"1": tmp_path / "former"}
    terms = "--client 1 --shard 1 --epsilon 20 --delta 1e-2 --epsilon-run 8 --delta-run 1e-3"
    words = ["site", "init", str(sites["1"]), "--experiment", str(file), *terms.split()]
    words += ["--population", "ward", "--unit", "record", "--seed", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "xcal", *words], env=former, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with speaking(SITE, sites["1"], env=former) as pipes:
        post = Post(sites, **{"1": pipes})
        check_run(run_today(tmp_path / "run", file, post), whole, sites)
    # refused once, then asked in its own edition
    assert post.editions == {"0": ["0.2", "0.2"], "1": ["0.2", "0.1", "0.1"]}


@pytest.mark.slow
def test_a_server_of_the_previous_minor_version_is_answered(
    tmp_path: Path, former: dict[str, str], file: Path, whole: Path
) -> None:
    sites = sites_today(tmp_path / "sites", file)
    with speaking(SERVER, file, tmp_path / "run", env=former) as (into, out_of):
        while client := take(out_of).decode():
            message = take(out_of)
            assert header(message)["edition"] == "0.1"
            give(into, answer(sites[client], message))
    check_run(tmp_path / "run", whole, sites)
