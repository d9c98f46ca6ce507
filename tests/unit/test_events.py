"""Event files: what TensorBoard reads, with released quantities only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xcal.errors import UserError
from xcal.federation.loggers import EventFile, scalars_of

RECORD = {
    "round": 2,
    "validation_macro_f1": 0.5,
    "road_validation": None,
    "answered": 2,
    "seconds": 1.25,
    "clients": [{"client": "a", "share_spent": 0.25, "units": 100, "mean_sigma": 0.8}],
}
DRAWN = {
    "server/validation_macro_f1": 0.5,
    "server/answered": 2.0,
    "a/share_spent": 0.25,
    "a/mean_sigma": 0.8,
}


def test_a_round_is_read_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = EventFile(tmp_path / "new" / "events")
    file.round(RECORD)
    found = EventAccumulator(str(tmp_path / "new" / "events"))
    found.Reload()  # before the file is closed: a round is there as soon as it is told
    read = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}
    assert {tag: pytest.approx(events[0].value) for tag, events in read.items()} == DRAWN
    assert {events[0].step for events in read.values()} == {3}
    file.close()


def test_only_what_may_be_drawn_is_drawn() -> None:
    assert dict(scalars_of(RECORD)) == DRAWN


def test_without_tensorboard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"whl\[loggers\]"):
        EventFile(tmp_path)
