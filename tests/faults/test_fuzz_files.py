"""Damaged files of every kind that is read: refused in a sentence, or read for what they are."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sqlite3
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fuzzing import damaged, one_sentence, rounds, within
from support import TINY, micro
from xcal.data.importing import import_dataset
from xcal.dp.account import Account
from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import (
    GENESIS,
    Release,
    RunTerms,
    Terms,
    charges_of,
    head_path,
    read_rows,
    row_hash,
    runs_of,
    terms_of,
    verify,
)
from xcal.errors import UserError
from xcal.models.weights import load_published, read_weights

# --- data sets ------------------------------------------------------------------------------------


def picture(kind: str, number: int) -> bytes:
    out = io.BytesIO()
    rng = np.random.default_rng(number)
    image = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    image.save(out, format=kind)
    return out.getvalue()


def pictures_folder(root: Path, kind: str, ending: str) -> Path:
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for i in range(6):
            (root / name / f"{i}{ending}").write_bytes(picture(kind, i))
    return root


def as_zip(folder: Path) -> Path:
    target = folder.with_suffix(".zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, file.relative_to(folder).as_posix())
    return target


def npz(root: Path) -> Path:
    rng = np.random.default_rng(0)
    target = root / "set.npz"
    parts: dict[str, Any] = {}
    for part, count in (("train", 8), ("val", 4), ("test", 4)):
        parts[f"{part}_images"] = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        parts[f"{part}_labels"] = (np.arange(count) % 2).reshape(-1, 1)
    np.savez_compressed(target, **parts)
    return target


def table(root: Path) -> Path:
    pictures_folder(root / "set", "PNG", ".png")
    rows = [f"{c}/{i}.png,{c},p{i}" for c in "ab" for i in range(6)]
    target = root / "set" / "labels.csv"
    target.write_text("path,label,patient\n" + "\n".join(rows) + "\n")
    return target


def dicom(root: Path) -> Path:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    for name in ("a", "b"):
        (root / "set" / name).mkdir(parents=True)
        for i in range(4):
            meta = FileMetaDataset()
            meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
            meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[name, str(i)])
            meta.TransferSyntaxUID = ExplicitVRLittleEndian
            image = Dataset()
            image.file_meta = meta
            image.Rows = image.Columns = 8
            image.SamplesPerPixel, image.BitsAllocated, image.BitsStored = 1, 16, 12
            image.HighBit, image.PixelRepresentation = 11, 0
            image.PhotometricInterpretation = "MONOCHROME2"
            image.PatientID = f"{name}{i}"
            image.PixelData = np.arange(64, dtype=np.uint16).tobytes()
            image.save_as(root / "set" / name / f"{i}.dcm", enforce_file_format=True)
    return root / "set"


SETS: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    # what is imported, which of its files is damaged, how often
    "zip": (lambda r: as_zip(pictures_folder(r / "set", "PNG", ".png")), "", 25),
    "png": (lambda r: pictures_folder(r / "set", "PNG", ".png"), "a/0.png", 12),
    "jpeg": (lambda r: pictures_folder(r / "set", "JPEG", ".jpg"), "a/0.jpg", 12),
    "tiff": (lambda r: pictures_folder(r / "set", "TIFF", ".tiff"), "a/0.tiff", 12),
    "gif": (lambda r: pictures_folder(r / "set", "GIF", ".gif"), "a/0.gif", 8),
    "webp": (lambda r: pictures_folder(r / "set", "WEBP", ".webp"), "a/0.webp", 8),
    "bmp": (lambda r: pictures_folder(r / "set", "BMP", ".bmp"), "a/0.bmp", 8),
    "npz": (npz, "", 40),
    "csv": (table, "", 25),
    "dicom": (dicom, "a/0.dcm", 30),
}


@pytest.mark.parametrize("kind", SETS)
def test_damaged_data_sets(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inside, count = SETS[kind]
    given = make(tmp_path)
    victim = given / inside if inside else given
    whole = victim.read_bytes()
    site_dir = tmp_path / "site"
    monkeypatch.setenv("XCAL_HOME", str(site_dir))
    assert import_dataset(given, name="good", pixels=8).info.name == "good"
    read = refused = 0
    for number in rounds(count):
        rng = random.Random(f"{kind} {number}")
        victim.write_bytes(damaged(whole, rng))
        before = {p for p in site_dir.rglob("*") if p.is_file() and "lock" not in p.name}
        with within(20, f"{kind} {number}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import_dataset(given, name="x", pixels=8, skip_bad=bool(number % 2), replace=True)
                read += 1
                shutil.rmtree(site_dir / "data" / "x")
            except UserError as error:
                refused += 1
                assert str(error).strip()  # noqa: PT017 - bad files are told a line each
                after = {p for p in site_dir.rglob("*") if p.is_file() and "lock" not in p.name}
                assert after == before, number
    assert refused > 0


# --- model files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".safetensors", ".pth", ".old.pth"])
def test_damaged_weights(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{ending}"
    state = micro(3, seed=1).state_dict()
    if ending == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=ending == ".pth")
    load_published(micro(3), read_weights(path))
    whole = path.read_bytes()
    for number in rounds(100):
        path.write_bytes(damaged(whole, random.Random(f"{ending} {number}")))
        model = micro(3)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with within(20, f"{ending} {number}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load_published(model, read_weights(path))
            except UserError as error:
                one_sentence(error)
                assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(bool(torch.isfinite(v).all()) for v in model.state_dict().values())


# --- ledgers --------------------------------------------------------------------------------------

ORDER = 8.0
RUN = RunTerms("run", "xcal", "record", 3.0, 1e-5, ORDER, budget_at(ORDER, 3.0, 1e-5), 100)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "site" / "ledger.sqlite"
    create(path, Terms("people", "record", 4.0, 1e-4))
    with Ledger(path) as book:
        account = Account(book, RUN, replayable=False)
        for step in range(4):
            account.pay(
                0,
                step,
                rate=0.05,
                sigma=2.0,
                cost=step_cost(0.05, 2.0, ORDER),
                releases=(Release("gradient", 2.0, 1.0),),
                inputs=None,
            )
    return path


def read_all(path: Path) -> None:
    """All that commands do with a ledger."""
    for reading in (_show, verify, _spend):
        try:
            reading(path)
        except UserError as error:
            one_sentence(error)


def _show(path: Path) -> None:
    rows = read_rows(path)
    terms_of(rows)
    for run in runs_of(rows):
        charges_of(rows, run)


def _spend(path: Path) -> None:
    with Ledger(path) as book:
        Account(book, RUN, replayable=False)


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.head"])
def test_damaged_ledgers(name: str, ledger: Path) -> None:
    site_dir = ledger.parent
    kept = {p.name: p.read_bytes() for p in site_dir.iterdir()}
    for number in rounds(60):
        for file in site_dir.iterdir():
            file.unlink()
        for file_name, content in kept.items():
            (site_dir / file_name).write_bytes(content)
        changed = damaged(kept[name], random.Random(f"{name} {number}"))
        (site_dir / name).write_bytes(changed)
        with within(20, f"{name} {number}"):
            read_all(ledger)


BODIES = (
    "{}", "[]", "null", "1", '"x"', '{"run":1}', '{"terms":{}}', '{"terms":null}', '{"cost":"x"}',
    '{"run":"run","round":0,"step":0,"rate":0,"sigma":0,"cost":0,"releases":[]}',
    '{"run":"run","round":0,"step":0,"rate":2,"sigma":-1,"cost":1,"releases":[["g",1,0]]}',
    '{"run":"run","round":0,"step":0,"rate":0.05,"sigma":2,"cost":1e308,"releases":[["g",2,1]]}',
    '{"run":"run","round":"a","step":{},"rate":[],"sigma":null,"cost":1,"releases":"gradient"}',
    '{"run":"run","method":"xcal-steered","unit":"x","epsilon":null,"delta":null,"order":0,"budget":-1,'
    '"steps":"many","noise":7}',
)  # fmt: skip
KINDS = ("create", "run", "charge", "halt", "unbounded", "other")


def test_ledgers_that_hold_together_and_say_nonsense(ledger: Path) -> None:
    """Chained and headed as by their maker, since a forger can do that too."""
    kept = ledger.read_bytes()
    combinations = [(s, k, b) for s in (1, 2, 4) for k in KINDS for b in BODIES]
    rng = random.Random(0)
    for seq, kind, body in rng.sample(combinations, len(rounds(60, 5)[: len(combinations)])):
        ledger.write_bytes(kept)
        with contextlib.closing(sqlite3.connect(ledger, isolation_level=None)) as connection:
            connection.execute("DROP TRIGGER no_update")
            connection.execute(
                "UPDATE rows SET kind = ?, body = ? WHERE seq = ?",
                (kind, json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")), seq),
            )
            previous, rows = GENESIS, connection.execute("SELECT seq, kind, body FROM rows")
            for number, row_kind, row_body in rows.fetchall():
                digest = row_hash(number, row_kind, row_body, previous)
                connection.execute(
                    "UPDATE rows SET prev = ?, hash = ? WHERE seq = ?", (previous, digest, number)
                )
                previous = digest
        head_path(ledger).write_text(f"{number} {previous}\n")
        with within(20, f"{seq} {kind} {body}"):
            read_all(ledger)


# --- a run's own files ----------------------------------------------------------------------------


def test_damaged_files_of_a_run(tmp_path: Path) -> None:
    """Resuming from them is refused in a sentence, or gives the run that it would have been."""
    import xcal
    from commands import ForkedXcal, die_at
    from support import sets
    from xcal.federation.folder import RunFolder

    keys = {"method": "fl-dp", "rounds": 2, "clients": 2, "road_images": 0, "road_test_images": 0}
    whole = xcal.run(tmp_path / "whole", **{**TINY, **keys})
    process = ForkedXcal(
        ["run", *sets(**keys), "--out", str(tmp_path / "cut")],
        tmp_path / "log",
        lambda: die_at(RunFolder, "save_checkpoint", 2),
    )
    assert process.wait()[0] == -9
    names = sorted(
        str(p.relative_to(tmp_path / "cut"))
        for p in (tmp_path / "cut").rglob("*")
        if p.is_file() and "sqlite" not in p.name and "lock" not in p.name
    )
    for number in rounds(len(names), 20):
        rng = random.Random(f"run {number}")
        out = tmp_path / "again"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "cut", out)
        victim = out / names[number % len(names)]
        victim.write_bytes(damaged(victim.read_bytes(), rng))
        with within(60, f"{number} {victim.name}"):
            try:
                result = xcal.run(out, resume=True)
            except UserError as error:
                one_sentence(error)
                continue
        assert result["macro_f1"] == whole["macro_f1"], (number, victim.name)
