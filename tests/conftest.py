"""What tests of more than one file are given."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer.main

from xcal.cli.app import main

Invoke = Callable[..., tuple[int, str, str]]

torch.set_num_threads(1)  # a fork of a process whose torch has several threads can hang
typer.main.get_command = functools.cache(typer.main.get_command)  # 40 ms of every command


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


@pytest.fixture
def call(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """The same from a folder of the test's own; words may be paths."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        return invoke(*map(str, words))

    return command
