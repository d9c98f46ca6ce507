"""The page for users of the library: its scripts run, its list of refusals is the list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import xcal_forked
from support import ROOT

PAGE = (ROOT / "docs" / "library.md").read_text()


@pytest.mark.slow
def test_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "differentially private for all records" in " ".join(done.stdout.split())
    for folder in ("ward-7", "ward-8"):
        verified = xcal_forked("ledger", "verify", str(tmp_path / folder))
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_page_lists_every_refusal() -> None:
    from xcal.dp.refusals import CODES

    table = PAGE.split("<!-- codes -->")[1].split("<!-- /codes -->")[0]
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", table, re.MULTILINE)) == CODES
