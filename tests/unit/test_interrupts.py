"""Ctrl-C ends with one sentence and 130, whatever the interrupted call made of it."""

from __future__ import annotations

import os
import signal

import pytest
import typer
from rich.console import Console

from xcal.cli.interrupts import interruptible
from xcal.errors import UserError


def _interrupt_myself(turned_into: type[Exception] | None) -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000):  # the handler runs between two steps of the interpreter
            pass
    except KeyboardInterrupt:
        if turned_into is None:
            raise
        raise turned_into("something went wrong") from None


@pytest.mark.parametrize("turned_into", [None, UserError, RuntimeError])
def test_an_interrupt_stays_one_when_a_library_changes_it(
    turned_into: type[Exception] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(typer.Exit) as ended, interruptible(Console(), "Go on so."):
            _interrupt_myself(turned_into)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().out == "\nInterrupted. Go on so.\n"


def test_an_error_of_its_own_stays_an_error() -> None:
    with pytest.raises(UserError, match="wrong"), interruptible(Console(), "Go on so."):
        raise UserError("wrong")
