"""A secret is kept once, whoever comes first, and is never half there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from xcal.federation import files
from xcal.federation.files import write_secret_once
from xcal.federation.masks import _own_secret
from xcal.federation.site_identity import public_key


def _mask_key(path: Path, _: int) -> bytes:
    return _own_secret(path).public_key().public_bytes_raw()


def _site_key(path: Path, _: int) -> bytes:
    return public_key(path)


@pytest.mark.parametrize("ask", [_mask_key, _site_key])
def test_all_that_ask_at_once_get_one_key(ask, tmp_path: Path) -> None:
    path = tmp_path / "key" if ask is _mask_key else tmp_path
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(partial(ask, path), range(16)))
    assert len(found) == 1
    assert found == {ask(path, 0)}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_first_secret_stays_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_secret_once(path, b"first")
    write_secret_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_file_system_without_links_keeps_it_too(tmp_path: Path, monkeypatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_links)
    for secret in (b"first", b"second"):
        write_secret_once(tmp_path / "key", secret)
    assert (tmp_path / "key").read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_crash_before_it_is_whole_leaves_none(tmp_path: Path, monkeypatch) -> None:
    def crash(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_secret_once(tmp_path / "key", b"first")
    assert not list(tmp_path.iterdir())
