"""The real sets under XCAL_DATA, with their exact counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from xcal.data.catalog import load
from xcal.data.image_store import DatasetInfo
from xcal.data.importing import import_dataset

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("XCAL_DATA" not in os.environ, reason="XCAL_DATA is not set"),
]


@pytest.fixture(scope="module", autouse=True)
def site_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XCAL_HOME", str(tmp_path_factory.mktemp("site")))
        yield


def read(file: str, **options: object) -> DatasetInfo:
    path = Path(os.environ["XCAL_DATA"]) / file
    if not path.exists():
        pytest.skip(f"{file} is not under XCAL_DATA")
    return import_dataset(path, **options).info  # type: ignore[arg-type]


def groups_and_purity(name: str) -> int:
    """How many groups there are; no group may stand in two splits."""
    groups = [set(images.groups.tolist()) for _, images in load(name).splits()]
    together = set().union(*groups)
    assert sum(len(g) for g in groups) == len(together)
    return len(together)


@pytest.mark.slow
def test_blood_cells():
    info = read("blood-cells.zip", pixels=32)
    train, validation, test = (info.splits[s] for s in ("train", "validation", "test"))
    assert train.images + validation.images == 9741
    together = np.array(train.per_class) + np.array(validation.per_class)
    assert together.tolist() == [2465, 2392, 2478, 2406]
    assert train.groups + validation.groups == 247
    assert (test.images, test.groups) == (2487, 67)
    assert test.per_class == (623, 620, 620, 624)
    assert info.notes[0].startswith("TRAIN: 9,741 files are copies of 247 pictures")
    assert any("216 more files are left out, as their 6 pictures" in note for note in info.notes)
    assert info.original_sizes == (("320×240", 12228),)
    assert groups_and_purity("blood-cells") == 314
    # About a tenth of every class is held back, as nearly as whole pictures allow.
    shares = np.array(validation.per_class) / together
    assert ((shares > 0.05) & (shares < 0.15)).all()


@pytest.mark.parametrize(
    ("task", "positive"), [(None, (1557, 180, 506)), ("pneumonia", (49, 3, 11))]
)
def test_chest_xray(task, positive):
    info = read("nih-chest-xray-part1-128px.zip", name=f"nih-{task}", pixels=32, task=task)
    assert [counts.images for counts in info.splits.values()] == [3544, 410, 1045]
    assert tuple(counts.per_class[1] for counts in info.splits.values()) == positive
    assert groups_and_purity(f"nih-{task}") == 1335


@pytest.mark.slow
def test_ham10000():
    info = read("ham10000-200px.zip", pixels=32)
    totals = np.sum([counts.per_class for counts in info.splits.values()], axis=0)
    assert totals.tolist() == [8061, 1954]
    assert groups_and_purity("ham10000") == 7470
    shares = [counts.images / 10015 for counts in info.splits.values()]
    assert np.allclose(shares, [0.8, 0.1, 0.1], atol=0.005)


def test_pneumoniamnist():
    info = read("pneumoniamnist.npz", pixels=28)
    assert [counts.images for counts in info.splits.values()] == [4708, 524, 624]
    data = load("pneumoniamnist")
    with np.load(Path(os.environ["XCAL_DATA"]) / "pneumoniamnist.npz") as original:
        assert np.array_equal(data.test.pixels[..., 1], original["test_images"])
        assert np.array_equal(data.test.labels, original["test_labels"][:, 0])
