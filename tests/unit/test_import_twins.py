"""The same image under two names, and a table that begins with Excel's own line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import xcal_forked
from xcal.data.importing import import_dataset
from xcal.data.listing import read_table
from xcal.data.source_files import FolderFiles
from xcal.errors import UserError


def scans(folder: Path, owners: list[str], same: dict[int, int], first: str = "") -> Path:
    """One image for every owner; those in `same` are files of another's bytes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(len(owners)):
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for number, source in same.items():
        (folder / f"{number}.png").write_bytes((folder / f"{source}.png").read_bytes())
    rows = [f"{n}.png,{'ab'[n % 2]},{owner}" for n, owner in enumerate(owners)]
    (folder / "table.csv").write_text("\n".join([f"{first}path,label,patient_id", *rows]))
    return folder


def test_one_image_under_two_patients_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "home"))
    owners = [f"p{n // 2}" for n in range(40)]
    # 1 and 0 are p0's; 5 is p2's and 9 p4's.
    source = scans(tmp_path / "scans", owners, {1: 0, 5: 0, 9: 3})
    notes = import_dataset(source, "ward", pixels=16).info.notes
    (told,) = [note for note in notes if "the same" in note]
    assert "under different patients, 2 times (for instance 3.png and 9.png)" in told
    shown = xcal_forked("data", "show", "ward")
    assert shown.returncode == 0 and told in shown.stdout
    clean = scans(tmp_path / "clean", owners, {1: 0})
    assert not any("the same" in n for n in import_dataset(clean, "clean", pixels=16).info.notes)


@pytest.mark.parametrize("first", ["sep=,\n", "SEP=,\r\n", '"sep=,"\n', "sep=,,,\n"])
def test_a_table_that_begins_with_its_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "home"))
    source = scans(tmp_path / "scans", [f"p{n // 2}" for n in range(40)], {}, first)
    info = import_dataset(source, "ward", pixels=16).info
    assert (info.kind, info.group_name, info.classes) == ("csv", "patient", ("a", "b"))
    assert sum(split.groups for split in info.splits.values()) == 20


def test_its_sign_is_the_one_it_says(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=|\npath|label\na,b.png|x,y,z\n")
    assert read_table(FolderFiles(tmp_path), "t.csv") == [{"path": "a,b.png", "label": "x,y,z"}]
    (tmp_path / "t.csv").write_text("sep=,\npath,label\na.png,x,y\n")
    with pytest.raises(UserError, match="line 3"):
        read_table(FolderFiles(tmp_path), "t.csv")
