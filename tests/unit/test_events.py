"""Event files: what TensorBoard reads, with released quantities only."""

from __future__ import annotations

import struct
from pathlib import Path

from xcal.federation.events import EventFile, _masked, crc32c, scalars_of

RECORD = {
    "round": 2,
    "validation_macro_f1": 0.5,
    "road_validation": None,
    "answered": 2,
    "seconds": 1.25,
    "clients": [{"client": "a", "share_spent": 0.25, "units": 100, "mean_sigma": 0.8}],
}


def records(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        head = data[at : at + 8]
        (size,) = struct.unpack("<Q", head)
        assert data[at + 8 : at + 12] == _masked(head)
        body = data[at + 12 : at + 12 + size]
        assert data[at + 12 + size : at + 16 + size] == _masked(body)
        found.append(body)
        at += 16 + size
    return found


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_a_round_becomes_framed_records(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.round(RECORD)
    file.close()
    first, *rest = records(file.path.read_bytes())
    assert b"brain.Event:2" in first
    assert len(rest) == 4
    assert b"server/validation_macro_f1" in rest[0]
    assert rest[0].endswith(struct.pack("<f", 0.5))


def test_only_what_may_be_drawn_is_drawn() -> None:
    assert dict(scalars_of(RECORD)) == {
        "server/validation_macro_f1": 0.5,
        "server/answered": 2.0,
        "a/share_spent": 0.25,
        "a/mean_sigma": 0.8,
    }
