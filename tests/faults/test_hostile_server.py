"""A server that wants more than it may have, against a client's real entry point.

What a client refuses it refuses with a fixed code, for no charge, and writes down why. What it
answers is paid for, and holds nothing of a record that the server's weights have blown up.
"""

from __future__ import annotations

import ast
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzzing import damaged, rounds, within
from made_sites import tiny_site
from support import ROOT
from wire import a_request, ask, changed, real
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.federation.answer import answer
from xcal.federation.messages import Refusal, Reply, decode_answer, encode_request
from xcal.federation.site_directory import SiteDirectory


@pytest.fixture
def site_dir(tmp_path: Path) -> Path:
    return tiny_site(tmp_path)


def paid(site_dir: Path) -> int:
    rows = read_rows(site_dir / "ledger.sqlite")
    return sum(len(charges_of(rows, run)) for run in runs_of(rows))


# --- messages that are none -----------------------------------------------------------------------


def test_damaged_requests(site_dir: Path) -> None:
    whole = encode_request(a_request())
    before = read_rows(site_dir / "ledger.sqlite")
    refusals = 0
    for number in rounds(80):
        data = damaged(whole, random.Random(f"request {number}"))
        with within(20, f"request {number}"):
            sent = answer(site_dir, data)
        got = decode_answer(sent, 1 << 24)
        if isinstance(got, Reply):  # the damage was in what does not count
            shutil.rmtree(site_dir / "runs")
            for file in site_dir.glob("ledger.*"):
                file.unlink()
            site_dir = tiny_site(site_dir.parent / f"again{number}")
            before = read_rows(site_dir / "ledger.sqlite")
            continue
        refusals += 1
        assert got.code != "internal", (number, SiteDirectory.open(site_dir).refusals()[-1])
        assert read_rows(site_dir / "ledger.sqlite") == before
        assert str(site_dir).encode() not in sent
    assert refusals > 50


NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**70, 1.5, 1e308, "", "x", "../..", "a" * 5000, "\x00", [],
    [[]], [0] * 2000, {}, {"a": {}}, ["0" * 64, 1], [1, "0" * 64], [10**30, "0" * 64],
)  # fmt: skip
FIELDS = (
    "client run round own_rounds experiment initial_seed frozen head weights_hash"
    " validation_losses format kind report seed log".split()
)


