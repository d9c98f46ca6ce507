"""Ctrl-C in long work: one sentence that says how to go on, and exit code 130."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console


@contextmanager
def interruptible(console: Console, how_to_go_on: str) -> Iterator[None]:
    """Within: Ctrl-C prints the sentence and exits with 130.

    A library that is interrupted in the middle of a call may turn the interrupt into an error of
    its own, which would be shown to the user as if something were wrong. So the signal is noted
    when it comes, and whatever error follows it counts as the interrupt that it is.
    """
    noted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        noted.set()
        signal.default_int_handler(number, frame)

    # Only the main thread may change handlers, and only Python's own is ours to replace.
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except BaseException as error:
        if not noted.is_set() and not isinstance(error, KeyboardInterrupt):
            raise
        console.print(f"\nInterrupted. {how_to_go_on}")
        raise typer.Exit(130) from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
