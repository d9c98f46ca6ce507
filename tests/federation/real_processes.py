"""Ports and processes of tests that start the real thing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_flower(processes: Iterable[subprocess.Popen[bytes]], folder: Path) -> None:
    """Kill what was started, and what Flower started of its own below this folder."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()
    # Flower starts some of its own in sessions of theirs: they carry our folder in FLWR_HOME.
    mark = f"FLWR_HOME={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # not ours, or gone already
