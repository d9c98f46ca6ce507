"""Masked sums by sites that are reached only by bytes: their one entry, and every engine's."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import xcal
from commands import die_at, xcal_process
from federation.test_inventory import EXPLAINED
from federation.test_masked_runs import KEYS, charges, ledgers, same
from made_sites import tiny_site
from support import ROOT, TINY, sets
from wire import a_request
from xcal.cli.app import app
from xcal.dp.account import Account
from xcal.dp.ledger.rows import read_rows, verify
from xcal.errors import UserError
from xcal.experiments import load_experiment, make_experiment
from xcal.federation import masks
from xcal.federation.answer import answer
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment, threads_of
from xcal.federation.messages import (
    Introduction,
    Refusal,
    Reply,
    Request,
    decode_answer,
    decode_request,
    encode_request,
    fields_of,
)
from xcal.federation.setup import prepare
from xcal.federation.simulated import make_sites
from xcal.federation.site_identity import ROSTER

LIMIT = 1 << 24
Change = Callable[[str, int, bytes], bytes | None]


class Bytes:
    """Carries bytes to sites of this process and keeps all of them; `change` is the network."""

    def __init__(self, sites: Path, change: Change | None = None) -> None:
        self._sites, self._change = sites, change or (lambda client, number, data: data)
        self.asked: list[tuple[str, bytes]] = []
        self.came: list[tuple[str, bytes]] = []

    def exchange(
        self, number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        found = {}
        for client, data in messages.items():
            self.asked.append((client, data))
            told = self._change(client, number, answer(self._sites / client, data))
            if told is not None:
                self.came.append((client, told))
                found[client] = told
        return found

    def late(self) -> list[str]:
        return []

    def messages(self, kind: type) -> list[Any]:
        found = (decode_answer(data, LIMIT) for _, data in self.came)
        return [message for message in found if isinstance(message, kind)]


def begin(out: Path, **keys: Any) -> RunFolder:
    if not out.exists():
        asked = {**KEYS, **keys}
        RunFolder.create(out, prepare(make_experiment(asked)).experiment, sorted(asked))
    folder = RunFolder.find(out)
    make_sites(folder, prepare(folder.experiment, new=False), threads_of(folder))
    return folder


def by_bytes(out: Path, change: Change | None = None, **keys: Any) -> Bytes:
    folder = begin(out, **keys)
    carrier = Bytes(out.resolve() / "clients", change)
    run_experiment(folder, None, prepare(folder.experiment, new=False), carrier)
    return carrier


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl-dp", "adaptive-clip"])
def test_sites_reached_by_bytes_make_the_local_engine_s_model(method: str, tmp_path: Path) -> None:
    xcal.run(tmp_path / "local", **{**KEYS, "method": method})
    carrier = by_bytes(tmp_path / "bytes", method=method)
    assert same(tmp_path / "local", tmp_path / "bytes")
    assert charges(tmp_path / "bytes") == [3, 3, 3]
    assert all(verify(path).ok for path in ledgers(tmp_path / "bytes"))
    # What the server got: keys, and parts of sums that look like nothing.
    assert len(carrier.messages(Introduction)) == 6  # at the beginning, and to forget at the end
    replies = carrier.messages(Reply)
    assert len(replies) == 9 and all(r.answer.weights is None for r in replies)
    seen = np.frombuffer(b"".join(r.answer.masked.numbers for r in replies), dtype=np.uint8)
    assert stats.chisquare(np.bincount(seen, minlength=256)).pvalue > 1e-6
    assert not list((tmp_path / "bytes").rglob(masks.KEY))
    for _, data in carrier.came:  # nothing that the inventory does not explain
        kind = "introduction" if isinstance(decode_answer(data, LIMIT), Introduction) else "reply"
        assert all(EXPLAINED[name].is_in(kind) for name in fields_of(data))
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("local", "bytes")]
    assert results[0]["epsilon_masked"] == results[1]["epsilon_masked"] == 8.0


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_site_killed_in_mid_attempt_goes_on_and_pays_for_what_it_draws(
    noise: str, tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:
        die_at(Account, "pay", 5)  # before the second site's second charge
        by_bytes(tmp_path / "run", noise=noise)
        os._exit(1)
    os.waitpid(child, 0)
    assert charges(tmp_path / "run") == [2, 1, 1]
    carrier = by_bytes(tmp_path / "run")
    assert charges(tmp_path / "run") == [3, 3, 3]
    # Site 0's message is the one it had made: drawn once, paid once, sent again.
    assert [r.client for r in carrier.messages(Reply)] == ["0", "1", "2"] * 2
    if noise == "seeded":
        xcal.run(tmp_path / "whole", **KEYS)
        assert same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_another_engine_goes_on_with_a_masked_run(tmp_path: Path) -> None:
    xcal.run(tmp_path / "whole", **KEYS)
    child = os.fork()
    if child == 0:
        die_at(Account, "pay", 5)
        xcal.run(tmp_path / "run", **KEYS)
        os._exit(1)
    os.waitpid(child, 0)
    by_bytes(tmp_path / "run")
    assert same(tmp_path / "whole", tmp_path / "run")
    assert charges(tmp_path / "run") == [3, 3, 3]


@pytest.mark.slow
def test_a_lost_answer_voids_the_attempt_and_a_tampered_one_is_noticed(tmp_path: Path) -> None:
    lost: list[str] = []

    def losing(client: str, number: int, data: bytes) -> bytes | None:
        got = decode_answer(data, LIMIT)
        if client == "3" and number == 1 and isinstance(got, Reply) and not lost:
            lost.append(client)
            return None
        return data

    keys = {"clients": 4, "honest": 3, "batch": 5, "rounds": 3}
    by_bytes(tmp_path / "lost", losing, **keys)
    lines = [json.loads(x) for x in (tmp_path / "lost/rounds.jsonl").read_text().splitlines()]
    assert [r["answered"] for r in lines] == [4, 3, 0]
    assert charges(tmp_path / "lost") == [3, 3, 3, 3]

    def tampering(client: str, number: int, data: bytes) -> bytes:
        got = decode_answer(data, LIMIT)
        if client == "1" and number == 1 and isinstance(got, Reply):
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    with pytest.raises(UserError, match="not what it sent"):
        by_bytes(tmp_path / "tampered", tampering)
    by_bytes(tmp_path / "tampered")  # resumed: the site gives its stored message again
    assert charges(tmp_path / "tampered") == [3, 3, 3]


class OnlyKeys(Bytes):
    """The sites' keys come; sums are asked for, and reach nobody."""

    def exchange(
        self, number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        first = decode_request(next(iter(messages.values())), LIMIT)
        if isinstance(first, Request) and first.keys:
            return super().exchange(number, messages, timeout)
        self.asked += messages.items()
        return {}


def changed_sums(request: Request) -> dict[str, Request]:
    """A server's ways to get more than a sum with all its noise."""
    asked = request.sum
    assert asked is not None
    attempt = asked.attempt
    stranger = masks.X25519PrivateKey.generate().public_key().public_bytes_raw()
    swapped = tuple(replace(a, key=stranger) if a.site == "2" else a for a in asked.announced)
    return {
        "masks: a key of the server's own": replace(request, sum=replace(asked, announced=swapped)),
        "masks: no keys": replace(request, sum=replace(asked, announced=())),
        "masks: too few": replace(
            request, sum=replace(asked, attempt=replace(attempt, sites=("0",)))
        ),
        "masks: strangers": replace(
            request, sum=replace(asked, attempt=replace(attempt, sites=("0", "1", "7")))
        ),
        "plan-refused: less noise": replace(request, sum=replace(asked, sigma=asked.sigma * 0.9)),
        "plan-refused: fewer units": replace(request, sum=replace(asked, units=3)),
        "experiment-invalid: other terms": replace(
            request, sum=replace(asked, attempt=replace(attempt, terms="0" * 64))
        ),
        "experiment-invalid: no norm": replace(request, sum=replace(asked, clip=0.0)),
        "experiment-invalid: much more noise": replace(request, sum=replace(asked, sigma=1e300)),
    }


@pytest.mark.slow
def test_a_hostile_server_is_refused_by_code_and_nothing_is_charged(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    carrier = OnlyKeys(tmp_path.resolve() / "run/clients")
    with pytest.raises(UserError):
        run_experiment(folder, None, prepare(folder.experiment, new=False), carrier)
    request = decode_request(carrier.asked[3][1], LIMIT)  # the first sum for site 0
    assert isinstance(request, Request) and request.sum is not None and request.client == "0"
    site_dir = tmp_path / "run/clients/0"

    def told(asked: Request) -> str:
        got = decode_answer(answer(site_dir, encode_request(asked)), LIMIT)
        return got.code if isinstance(got, Refusal) else "answered"

    for what, asked in changed_sums(request).items():
        assert told(asked) == what.split(":")[0], what
    assert told(replace(request, sum=None)) == "answered"  # all of the noise, under its own terms
    assert charges(tmp_path / "run") == [6, 0, 0]


@pytest.mark.slow
def test_an_attempt_of_any_number_takes_the_room_of_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(tmp_path / "run")
    carrier = OnlyKeys(tmp_path.resolve() / "run/clients")
    with pytest.raises(UserError):
        run_experiment(folder, None, prepare(folder.experiment, new=False), carrier)
    request = decode_request(carrier.asked[3][1], LIMIT)
    assert isinstance(request, Request) and request.sum is not None
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, start, size: taken.append(size))
    for number in (0, 10**9):
        attempt = replace(request.sum.attempt, number=number)
        asked = replace(request, sum=replace(request.sum, attempt=attempt))
        got = decode_answer(answer(tmp_path / "run/clients/0", encode_request(asked)), LIMIT)
        assert isinstance(got, Reply) and got.answer.masked is not None
    assert taken[0] == taken[1]


@pytest.mark.slow
def test_a_site_answers_once_under_one_attempt_and_never_without_a_roster(tmp_path: Path) -> None:
    carrier = by_bytes(tmp_path / "run", rounds=2)
    sums = [data for client, data in carrier.asked if client == "0"]
    first, second = (decode_request(data, LIMIT) for data in sums[1:3])
    assert isinstance(first, Request) and isinstance(second, Request) and second.sum is not None
    site_dir = tmp_path / "run/clients/0"

    def told(asked: Request) -> str:
        got = decode_answer(answer(site_dir, encode_request(asked)), LIMIT)
        return got.code if isinstance(got, Refusal) else "answered"

    before = charges(tmp_path / "run")
    assert told(first) == "round-past"  # an attempt replayed
    assert told(second) == "answered"  # the stored message, and nothing new
    moved = {k: v + 1 for k, v in second.weights.items()}
    assert told(replace(second, weights=moved)) == "round-other-weights"
    later = replace(second.sum.attempt, number=1)
    # The run's secret is gone: a site that makes another finds that the others have the old one.
    assert told(replace(second, sum=replace(second.sum, attempt=later))) == "masks"
    (site_dir / ROSTER).unlink()
    assert told(replace(second, sum=replace(second.sum, attempt=later))) == "masks"
    assert charges(tmp_path / "run") == before


@pytest.mark.slow
def test_a_run_s_folder_put_back_sends_nothing_anew_under_the_masks_of_what_was_sent(
    tmp_path: Path,
) -> None:
    """An owner's copy of `runs/RUN` knows neither message nor record; the ledger does."""
    folder = begin(tmp_path / "run", noise="secure")
    carrier = OnlyKeys(tmp_path.resolve() / "run/clients")
    with pytest.raises(UserError):
        run_experiment(folder, None, prepare(folder.experiment, new=False), carrier)
    first = decode_request(carrier.asked[3][1], LIMIT)
    assert isinstance(first, Request) and first.sum is not None and first.client == "0"
    second = replace(first, sum=replace(first.sum, attempt=replace(first.sum.attempt, number=1)))
    site_dir = tmp_path / "run/clients/0"
    (state,) = (site_dir / "runs").iterdir()

    def told(asked: Request) -> str:
        got = decode_answer(answer(site_dir, encode_request(asked)), LIMIT)
        return got.code if isinstance(got, Refusal) else "answered"

    for paid, asked in enumerate((first, second), start=1):
        copy = tmp_path / f"copy {paid}"
        shutil.copytree(state, copy)
        assert told(asked) == "answered"
        newest = tmp_path / f"newest {paid}"
        shutil.copytree(state, newest)
        for found, said in ((copy, "site"), (newest, "answered")):
            shutil.rmtree(state)
            shutil.copytree(found, state)
            assert told(asked) == said
            assert charges(tmp_path / "run") == [paid, 0, 0]


@pytest.mark.slow
def test_a_whole_site_put_back_sends_nothing_anew_under_the_masks_of_a_void_attempt(
    tmp_path: Path,
) -> None:
    """Ledger and all, to where it had met the others and sent nothing: only the server can tell."""
    site, copy = tmp_path.resolve() / "run/clients/0", tmp_path / "copy"

    def losing(client: str, number: int, data: bytes) -> bytes | None:
        if isinstance(decode_answer(data, LIMIT), Introduction):
            if client == "0":
                shutil.copytree(site, copy)
            return data
        return data if client == "0" else None

    with pytest.raises(UserError, match="no answer from 1, 2"):
        by_bytes(tmp_path / "run", losing, noise="secure")
    assert charges(tmp_path / "run") == [1, 1, 1]
    shutil.rmtree(site)
    shutil.copytree(copy, site)
    carrier = by_bytes(tmp_path / "run")
    assert {r.client for r in carrier.messages(Reply)} == {"1", "2"}
    assert {(r.client, r.code) for r in carrier.messages(Refusal)} == {("0", "ledger-older")}
    assert charges(tmp_path / "run")[0] == 0


@pytest.mark.slow
def test_sites_whose_rosters_differ_make_no_sum_and_pay_nothing(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run", clients=5, honest=4, batch=5)
    roster = tmp_path / "run/clients/1" / ROSTER
    roster.write_text(roster.read_text().replace("honest = 4", "honest = 3"))
    carrier = Bytes(tmp_path.resolve() / "run/clients")
    with pytest.raises(UserError, match=r"roster.toml of 1 names"):
        run_experiment(folder, None, prepare(folder.experiment, new=False), carrier)
    assert charges(tmp_path / "run") == [0, 0, 0, 0, 0]


def test_owners_exchange_keys_and_a_roster_that_is_none_is_told(tmp_path: Path) -> None:
    sites = [tiny_site(tmp_path / name) for name in "abc"]
    ask = CliRunner()
    lines = []
    for name, site_dir in zip("abc", sites, strict=True):
        about = site_dir / "site.toml"
        about.write_text(about.read_text().replace('client = "0"', f'client = "{name}"'))
        told = ask.invoke(app, ["site", "key", str(site_dir)])
        assert told.exit_code == 0
        assert re.fullmatch(f'"{name}" = "[0-9a-f]{{64}}"\n', told.stdout)
        lines.append(told.stdout)
    roster = sites[0] / ROSTER
    roster.write_text("honest = 2\n\n[keys]\n" + "".join(lines))
    checked = ask.invoke(app, ["site", "check", str(sites[0])])
    assert "roster.toml: 2 of 3 sites are taken for honest" in checked.stdout
    request = a_request(client="a", keys=True, weights={})
    request = replace(request, experiment={**request.experiment, "method": "fl-dp"})

    def told_to(asked: Request) -> Any:
        return decode_answer(answer(sites[0], encode_request(asked)), LIMIT)

    assert isinstance(told_to(request), Introduction)
    assert told_to(replace(request, client="b")).code == "wrong-client"
    paper = replace(request, experiment={**request.experiment, "method": "xcal-paper"})
    assert told_to(paper).code in ("experiment-invalid", "method-not-allowed")
    for text, code in (
        ("honest = 2\n[keys]\n" + "".join(lines[1:]), "masks"),  # without itself
        ("honest = 3\n[keys]\n" + "".join(lines), "masks"),  # nobody is not honest
        ('honest = 2\n[keys]\n"a" = "xyz"\n', "masks"),
        ("what is this", "site"),
        ("honest = 2\n", "site"),
    ):
        roster.write_text(text)
        assert told_to(request).code == code, text
        assert ask.invoke(app, ["site", "check", str(sites[0])]).exit_code == 1
    assert [len(read_rows(site_dir / "ledger.sqlite")) for site_dir in sites] == [1, 1, 1]


@pytest.mark.skipif(
    find_spec("flwr") is None or find_spec("ray") is None, reason="the extra flower is not there"
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flower_carries_it_and_makes_the_local_engine_s_model(tmp_path: Path) -> None:
    xcal.run(tmp_path / "local", **KEYS)
    words = sets(**{k: v for k, v in KEYS.items() if TINY.get(k) != v})
    out = ["--engine", "flower", "--client-cpus", "1", "--out", str(tmp_path / "flower")]
    done = xcal_process("run", *words, *out, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(tmp_path / "local", tmp_path / "flower")
    assert charges(tmp_path / "flower") == [3, 3, 3]
    assert all(verify(path).ok for path in ledgers(tmp_path / "flower"))


@pytest.mark.skipif(
    find_spec("nvflare") is None or "XCAL_TEST_FEDERATION" not in os.environ,
    reason="`make test-federation` runs it",
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_flare_carries_it_between_sites_whose_owners_exchanged_their_keys(tmp_path: Path) -> None:
    from federation.flare_support import SITES, running

    words = ["method=fl-dp", "trust=masked", "rounds=3"]
    with running(tmp_path / "three") as federation:
        sites = [federation.site_dir(name) for name in SITES]
        told = [xcal_process("site", "key", str(site_dir)).stdout for site_dir in sites]
        for site_dir in sites:  # as each owner writes it down
            (site_dir / ROSTER).write_text("honest = 2\n\n[keys]\n" + "".join(told))
        federation.wait_connected()
        sums = [word for pair in words for word in ("--set", pair)]
        federation.submit("masked", *sums)
        assert "FINISHED:COMPLETED" in federation.wait_end("masked")
        fetched = federation.fetch("masked")
        experiment, given = load_experiment(federation.experiment, words)
    folder = RunFolder.create(tmp_path / "local", experiment, sorted(given))
    run_experiment(folder)
    models = [(p / "model.safetensors").read_bytes() for p in (tmp_path / "local", fetched)]
    assert models[0] == models[1]
    for site_dir in sites:
        assert verify(site_dir / "ledger.sqlite").ok
        assert not list(site_dir.rglob(masks.KEY))
