"""Ctrl-C at any moment: one sentence that says how to go on, and exit code 130.

Python raises `KeyboardInterrupt` wherever the program happens to be. A library that is interrupted
in the middle of a call may turn it into an error of its own ("the file is damaged"), and in a
destructor it is printed and forgotten. So the signal is noted when it comes: whatever error follows
counts as the interrupt that it is, and one that was forgotten is raised again at the next step.

Nothing here imports more than the standard library: it is in force while the rest is imported.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""The exit code, as shells have it: 128 + SIGINT."""

_noted = threading.Event()  # a signal belongs to the process, and so does the note


def _note(number: int, frame: FrameType | None) -> None:
    _noted.set()
    signal.default_int_handler(number, frame)


def interrupted() -> bool:
    """Whether Ctrl-C came while someone was `noting`."""
    return _noted.is_set()


def stop_if_interrupted() -> None:
    """Raise the interrupt again that somebody swallowed; to be called between two steps."""
    if _noted.is_set():
        raise KeyboardInterrupt


@contextmanager
def noting() -> Iterator[None]:
    """Within: `interrupted` knows of every Ctrl-C. May be nested; the outermost starts afresh."""
    # Only the main thread may change handlers, and only Python's own is ours to replace: where
    # Ctrl-C is ignored or handled by whoever called us, it stays so.
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield
        return
    _noted.clear()
    unraisable = sys.unraisablehook

    def quiet(found: sys.UnraisableHookArgs) -> None:
        if not (_noted.is_set() and issubclass(found.exc_type, KeyboardInterrupt)):
            unraisable(found)

    sys.unraisablehook = quiet
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _noted.clear()  # whoever comes next may not be able to start afresh (Ctrl-C ignored)


@contextmanager
def interruptible(console: Console, how_to_go_on: str) -> Iterator[None]:
    """Within: Ctrl-C, and any error after it, prints the sentence and exits with 130."""
    from typer import Exit

    with noting():
        try:
            yield
        except BaseException as error:
            if not interrupted() and not isinstance(error, KeyboardInterrupt):
                raise
            with contextlib.suppress(KeyboardInterrupt):  # an impatient second one
                console.print(f"\nInterrupted. {how_to_go_on}")
            raise Exit(INTERRUPTED) from None
