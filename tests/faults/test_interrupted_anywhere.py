"""Ctrl-C right before any line of the code: exit code 130, and a run that can be taken up again."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import xcal
from commands import ForkedXcal, warm_up, xcal_environment
from kill_chain import KEYS
from left_behind import Snapshot, compare, examine
from support import sets
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.ledger import __file__ as ledger_file
from xcal.dp.ledger.rows import Charge, Release, RunTerms, Terms, read_rows
from xcal.federation.files import read_tensors, write_tensors

SOURCE = str(Path(xcal.__file__).parent)
LONG = os.environ.get("XCAL_FAULTS") == "long"
TRIES = 150 if LONG else 6
SHORT = {**KEYS, "rounds": 2, "local_epochs": 1}

Line = tuple[str, int]


def _trace(ours: Callable[[str], bool], on_line: Callable[[Line], None]) -> None:
    """Have this process call `on_line` before every line of the files that are ours."""

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            on_line((frame.f_code.co_filename, frame.f_lineno))
        return local

    sys.settrace(lambda frame, event, argument: local if ours(frame.f_code.co_filename) else None)


def _write_lines(path: Path) -> None:
    """Have this process leave a file of the lines it came to, each with how often."""
    times: dict[Line, int] = {}
    _trace(
        lambda file: file.startswith(SOURCE),
        lambda line: times.update({line: times.get(line, 0) + 1}),
    )
    leave = os._exit

    def leave_with_lines(code: int) -> None:
        sys.settrace(None)
        path.write_text(json.dumps(list(times.items())))
        leave(code)

    os._exit = leave_with_lines  # type: ignore[assignment]


def _interrupt_before(line: Line, count: int) -> None:
    """Have this process send itself SIGINT when it comes to the line for the count-th time."""
    left = [count]

    def on_line(here: Line) -> None:
        left[0] -= here == line
        if left[0] == 0 and here == line:
            os.kill(os.getpid(), signal.SIGINT)

    _trace(lambda file: file == line[0], on_line)


@pytest.mark.slow
def test_control_c_before_any_line(tmp_path: Path) -> None:
    warm_up(**SHORT)
    start = ["run", *sets(**SHORT), "--out"]
    whole, log = tmp_path / "whole", tmp_path / "log"
    lines = tmp_path / "lines.json"
    code, _, err = ForkedXcal([*start, str(whole)], log, lambda: _write_lines(lines)).wait()
    assert code == 0, err
    passed = [
        ((str(file), int(number)), times)
        for (file, number), times in _read(lines)
        if not file.endswith("__main__.py")  # its few lines are what catches the last of them
    ]
    assert len(passed) > 1000
    rng = random.Random(8)
    run, snapshot, interrupted = 0, Snapshot(), 0
    for line, times in rng.sample(passed, TRIES):
        out = tmp_path / f"run{run}"
        begun = (out / "run.json").exists()
        count = rng.choice((1, rng.randint(1, times)))
        words = ["run", "--resume", str(out)] if begun else [*start, str(out)]

        def prepare(line: Line = line, count: int = count) -> None:
            _interrupt_before(line, count)

        code, _, err = ForkedXcal(words, log, prepare).wait()
        where = f"Ctrl-C before {line}, time {count}"
        assert code in (0, 130), f"{where} ended with {code}: {err}"  # 0: not come by this time
        assert "Traceback" not in err, f"{where}: {err}"
        interrupted += code == 130
        snapshot = examine(out, snapshot)
        if code == 0:
            compare(out, whole)
            run, snapshot = run + 1, Snapshot()
    assert interrupted > TRIES // 2
    code, _, err = ForkedXcal(["run", "--resume", str(out)], log).wait()
    assert code == 0 or not (out / "run.json").exists(), err
    if code == 0:
        compare(out, whole)


def _read(path: Path) -> list[Any]:
    found: list[Any] = json.loads(path.read_text())
    return found


def _lines_of(work: Callable[[], object], interrupt_at: int = 0, within: str = "") -> int | None:
    """How many lines `work` comes to, of any file or of one; None where it was interrupted."""
    count = [0]

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and within in frame.f_code.co_filename:
            count[0] += 1
            if count[0] == interrupt_at:
                raise KeyboardInterrupt
        return local

    gc.disable()  # what an earlier test left behind is not `work`, and swallows what it raises
    before = sys.gettrace()
    sys.settrace(local)
    try:
        work()
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(before)
        gc.enable()
    return count[0]


# an interrupt in the middle of opening leaves a file to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_c_while_a_file_is_read_is_no_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {str(i): torch.ones(i) for i in range(3)}, {"a": 1})
    lines = _lines_of(lambda: read_tensors(path))
    assert lines is not None and lines > 50
    for at in range(1, lines + 1):
        assert _lines_of(lambda: read_tensors(path), at) is None, f"swallowed at {at}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_c_anywhere_in_a_ledger_leaves_it_free_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 10.0, 1e-4))
    terms = RunTerms("run", "fl-dp", "record", 5.0, 1e-5, 8.0, 3.0, 10**6)

    def spend() -> None:
        with Ledger(path) as ledger:
            ledger.reserve(terms)
            number = len(ledger.charges("run"))
            releases = (Release("gradient", 9.0, 1.0),)
            ledger.charge(Charge("run", 0, number, 0.01, 9.0, 1e-6, releases, None))

    spend()
    within = "" if LONG else ledger_file
    lines = _lines_of(spend, within=within)
    assert lines is not None
    for at in range(1, lines + 1):
        before = len(read_rows(path))
        _lines_of(spend, at, within)
        rows = read_rows(path)
        assert len(rows) - before in (0, 1)
        with Ledger(path) as ledger:  # in this very process: the lock is free
            assert ledger.head.count == len(rows)


def test_control_c_while_importing(tmp_path: Path) -> None:
    # A library that is interrupted while it is imported may call it whatever it likes.
    program = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("numpy.core.multiarray failed to import") from None
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["xcal", "--help"]
from xcal.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=xcal_environment(), capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stderr == "\nxcal: interrupted.\n"
