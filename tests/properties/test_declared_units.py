"""Declared units: with room filled up by null units, adding or removing one unit is a neighbor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support import micro, tiny
from xcal.data.images import Images
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Terms, charges_of, read_rows
from xcal.dp.noise import NoiseKey, release_grid
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.exchange import RoundReply, RoundRequest
from xcal.federation.loaded_site import LoadedSite
from xcal.federation.rounds import client_round
from xcal.methods.client_data import Batch, LocalData
from xcal.methods.registry import method_of

DECLARED = 40
REMOVED = 4  # a group in the middle: all units after it move down by one place


class Quiet:
    """Noise of zero, and draws that are given: what is left of a release is the sum itself."""

    name = "secure"

    def __init__(self, units: np.ndarray | None = None, images: np.ndarray | None = None) -> None:
        self._given = {"draw": units, "views": images}

    def uniforms(self, key: NoiseKey, count: int) -> np.ndarray:
        given = self._given.get(key.block)
        if given is None:
            return np.zeros(count)
        assert len(given) == count
        return given

    def normals(self, key: NoiseKey, count: int) -> Tensor:
        return torch.zeros(count)

    def scalar(self, key: NoiseKey) -> float:
        return 0.0


def neighbors(unit: str) -> tuple[Images, Images, np.ndarray]:
    """A data set, the same without one unit, and which images the second one keeps."""
    whole = tiny(train=60).train  # 20 groups of three
    gone = whole.groups == REMOVED if unit == "group" else np.arange(60) == 3 * REMOVED
    return whole, whole.take(np.flatnonzero(~gone)), ~gone


def local(images: Images, unit: str, declared: int | None, **keys: Any) -> LocalData:
    options = {"images_per_unit": 2, **keys}
    return LocalData(images, unit=unit, declared_units=declared, **options)


@pytest.mark.parametrize("unit", ["record", "group"])
def test_whoever_else_is_drawn_does_not_depend_on_a_unit_that_is_not_there(unit: str) -> None:
    whole, less, kept = neighbors(unit)
    place = 3 * REMOVED if unit == "record" else REMOVED
    declared = 70 if unit == "record" else 25
    rng = np.random.default_rng(0)
    for _ in range(20):
        units, images = rng.random(declared), rng.random(60)
        # The same values for every unit that is there; the removed one's goes to a null unit.
        moved = np.append(np.delete(units, place), units[place])
        key = NoiseKey("0", "m", 0, 0, "draw")
        first = local(whole, unit, declared).draw(0.4, Quiet(units, images), key)
        second = local(less, unit, declared).draw(0.4, Quiet(moved, images[kept]), key)
        assert first.n_units == second.n_units == int((units < 0.4).sum())
        numbers = np.flatnonzero(units < 0.4)
        others = torch.from_numpy(numbers[first.units.numpy()] != place)
        assert torch.equal(first.images[others], second.images)
        assert torch.equal(first.labels[others], second.labels)
        # Rows stay together by unit, in the same order.
        _, one = torch.unique(first.units[others], return_inverse=True)
        _, two = torch.unique(second.units, return_inverse=True)
        assert torch.equal(one, two)


@pytest.mark.parametrize("images", [0, 1])
def test_a_client_may_hold_almost_nothing(images: int) -> None:
    data = local(tiny(train=3).train.take(np.arange(images)), "record", DECLARED)
    batch = data.draw(1.0, Quiet(), NoiseKey("0", "m", 0, 0, "draw"))
    assert data.units == batch.n_units == DECLARED
    assert len(batch.labels) == images


def test_more_units_than_declared_are_refused() -> None:
    with pytest.raises(UserError, match="declares units = 59, and the data hold 60"):
        local(tiny(train=60).train, "record", 59)
    assert local(tiny(train=60).train, "group", 20).units == 20


def test_without_a_declaration_a_draw_is_what_it_was() -> None:
    whole, _, _ = neighbors("group")
    units, images = np.random.default_rng(1).random((2, 60))
    key = NoiseKey("0", "m", 0, 0, "draw")
    drawn: list[Batch] = [
        local(whole, "group", declared).draw(0.5, Quiet(units[:20], images), key)
        for declared in (None, 20)
    ]
    assert drawn[0].n_units == drawn[1].n_units
    assert torch.equal(drawn[0].images, drawn[1].images)
    assert torch.equal(drawn[0].units, drawn[1].units)
    assert local(whole, "group", None).digest() == local(whole, "group", 20).digest()


METHODS: dict[str, dict[str, Any]] = {
    "fl-dp": {},
    "xcal-steered": {"w": 0.0},
    "xcal with parts": {
        "method": "xcal-steered",
        "w": 0.0,
        "clipping": "quantile",
        "geometry": "importance",
    },
    "xcal-paper": {},
    "adaptive-clip": {},
    "agp-dp": {},
}


def one_round(folder: Path, images: Images, name: str, unit: str, **changes: Any) -> RoundReply:
    """A real round in which every declared unit is drawn in every step, without noise."""
    keys = {"method": name, "unit": unit, "noise": "secure", "pixels": 16, "batch": 70}
    keys |= {"network": "support:micro", "epsilon": 8.0, "delta": 1e-3, "rounds": 1, "lr": 1.0}
    experiment = make_experiment({**keys, **METHODS[name], **changes})
    ledger.create(folder / "ledger.sqlite", Terms("p", unit, 8.0, 1e-3))
    site = LoadedSite(
        client="0",
        site_dir=folder,
        data=local(images, unit, 70),
        noise=Quiet(),
        build_model=lambda: micro(3, seed=1),
    )
    weights = {k: p.detach().clone() for k, p in trainable(micro(3, seed=1)).items()}
    return client_round(RoundRequest("r", 0, (0,), experiment), weights, site)


@pytest.mark.parametrize("unit", ["record", "group"])
@pytest.mark.parametrize("name", METHODS)
def test_one_unit_more_moves_every_release_by_at_most_what_was_paid_for(
    name: str, unit: str, tmp_path: Path
) -> None:
    whole, less, _ = neighbors(unit)
    replies, charges = [], []
    for at, images in enumerate((whole, less)):
        folder = tmp_path / str(at)
        replies.append(one_round(folder, images, name, unit))
        charges.append(charges_of(read_rows(folder / "ledger.sqlite"), "r"))
    # All that leaves beside weights and signal is the same: one step, charged for 70 units.
    first, second = replies
    assert [(c.rate, c.cost, c.sigma) for c in charges[0]] == [
        (c.rate, c.cost, c.sigma) for c in charges[1]
    ]
    assert len(charges[0]) == 1
    plain = [{**vars(r.report), "mean_signal": None, "ledger_hash": None} for r in replies]
    assert plain[0] == plain[1]
    assert plain[0]["units"] == 70 and plain[0]["add_remove"] is True
    # The gradient: from the weights, since lr = 1 and B = 70; micro's noise grid is known.
    assert first.weights is not None and second.weights is not None
    moved = torch.cat([(first.weights[k] - second.weights[k]).flatten() for k in first.weights])
    grid = max(release_grid(r.noise) for c in charges[0] for r in c.releases)
    rounding = grid * len(moved) ** 0.5
    # C holds in the scaled space, whose weights are at least 1/64.
    factor = 64.0 if name in ("agp-dp", "xcal with parts") else 1.0
    assert 0 < float(moved.norm()) * 70 <= factor * (1.0 + rounding) + 1e-3
    signal = [r.trace[0].signal for r in replies]
    if signal[0] is not None and signal[1] is not None:
        bound = 1.0 if name == "xcal-paper" else 0.5 / 70
        assert abs(signal[0] - signal[1]) <= bound + grid


@pytest.mark.parametrize("name", ["adaptive-clip", "xcal with parts"])
def test_a_null_unit_is_not_counted(name: str, tmp_path: Path) -> None:
    """C of the second step follows the first one's count, in which one unit more is ½ at most."""
    whole, less, _ = neighbors("record")
    clips = []
    for at, images in enumerate((whole, less, less.take(np.arange(0)))):
        # A rate so small that weights stay what they are.
        reply = one_round(tmp_path / str(at), images, name, "record", lr=1e-30, local_epochs=2)
        assert reply.weights is not None
        clips.append([r.clip for r in reply.trace])
    method = make_experiment({**METHODS[name], "method": METHODS[name].get("method", name)})
    assert method_of(method).private
    rate = method.clip_rate
    assert clips[0][0] == clips[1][0] == clips[2][0]
    logs = [np.log(c[1] / c[0]) / rate for c in clips]  # −(b̃ − γ)
    assert abs(logs[0] - logs[1]) <= 0.5 / 70 + 1e-3
    # Nobody there: 70 null units, and a count of exactly 0, b̃ = ½ = γ.
    assert logs[2] == pytest.approx(0.0, abs=1e-12)


def test_a_null_unit_says_nothing_in_the_signal(tmp_path: Path) -> None:
    """Not even its −½: of 70 null units the released mean is ½."""
    nobody = tiny(train=3).train.take(np.arange(0))
    reply = one_round(tmp_path / "none", nobody, "xcal-steered", "record")
    assert reply.trace[0].signal == 0.5
