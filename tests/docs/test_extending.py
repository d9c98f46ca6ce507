"""The page on code of one's own: its files, as they stand, train with its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from xcal.dp.ledger.rows import verify
from xcal.federation.ledgers_of import find_ledgers
from xcal.methods import own
from xcal.plugins import MANUAL

PAGE = ROOT / MANUAL


def files() -> dict[str, str]:
    """The page's files by name; one that is given in several parts is put together."""
    found: dict[str, str] = {}
    for text, name in re.findall(
        r"```(?:python|toml)\n(# (\w+\.\w+).*?)```", PAGE.read_text(), re.DOTALL
    ):
        found[name] = found.get(name, "") + text
    return found


def command() -> list[str]:
    match = re.search(r"```sh\nxcal (run .*)\n```", PAGE.read_text())
    assert match is not None
    return match.group(1).split()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("--set", "network=frozen:network")], ids=["own", "norm"])
def test_the_files_of_the_page_train_as_they_stand(
    changes: tuple[str, ...], tmp_path: Path
) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    # As it is installed: the current folder is not on Python's path.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "xcal", *command(), *changes],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["method"] == "mine:tighter" and result["epsilon_target"] == 5.0
    for path in find_ledgers(tmp_path / "run"):
        assert verify(path).ok


def test_the_page_names_all_that_a_method_is_asked() -> None:
    text = PAGE.read_text()
    for name in own.VALUES:
        assert f"| `{name}` |" in text
    for name, given in {**own.NEEDED, **own.OPTIONAL}.items():
        assert f"| `{name}({', '.join(given)})` |" in text
    assert "| `" + "`, `".join(own.SERVER) + "` |" in text
