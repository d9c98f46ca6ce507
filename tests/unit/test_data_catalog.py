"""Data sets by name."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from xcal.data.catalog import ImageData, Images, load
from xcal.data.synthetic import smear
from xcal.errors import UserError


def own(*, pixels: int = 16, seed: int, train: int = 8) -> ImageData:
    return smear(pixels=pixels, seed=seed, train=train, validation=0, test=0)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_plugin")
    module.own = own  # type: ignore[attr-defined]
    module.wrong = lambda pixels=1, seed=1: 42  # type: ignore[attr-defined]
    module.number = 42  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plugin", module)


def test_an_own_data_set_is_called_with_what_was_asked(plugin):
    data = load("a_plugin:own", pixels=32, seed=5, train=12)
    assert data.train.pixels.shape == (12, 32, 32, 3)
    assert load("a_plugin:own", pixels=None, seed=5).train.pixels.shape == (8, 16, 16, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smeer", {}, "no data set called 'smeer'"),
        ("smear", {"trian": 8}, "Did you mean 'train'"),
        ("no_such_module:x", {}, "cannot be imported"),
        ("a_plugin:absent", {}, "cannot be imported"),
        (":x", {}, "cannot be imported"),
        ("a_plugin:number", {}, "not a function"),
        ("a_plugin:wrong", {}, "instead of ImageData"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(plugin, name, options, message):
    with pytest.raises(UserError, match=message):
        load(name, pixels=16, seed=0, **options)


def test_take_keeps_what_belongs_together():
    images = own(seed=0).train
    chosen = images.take(np.array([5, 2]))
    assert len(chosen) == 2
    assert chosen.ids.tolist() == [images.ids[5], images.ids[2]]
    assert chosen.masks is not None
    assert images.masks is not None
    assert np.array_equal(chosen.masks[1], images.masks[2])
    assert np.array_equal(chosen.pixels[0], images.pixels[5])


def test_arrays_that_do_not_fit_are_refused():
    good = own(seed=0).train
    with pytest.raises(ValueError, match="pixels"):
        Images(good.pixels.astype(np.float32), good.labels, good.groups, good.ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels"):
        Images(good.pixels, good.labels[:3], good.groups, good.ids)
    with pytest.raises(ValueError, match="masks"):
        Images(good.pixels, good.labels, good.groups, good.ids, good.labels > 0)
    with pytest.raises(ValueError, match="label"):
        ImageData("x", ("a",), "record", "none", good, good, good)