def with_field(data: bytes, name: str, value: Any) -> bytes:
    """The same message with one field of its header replaced, or added."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    values = json.loads(header["__metadata__"]["xcal"])
    values[name] = value
    header["__metadata__"]["xcal"] = json.dumps(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def allowed(name: str, value: Any) -> bool:
    """Whether a request may say so; what follows from it is tested elsewhere."""
    whole = type(value) is int and 0 <= value < 2**63
    return (
        (name in ("round", "initial_seed") and whole)
        or (name == "validation_losses" and isinstance(value, list) and all(v == 0 for v in value))
        or (name == "head" and value is None)
        or (name in ("run", "client") and value == "x")
        or (name == "format" and value is True)  # which is 1 in JSON's Python
    )


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_hold_anything(site_dir: Path, name: str) -> None:
    whole = encode_request(a_request())
    before = read_rows(site_dir / "ledger.sqlite")
    for value in NASTY:
        if allowed(name, value):
            continue
        with within(20, f"{name} = {value!r:.50}"):
            got = decode_answer(answer(site_dir, with_field(whole, name, value)), 1 << 24)
        assert isinstance(got, Refusal), (name, value)
        assert got.code != "internal", (name, value, SiteDirectory.open(site_dir).refusals()[-1])
        assert read_rows(site_dir / "ledger.sqlite") == before


# --- requests that ask for more -------------------------------------------------------------------

HUGE = 10**15
ATTACKS: dict[str, dict[str, Any]] = {
    "endless epochs": {"local_epochs": HUGE},
    "endless rounds": {"rounds": HUGE},
    "endless units": {"images_per_unit": HUGE, "batch": HUGE},
    "no batch": {"batch": 0},
    "a norm below all numbers": {"clip": 1e-44},
    "a norm above all numbers": {"clip": 1e300},
    "a rate above all numbers": {"lr": 1e300},
    "a free signal": {"kappa": 1e-300},
    "a worthless signal": {"kappa": 1e300},
    "all ε at once": {"w": 1.0},
    "ε without end": {"epsilon": 1e300},
    "no δ": {"delta": 0.0},
    "all δ": {"delta": 1.0},
    "not a number": {"epsilon": "nan"},
    "a nested value": {"epsilon": {"a": 1}},
    "a client-level method": {"method": "dp-fedavg"},
    "a method without a guarantee": {"method": "agp"},
    "a network by import": {"network": "os:system"},
    "a seed for the noise": {"noise_seed": 1},
    "a seed for the draws": {"seed": 1},
    "seeded noise": {"noise": "seeded"},
    "other data": {"data": "os:listdir"},
    "a louder log": {"log": "debug"},
    "a trace": {"report": ["trace", "loss"]},
    "message logs": {"message_log": True},
    "no policy": {"policy": {}},
}


@pytest.mark.parametrize("what", ATTACKS)
def test_what_a_server_may_not_have(site_dir: Path, what: str) -> None:
    with within(30, what):
        got = ask(site_dir, changed(**ATTACKS[what]))
    entries = SiteDirectory.open(site_dir).refusals()
    assert verify(site_dir / "ledger.sqlite").ok
    if isinstance(got, Reply):
        # A foolish wish is no attack: it was trained within the budget, and paid for.
        assert got.answer.report.steps == paid(site_dir)
        assert got.answer.report.share_spent is not None
        assert got.answer.report.share_spent <= 1
        return
    assert got.code != "internal", entries
    assert entries[-1]["code"] == got.code
    assert entries[-1]["detail"]
    if got.code != "diverged":  # which is told after steps that were paid for
        assert paid(site_dir) == 0


def test_other_terms_under_a_name_that_has_begun(site_dir: Path) -> None:
    first = ask(site_dir, a_request())
    assert isinstance(first, Reply)
    before, weights = paid(site_dir), first.answer.weights
    for keys in ({"epsilon": 7.0}, {"method": "fl-dp"}, {"local_epochs": 3}):
        request = changed(**keys)
        request = a_request(round=1, weights=weights, experiment=request.experiment)
        assert ask(site_dir, request) == Refusal("0", "ledger")
    for own in ((0, 1), (1,), (0, 1, 2, 3)):
        got = ask(site_dir, a_request(round=1, weights=weights, own_rounds=own))
        assert isinstance(got, Refusal)
    assert paid(site_dir) == before


def test_a_round_replayed_for_other_weights_gives_nothing_new(site_dir: Path) -> None:
    first = answer(site_dir, encode_request(a_request()))
    spent = paid(site_dir)
    for number in range(5):
        other = {k: v + 1e-6 * (number + 1) for k, v in a_request().weights.items()}
        assert ask(site_dir, a_request(weights=other)) == Refusal("0", "round-other-weights")
    assert answer(site_dir, encode_request(a_request())) == first
    assert paid(site_dir) == spent


# --- noise and draws ------------------------------------------------------------------------------


def test_a_real_client_takes_no_seed_from_a_server(tmp_path: Path) -> None:
    """Same request, same data, same first seed: two answers that share no noise and no draw."""
    answers = []
    for name in ("a", "b"):
        got = ask(real(tiny_site(tmp_path / name)), a_request())
        assert isinstance(got, Reply)
        assert got.answer.report.noise == "secure"
        answers.append(got.answer.weights)
    first, second = answers
    assert first is not None and second is not None
    moved = torch.cat([(first[k] - second[k]).flatten() for k in first])
    assert float((moved != 0).float().mean()) > 0.99


def test_the_first_weights_seed_does_not_reach_the_noise(tmp_path: Path) -> None:
    """Even a simulated client takes its noise from its own seed only."""
    answers = [
        ask(tiny_site(tmp_path / str(seed)), a_request(initial_seed=seed)) for seed in (0, 123)
    ]
    first, second = answers
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert first.answer.weights is not None and second.answer.weights is not None
    for name, value in first.answer.weights.items():
        assert torch.equal(value, second.answer.weights[name])


# --- weights as weapons ---------------------------------------------------------------------------


def blown_up() -> dict[str, torch.Tensor]:
    """Finite weights under which every record's loss and gradient overflow."""
    weights = a_request().weights
    weights["head.weight"] = torch.full_like(weights["head.weight"], 3e38)
    weights["head.weight"][1] *= -1
    return weights


