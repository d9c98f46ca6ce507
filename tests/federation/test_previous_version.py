"""Messages that earlier versions really wrote: kept as bytes, so that no later edit adapts them.

The table in docs/deploy.md ("Upgrades") says what these tests hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from made_sites import tiny_site
from support import ROOT
from wire import KEYS, a_request, ask
from xcal.experiments import make_experiment
from xcal.federation import messages
from xcal.federation.coordinator import Answer, Remote
from xcal.federation.exchange import Question, RoundReply, RoundRequest
from xcal.federation.messages import VERSION, Edition, Refusal, Reply, decode_answer, public_keys
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
    assert all(torch.equal(now.weights[k], before.weights[k]) for k in before.weights)
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
