"""The notebooks: small output is kept, and every cell still runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, object]]:
    return list(json.loads(path.read_text())["cells"])


def test_there_are_four() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["1-", "2-", "3-", "4-"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_output_is_kept_and_small(path: Path) -> None:
    assert path.stat().st_size < 60_000
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in code) >= 3
    text = json.dumps(code)
    assert "Traceback" not in text and "/work" not in text and "/root" not in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs(path: Path, tmp_path: Path) -> None:
    """As one script: no cell needs Jupyter."""
    code = ["".join(c["source"]) for c in cells(path) if c["cell_type"] == "code"]  # type: ignore[arg-type]
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(code) + "\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
