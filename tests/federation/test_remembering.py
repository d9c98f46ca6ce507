"""A site remembers what it released, whatever becomes of its ledger and whoever asks at once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_sites import tiny_site
from wire import a_request, ask, changed
from xcal.dp.ledger.rows import head_path, read_rows
from xcal.federation import answer as entry
from xcal.federation.messages import Refusal, Reply
from xcal.federation.site_directory import SiteDirectory


def _keep(site_dir: Path, place: Path) -> None:
    place.mkdir()
    for path in (site_dir / "ledger.sqlite", head_path(site_dir / "ledger.sqlite")):
        shutil.copy(path, place / path.name)


def _put_back(site_dir: Path, place: Path) -> None:
    for extra in site_dir.glob("ledger.sqlite-*"):
        extra.unlink()
    for path in place.iterdir():
        shutil.copy(path, site_dir / path.name)


def test_an_older_ledger_is_refused_by_the_site_itself(tmp_path: Path) -> None:
    """Its own head file comes with it, and a server need not say what it remembers."""
    site_dir = tiny_site(tmp_path)
    _keep(site_dir, tmp_path / "before")
    first = ask(site_dir, a_request())
    assert isinstance(first, Reply)
    newest = tmp_path / "after"
    _keep(site_dir, newest)
    _put_back(site_dir, tmp_path / "before")
    following = a_request(round=1, weights=first.answer.weights)
    assert ask(site_dir, following) == Refusal("0", "ledger-older")
    assert ask(site_dir, a_request(run="another")) == Refusal("0", "ledger-older")
    assert "older than what this site remembers" in str(SiteDirectory.open(site_dir).refusals())
    _put_back(site_dir, newest)
    assert isinstance(ask(site_dir, following), Reply)


def test_totals_hold_for_two_runs_that_ask_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's reservation comes right before the second one's look at the ledger."""
    site_dir = tiny_site(tmp_path)
    text = (site_dir / "policy.toml").read_text()
    (site_dir / "policy.toml").write_text(
        text.replace("epsilon_total = 20.0", "epsilon_total = 8.0")
    )
    check = entry.check_weights

    def overtaken(*args: Any) -> None:
        check(*args)
        monkeypatch.setattr(entry, "check_weights", check)
        assert isinstance(ask(site_dir, a_request(run="first")), Reply)

    monkeypatch.setattr(entry, "check_weights", overtaken)
    assert ask(site_dir, a_request(run="second")) == Refusal("0", "epsilon-total")
    assert {r.body["run"] for r in read_rows(site_dir / "ledger.sqlite") if r.kind == "run"} == {
        "first"
    }


def test_no_server_varies_how_many_images_of_a_person_are_used(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path)
    assert ask(site_dir, changed(group_cap=2)) == Refusal("0", "key-not-allowed")


def test_a_network_is_looked_at_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xcal.errors import UserError

    site_dir = tiny_site(tmp_path)
    first = ask(site_dir, a_request())
    assert isinstance(first, Reply)

    def refuse(*_: Any) -> None:
        raise UserError("It mixes the images of a batch.")

    monkeypatch.setattr(entry, "check_network", refuse)
    following = a_request(round=1, weights=first.answer.weights)
    assert ask(site_dir, following) == Refusal("0", "network-not-allowed")


def test_a_refusal_is_written_down_in_few_words(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path)
    strange = "\x1b[31mred"
    assert ask(site_dir, changed(**{strange: 1})) == Refusal("0", "key-not-allowed")
    assert ask(site_dir, changed(method="x" * 100_000)) == Refusal("0", "method-not-allowed")
    for line in (site_dir / "refusals.jsonl").read_text().splitlines():
        assert len(line) < 3000
    assert strange not in str([r["detail"] for r in SiteDirectory.open(site_dir).refusals()])
    huge = replace(a_request(), validation_losses=(10**400,))
    assert ask(site_dir, huge) == Refusal("0", "malformed")
