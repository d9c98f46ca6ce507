"""Imports of damaged and hostile files, interrupted imports, damaged caches."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xcal.data import image_store as store
from xcal.data.catalog import load
from xcal.data.image_store import list_datasets, read_info
from xcal.data.importing import BadFilesError, import_dataset
from xcal.errors import UserError


@pytest.fixture(autouse=True)
def site_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "site"))
    return tmp_path / "site"


def encoded(kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, 90 if mode in ("L", "I;16", "I", "F") else None).save(out, format=kind)
    return out.getvalue()


def good_set(root: Path, count: int = 10) -> Path:
    for cls in ("a", "b"):
        (root / cls).mkdir(parents=True)
        for i in range(count):
            (root / cls / f"{i}.png").write_bytes(encoded())
    return root


def png_header_only(width: int, height: int) -> bytes:
    """A PNG that claims to be enormous and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


BAD = {
    "empty.png": (b"", "empty"),
    "text.jpg": (b"this is no picture", "not an image that can be recognized"),
    "truncated.png": (encoded(size=(200, 200))[:120], "broken or truncated"),
    "truncated.jpg": (encoded("JPEG", size=(200, 200))[:-300], "broken or truncated"),
    "jpeg-inside.png": (encoded("JPEG"), "is named as PNG but holds JPEG"),
    "bomb.png": (png_header_only(60_000, 60_000), "too large"),
    "smaller-bomb.png": (png_header_only(10_000, 10_000), "too large"),
    "large.png": (png_header_only(9_000, 8_000), "too large"),
}


def test_every_bad_file_is_named_with_its_reason(tmp_path):
    folder = good_set(tmp_path / "set")
    for name, (data, _) in BAD.items():
        (folder / "a" / name).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadFilesError) as caught:
            import_dataset(folder, name="x", pixels=16)
    reasons = {Path(name).name: reason for name, reason in caught.value.files}
    assert set(reasons) == set(BAD)
    for name, (_, expected) in BAD.items():
        assert expected in reasons[name], name
        assert name in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    assert list_datasets() == ()
    info = import_dataset(folder, name="x", pixels=16, skip_bad=True).info
    assert {Path(name).name for name, _ in info.skipped} == set(BAD)
    assert sum(counts.images for counts in info.splits.values()) == 20
    assert len(load("x").train) == info.splits["train"].images


@pytest.mark.parametrize(
    ("kind", "mode", "ending"),
    [
        ("PNG", "L", "png"),
        ("PNG", "RGBA", "png"),
        ("PNG", "LA", "png"),
        ("PNG", "P", "png"),
        ("PNG", "1", "png"),
        ("PNG", "I;16", "png"),
        ("TIFF", "F", "tif"),
        ("JPEG", "CMYK", "jpg"),
        ("BMP", "RGB", "bmp"),
        ("GIF", "L", "gif"),
        ("WEBP", "RGB", "webp"),
    ],
)
def test_every_kind_of_image_becomes_three_channels(tmp_path, kind, mode, ending):
    folder = good_set(tmp_path / "set")
    (folder / "a" / f"odd.{ending}").write_bytes(encoded(kind, mode))
    info = import_dataset(folder, name="x", pixels=16).info
    assert sum(counts.images for counts in info.splits.values()) == 21


def test_sixteen_bits_keep_their_contrast(tmp_path):
    folder = good_set(tmp_path / "set")
    ramp = np.linspace(1000, 3000, 256).reshape(16, 16).astype(np.uint16)
    for i in range(10):
        Image.fromarray(ramp).save(folder / "a" / f"{i}.png")
    import_dataset(folder, name="x", pixels=16)
    train = load("x").train
    of_a = train.pixels[train.labels == 0][0]
    assert (int(of_a.min()), int(of_a.max())) == (0, 255)


