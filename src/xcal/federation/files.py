"""Files that are either the old one or the new one, whatever happens in between."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from safetensors import SafetensorError

from xcal.config import nearest, read_toml
from xcal.durable import sync_folder
from xcal.errors import UserError
from xcal.first_edition import names_of_today

if TYPE_CHECKING:  # commands that only read and write text need not wait for torch
    from torch import Tensor


Table = TypeVar("Table", bound=BaseModel)
Read = TypeVar("Read")
_SUM = "sha256"  # where a description keeps the checksum


def write_bytes(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write, sync, rename: a reader sees the whole old file or the whole new one."""
    scratch = path.with_name(path.name + ".new")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(scratch, path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()  # half a file is of use to nobody, and takes room
        raise UserError(f"{path} could not be written: {error.strerror}.") from error


def write_secret_once(path: Path, secret: bytes) -> None:
    """Keep a secret for its owner's eyes, unless there is one: of several writers the first wins.

    Raises `OSError`. Whole and on the disk, or not there: never half of it, at any crash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # for its owner only
    scratch = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not path.exists():
                os.rename(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_unused(path: Path, otherwise: str = "") -> None:
    """Refuse a folder that holds something; `otherwise`: what else could be done with it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} is in use already: choose another folder{otherwise}.")


def own_folder(path: Path) -> None:
    """Make a folder that only its owner reads and writes, or have one be so."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise UserError(f"{path} cannot be created: {error.strerror}.") from error


def append_text(path: Path, text: str) -> None:
    """Add to a file that only grows; a reader passes over a last line that was cut off."""
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}.") from error


def whole_lines(path: Path, *, strict: bool = True) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, without one that was cut off; none without a file.

    Not `strict`: bytes that are no text spoil their own line only.
    """
    try:
        text = path.read_text(errors="strict" if strict else "replace")
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read: it is damaged.") from None
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                lines.append(value)
    return lines


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read: it is damaged.") from None


def read_as(kind: type[Read], path: Path) -> Read:
    """A JSON file of ours as what it was written from; what says anything else is damaged."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read: restore it from a backup.") from None


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, sync: bool = True
) -> None:
    """Tensors, a JSON description and a checksum over both in one file."""
    from safetensors.torch import save as tensors_to_bytes

    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # One entry of metadata: several would come in any order, and equal files not be equal.
    signed = {**about, _SUM: _checksum(plain, about)}
    write_bytes(path, tensors_to_bytes(plain, {"about": json.dumps(signed)}), sync=sync)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `write_tensors` wrote; None where there is no file or it is damaged, be it by a bit.

    A file without a checksum, as versions before this one wrote it, is taken as it is.
    """
    from safetensors.torch import load as bytes_to_tensors

    try:
        # Not `safe_open`: it calls Python from within, and makes of a Ctrl-C that comes there an
        # error as of a damaged file.
        content = path.read_bytes()
        tensors = bytes_to_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        expected = about.pop(_SUM, None)
        if expected is not None and expected != _checksum(tensors, about):
            return None
        return dict(sorted(tensors.items())), about
    except (
        OSError,
        AttributeError,
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ):
        return None


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Of values, names and description, whatever the order in which a file has them."""
    from xcal.methods.context import digest_tensors

    text = f"{digest_tensors(sorted(tensors.items()))}\n{json.dumps(about)}"
    return hashlib.sha256(text.encode()).hexdigest()


def read_table(
    kind: type[Table], path: Path, what: str, hint: str = "`xcal site init` makes one"
) -> Table:
    """A small TOML file as a checked table; whatever is wrong with it becomes one sentence."""
    if not path.exists():
        raise UserError(f"{path} is missing: {hint}.")
    values = names_of_today(read_toml(path, what))
    known = tuple(kind.model_fields)
    for key in values:
        if key not in known:
            raise UserError(f"Unknown key {key!r} in {path}.{nearest(key, known)}")
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "?"
        if first["type"] == "missing":
            text = f"{path} lacks {key} ({kind.model_fields[key].description}): add it."
        else:
            problem = first["msg"].removeprefix("Value error, ")
            problem = problem[:1].lower() + problem[1:]
            text = f"{key} = {values.get(key)!r} in {path} is not accepted: {problem}."
        raise UserError(text) from None


_PATIENCE = 3.0  # seconds


class FolderBusy(UserError):
    """Another process holds the folder."""


def lock_folder(folder: Path) -> int:
    """Hold a folder for this process; the lock goes with the process, however it ends.

    And with its workers, who end with it: whoever comes next waits until the last one is gone.
    """
    try:
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise UserError(f"The run in {folder} cannot be locked: {error.strerror}.") from error
    patient_until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() < patient_until:
                time.sleep(0.05)
                continue
            os.close(handle)
            raise FolderBusy(
                f"The run in {folder} is being worked on by another process: wait until it ends."
            ) from None
