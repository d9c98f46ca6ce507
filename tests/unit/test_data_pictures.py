"""Contact sheets and pictures of a partition."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from xcal.data.images import ImageData
from xcal.data.partition import partition
from xcal.data.pictures import PALETTE, contact_sheet, mosaic, partition_picture
from xcal.data.synthetic import smear


@pytest.fixture(scope="module")
def data() -> ImageData:
    return smear(pixels=48, train=120, validation=0, test=0, seed=0)


def colors_of(path) -> set[str]:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    return {"#{:02X}{:02X}{:02X}".format(*c) for c in np.unique(pixels, axis=0)}


def test_a_contact_sheet_shows_images_of_every_class(tmp_path, data):
    contact_sheet(data, tmp_path / "sheet.png", per_class=5)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.height > 4 * 48
    pixels = mosaic(data, 5, seed=0)
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (48, 48, 3))[:, :, 0]
    found = set()
    for index, image in enumerate(data.train.pixels):
        corner = (windows[:, :, 0, 0] == image[0, 0]).all(-1)
        for y, x in np.argwhere(corner):
            if np.array_equal(windows[y, x], image):
                found.add(index)
    assert np.bincount(data.train.labels[list(found)], minlength=4).tolist() == [5, 5, 5, 5]
    assert len(set(data.train.groups[list(found)].tolist())) > 10


def test_a_class_without_images_is_an_empty_row(tmp_path, data):
    only = data.train.take(np.flatnonzero(data.train.labels != 2))
    rest = data.validation
    lacking = ImageData("x", data.classes, "record", "none", only, rest, rest)
    contact_sheet(lacking, tmp_path / "sheet.png")


@pytest.mark.parametrize("kind", ["iid", "label", "label-extreme", "covariate"])
def test_a_partition_is_drawn_with_every_class(tmp_path, data, kind):
    parts = partition(data.train, 5, kind=kind, seed=0)
    partition_picture(data.train, data.classes, parts, tmp_path / "parts.png")
    assert set(PALETTE[:4]) <= colors_of(tmp_path / "parts.png")
