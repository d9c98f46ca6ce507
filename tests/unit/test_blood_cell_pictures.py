"""The table of the blood-cell pictures: it covers the official files and contradicts nothing."""

from __future__ import annotations

import os
import statistics
import zipfile
from collections import Counter, defaultdict
from importlib.resources import files
from pathlib import Path

import pytest

from xcal.data.folders import blood_cell_pictures

CELLS = ("EOSINOPHIL", "LYMPHOCYTE", "MONOCYTE", "NEUTROPHIL")
# As many as the file names have numbers, though those do not say which.
PHOTOGRAPHS = {"TRAIN": (75, 27, 16, 159), "TEST": (13, 6, 4, 48)}


def copies(split: str, cell: str) -> Counter[int]:
    """How many files of a folder each picture has."""
    table = blood_cell_pictures()
    return Counter(n for file, n in table.items() if file.startswith(f"{split}/{cell}/"))


def test_nearly_every_picture_shows_one_kind_of_cell():
    """Others are overlapping photographs of neighbors on the slide, or of one cell named twice."""
    cells = defaultdict(set)
    for file, number in blood_cell_pictures().items():
        cells[number].add(file.split("/")[1])
    assert sorted(cells) == list(range(len(cells)))
    assert Counter(len(kinds) for kinds in cells.values()) == {1: len(cells) - 7, 2: 7}


def test_numbers_of_files_and_pictures():
    of_train, of_test = ([copies(split, cell) for cell in CELLS] for split in ("TRAIN", "TEST"))
    assert [c.total() for c in of_train] == [2497, 2483, 2478, 2499]
    assert [c.total() for c in of_test] == [623, 620, 620, 624]
    assert [len(c) for c in of_train] == [71, 24, 14, 150]
    assert [len(c) for c in of_test] == [13, 6, 4, 45]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
def test_photographs_of_a_folder_have_about_as_many_copies(split, cell):
    """Each was copied as often as any other, so a file in the wrong place would show.

    A picture holds one photograph or two that overlap.
    """
    counts = copies(split, cell).values()
    usual = statistics.median(counts)
    for count in counts:
        photographs = round(count / usual)
        assert photographs in (1, 2)
        assert abs(count / photographs - usual) <= 0.1 * usual
    assert sum(round(count / usual) for count in counts) == PHOTOGRAPHS[split][CELLS.index(cell)]


def test_pictures_in_both_train_and_test():
    trained, tested = (
        Counter(n for cell in CELLS for n in copies(split, cell).elements())
        for split in ("TRAIN", "TEST")
    )
    torn = set(trained) & set(tested)
    assert (len(torn), sum(trained[n] for n in torn)) == (6, 216)


def test_the_table_says_where_it_is_from_and_its_bytes_follow_from_it():
    raw = files("xcal.data").joinpath("blood_cells.csv.gz").read_bytes()
    assert raw[4:8] == bytes(4)  # no time of making
    assert len(raw) < 100_000


@pytest.mark.data
@pytest.mark.skipif("XCAL_DATA" not in os.environ, reason="XCAL_DATA is not set")
def test_every_official_file_is_in_the_table_and_nothing_else():
    path = Path(os.environ["XCAL_DATA"]) / "blood-cells.zip"
    if not path.exists():
        pytest.skip("blood-cells.zip is not under XCAL_DATA")
    with zipfile.ZipFile(path) as archive:
        names = ["/".join(name.split("/")[-3:]) for name in archive.namelist()]
    official = [name for name in names if name.startswith(("TRAIN/", "TEST/"))]
    assert len(official) == 12444
    assert set(official) == set(blood_cell_pictures())
