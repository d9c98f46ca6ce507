"""Ctrl-C ends with one sentence and 130, whatever the interrupted call made of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import typer
from rich.console import Console

from xcal.cli import app as command
from xcal.cli.interrupts import interrupted, interruptible, noting, stop_if_interrupted
from xcal.errors import UserError


@pytest.fixture
def handler() -> Iterator[None]:
    """Ctrl-C as Python has it, whatever runs the tests."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


def _interrupt_myself(turned_into: type[Exception] | None) -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000):  # the handler runs between two steps of the interpreter
            pass
    except KeyboardInterrupt:
        if turned_into is None:
            raise
        raise turned_into("something went wrong") from None


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("turned_into", [None, UserError, RuntimeError])
def test_an_interrupt_stays_one_when_a_library_changes_it(
    turned_into: type[Exception] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, interruptible(Console(), "Go on so."):
        _interrupt_myself(turned_into)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().out == "\nInterrupted. Go on so.\n"


@pytest.mark.usefixtures("handler")
def test_an_interrupt_that_was_swallowed_is_raised_at_the_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Dying:
        def __del__(self) -> None:
            _interrupt_myself(None)

    def work() -> None:
        Dying()
        assert interrupted()
        stop_if_interrupted()

    with pytest.raises(typer.Exit) as ended, interruptible(Console(), "Go on so."):
        work()
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == ""  # not a word of an exception ignored


@pytest.mark.usefixtures("handler")
def test_an_interrupt_is_forgotten_with_the_command_that_it_ended() -> None:
    with pytest.raises(KeyboardInterrupt), noting():
        _interrupt_myself(None)
    assert not interrupted()
    with noting():
        assert not interrupted()
        stop_if_interrupted()


@pytest.mark.usefixtures("handler")
def test_the_command_takes_any_error_after_an_interrupt_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "app", lambda: _interrupt_myself(UserError))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\nxcal: interrupted.\n"


def test_an_error_of_its_own_stays_an_error() -> None:
    with pytest.raises(UserError, match="wrong"), interruptible(Console(), "Go on so."):
        raise UserError("wrong")
