"""The command as a process or as a fork of this one; forks that die where they are told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import ROOT, TESTS, TINY
from xcal.experiments import make_experiment
from xcal.federation import coordinator
from xcal.federation.setup import prepare


def xcal_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a real process."""
    return _process("xcal", words, options)


def xcal_forked(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in a fork of this process, which has imported torch already."""

    def prepare() -> None:
        os.environ.update(xcal_environment())
        os.chdir(cwd or Path.cwd())
        warnings.resetwarnings()  # as Python starts: here they are errors
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)

    with tempfile.TemporaryDirectory() as folder:
        ended = ForkedXcal(list(words), Path(folder) / "log", prepare).wait(240)
    return subprocess.CompletedProcess(words, *ended)


def reproduce_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m reproduce` in a real process."""
    return _process("reproduce", words, options)


def _process(
    module: str, words: tuple[str, ...], options: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=xcal_environment(),
        **options,
    )


class ForkedXcal:
    """The entry point of the real command in a fork of this process.

    It spares the seconds of importing torch. `prepare` is called in the fork, before the command.
    """

    def __init__(
        self, words: list[str], log: Path, prepare: Callable[[], object] | None = None
    ) -> None:
        import torch._dynamo  # noqa: F401 - what a first optimizer imports, for seconds

        from xcal.__main__ import main

        self._code: int | None = None
        self._log = log
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        outputs = [os.open(p, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for p in self._outputs()]
        # A Ctrl-C that comes early waits until the child is ready for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number, handle in enumerate(outputs, start=1):
                    os.dup2(handle, number)
                sys.stdout, sys.stderr = (os.fdopen(n, "w") for n in (1, 2))
                os.environ["COLUMNS"] = "120"
                sys.argv = ["xcal", *words]
                if prepare is not None:
                    prepare()
                try:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                except KeyboardInterrupt:
                    sys.exit(130)  # before the command's first line
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for handle in outputs:
            os.close(handle)

    def _outputs(self) -> list[Path]:
        return [self._log.with_suffix(s) for s in (".out", ".err")]

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
            self._code = os.waitstatus_to_exitcode(status)

    def interrupt(self) -> None:
        """Ctrl-C; it may take its time."""
        if self._code is None:
            os.kill(self._pid, signal.SIGINT)

    def wait(self, limit: float = 120.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; a command that hangs is killed."""
        end = time.monotonic() + limit
        while self.ended() is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the command hung for {limit:g} s")
            time.sleep(0.002)
        assert self._code is not None
        out, err = (path.read_text(errors="replace") for path in self._outputs())
        return self._code, out, err


def warm_up(**changes: Any) -> None:
    """Calibrate here what forks of this process would each calibrate for themselves."""
    prepare(make_experiment({**TINY, **changes}))


def die_at(owner: Any, name: str, count: int) -> None:
    """Have this process kill itself (−9) right before the count-th call of `owner.name`."""
    original, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)


def xcal_environment() -> dict[str, str]:
    path = os.pathsep.join(
        [str(TESTS), str(ROOT / "src"), str(ROOT)]
    )  # this checkout's code, not another's
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@contextmanager
def interrupted_after_a_round() -> Iterator[None]:
    """A Ctrl-C right after the server has saved a round."""
    save = coordinator.save_checkpoint

    def cut(*args: Any) -> None:
        save(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "save_checkpoint", cut)
        yield


def told_by_a_fork(made: Callable[[], bytes]) -> bytes:
    """What a function gives in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, made())
        finally:
            os._exit(0)
    os.close(write)
    told = b""
    while part := os.read(read, 4096):
        told += part
    os.close(read)
    os.waitpid(child, 0)
    return told