@pytest.mark.parametrize("method", ["xcal-steered", "fl-dp", "xcal-paper"])
def test_records_whose_gradients_overflow_contribute_nothing(tmp_path: Path, method: str) -> None:
    """Two clients with the same noise and wholly different data then give the same answer."""
    answers = []
    for shard in (0, 1):
        site_dir = tiny_site(tmp_path / str(shard))
        text = (site_dir / "site.toml").read_text()
        (site_dir / "site.toml").write_text(text.replace("shard = 0", f"shard = {shard}"))
        request = a_request(weights=blown_up(), experiment=changed(method=method).experiment)
        got = ask(site_dir, request)
        assert isinstance(got, Reply), SiteDirectory.open(site_dir).refusals()
        assert got.answer.weights is not None
        answers.append(got.answer)
        assert paid(site_dir) == len(got.answer.trace) > 0  # noise-only steps are charged like any
    first, second = answers
    for name, value in first.weights.items():
        assert torch.equal(value, second.weights[name])
        assert bool(torch.isfinite(value).all())
    assert first.trace == second.trace
    # … while under honest weights their answers differ.
    honest = []
    for shard in (0, 1):
        site_dir = tiny_site(tmp_path / f"honest{shard}")
        text = (site_dir / "site.toml").read_text()
        (site_dir / "site.toml").write_text(text.replace("shard = 0", f"shard = {shard}"))
        got = ask(site_dir, a_request(experiment=changed(method=method).experiment))
        assert isinstance(got, Reply)
        honest.append(got.answer.weights)
    assert not torch.equal(honest[0]["head.weight"], honest[1]["head.weight"])


@pytest.mark.parametrize("scale", [1e-45, 1e-20, 1e10, 1e20, 1e30, 3e38])
def test_weights_of_any_size_get_an_answer_or_a_code(site_dir: Path, scale: float) -> None:
    weights = {k: torch.full_like(v, scale) for k, v in a_request().weights.items()}
    with within(30, f"{scale:g}"):
        got = ask(site_dir, a_request(weights=weights))
    if isinstance(got, Refusal):
        assert got.code == "diverged"
    else:
        assert got.answer.weights is not None
        assert all(bool(torch.isfinite(v).all()) for v in got.answer.weights.values())
    assert verify(site_dir / "ledger.sqlite").ok


# --- sites and files ------------------------------------------------------------------------------


def test_a_ledger_of_another_population_is_refused(site_dir: Path) -> None:
    text = (site_dir / "site.toml").read_text()
    assert 'population = "simulated client 0"' in text
    (site_dir / "site.toml").write_text(text.replace("simulated client 0", "another ward"))
    assert ask(site_dir, a_request()) == Refusal("0", "ledger")
    (entry,) = SiteDirectory.open(site_dir).refusals()
    assert "another ward" in entry["detail"]
    assert paid(site_dir) == 0


def test_no_code_is_read_from_files() -> None:
    """Weights only through torch's weights-only loader; no pickles, no evaluation, anywhere."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            words = {k.arg: ast.unparse(k.value) for k in node.keywords}
            where = f"{path.name}:{node.lineno}"
            if name == "torch.load":
                assert words.get("weights_only") == "True", where
            if name in ("np.load", "numpy.load"):
                assert words.get("allow_pickle") in ("False", None), where
            if path.name == "workers.py" and name == "pickle.loads":
                continue  # from a pipe to a process that this one forked itself
            assert name not in ("pickle.load", "pickle.loads", "eval", "exec", "yaml.load"), where
