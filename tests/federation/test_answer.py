"""A client's entry point: the server proposes, the client decides, and nothing private leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from made_sites import tiny_site
from wire import KEYS, a_request, ask, changed
from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Terms, charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.answer import answer
from xcal.federation.messages import (
    Refusal,
    Reply,
    Request,
    decode_answer,
    encode_request,
    public_keys,
)
from xcal.federation.request_refusals import CODES
from xcal.federation.site_directory import SiteDirectory
from xcal.methods.registry import method_of


def reply_of(site_dir: Path, request: Request) -> Reply:
    got = ask(site_dir, request)
    assert isinstance(got, Reply), (got, SiteDirectory.open(site_dir).refusals())
    return got


def paid(site_dir: Path) -> int:
    rows = read_rows(site_dir / "ledger.sqlite")
    return sum(len(charges_of(rows, run)) for run in runs_of(rows))


def rows_of(site_dir: Path) -> int:
    return len(read_rows(site_dir / "ledger.sqlite"))


@pytest.fixture
def site_dir(tmp_path: Path) -> Path:
    return tiny_site(tmp_path)


def test_an_allowed_request_is_trained_and_paid_for(site_dir: Path) -> None:
    reply = reply_of(site_dir, a_request())
    assert reply.answer.weights is not None
    assert reply.answer.report.steps == paid(site_dir) == len(reply.answer.trace) == 6
    assert verify(site_dir / "ledger.sqlite").ok


def test_a_repeat_gives_the_stored_reply_and_costs_nothing(site_dir: Path) -> None:
    first = answer(site_dir, encode_request(a_request()))
    before = paid(site_dir)
    assert answer(site_dir, encode_request(a_request())) == first
    assert paid(site_dir) == before
    other = {k: v + 1 for k, v in a_request().weights.items()}
    assert ask(site_dir, a_request(weights=other)) == Refusal("0", "round-other-weights")
    assert paid(site_dir) == before


def test_an_earlier_round_is_refused(site_dir: Path) -> None:
    first = reply_of(site_dir, a_request())
    reply_of(site_dir, a_request(round=1, weights=first.answer.weights))
    assert ask(site_dir, a_request()) == Refusal("0", "round-past")


NOT_FINITE = {"conv.weight": float("nan"), "head.bias": float("inf")}


def spoilt(name: str, value: float) -> dict[str, torch.Tensor]:
    weights = a_request().weights
    weights[name].view(-1)[0] = value
    return weights


REFUSED: dict[str, tuple[Request, str]] = {
    "another client": (a_request(client="1"), "wrong-client"),
    "a foreign round": (a_request(round=1, own_rounds=(0, 2)), "round-not-own"),
    "a round beyond the last": (a_request(round=3, own_rounds=(0, 3)), "round-not-own"),
    "a path for a name": (a_request(run="../../elsewhere"), "malformed"),
    "rounds in disorder": (a_request(own_rounds=(2, 1, 0)), "malformed"),
    "a seed": (changed(seed=7), "key-not-allowed"),
    "seeded noise": (changed(noise="seeded"), "key-not-allowed"),
    "other sites": (changed(sites=["elsewhere"]), "key-not-allowed"),
    "a weights file": (changed(weights="/etc/passwd"), "key-not-allowed"),
    "an unknown key": (changed(verbose=True), "key-not-allowed"),
    "a value that is none": (changed(lr="fast"), "experiment-invalid"),
    "another method": (changed(method="fl"), "method-not-allowed"),
    "a method by import": (changed(method="os:system"), "method-not-allowed"),
    "another network": (changed(network="resnet18"), "network-not-allowed"),
    "more ε": (changed(epsilon=8.5), "epsilon-run"),
    "more δ": (changed(delta=2e-3), "delta-run"),
    "no possible target": (changed(epsilon=-1.0), "plan-refused"),
    "a batch larger than all": (changed(batch=500), "plan-refused"),
    "another size": (changed(pixels=32), "data"),
    "other frozen parts": (a_request(frozen="0" * 64), "frozen-mismatch"),
    "NaN": (a_request(weights=spoilt("conv.weight", float("nan"))), "weights-not-finite"),
    "infinity": (a_request(weights=spoilt("head.bias", float("inf"))), "weights-not-finite"),
    "a missing array": (
        a_request(weights={"conv.weight": a_request().weights["conv.weight"]}),
        "weights-mismatch",
    ),
    "another type": (
        a_request(weights={k: v.double() for k, v in a_request().weights.items()}),
        "weights-mismatch",
    ),
    "another shape": (
        a_request(weights={k: v[None] for k, v in a_request().weights.items()}),
        "weights-mismatch",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_a_code_costs_nothing_and_is_logged(site_dir: Path, what: str) -> None:
    request, code = REFUSED[what]
    before = read_rows(site_dir / "ledger.sqlite")
    data = answer(site_dir, encode_request(request))
    assert decode_answer(data, 1 << 24) == Refusal("0", code)
    assert str(site_dir).encode() not in data
    assert read_rows(site_dir / "ledger.sqlite") == before
    (entry,) = SiteDirectory.open(site_dir).refusals()
    assert entry["code"] == code
    assert entry["detail"]


@pytest.mark.parametrize(
    ("terms", "code"),
    [
        ({"sigma_min": 50.0}, "sigma-too-low"),
        ({"max_steps": 5}, "too-many-steps"),
        ({"max_message": 1024}, "too-large"),
        ({"unit": "group"}, "unit-not-allowed"),
        ({"epsilon_run": 1.0}, "epsilon-run"),
    ],
)
def test_the_policy_decides(tmp_path: Path, terms: dict[str, Any], code: str) -> None:
    site_dir = tiny_site(tmp_path, **terms)
    assert ask(site_dir, a_request()) == Refusal("0", code)
    assert rows_of(site_dir) == 1


def test_all_runs_together_stay_below_the_total(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path, epsilon_total=15.0)
    reply_of(site_dir, a_request())
    assert ask(site_dir, a_request(run="second")) == Refusal("0", "epsilon-total")
    # the run that is under way goes on
    reply_of(site_dir, a_request())


def test_the_lowest_noise_holds_at_every_step(tmp_path: Path) -> None:
    from xcal.federation.site_directory import SiteDirectory as Home

    site_dir = tiny_site(tmp_path)
    path = site_dir / "policy.toml"
    planned = reply_of(tiny_site(tmp_path / "b"), a_request()).answer.trace
    # above what some step chooses, below what the plan's first step might
    floor = sorted(record.sigma for record in planned)[3]
    path.write_text(path.read_text().replace("sigma_min = 0.0", f"sigma_min = {floor}"))
    assert Home.open(site_dir).policy.sigma_min == pytest.approx(floor)
    assert ask(site_dir, a_request()) == Refusal("0", "sigma-too-low")
    charges = charges_of(read_rows(site_dir / "ledger.sqlite"), "trial")
    assert all(c.sigma >= floor for c in charges)


def test_the_lowest_noise_holds_for_a_step_that_its_plan_did_not_tell_of(tmp_path: Path) -> None:
    """Losses that a server sends lower adap-dpfl's noise below that of the plan admitted."""
    experiment = make_experiment({**KEYS, "method": "adap-dpfl", "sigma_decay": 0.5, "rounds": 6})
    plan = method_of(experiment).plan(experiment, 51, 6)
    assert plan is not None
    floor = 0.9 * plan.sigma_joint_min
    request = a_request(
        experiment=public_keys(experiment),
        round=4,
        own_rounds=tuple(range(6)),
        validation_losses=(4.0, 3.0, 2.0, 1.0),
    )
    found = {}
    for lowest in (0.0, floor):
        site_dir = tiny_site(tmp_path / str(lowest), sigma_min=lowest, methods=("adap-dpfl",))
        told = ask(site_dir, request)
        rows = read_rows(site_dir / "ledger.sqlite")
        found[lowest] = (told, [c.sigma for c in charges_of(rows, "trial")])
    assert isinstance(found[0.0][0], Reply)
    assert min(found[0.0][1]) < floor  # else there would be nothing to refuse
    assert found[floor] == (Refusal("0", "sigma-too-low"), [])
    # as admitted, the run goes on
    assert isinstance(ask(site_dir, replace(request, validation_losses=())), Reply)


