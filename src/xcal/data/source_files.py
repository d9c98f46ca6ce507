"""Files of a data set as it was downloaded: a folder, or a zip read in place.

A zip is data from elsewhere. Nothing of it is ever written to disk under a name it chose, and
names that point outside, links, and entries that unpack to more than they may are refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from xcal.errors import UserError

LARGEST_FILE = 512 * 2**20
"""Bytes a single file may have, unpacked."""


class BadFile(Exception):
    """One file cannot be used; the text says why, and its name is with whoever catches it."""


class Files(Protocol):
    """Named files that can be read, from several threads at once."""

    sizes: Mapping[str, int]
    """Bytes of every file by its name: relative, with forward slashes, in sorted order."""

    def read(self, name: str) -> bytes:
        """All bytes of one file; `BadFile` where it is empty, too large or damaged."""

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of one file, as many as there are; none where it cannot be read."""

    def fingerprint(self) -> str:
        """A hash of all names and contents; a zip and its unpacked folder have the same one."""

    def close(self) -> None: ...


def open_files(path: Path) -> Files:
    """The files under `path`, a folder or a zip."""
    if path.is_dir():
        return FolderFiles(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a folder, a zip, a CSV or an .npz file.")
    if zipfile.is_zipfile(path):
        return ZipFiles(path)
    raise UserError(f"{path} is neither a folder nor a zip that can be read.")


def _is_clutter(name: str) -> bool:
    """What operating systems leave behind: hidden files, resource forks, thumbnails."""
    parts = name.split("/")
    return (
        any(part.startswith(".") or part == "__MACOSX" for part in parts)
        or parts[-1].lower() == "thumbs.db"
    )


def _fingerprint(checksums: list[tuple[str, int, int]]) -> str:
    digest = hashlib.sha256()
    for name, size, crc in checksums:
        digest.update(f"{name}\0{size}\0{crc:08x}\n".encode())
    return digest.hexdigest()


class FolderFiles:
    """The files of a folder and its subfolders; links to folders are not followed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        found: dict[str, int] = {}
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(root).as_posix()
                if not _is_clutter(relative) and path.is_file():
                    found[relative] = path.stat().st_size
        self.sizes: Mapping[str, int] = dict(sorted(found.items()))

    def read(self, name: str) -> bytes:
        size = self.sizes[name]
        if size == 0:
            raise BadFile("is empty (0 bytes)")
        if size > LARGEST_FILE:
            raise BadFile(f"is too large ({size:,} bytes)")
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            raise BadFile(f"cannot be read ({error.strerror})") from error

    def head(self, name: str, count: int) -> bytes:
        try:
            with (self._root / name).open("rb") as file:
                return file.read(count)
        except OSError:
            return b""

    def fingerprint(self) -> str:
        checksums = []
        for name, size in self.sizes.items():
            crc = 0
            try:
                with (self._root / name).open("rb") as file:
                    while block := file.read(2**20):
                        crc = zlib.crc32(block, crc)
            except OSError:
                crc = 0  # reading it for its image will say what is wrong
            checksums.append((name, size, crc))
        return _fingerprint(checksums)

    def close(self) -> None:
        pass


_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)


class ZipFiles:
    """The files of a zip, after a look at every entry's name and kind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
            raise UserError(f"{path} is not a zip that can be read: {error}.") from error
        self._entries: dict[str, zipfile.ZipInfo] = {}
        try:
            for entry in self._zip.infolist():
                self._admit(entry)
        except UserError:
            self._zip.close()
            raise
        self._entries = dict(sorted(self._entries.items()))
        self.sizes: Mapping[str, int] = {n: e.file_size for n, e in self._entries.items()}

    def _admit(self, entry: zipfile.ZipInfo) -> None:
        # `orig_filename`: zipfile cuts `filename` at a zero byte, which could hide the rest.
        name = entry.orig_filename.replace("\\", "/")
        shown = name.encode("unicode_escape").decode()[:120]
        outside = name.startswith("/") or re.match(r"^[A-Za-z]:", name) or ".." in name.split("/")
        if outside or "\0" in name:
            raise UserError(
                f"{self._path}: the entry {shown!r} points outside the archive; it is refused."
            )
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise UserError(f"{self._path}: the entry {shown!r} is a link; it is refused.")
        if entry.is_dir() or _is_clutter(name):
            return
        if entry.flag_bits & 0x1:
            raise UserError(f"{self._path} is encrypted; unpack it and give the folder.")
        if name in self._entries:
            raise UserError(f"{self._path} holds {shown!r} twice; it is refused.")
        self._entries[name] = entry

    def read(self, name: str) -> bytes:
        entry = self._entries[name]
        if entry.file_size == 0:
            raise BadFile("is empty (0 bytes)")
        if entry.file_size > LARGEST_FILE:
            raise BadFile(f"is too large ({entry.file_size:,} bytes unpacked)")
        try:
            with self._zip.open(entry) as file:
                # zipfile never gives more than the declared size; damage fails its checksum.
                return file.read()
        except _DAMAGED as error:
            raise BadFile(f"is damaged inside the zip ({error})") from error

    def head(self, name: str, count: int) -> bytes:
        try:
            with self._zip.open(self._entries[name]) as file:
                return file.read(count)
        except _DAMAGED:
            return b""

    def fingerprint(self) -> str:
        return _fingerprint([(n, e.file_size, e.CRC) for n, e in self._entries.items()])

    def close(self) -> None:
        self._zip.close()
