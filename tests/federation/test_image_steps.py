"""The container image's steps without a container engine: wheel, other user, read-only root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from support import ROOT

pytest.importorskip("nvflare", reason="the extra `nvflare` is not installed")
TOOLS = ("unshare", "setpriv", "mount")


def _may_mount() -> bool:
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        return False
    tried = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"])
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not _may_mount(), reason="needs root, and mount namespaces")
def test_the_images_steps_work_as_another_user_on_a_read_only_root() -> None:
    script = ROOT / "deploy" / "container" / "try.sh"
    done = subprocess.run(["sh", str(script), sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the image's steps work" in done.stdout and "Traceback" not in done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("not tested: ")]
    assert len(told) == 2  # what was borrowed, and what no script can stand for
