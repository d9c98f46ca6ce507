"""A run's released quantities as TensorBoard reads them, without TensorBoard.

An event file is a row of records, each framed by its length and masked CRC-32C, each a small
protocol buffer: time, step, and one number under a tag. That is all there is to write.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# What of a round's record may be drawn: measured on public images, or released by a client.
MEASURED = ("validation_macro_f1", "validation_loss", "road_validation", "answered")
RELEASED = ("share_spent", "epsilon_spent", "mean_sigma", "mean_signal")

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


def _table() -> list[int]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        found.append(byte)
    return found


_CRC = _table()


def crc32c(data: bytes) -> int:
    """The checksum of a record.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def _block(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _event(content: bytes, step: int, moment: float) -> bytes:
    return _record(b"\x09" + struct.pack("<d", moment) + b"\x10" + _varint(step) + content)


def scalar(tag: str, value: float, step: int, moment: float) -> bytes:
    """One number under a tag, as a record."""
    inner = _block(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    return _event(_block(5, _block(1, inner)), step, moment)


def scalars_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round's record that may be drawn, by tag."""
    for name in MEASURED:
        if record.get(name) is not None:
            yield f"server/{name}", float(record[name])
    for report in record.get("clients", []):
        for name in RELEASED:
            if report.get(name) is not None:
                yield f"{report['client']}/{name}", float(report[name])


class EventFile:
    """An event file in a folder; every round is flushed, so that a watcher sees it at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        moment = time.time()
        name = f"events.out.tfevents.{int(moment)}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._file.write(_event(_block(3, b"brain.Event:2"), 0, moment))
        self._file.flush()

    def round(self, record: Mapping[str, Any]) -> None:
        for tag, value in scalars_of(record):
            self._file.write(scalar(tag, value, int(record["round"]) + 1, time.time()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
