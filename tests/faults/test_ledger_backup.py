"""`xcal ledger backup`: a whole copy, whenever it is taken."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from xcal.cli.app import main as entry_point
from xcal.dp.ledger import ledger as ledgers
from xcal.dp.ledger.backup import back_up
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Charge, Release, RunTerms, Terms, read_rows, verify
from xcal.errors import UserError

RUN = RunTerms(
    noise="secure",
    run="r",
    method="fl-dp",
    unit="record",
    epsilon=2.0,
    delta=1e-5,
    order=8.0,
    budget=0.3,
    steps=50,
)


def main(words: list[str]) -> int:
    """The command as a user types it; its exit code."""
    before = sys.argv
    sys.argv = ["xcal", *words]
    try:
        entry_point()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def charge(step: int) -> Charge:
    from xcal.dp.accounting import step_cost

    cost = step_cost(0.1, 4.0, 8.0)
    return Charge("r", 0, step, 0.1, 4.0, cost, (Release("gradient", 4.0, 1.0),), None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "site" / "ledger.sqlite"
    ledgers.create(made, Terms("ward", "record", 8.0, 1e-4))
    return made


def killed_after(path: Path, steps: int) -> None:
    """A process that pays for some steps and is killed with the ledger open."""
    child = os.fork()
    if child == 0:
        try:
            ledger = Ledger(path)
            ledger.reserve(RUN)
            for step in range(steps):
                ledger.charge(charge(step))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_after_a_crash(path: Path, tmp_path: Path) -> None:
    killed_after(path, 5)
    assert path.with_name("ledger.sqlite-wal").stat().st_size > 0  # the newest rows are in there
    head = back_up(path, tmp_path / "copy")
    copy = tmp_path / "copy" / "ledger.sqlite"
    assert head.count == 7 and verify(copy).ok and len(read_rows(copy)) == 7
    assert sorted(p.name for p in copy.parent.iterdir()) == ["ledger.head", "ledger.sqlite"]
    with Ledger(copy) as restored:  # and can be spent from
        restored.charge(charge(5))


def test_while_it_is_spent_from(path: Path, tmp_path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.reserve(RUN)
        for step in range(4):
            ledger.charge(charge(step))
            assert back_up(path, tmp_path / "copy") == ledger.head
    assert verify(tmp_path / "copy" / "ledger.sqlite").rows == 6


def test_only_an_older_copy_is_replaced(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "ledger.sqlite"
    ledgers.create(other, Terms("another ward", "record", 8.0, 1e-4))
    content = other.read_bytes()
    with pytest.raises(UserError, match="not an older copy"):
        back_up(path, other.parent)
    assert other.read_bytes() == content
    with pytest.raises(UserError, match="where the ledger itself lies"):
        back_up(path, path.parent)
    # a copy that is ahead of the ledger is worth more than the ledger
    back_up(path, tmp_path / "copy")
    with Ledger(tmp_path / "copy" / "ledger.sqlite") as ahead:
        ahead.reserve(RUN)
    with pytest.raises(UserError, match="not an older copy"):
        back_up(path, tmp_path / "copy")


def test_as_a_user_types_it(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed_after(path, 2)
    assert main(["ledger", "backup", str(path.parent), str(tmp_path / "copy")]) == 0
    assert "4 rows" in capsys.readouterr().out
    assert main(["ledger", "verify", str(tmp_path / "copy")]) == 0
    assert main(["ledger", "backup", str(tmp_path / "nowhere"), str(tmp_path / "copy")]) == 2
    (tmp_path / "file").write_text("x")
    assert main(["ledger", "backup", str(path.parent), str(tmp_path / "file")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_a_damaged_ledger_is_not_copied_over_a_good_one(path: Path, tmp_path: Path) -> None:
    back_up(path, tmp_path / "copy")
    path.with_suffix(".head").write_text("9 " + "0" * 64 + "\n")
    with pytest.raises(UserError, match="was not copied"):
        back_up(path, tmp_path / "copy")
    assert verify(tmp_path / "copy" / "ledger.sqlite").ok


@pytest.mark.parametrize("name", ["x[/foo]", "[/x]", ":smile: [bold]"])
def test_names_are_shown_as_they_are(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site_dir = tmp_path / name.replace("/", "")
    ledgers.create(site_dir / "ledger.sqlite", Terms(name, "record", 8.0, 1e-4))
    with Ledger(site_dir / "ledger.sqlite") as ledger:
        ledger.reserve(RUN)
    for words in (["ledger", "show"], ["ledger", "analyse", "--no-pld"]):
        assert main([*words, str(site_dir)]) == 0
    assert name in capsys.readouterr().out


def test_an_order_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--population p --epsilon 1 --delta 1e-5 --unit record --rule renyi --order inf".split()
    assert main(["ledger", "create", str(tmp_path / "h"), *words]) == 2
    assert "Order inf" in capsys.readouterr().err
    assert not (tmp_path / "h").exists()


@pytest.mark.slow
def test_a_site_refused_for_its_terms_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--client", "a", "--epsilon", "1", "--delta", "1e-5", "--data", "smear"]
    site_dir = str(tmp_path / "h")
    assert main(["site", "init", site_dir, *words, "--population", ""]) == 2
    assert "population" in capsys.readouterr().err
    assert main(["site", "init", site_dir, *words, "--population", "ward"]) == 0
