"""Silence has a reason: whom one waits for, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

FIRST = 10.0  # seconds of silence until it is said; then twice as long each time
LONGEST = 300.0
NAMED = 5  # clients named in one line


def listed(names: Sequence[str]) -> str:
    """The names, or the first of many and how many more there are."""
    shown = ", ".join(names[:NAMED])
    more = len(names) - NAMED
    return f"{shown} and {more} more" if more > 0 else shown


class Waiting:
    """Says what is waited for: after ten seconds, then at longer and longer intervals."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._began = clock()
        self._next = FIRST

    def look(self, what: str) -> None:
        """To be called as often as one likes; says `what` when it is time."""
        passed = self._clock() - self._began
        if passed >= self._next:
            self._say(f"{what} ({passed:.0f} s so far).")
            self._next = passed + min(max(passed, FIRST), LONGEST)