@pytest.mark.parametrize(
    "name", ["../evil.png", "/etc/evil.png", "a/../../evil.png", "..\\evil.png", "C:\\evil.png"]
)
def test_zip_entries_that_point_outside_are_refused(tmp_path, name):
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/1.png", encoded())
        archive.writestr(zipfile.ZipInfo(name), encoded())
    with pytest.raises(UserError, match="points outside"):
        import_dataset(path, name="x", pixels=16)
    assert not (tmp_path / "evil.png").exists()


def test_links_twins_and_encryption_in_a_zip_are_refused(tmp_path):
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = tmp_path / "link.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="is a link"):
        import_dataset(path, pixels=16)

    path = tmp_path / "twice.zip"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("a/1.png", encoded())
        archive.writestr("a/1.png", encoded())
    with pytest.raises(UserError, match="twice"):
        import_dataset(path, pixels=16)

    path = tmp_path / "locked.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/1.png", encoded())
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="encrypted"):
        import_dataset(path, pixels=16)


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("xcal.data.source_files.LARGEST_FILE", 100_000)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(10):
            archive.writestr(f"a/{i}.png", encoded())
            archive.writestr(f"b/{i}.png", encoded())
        archive.writestr("b/bomb.png", bytes(1_000_000))
    with pytest.raises(BadFilesError, match=r"b/bomb\.png is too large \(1,000,000 bytes"):
        import_dataset(path, name="x", pixels=16)


def test_a_zip_entry_that_lies_about_its_size_gives_no_more_than_it_said(tmp_path):
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for cls in ("a", "b"):
            for i in range(10):
                archive.writestr(f"{cls}/{i}.png", encoded())
        archive.writestr("b/liar.png", bytes(5_000_000))
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02")
    raw[at + 24 : at + 28] = struct.pack("<I", 1000)
    path.write_bytes(raw)
    with pytest.raises(BadFilesError, match=r"b/liar\.png"):
        import_dataset(path, name="x", pixels=16)


def test_damage_inside_a_zip_is_found(tmp_path):
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for cls in ("a", "b"):
            for i in range(10):
                archive.writestr(f"{cls}/{i}.png", encoded())
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\x89PNG") + 40] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(BadFilesError, match=r"a/0\.png is damaged inside the zip"):
        import_dataset(path, name="x", pixels=16)
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match="neither a folder nor a zip"):
        import_dataset(path, name="x", pixels=16)


def test_clutter_of_operating_systems_is_ignored(tmp_path):
    folder = good_set(tmp_path / "set")
    (folder / "a" / ".DS_Store").write_bytes(b"x")
    (folder / "a" / "._1.png").write_bytes(b"x")
    (folder / "a" / "Thumbs.db").write_bytes(b"x")
    assert import_dataset(folder, name="x", pixels=16).info.notes[0].startswith("No test split")


