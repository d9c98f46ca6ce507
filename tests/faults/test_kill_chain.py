"""The first sixteen of the long chain of kills (`make test-faults` has two hundred)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kill_chain import run_chain


@pytest.mark.slow
def test_sixteen_kills_of_the_command_lose_nothing(tmp_path: Path) -> None:
    # Most are forks of this process, which has imported torch already; some are real commands.
    tally = run_chain(tmp_path, kills=16, seed=8, cold_every=10)
    assert sum(tally.kills.values()) == 16
    assert len(tally.kills) >= 4  # starting, stepping, charging, saving, …; of chance
    assert tally.interrupts >= 1
    assert tally.runs >= 1
    assert tally.resumes >= 5
