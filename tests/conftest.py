"""What tests of more than one room are given."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from xcal.cli.app import main

Invoke = Callable[..., tuple[int, str, str]]

torch.set_num_threads(1)  # a fork of a process whose torch has several threads can hang


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run the real entry point; returns exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "140")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["xcal", *words])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
