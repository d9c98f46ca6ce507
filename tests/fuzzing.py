"""Damage by seed: bytes as disks, editors and attackers change them; bounded, repeatable."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LONG = os.environ.get("XCAL_FAULTS") == "long"
"""Whether `make test-faults` asks for more than `make test` has time for."""

NUMBERS = (b"\x00" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00")
WORDS = (b'"', b"{", b"]", b"null", b"NaN", b"1e999", b"-1", b"\x00", b"\n", b",", b"../", b"\xf0")


def rounds(short: int, factor: int = 20) -> range:
    """How many pieces of damage a test tries."""
    return range(short * factor if LONG else short)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: flipped bits, foreign words and numbers, pieces lost, doubled, swapped.

    The first and the last bytes, where formats keep what they are, are hit more often.
    """
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        span = rng.choice((len(data), min(len(data), 64), min(len(data), 512)))
        at = rng.randrange(span) if rng.random() < 0.7 else len(data) - 1 - rng.randrange(span)
        kind = rng.randrange(7)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            number = rng.choice(NUMBERS)
            data[at : at + len(number)] = number
        elif kind == 3:
            data[at:at] = rng.choice(WORDS)
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            del data[at : at + rng.randrange(1, 64)]
        else:
            piece = data[at : at + rng.randrange(1, 256)]
            data[at:at] = piece
    return bytes(data)


class Hung(BaseException):
    """Raised where something takes longer than it may; nothing catches it by accident."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fail, instead of computing for ever. Counts the processor's seconds: machines are shared."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def one_sentence(error: Exception) -> None:
    """A refusal is one line that says something."""
    text = str(error)
    assert text.strip()
    assert "\n" not in text
