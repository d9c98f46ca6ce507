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
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from xcal.errors import UserError

LARGEST_FILE = 512 * 2**20
"""Bytes a single file may have, unpacked."""


_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)


class BadFile(Exception):
    """One file cannot be used; the text says why, and its name is with whoever catches it."""


class Files(ABC):
    """Named files that can be read, from several threads at once."""

    sizes: Mapping[str, int]
    """Bytes of every file by its name: relative, with forward slashes, in sorted order."""
    trouble = "cannot be read"

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """One file, to be read from its beginning."""

    @abstractmethod
    def checksum(self, name: str) -> int:
        """CRC-32 of one file; 0 where it cannot be read, as reading its image will say."""

    def read(self, name: str) -> bytes:
        """All bytes of one file; `BadFile` where it is empty, too large or damaged."""
        size = self.sizes[name]
        if size == 0:
            raise BadFile("is empty (0 bytes)")
        if size > LARGEST_FILE:
            raise BadFile(f"is too large ({size:,} bytes)")
        try:
            with self.open(name) as file:
                # zipfile never gives more than the declared size; damage fails its checksum.
                return file.read()
        except _DAMAGED as error:
            raise BadFile(
                f"{self.trouble} ({getattr(error, 'strerror', None) or error})"
            ) from error

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of one file, as many as there are; none where it cannot be read."""
        try:
            with self.open(name) as file:
                return file.read(count)
        except _DAMAGED:
            return b""

    def fingerprint(self) -> str:
        """A hash of all names and contents; a zip and its unpacked folder have the same one."""
        digest = hashlib.sha256()
        for name, size in self.sizes.items():
            digest.update(f"{name}\0{size}\0{self.checksum(name):08x}\n".encode())
        return digest.hexdigest()

    def close(self) -> None:  # noqa: B027  (a folder holds nothing open)
        """Let go of what is open."""


def open_files(path: Path) -> Files:
    """The files under `path`, a folder or a zip."""
    if path.is_dir():
        return FolderFiles(path)
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


class FolderFiles(Files):
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

    def open(self, name: str) -> IO[bytes]:
        return (self._root / name).open("rb")

    def checksum(self, name: str) -> int:
        crc = 0
        try:
            with self.open(name) as file:
                while block := file.read(2**20):
                    crc = zlib.crc32(block, crc)
        except OSError:
            return 0
        return crc


class ZipFiles(Files):
    """The files of a zip, after a look at every entry's name and kind."""

    trouble = "is damaged inside the zip"

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

    def open(self, name: str) -> IO[bytes]:
        return self._zip.open(self._entries[name])

    def checksum(self, name: str) -> int:
        return self._entries[name].CRC

    def close(self) -> None:
        self._zip.close()
