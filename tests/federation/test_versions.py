"""Servers and sites of different versions: what fits is answered, what does not says so."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from made_sites import tiny_site
from support import TINY
from wire import KEYS, a_request, ask, changed
from xcal.experiments import LOCAL_KEYS, experiment_type, make_experiment
from xcal.federation import messages
from xcal.federation.answer import answer
from xcal.federation.coordinator import Remote
from xcal.federation.exchange import Question, RoundRequest
from xcal.federation.messages import (
    EDITIONS,
    VERSION,
    Edition,
    Refusal,
    Reply,
    decode_request,
    edition_of,
    encode_request,
    public_keys,
)
from xcal.federation.site_directory import SiteDirectory
from xcal.models.model_registry import build_network

HERE = edition_of(VERSION)


def header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["xcal"])
    return found


def rewritten(data: bytes, **fields: Any) -> bytes:
    """The message as another version would send it; None takes a field away."""
    gone = {k for k, v in fields.items() if v is None}
    values = {k: v for k, v in {**header(data), **fields}.items() if k not in gone}
    tensors = safetensors.torch.load(data)
    return safetensors.torch.save(tensors, {"xcal": json.dumps(values)})


def test_a_request_carries_only_what_differs_from_the_defaults() -> None:
    request = a_request()
    sent = header(encode_request(request))
    assert sent["version"] == VERSION
    assert sent["edition"] == HERE
    defaults = {k: f.get_default() for k, f in experiment_type().model_fields.items()}
    assert all(value != defaults[key] for key, value in sent["experiment"].items())
    assert "momentum" not in sent["experiment"]
    assert "epsilon" in sent["experiment"]
    # and the site understands all of it
    got = decode_request(encode_request(request), 1 << 24)
    assert got.experiment == request.experiment


def test_the_defaults_of_an_edition_are_for_good() -> None:
    """Another default or another key makes another minor version: then EDITIONS gets an entry."""
    text = json.dumps(messages._defaults("0.1"), sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert found == "f9c6086996d57fd5", text


def test_a_newer_server_with_one_more_key_is_answered(tmp_path: Path) -> None:
    """It does not send the key it does not use."""
    data = encode_request(a_request())
    newer = rewritten(data, version="0.2.9")
    assert isinstance(ask(tiny_site(tmp_path), newer), Reply)


def test_a_key_of_a_newer_version_is_another_version_and_no_intruder(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path)
    data = encode_request(changed(brand_new=1))
    said = ask(site_dir, rewritten(data, version="0.2.9"))
    assert said == Refusal("0", "other-version")
    assert isinstance(said, Refusal)
    assert said.version == VERSION
    (entry,) = SiteDirectory.open(site_dir).refusals()
    assert "0.2.9" in entry["detail"]
    assert VERSION in entry["detail"]
    # of the same version, or with a key that no server may set, it is an intruder as ever
    assert ask(site_dir, changed(brand_new=1)) == Refusal("0", "key-not-allowed")
    local = rewritten(encode_request(changed(brand_new=1, noise="seeded")), version="0.2.9")
    assert ask(site_dir, local) == Refusal("0", "key-not-allowed")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"version": "0.9.0", "edition": "0.9"}, "other-version"),
        ({"version": None, "edition": None}, "other-version"),  # older than editions
        ({"version": "1; rm", "edition": "0.1"}, "malformed"),
        ({"version": 7}, "malformed"),
        ({"edition": ["0.1"]}, "other-version"),
    ],
)
def test_the_version_is_read_before_anything_else(
    tmp_path: Path, fields: dict[str, Any], code: str
) -> None:
    site_dir = tiny_site(tmp_path)
    # whatever else is in it
    strange = rewritten(encode_request(a_request()), **fields, something="new")
    assert ask(site_dir, strange) == Refusal("0", code)


def test_the_names_of_the_first_edition_are_understood(tmp_path: Path) -> None:
    data = encode_request(a_request())
    keys = dict(header(data)["experiment"])
    keys["batch"] = keys.pop("expected_batch_size")
    assert isinstance(ask(tiny_site(tmp_path), rewritten(data, experiment=keys)), Reply)


class OldSite:
    """A carrier to one site of the edition 0.1, asked by a server of 0.2."""

    def __init__(self, site_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site_dir, self._patch, self.sent = site_dir, monkeypatch, list[bytes]()

    def exchange(self, _: int, asked: dict[str, bytes], __: float | None) -> dict[str, bytes]:
        ((client, data),) = asked.items()
        self.sent.append(data)
        with self._patch.context() as old:
            old.setattr(messages, "EDITIONS", {"0.1": Edition()})
            old.setattr(messages, "VERSION", "0.1.0")
            return {client: answer(self.site_dir, data)}

    def late(self) -> list[str]:
        return []


def test_a_newer_server_asks_an_older_site_again_in_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_dir = tiny_site(tmp_path)
    carrier = OldSite(site_dir, monkeypatch)
    # 0.2 has another default of momentum: a site of 0.1 has to be told it
    old_default = experiment_type().model_fields["momentum"].get_default()
    editions = {"0.1": Edition({"momentum": old_default + 0.05}), "0.2": Edition()}
    monkeypatch.setattr(messages, "VERSION", "0.2.0")
    monkeypatch.setattr("xcal.federation.coordinator.VERSION", "0.2.0")
    monkeypatch.setattr(messages, "EDITIONS", editions)
    monkeypatch.setattr("xcal.federation.coordinator.EDITIONS", editions)
    request = a_request()
    experiment = make_experiment(KEYS)
    model = build_network(experiment, 3)
    remote = Remote(carrier, model)  # type: ignore[arg-type]
    round_request = RoundRequest("trial", 0, (0, 1, 2), experiment, ())
    question = Question("0", round_request, request.weights, None)
    said = remote.ask(0, [question], None)["0"]
    assert not isinstance(said, Refusal), said
    first, second = (header(data) for data in carrier.sent)
    assert (first["edition"], second["edition"]) == ("0.2", "0.1")
    assert "momentum" not in first["experiment"]
    assert second["experiment"]["momentum"] == old_default
    # the next round needs no second try
    remote.ask(0, [question], None)
    assert header(carrier.sent[-1])["edition"] == "0.1"
    assert len(carrier.sent) == 3


def test_both_numbers_are_told_where_no_version_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = OldSite(tiny_site(tmp_path), monkeypatch)
    monkeypatch.setattr(messages, "VERSION", "7.0.0")
    monkeypatch.setattr("xcal.federation.coordinator.VERSION", "7.0.0")
    monkeypatch.setattr(messages, "EDITIONS", {"7.0": Edition()})
    monkeypatch.setattr("xcal.federation.coordinator.EDITIONS", {"7.0": Edition()})
    request, experiment = a_request(), make_experiment(KEYS)
    remote = Remote(carrier, build_network(experiment, 3))  # type: ignore[arg-type]
    asked = RoundRequest("trial", 0, (0, 1, 2), experiment, ())
    said = remote.ask(0, [Question("0", asked, request.weights, None)], None)["0"]
    assert isinstance(said, Refusal)
    assert said.text() == "other-version: server 7.0.0, site 0.1.0"
    assert len(carrier.sent) == 1


def test_own_methods_send_all_their_keys() -> None:
    request = a_request()
    own = replace(request, experiment={**request.experiment, "method": "mine:Method"})
    assert set(header(encode_request(own))["experiment"]) == set(own.experiment)
    assert not LOCAL_KEYS & set(public_keys(make_experiment(TINY)))
    assert set(EDITIONS) == {"0.1", "0.2"}
