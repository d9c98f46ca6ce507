"""Every row of a draw is of the unit it comes from, whoever else is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import tiny
from xcal.data.augment import VIEWS
from xcal.data.images import Images
from xcal.dp.noise import NoiseKey, SecureNoise
from xcal.dp.sampling import UnitTable
from xcal.methods.client_data import Batch, LocalData

KEY = NoiseKey("0", "m", 3, 4, "draw")
UNIT = st.sampled_from(["record", "group"])
AUGMENT = st.sampled_from(sorted(VIEWS))


class Given(SecureNoise):
    """Uniforms that are known, by what they are for; remembers what was asked for."""

    def __init__(self, uniforms: dict[str, Any]) -> None:
        super().__init__()
        self._uniforms = uniforms
        self.asked: list[NoiseKey] = []

    def uniforms(self, key: NoiseKey, count: int) -> Any:
        self.asked.append(key)
        found = self._uniforms[key.block]
        assert len(found) == count
        return found


def in_groups(groups: list[int]) -> Images:
    some = tiny(train=len(groups)).train
    return Images(some.pixels, some.labels, np.array(groups, np.int64), some.ids)


def uniforms(
    rng: np.random.Generator, data: LocalData, images: int, augment: str
) -> dict[str, Any]:
    others = len(VIEWS[augment]) - 1
    return {
        "draw": rng.random(data.units),
        "views": rng.random(images),
        "augment": rng.random(images * others),
    }


def rows_of(batch: Batch, place: int) -> list[tuple[int, int]]:
    """(image, view) of every row of the drawn unit at this place."""
    rows = np.flatnonzero(batch.units.numpy() == place)
    return list(
        zip(batch.inputs.images[rows].tolist(), batch.inputs.views[rows].tolist(), strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.integers(0, 6), min_size=1, max_size=24),
    unit=UNIT,
    augment=AUGMENT,
    views=st.integers(1, 8),
    most=st.integers(1, 3),
    rate=st.floats(0, 1),
    seed=st.integers(0, 10_000),
    null=st.none() | st.integers(0, 5),
)
def test_every_row_is_of_the_unit_it_comes_from(
    groups, unit, augment, views, most, rate, seed, null
):
    images = in_groups(groups)
    table = UnitTable.of(unit, images.groups)
    declared = None if null is None else table.n_units + null
    data = LocalData(
        images,
        unit=unit,
        images_per_unit=most,
        views=views,
        augment=augment,
        declared_units=declared,
    )
    assert data.units == (declared or table.n_units)
    known = uniforms(np.random.default_rng(seed), data, len(groups), augment)
    batch = data.draw(rate, Given(known), KEY)
    drawn = np.flatnonzero(known["draw"] < rate)  # each once, by its own uniform alone
    assert batch.n_units == len(drawn)
    real = drawn[drawn < table.n_units]  # the others are null: drawn, and without a row
    assert set(batch.units.tolist()) == set(range(len(real)))  # no row of anybody else
    for place, number in enumerate(real):
        own = set(table.images[table.starts[number] : table.starts[number + 1]].tolist())
        rows = rows_of(batch, place)
        used = {image for image, _ in rows}
        assert used <= own
        assert len(used) == min(len(own), most)
        for image in used:
            shown = [view for i, view in rows if i == image]
            assert len(shown) == len(set(shown)) == views
            assert 0 in shown  # the image as it is
    assert batch.labels.tolist() == images.labels[batch.inputs.images].tolist()
    plain = [True] * len(batch.labels) if batch.plain is None else batch.plain.tolist()
    assert plain == (batch.inputs.views == 0).tolist()
    assert batch.one_row_each == (unit == "record" and views == 1)
    if batch.one_row_each:
        assert batch.units.tolist() == list(range(len(real)))


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.integers(0, 4), min_size=2, max_size=20),
    unit=UNIT,
    augment=AUGMENT,
    views=st.integers(1, 8),
    most=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    rates=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    data_=st.data(),
)
def test_a_unit_s_rows_follow_from_its_own_uniforms(
    groups, unit, augment, views, most, seed, rates, data_
):
    """Others' uniforms are exchanged, so that others are drawn and shown otherwise."""
    images = in_groups(groups)
    data = LocalData(images, unit=unit, images_per_unit=most, views=views, augment=augment)
    table = UnitTable.of(unit, images.groups)
    one = data_.draw(st.integers(0, data.units - 1))
    own = table.images[table.starts[one] : table.starts[one + 1]]
    first = uniforms(np.random.default_rng(seed), data, len(groups), augment)
    found = []
    for number, rate in enumerate(rates):
        known = uniforms(np.random.default_rng([seed, number]), data, len(groups), augment)
        known["draw"][one] = -1.0  # drawn at any rate
        known["views"][own] = first["views"][own]
        known["augment"].reshape(len(groups), -1)[own] = first["augment"].reshape(len(groups), -1)[
            own
        ]
        batch = data.draw(rate, Given(known), KEY)
        place = int((np.flatnonzero(known["draw"] < rate) == one).argmax())
        found.append(rows_of(batch, place))
    assert found[0] == found[1] != []


@pytest.mark.parametrize("unit", ["record", "group"])
def test_a_draw_s_uniforms_have_keys_of_their_own_for_this_step(unit: str) -> None:
    images = in_groups([0, 0, 0, 1, 1, 1])
    data = LocalData(images, unit=unit, images_per_unit=2, views=2)
    noise = Given(uniforms(np.random.default_rng(0), data, 6, "turns"))
    data.draw(0.5, noise, KEY)
    assert len(set(noise.asked)) == len(noise.asked) == (3 if unit == "group" else 2)
    assert {(k.client, k.method, k.round, k.step) for k in noise.asked} == {("0", "m", 3, 4)}


def test_how_many_uniforms_a_draw_takes_does_not_depend_on_who_is_drawn() -> None:
    """Else a stream that goes on would tell, and a replayed step would shift."""
    images = in_groups([0, 0, 0, 1, 2, 2])
    data = LocalData(images, unit="group", images_per_unit=2, views=2)
    asked = []
    for rate in (0.0, 0.5, 1.0):
        noise = Given(uniforms(np.random.default_rng(0), data, 6, "turns"))
        data.draw(rate, noise, KEY)  # each of as many as there are units, images or views
        asked.append(noise.asked)
    assert asked[0] == asked[1] == asked[2]
