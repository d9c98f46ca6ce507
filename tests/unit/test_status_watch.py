"""Who watches a run waits out a server that gives no answer for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from xcal.cli import federation_runs as federation
from xcal.federation.nvflare import lead_runs as runs
from xcal.federation.nvflare.jobs import ServerSilent


class Look:
    """A run of three rounds, on a server that is silent after the second."""

    looks = 0

    def __init__(self) -> None:
        Look.looks += 1
        self._round = 0

    def first(self) -> list[str]:
        return ["connected: a, b"]

    @property
    def rounds(self) -> int:
        return self._round

    def goes_on(self) -> bool:
        return self._round < 3

    def news(self) -> list[str]:
        self._round += 1
        if Look.looks == 1 and self._round == 3:
            raise ServerSilent("The server does not answer.")
        return [f"round {self._round}/3"]

    def last(self) -> list[str]:
        return []


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def look(*_: Any) -> Iterator[Look]:
        yield Look()

    Look.looks = 0
    monkeypatch.setattr(runs, "look", look)


def status(**changes: Any) -> None:
    federation.status_command(
        **{"run": "r", "lead": Path(), "watch": True, "every": 0.0, "tensorboard": None}
        | {"keep_going": False, **changes}
    )


@pytest.mark.usefixtures("silent")
def test_a_moment_of_silence_ends_no_watch_and_repeats_no_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status()
    assert capsys.readouterr().out.splitlines() == [
        "connected: a, b",
        "round 1/3",
        "round 2/3",
        "The server does not answer just now; still watching.",
        "round 3/3",
    ]


@pytest.mark.usefixtures("silent")
def test_a_long_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "WATCH_PATIENCE", -1.0)
    with pytest.raises(ServerSilent):
        status()
