"""A reviewer verifies one step of any private method in few files."""

from __future__ import annotations

import pytest

from step_files import to_read
from xcal.methods.registry import METHODS


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.private])
def test_a_step_is_verified_in_twelve_files(method: str) -> None:
    files = to_read(method)
    assert len(files) <= 12, files
    assert sum(files.values()) <= 2800
