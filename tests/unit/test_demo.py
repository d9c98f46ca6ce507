"""The demo: each part alone, and all of them with what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support import TINY
from xcal.cli import demo, demo_budget, demo_speed
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.federation.site_directory import SiteDirectory

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo on what trains in a second."""
    monkeypatch.setattr(demo, "METHODS", {"fl": "plain", "fl-dp": "static noise"})
    few = {"rounds": 1, "road_images": 0, "road_test_images": 6}
    monkeypatch.setattr(demo, "SETTINGS", {**TINY, **few})
    monkeypatch.setattr(demo_speed, "BATCH", 2)
    monkeypatch.setattr(demo_speed, "PIXELS", 32)


def test_an_unknown_part_is_refused_with_the_nearest(invoke: Invoke, tmp_path: Path) -> None:
    code, _, err = invoke("demo", "sped", "--out", str(tmp_path / "demo"))
    assert code == 2 and "'speed'" in err
    assert not (tmp_path / "demo").exists()


@pytest.mark.usefixtures("small")
def test_the_part_methods_ends_with_a_page_and_a_picture(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    code, shown, err = invoke("demo", "methods", "--out", str(out))
    assert code == 0, err
    page = (out / demo.REPORT).read_text()
    assert "Where the models look" in page and "fl-dp" in page
    assert (out / demo.PANEL).read_bytes().startswith(b"\x89PNG")
    assert str(out / demo.REPORT) in shown and str(out / demo.PANEL) in shown
    code, _, err = invoke("demo", "methods", "--out", str(out))  # goes on from what is there
    assert code == 0, err
    (out / "mine.txt").touch()
    code, _, err = invoke("demo", "methods", "--out", str(out), "--fresh")
    assert code == 2 and "other things than a demo" in err


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("opacus", [True, False])
def test_the_part_speed_compares_in_turns(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opacus: bool
) -> None:
    if not opacus:
        monkeypatch.setattr(demo_speed, "find_spec", lambda name: None)
    code, shown, err = invoke("demo", "speed", "--out", str(tmp_path / "demo"))
    assert code == 0, err
    turns = [line for line in shown.splitlines() if line.startswith("  turn ")]
    assert len(turns) == demo_speed.TURNS
    assert all("plain SGD" in line and "xcal" in line for line in turns)
    assert sum("Opacus" in line for line in turns) == (demo_speed.SLOW_TURNS if opacus else 0)
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_part_budget_refuses_is_killed_and_goes_on(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    code, shown, err = invoke("demo", "budget", "--out", str(out))
    assert code == 0, err
    assert "kill -9 in round 2" in shown
    folder = out / "budget"
    sites = [folder / name for name in demo_budget.SITES]
    codes = [r["code"] for r in SiteDirectory.open(sites[0]).refusals()]
    assert codes == ["epsilon-run", "epsilon-total"]
    result = json.loads((folder / "run" / "result.json").read_text())
    for site in sites:
        assert verify(site / "ledger.sqlite").ok
        rows = read_rows(site / "ledger.sqlite")
        assert len(runs_of(rows)) == 1
        assert all(charges_of(rows, name) for name in runs_of(rows))
    spent = [c["epsilon_spent"] for c in result["clients"]]
    assert max(spent) <= demo_budget.LIMITS["epsilon_run"]
    assert not (folder / "too-much").exists() and not (folder / "again").exists()
