"""The ledger's rows: what they hold, how they chain, which ledgers a path means."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import (
    GENESIS,
    Charge,
    Head,
    Release,
    RunTerms,
    Terms,
    charges_of,
    check_chain,
    check_head,
    covers,
    read_head,
    read_rows,
    runs_of,
    terms_of,
    verify,
)
from xcal.errors import UserError
from xcal.federation.ledgers_of import find_ledgers

RUN = RunTerms("run", "xcal", "record", 3.0, 1e-5, 8.0, budget_at(8.0, 3.0, 1e-5), 10)
TERMS = Terms("people", "record", 4.0, 1e-4)


def charge(step: int = 0, run: str = "run", inputs: str | None = "digest") -> Charge:
    sigma = 2.0
    releases = (Release("gradient", 2.6, 1.3),)
    return Charge(run, 0, step, 0.05, sigma, step_cost(0.05, sigma, 8.0), releases, inputs)


@pytest.fixture
def path(tmp_path) -> Path:
    place = tmp_path / "site" / "ledger.sqlite"
    create(place, TERMS)
    return place


def test_a_new_ledger_has_one_row_with_its_terms(path):
    rows = read_rows(path)
    assert [row.kind for row in rows] == ["create"]
    assert terms_of(rows) == TERMS
    assert rows[0].prev == GENESIS
    assert read_head(path) == Head(1, rows[0].hash)
    assert verify(path).ok


def test_what_is_written_is_read_back_to_the_bit(path):
    with Ledger(path) as ledger:
        ledger.reserve(RUN)
        for step in range(3):
            ledger.charge(charge(step))
        assert ledger.charges("run") == [charge(step) for step in range(3)]
    rows = read_rows(path)
    assert runs_of(rows) == {"run": RUN}
    assert charges_of(rows, "run") == [charge(step) for step in range(3)]
    assert charges_of(rows, "other") == []


def test_rows_chain_and_the_head_follows(path):
    with Ledger(path) as ledger:
        ledger.reserve(RUN)
        ledger.charge(charge())
        # Readable by others, head included, while the ledger is held.
        assert read_head(path) == ledger.head == Head(3, read_rows(path)[-1].hash)
    rows = read_rows(path)
    assert check_chain(rows).ok
    assert [row.prev for row in rows[1:]] == [row.hash for row in rows[:-1]]
    assert not check_chain(rows[1:]).ok
    assert not check_chain([rows[0], rows[2]]).ok
    assert check_head(rows, Head(2, rows[1].hash)).ok  # a ledger may be ahead of its head
    assert not check_head(rows[:2], Head(3, rows[2].hash)).ok


def test_equal_histories_of_two_populations_have_different_hashes(tmp_path):
    for name in ("one", "two"):
        create(tmp_path / name / "ledger.sqlite", Terms(name, "record", 4.0, 1e-4))
    assert read_head(tmp_path / "one/ledger.sqlite") != read_head(tmp_path / "two/ledger.sqlite")


def test_a_charge_needs_a_reserved_run(path):
    with Ledger(path) as ledger, pytest.raises(ValueError, match="never reserved"):
        ledger.charge(charge(run="unknown"))
    assert len(read_rows(path)) == 1


def test_closing_twice_does_no_harm(path):
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with Ledger(path):
        pass


def test_every_append_is_synced_before_it_returns(path):
    """What makes "paid before released" survive a power cut."""
    with Ledger(path) as ledger:
        (level,) = ledger._connection.execute("PRAGMA synchronous").fetchone()
        assert level >= 2  # FULL
        ledger.reserve(RUN)
        with closing(sqlite3.connect(path)) as other:  # committed: others see it at once
            assert other.execute("SELECT COUNT(*) FROM rows").fetchone() == (2,)


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        (Terms("people", "image", 4.0, 1e-4), "unit"),
        (Terms("people", "record", 4.0, 1e-4, "product"), "rule"),
        (Terms("", "record", 4.0, 1e-4), "population"),
        (Terms("people", "record", 4.0, 1e-4, "renyi"), "order"),
        (Terms("people", "record", None, None, "renyi", 8.0), "needs epsilon"),
        (Terms("people", "record", 0.1, 1e-5, "renyi", 2.0), "leaves no budget"),
        (Terms("people", "record", 4.0, 1e-4, "renyi", 1.0), "leaves no budget"),
    ],
)
def test_terms_without_sense_are_refused_and_nothing_is_made(tmp_path, terms, word):
    with pytest.raises(UserError, match=word) as caught:
        create(tmp_path / "site" / "ledger.sqlite", terms)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_creation_that_was_cut_off_can_be_repeated(tmp_path):
    """The head file is written first: alone, and of one row, it stands for nothing spent."""
    path = tmp_path / "ledger.sqlite"
    create(path, TERMS)
    path.unlink()
    (tmp_path / "ledger.sqlite.new").write_bytes(b"half of it")
    create(path, TERMS)
    assert verify(path).ok


def test_a_ledger_takes_charges_for_its_own_unit_only():
    units = ("record", "group", "client")
    assert {(a, b) for a in units for b in units if covers(a, b)} == {(a, a) for a in units}


def test_which_ledgers_a_path_means(tmp_path):
    for client in ("0", "2", "10"):
        create(tmp_path / "run" / "clients" / client / "ledger.sqlite", TERMS)
    sites = tmp_path / "run" / "clients"
    found = list(find_ledgers(tmp_path / "run"))
    assert [p.parent.name for p in found] == ["0", "2", "10"]
    assert list(find_ledgers(sites / "2")) == [sites / "2" / "ledger.sqlite"]
    assert list(find_ledgers(sites / "2" / "ledger.sqlite")) == [sites / "2" / "ledger.sqlite"]
    with pytest.raises(UserError, match="There is no ledger at"):
        list(find_ledgers(tmp_path / "nowhere"))


def test_verify_finds_noise_that_does_not_match_its_charge(path):
    """A row whose releases have less noise than was paid for."""
    with Ledger(path) as ledger:
        ledger.reserve(RUN)
        ledger.charge(charge())
        honest = charge(1)
        less = (Release("gradient", 1.3, 1.3),)
        ledger.charge(
            Charge("run", 0, 1, honest.rate, honest.sigma, honest.cost, less, honest.inputs)
        )
    check = verify(path)
    assert (check.ok, check.row) == (False, 4)
    assert "other noise" in check.problem


def test_verify_finds_a_charge_after_the_halt(path):
    with Ledger(path) as ledger:
        ledger.reserve(RUN)
        ledger.halt("run", 0, 0)
        ledger.charge(charge())
    check = verify(path)
    assert (check.ok, check.row) == (False, 4)
    assert "had halted" in check.problem