@pytest.mark.parametrize("file", ["train.pixels.u8", "test.labels.npy", "about.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_found_and_made_anew(tmp_path, file, how):
    folder = good_set(tmp_path / "set")
    first = import_dataset(folder, name="x", pixels=16)
    before = np.array(load("x").train.pixels)
    path = store.folder_of("x", 16) / file
    raw = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        if how == "flip":
            raw[len(raw) // 2] ^= 0x55
        path.write_bytes(raw[: len(raw) // 2] if how == "cut" else raw)
    if not (file == "about.json" and how == "flip"):
        with pytest.raises(UserError, match="damaged"):
            load("x")
        second = import_dataset(folder, name="x", pixels=16)
        assert not second.already_there
        assert second.info == first.info
        assert np.array_equal(load("x").train.pixels, before)


def test_another_format_version_is_made_anew(tmp_path):
    folder = good_set(tmp_path / "set")
    import_dataset(folder, name="x", pixels=16)
    about = store.folder_of("x", 16) / "about.json"
    raw = json.loads(about.read_text())
    about.write_text(json.dumps(raw | {"format": -1}))
    with pytest.raises(UserError, match="another version"):
        load("x")
    assert not import_dataset(folder, name="x", pixels=16).already_there
    assert len(load("x").train) == 16


def test_a_name_is_not_taken_over_silently(tmp_path):
    first, second = good_set(tmp_path / "one"), good_set(tmp_path / "two", count=12)
    import_dataset(first, name="x", pixels=16)
    with pytest.raises(UserError, match="already holds other images"):
        import_dataset(second, name="x", pixels=16)
    assert len(load("x").train) == 16
    import_dataset(second, name="x", pixels=16, replace=True)
    assert len(load("x").train) > 16
    import_dataset(second, name="x", pixels=32)
    assert load("x").train.pixels.shape[1] == 32
    assert load("x", pixels=16).train.pixels.shape[1] == 16
    with pytest.raises(UserError, match="imported at 16, 32 pixels, not 64"):
        load("x", pixels=64)
    assert [(info.name, info.pixels) for info in list_datasets()] == [("x", 16), ("x", 32)]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "smear", ".hidden", "x" * 100])
def test_names_that_cannot_be_folders_are_refused(tmp_path, name):
    folder = good_set(tmp_path / "set")
    if name:
        with pytest.raises(UserError, match="cannot name a data set"):
            import_dataset(folder, name=name, pixels=16)
    with pytest.raises(UserError):
        read_info(name)


def test_unknown_sets_and_paths_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no data set called 'nothing'; known here: smear"):
        load("nothing")
    with pytest.raises(UserError, match="does not exist"):
        import_dataset(tmp_path / "nowhere", pixels=16)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(UserError, match="neither a folder nor a zip"):
        import_dataset(tmp_path / "file.txt", pixels=16)
    good_set(tmp_path / "set")
    import_dataset(tmp_path / "set", name="x", pixels=16)
    with pytest.raises(UserError, match="no option 'train'"):
        load("x", train=5)
    with pytest.raises(UserError, match="pixels"):
        import_dataset(tmp_path / "set", pixels=4)


def test_progress_counts_every_image(tmp_path):
    seen: list[tuple[int, int]] = []
    import_dataset(good_set(tmp_path / "set"), pixels=16, progress=lambda a, b: seen.append((a, b)))
    assert seen == [(i, 20) for i in range(1, 21)]


def test_a_failing_import_leaves_the_old_set_and_no_litter(tmp_path, site_dir):
    folder = good_set(tmp_path / "set")
    import_dataset(folder, name="x", pixels=16)

    def stop(done: int, _all: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    (folder / "a" / "new.png").write_bytes(encoded())
    with pytest.raises(KeyboardInterrupt):
        import_dataset(folder, name="x", pixels=16, replace=True, progress=stop)
    assert len(load("x").train) == 16
    assert [p.name for p in (site_dir / "data").iterdir() if "partial" in p.name] == []


KILLED = """
import sys, time
from xcal.data.importing import import_dataset
def wait(done, all):
    if done == 7:
        print("seven", flush=True)
        time.sleep(60)
import_dataset(sys.argv[1], name="x", pixels=16, progress=wait)
"""


def test_an_import_that_is_killed_is_not_taken_for_a_whole_one(tmp_path, site_dir):
    folder = good_set(tmp_path / "set")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "seven"
        # While it is under way, nobody else may import the same name.
        with pytest.raises(UserError, match="under way"):
            import_dataset(folder, name="x", pixels=16)
        os.kill(process.pid, signal.SIGKILL)
    assert list_datasets() == ()
    with pytest.raises(UserError, match="no data set"):
        load("x")
    assert not import_dataset(folder, name="x", pixels=16).already_there
    assert len(load("x").train) == 16


def test_a_second_import_decodes_nothing(tmp_path):
    folder = good_set(tmp_path / "set", count=40)
    import_dataset(folder, name="x", pixels=16)
    start = time.perf_counter()
    calls: list[int] = []
    again = import_dataset(folder, name="x", pixels=16, progress=lambda a, _: calls.append(a))
    assert again.already_there
    assert not calls
    assert time.perf_counter() - start < 5
