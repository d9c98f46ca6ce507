"""A run's folder: what is written, when, and how a cut-off run is found again."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from xcal.config import Experiment, to_toml
from xcal.errors import UserError
from xcal.experiments import read_pinned
from xcal.federation.files import (
    append_text,
    check_unused,
    read_json,
    read_tensors,
    whole_lines,
    write_bytes,
    write_json,
    write_tensors,
)

PACKAGES = ("xcal-fl", "torch", "numpy", "scipy", "dp-accounting", "safetensors")


@functools.cache
def versions() -> dict[str, str]:
    """What computed the result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


@functools.cache  # of the code that was loaded
def commit() -> str | None:
    """The commit this code runs from, with `+changes` if it was edited; None outside a checkout."""
    here = Path(__file__).resolve().parent
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                [git, "-C", str(here), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = ask("ls-files", "--error-unmatch", str(Path(__file__).resolve()))
    head = ask("rev-parse", "HEAD")
    if not tracked or not head:
        return None
    return head + ("+changes" if ask("status", "--porcelain", "--", str(here)) else "")


def command() -> str:
    """How this process was called, without the machine's paths to the program."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return shlex.join([name, *sys.argv[1:]])


class RunFolder:
    """DIR of one run. It exists only with its configuration in it, so it can always be resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(path: Path, experiment: Experiment, given: Sequence[str]) -> RunFolder:
        """Make DIR in one move, configuration inside."""
        check_unused(path, f", or continue it with `xcal run --resume {path}`")
        about = {
            "run": f"{path.name}-{secrets.token_hex(4)}",
            "command": command(),
            "commit": commit(),
            "versions": versions(),
            "given": sorted(given),
        }
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.mkdir()
            text = to_toml(experiment.resolved()).encode()
            about["experiment"] = hashlib.sha256(text).hexdigest()
            write_bytes(scratch / "experiment.toml", text)
            write_json(scratch / "run.json", about)
            if path.exists():
                path.rmdir()
            scratch.rename(path)
        except OSError as error:
            raise UserError(f"{path} cannot be created: {error.strerror}.") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # there only where something failed
        return RunFolder(path)

    @staticmethod
    def find(path: Path) -> RunFolder:
        """An existing run."""
        if not (path / "run.json").exists() or not (path / "experiment.toml").exists():
            raise UserError(f"{path} holds no run: start one with `xcal run --out {path}`.")
        return RunFolder(path)

    @property
    def about(self) -> dict[str, Any]:
        result: dict[str, Any] = read_json(self.path / "run.json")
        return result

    @property
    def experiment(self) -> Experiment:
        """The run's configuration, refused where it is not the one the run began with."""
        path = self.path / "experiment.toml"
        if self.about.get("experiment") != hashlib.sha256(path.read_bytes()).hexdigest():
            raise UserError(
                f"{path} was changed since the run began: restore it, or start a new run with it."
            )
        return read_pinned(path)

    def client_dir(self, client: str) -> Path:
        return self.path / "clients" / client

    @property
    def result(self) -> dict[str, Any] | None:
        """The finished run's result; None while it is not finished."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        value: dict[str, Any] = read_json(path)
        return value

    def save_checkpoint(self, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """The server's state after a round: write, sync, rename."""
        write_tensors(self.path / "checkpoint.safetensors", weights, about)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        path = self.path / "checkpoint.safetensors"
        found = read_tensors(path)
        if found is None and path.exists():
            raise UserError(f"{path} cannot be read: it is damaged. Restore it from a backup.")
        return found

    def rewrite_lines(self, name: str, keep: int) -> None:
        """Drop the records of rounds that were not completed."""
        path = self.path / name
        if path.exists():
            kept = [v for v in whole_lines(path) if v.get("round", keep) < keep]
            write_bytes(path, "".join(json.dumps(v) + "\n" for v in kept).encode())

    def append_lines(self, name: str, values: Sequence[Mapping[str, Any]]) -> None:
        append_text(self.path / name, "".join(json.dumps(v) + "\n" for v in values))

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        return whole_lines(self.path / name)
