"""Features on disk: the same numbers, computed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from xcal.data.augment import View
from xcal.methods.client_data import Inputs
from xcal.methods.feature_store import FeatureStore
from xcal.models.backbone import Split, split_backbone
from xcal.models.efficientnet import efficientnet_b0

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def split() -> Split:
    found = split_backbone(efficientnet_b0(3, norm="frozen", trainable="head", seed=1).eval())
    assert found is not None
    return found


def kept(split: Split, root: Path | None, images: np.ndarray) -> torch.Tensor:
    store = None if root is None else FeatureStore(root)
    inputs = Inputs(images, (View(),), 1.0, "cpu", store)
    assert inputs.keep(split, 1, 64)
    numbers = np.arange(len(images))
    return inputs.activations(numbers, np.zeros_like(numbers))


def test_features_are_those_without_a_store(split: Split, tmp_path: Path) -> None:
    plain = kept(split, None, PIXELS)
    assert torch.allclose(kept(split, tmp_path, PIXELS), plain, atol=1e-6)


def test_whoever_asks_first_the_bits_are_the_same(split: Split, tmp_path: Path) -> None:
    first = kept(split, tmp_path / "a", PIXELS)
    backwards = kept(split, tmp_path / "b", PIXELS[::-1].copy())
    kept(split, tmp_path / "c", PIXELS[5:11])
    rest = kept(split, tmp_path / "c", PIXELS)
    assert torch.equal(first, backwards.flip(0))
    assert torch.equal(first, rest)


def test_nothing_is_computed_twice(split: Split, tmp_path: Path) -> None:
    first = kept(split, tmp_path, PIXELS)

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("computed again")

    class Known(Split):
        def begin(self, images: torch.Tensor) -> torch.Tensor:
            return split.begin(images) if len(images) == 1 else refuse(images)

    assert torch.equal(kept(Known(split.beginning, split.rest), tmp_path, PIXELS), first)


def test_what_an_interrupted_writer_left_is_cut_off(split: Split, tmp_path: Path) -> None:
    first = kept(split, tmp_path, PIXELS)
    (folder,) = tmp_path.iterdir()
    rows = folder / "rows.bin"
    keys = folder / "keys.bin"
    keys.write_bytes(keys.read_bytes()[: 16 * 35 + 3])  # between two keys
    rows.write_bytes(rows.read_bytes() + b"abc")
    assert torch.equal(kept(split, tmp_path, PIXELS), first)
    assert torch.equal(kept(split, tmp_path, PIXELS), first)


def test_another_backbone_has_other_features(split: Split, tmp_path: Path) -> None:
    other = split_backbone(efficientnet_b0(3, norm="frozen", trainable="head", seed=2).eval())
    assert other is not None
    assert not torch.equal(kept(split, tmp_path, PIXELS), kept(other, tmp_path, PIXELS))


def test_images_of_another_size_do_not_disturb_what_is_kept(split: Split, tmp_path: Path) -> None:
    beginning = Split(split.beginning[:1], split.rest)  # its rows are as long as the image is large
    larger = np.random.default_rng(1).integers(0, 256, (6, 48, 48, 3), dtype=np.uint8)
    first = kept(beginning, tmp_path, PIXELS)
    of_larger = kept(beginning, tmp_path, larger)
    assert torch.equal(kept(beginning, tmp_path, PIXELS), first)
    kept(beginning, tmp_path, PIXELS[:4] // 2)
    assert torch.equal(kept(beginning, tmp_path, larger), of_larger)
    assert torch.equal(kept(beginning, tmp_path, PIXELS), first)