def test_what_the_owner_does_not_report_stays(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path, report=("steps",))
    reply = reply_of(site_dir, a_request())
    report = reply.answer.report
    assert report.steps == 6
    assert reply.answer.trace == ()
    assert (report.mean_signal, report.epsilon_spent, report.ledger_hash) == (None, None, None)


@pytest.mark.parametrize("cut", [0, 4, 8, 60, 400, -1])
def test_broken_bytes_are_refused(site_dir: Path, cut: int) -> None:
    data = encode_request(a_request())[:cut]
    assert ask(site_dir, data) == Refusal("0", "malformed")


def test_a_header_that_promises_gigabytes_allocates_none(site_dir: Path) -> None:
    header = {"head.bias": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    text = json.dumps(header).encode()
    assert ask(site_dir, len(text).to_bytes(8, "little") + text) == Refusal("0", "malformed")


def test_a_client_dead_in_a_round_joins_the_next(
    site_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xcal.dp.account import Account

    first = reply_of(site_dir, a_request())
    pay, calls = Account.pay, [0]

    def deadly(*args: Any, **kwargs: Any) -> None:
        pay(*args, **kwargs)
        calls[0] += 1
        if calls[0] == 3:
            raise OSError("the power went")

    monkeypatch.setattr(Account, "pay", deadly)
    weights = first.answer.weights
    assert ask(site_dir, a_request(round=1, weights=weights)) == Refusal("0", "internal")
    monkeypatch.undo()
    # the server went on without it
    reply = reply_of(site_dir, a_request(round=2, weights=weights))
    assert paid(site_dir) == 6 + 3 + 6
    assert reply.answer.report.share_spent is not None
    assert reply.answer.report.share_spent <= 1
    assert verify(site_dir / "ledger.sqlite").ok


def test_a_ledger_behind_what_the_server_saw_is_refused(site_dir: Path) -> None:
    head = reply_of(site_dir, a_request()).answer.report.head
    assert head is not None
    later = replace(head, count=head.count + 5)
    assert ask(site_dir, a_request(round=1, head=later)) == Refusal("0", "ledger-older")


def test_every_code_is_one_the_server_knows() -> None:
    source = "".join(
        p.read_text() for p in (Path(__file__).parents[2] / "src/xcal/federation").glob("*.py")
    )
    for code in CODES:
        assert f'"{code}"' in source.replace('"""', "")
    assert all(code.islower() and " " not in code for code in CODES)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("epsilon_run = 8.0", "epsilon_run = 80.0", "cannot have more than all"),
        ("epsilon_run = 8.0", "epsilon_rum = 8.0", "Did you mean 'epsilon_run'"),
        ("epsilon_run = 8.0", "", "lacks epsilon_run"),
        ("epsilon_run = 8.0", "epsilon_run = 'much'", "is not accepted"),
        ("epsilon_run = 8.0", "epsilon_run = = 8", "not valid TOML"),
        ('"mean_signal"', '"mean_loss"', "nothing a client reports"),
    ],
)
def test_a_bad_policy_is_one_sentence_and_refuses(
    site_dir: Path, old: str, new: str, match: str
) -> None:
    path = site_dir / "policy.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=match) as caught:
        SiteDirectory.open(site_dir)
    assert "\n" not in str(caught.value)
    assert ask(site_dir, a_request()) == Refusal("0", "site")


def test_a_client_that_diverges_does_not_stop_a_server_whose_noise_hides_it(tmp_path: Path) -> None:
    """Whether a run of `dp-fedavg` goes on must not tell what one client's images are."""
    site_dir = tiny_site(tmp_path, methods=("dp-fedavg", "fl"))
    for limited in site_dir.glob("ledger.sqlite*"):
        limited.unlink()
    terms = Terms("simulated client 0", "record", None, None, simulated=True)
    ledger.create(site_dir / "ledger.sqlite", terms)
    asked = changed(method="dp-fedavg", lr=1e30)
    got = ask(site_dir, asked)
    assert isinstance(got, Reply), SiteDirectory.open(site_dir).refusals()
    assert got.answer.weights is not None
    for name, value in asked.weights.items():
        assert torch.equal(got.answer.weights[name], value)
    plain = ask(site_dir, replace(changed(method="fl", lr=1e30), run="another"))
    assert plain == Refusal("0", "diverged")
