"""A draw as large as the whole set takes no more memory than a chunk of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import xcal
from support import TINY
from xcal.methods.client_data import Rows


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered", "xcal-paper", "fl", "adaptive-clip"])
@pytest.mark.parametrize("views", [1, 2])
def test_pictures_are_made_a_chunk_at_a_time(
    method: str, views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    whole = Rows.pictures

    def counted(self: Rows) -> Tensor:
        made.append(len(self))
        return whole(self)

    monkeypatch.setattr(Rows, "pictures", counted)
    keys = {**TINY, "method": method, "rounds": 1, "batch": 40, "chunk": 8, "signal_every": 1}
    keys |= {"views": views, "road_images": 0, "road_test_images": 0}
    xcal.run(tmp_path / "run", **keys)
    assert max(made) <= 8 + views, sorted(made)[-3:]
