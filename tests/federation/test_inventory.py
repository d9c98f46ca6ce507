"""Nothing is sent that the inventory does not explain."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from inventory import INVENTORY
from made_sites import tiny_site
from support import ROOT, TINY
from wire import a_request, ask, changed
from xcal.experiments import KEYS, LOCAL_KEYS, experiment_type, make_experiment
from xcal.federation.disclosure import CLASSES
from xcal.federation.exchange import ClientReport, RoundReply
from xcal.federation.local_evaluation import TABLES
from xcal.federation.masks import Masked
from xcal.federation.messages import (
    Disclosure,
    Introduction,
    Refusal,
    Reply,
    public_keys,
)
from xcal.federation.request_refusals import CODES
from xcal.methods.context import StepRecord

EXPLAINED = {f.name: f for f in INVENTORY}


def test_every_field_of_the_messages_is_explained() -> None:
    names = {f"report.{f.name}" for f in fields(ClientReport)}
    names |= {f"trace.{f.name}" for f in fields(StepRecord)}
    names |= {f.name for f in fields(Refusal)}
    names |= {f.name for f in fields(Reply) if f.name != "answer"}
    assert {f.name for f in fields(RoundReply)} == {"report", "weights", "trace", "masked"}
    names |= {"weights", "trained", "format", "kind", "version"}
    # A part of a masked sum: its numbers, and of which attempt. The site is the client.
    assert {f.name for f in fields(Masked)} == {"site", "context", "numbers", "signature"}
    names |= {"numbers", "masked.context", "masked.signature"}
    names |= {f.name for f in fields(Introduction)}
    names |= {f.name for f in fields(Disclosure) if f.name != "tables"}
    names |= {f"tables.{name}" for name in (CLASSES, *TABLES)}
    assert len(INVENTORY) == len(EXPLAINED)
    assert names == set(EXPLAINED), "explain the field in docs/messages.md"


def test_nothing_else_is_in_the_log_of_real_messages(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path)
    assert isinstance(ask(site_dir, a_request()), Reply)
    assert isinstance(ask(site_dir, changed(epsilon=100.0)), Refusal)
    logged = [json.loads(line) for line in (site_dir / "messages.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in logged] == ["reply", "refusal"]
    for entry in logged:
        for name, size in entry["fields"].items():
            assert EXPLAINED[name].is_in(entry["kind"])
            assert size > 0
    assert logged[0]["fields"]["weights"] >= 4 * 3 * 8 * 9


def test_the_printed_codes_are_the_table() -> None:
    page = (ROOT / "docs" / "federation.md").read_text()
    for code, what in CODES.items():
        assert f"| `{code}` | {what} |" in page, "run python docs/make_messages.py"


def test_every_key_of_an_experiment_is_placed() -> None:
    kind = experiment_type()
    for key in KEYS:
        extra = kind.model_fields[key].json_schema_extra
        assert isinstance(extra, dict) and "travels" in extra, f"say of {key} whether it travels"
    sent = public_keys(make_experiment({**TINY, "seed": 5}))
    assert set(sent) == set(KEYS) - LOCAL_KEYS
    assert not {"seed", "noise", "sites", "data", "weights"} & set(sent)
