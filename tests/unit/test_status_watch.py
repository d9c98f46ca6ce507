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


class LosesItsServer:
    """A run of eight rounds: the server is lost after each, and knows of none when it is back."""

    done = 0  # rounds complete
    lost = False

    def __init__(self) -> None:
        self.rounds = 0

    def first(self) -> list[str]:
        return []

    def goes_on(self) -> bool:
        return not self.lost and self.done < 8

    def may_continue(self) -> bool:
        return self.lost

    def news(self) -> Iterator[str]:
        LosesItsServer.done += 1
        self.rounds = self.done
        yield f"round {self.done}/8"
        LosesItsServer.lost = True
        raise ServerSilent("The server does not answer.")

    def last(self) -> list[str]:
        return []


def test_a_run_that_gets_further_is_kept_going_however_often_its_server_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def look(*_: Any) -> Iterator[LosesItsServer]:
        yield LosesItsServer()

    def continue_run(*_: Any) -> str:
        LosesItsServer.lost = False
        return "j"

    monkeypatch.setattr(runs, "look", look)
    monkeypatch.setattr(runs, "continue_run", continue_run)
    monkeypatch.setattr(runs, "was_stopped", lambda *_: False)
    status(keep_going=True)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("Resumed")] == [
        f"Resumed 'r' after round {n} (1, job j): it was not worked on." for n in range(1, 9)
    ]
