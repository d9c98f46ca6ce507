"""The demo ends with a report, whatever it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import TINY
from xcal.cli import demo
from xcal.errors import UserError


def test_the_demo_ends_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "METHODS", ("fl", "fl-dp"))
    few = {"rounds": 1, "road_images": 4, "road_test_images": 6}
    monkeypatch.setattr(demo, "SETTINGS", {**TINY, **few})
    demo.demo_command(out=tmp_path / "demo", fresh=False)
    page = (tmp_path / "demo" / demo.REPORT).read_text()
    assert "Where the models look" in page and "fl-dp" in page
    assert demo.REPORT in capsys.readouterr().out
    (tmp_path / "demo" / "mine.txt").touch()
    with pytest.raises(UserError, match="other things than a demo"):
        demo.demo_command(out=tmp_path / "demo", fresh=True)
