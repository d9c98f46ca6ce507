"""Memory that a variant's first steps need, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from peers.variants import Setting, make_step

_STATUS = Path("/proc/self/status")
_STEPS = 2
_TIME_LIMIT = 600  # seconds


def memory_growth(variant: str, setting: Setting, threads: int) -> tuple[float | None, str | None]:
    """Peak minus starting memory over two steps in MB, or None and the reason."""
    if not _STATUS.exists():
        return None, "memory is measured on Linux only"
    command = [sys.executable, "-c", "from peers.memory import main; main()"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command += [variant, setting.network, str(setting.pixels), str(threads)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return None, f"two steps took more than {_TIME_LIMIT} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        return None, last
    return float(json.loads(done.stdout)["memory_mb"]), None


def _status_mb(field: str) -> float:
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) / 1024


def _measure(variant: str, setting: Setting, threads: int) -> float:
    torch.set_num_threads(threads)
    step = make_step(variant, setting)
    try:
        # Loading libraries may have needed more for a moment: the peak starts anew from here.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_mb("VmRSS")
        for index in range(_STEPS):
            step.run(index)
        return _status_mb("VmHWM") - before
    finally:
        step.close()


def main() -> None:
    """What the separate process runs: arguments in, one JSON object out."""
    warnings.simplefilter("ignore")
    name, network, pixels, cores = sys.argv[1:]
    growth = _measure(name, Setting(network, int(pixels)), int(cores))
    print(json.dumps({"memory_mb": round(growth, 1)}))
