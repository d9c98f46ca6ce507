"""What a step asks of its releases follows from earlier releases only.

`tests/taint` holds what a run writes. Here both release functions answer with numbers that have
nothing to do with what they were given, and what they were asked for is looked at: what a unit was
clipped to, which noise and which key. A server's releases too, and the noise of an empty draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xcal
import xcal.dp.distributed
import xcal.dp.mechanism
from method_cases import BASE, CASES
from support import TINY, tiny
from xcal.audit.one_client import train_one_client
from xcal.config import Experiment
from xcal.dp.clipping import ClippingEngine
from xcal.dp.distributed import DistributedGrid, Part
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of
from xcal.dp.noise import NoiseKey, SecureNoise
from xcal.experiments import make_experiment
from xcal.methods.base import CentralMethod
from xcal.methods.client_data import LocalData
from xcal.methods.dp_fedavg import ServerContext
from xcal.methods.registry import METHODS, method_of, plan_for


def local_data(experiment: Experiment, seed: int) -> LocalData:
    """75 images in groups of three; pixels and labels are those of a seed, all else is the same."""
    rng = np.random.default_rng(seed)
    some = tiny(train=75).train
    pixels = rng.integers(0, 256, some.pixels.shape, dtype=np.uint8)
    return LocalData(
        replace(some, pixels=pixels, labels=rng.integers(0, 3, len(some.labels))),
        unit=experiment.unit,
        images_per_unit=experiment.images_per_unit,
        views=experiment.views,
        augment=experiment.augment,
    )


class Drawing(SecureNoise):
    """Draws everybody, or nobody."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._value = 0.0 if who == "everybody" else 1 - 2.0**-53

    def uniforms(self, key: NoiseKey, count: int) -> Any:
        return np.full(count, self._value)


class Seen:
    """What the releases of a training were asked for; they answer by their number."""

    def __init__(self) -> None:
        self.clipped: dict[tuple[float, str], None] = {}  # C and D, in the order they came
        self.released: list[tuple[NoiseKey, float]] = []  # and the noise's deviation
        self._numbers = itertools.count()

    def tensors(self, sums: dict[str, Tensor], scale: float, _: Any, key: NoiseKey) -> Any:
        self.released.append((key, scale))
        source = torch.Generator().manual_seed(next(self._numbers))
        return {
            name: scale * torch.randn(value.shape, generator=source).to(value.dtype)
            for name, value in sums.items()
        }

    def scalar(self, value: float, scale: float, _: Any, key: NoiseKey) -> float:
        self.released.append((key, scale))
        return scale * math.sin(next(self._numbers))

    def whole(
        self, value: Tensor | float, part: Part, grid: DistributedGrid, _: Any, key: NoiseKey
    ) -> Any:
        deviation = grid.scale / grid.fineness(part)
        self.released.append((key, deviation))
        return deviation * np.random.default_rng(next(self._numbers)).standard_normal(part.size)

    @contextmanager
    def watching(self) -> Iterator[None]:
        real = ClippingEngine.clipped_sum

        def clipped_sum(engine: Any, *args: Any, **options: Any) -> Any:
            self.clipped[options["clip"], options["geometry"].digest()] = None
            return real(engine, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xcal.dp.mechanism, "release_tensors", self.tensors)
            patch.setattr(xcal.dp.mechanism, "release_scalar", self.scalar)
            patch.setattr(xcal.dp.distributed, "release_whole", self.whole)
            patch.setattr(ClippingEngine, "clipped_sum", clipped_sum)
            yield


@pytest.mark.parametrize(("method", "options"), CASES)
def test_what_a_step_asks_for_follows_from_releases_only(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """C, D, noise and keys, whatever the images are and whoever is drawn."""
    experiment = make_experiment({**BASE, **options, "method": method})
    found = []
    for seed, noise in enumerate((SecureNoise(), Drawing("everybody"), Drawing("nobody"))):
        seen = Seen()
        data = local_data(experiment, seed)
        with seen.watching():
            trained = train_one_client(
                experiment, data, 3, noise=noise, site_dir=tmp_path / str(seed)
            )
        assert seen.clipped
        found.append((list(seen.clipped), seen.released, trained.charges, trained.trace))
        keys = [key for key, _ in seen.released]
        assert len(set(keys)) == len(keys)  # no two releases share their noise
        declared = [(c.round, c.step, r.name) for c in trained.charges for r in c.releases]
        assert sorted((k.round, k.step, k.block) for k in keys) == sorted(declared)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("method", "options"), CASES)
def test_an_empty_draw_gets_noise_on_every_coordinate(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    experiment = make_experiment({**BASE, **options, "method": method})
    data = local_data(experiment, 1)
    trained = train_one_client(
        experiment, data, 3, noise=Drawing("nobody"), site_dir=tmp_path / "site"
    )
    steps = experiment.rounds * -(-data.units // experiment.expected_batch_size)
    assert len(trained.trace) == len(trained.charges) == steps
    assert bool((trained.final != trained.first).all())


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.private])
def test_what_a_run_says_it_spent_is_what_its_ledger_says(method: str, tmp_path: Path) -> None:
    keys = {**TINY, "clients": 2, "road_images": 0, "road_test_images": 0}
    result = xcal.run(tmp_path / "run", **{**keys, "method": method})
    for client in result["clients"]:
        rows = read_rows(tmp_path / "run" / "clients" / client["id"] / "ledger.sqlite")
        (run,) = runs_of(rows)
        spent = math.fsum(c.cost for c in charges_of(rows, run))
        plan = plan_for(make_experiment({**keys, "method": method}), client["units"])
        assert client["epsilon_spent"] == pytest.approx(plan.odometer(spent), rel=1e-9)
        steps = len(charges_of(rows, run)) / plan.steps  # which fixed plans are counted by
        share = steps if plan.accountant == "pld" else spent / plan.budget
        assert client["share_spent"] == pytest.approx(share, rel=1e-9)


# --- at a trusted server --------------------------------------------------------------------------

CENTRAL = [
    experiment
    for name in METHODS
    for level in ("record", "client")
    if level == "record" or "level" in METHODS[name].uses
    for experiment in [make_experiment({**BASE, "method": name, "level": level})]
    if isinstance(method_of(experiment), CentralMethod)
]


class _Open:
    """An account that pays for everything and remembers it."""

    def __init__(self, plan: Any) -> None:
        self.filter = plan
        self.paid: list[dict[str, Any]] = []

    def pay(self, *place: int, **charge: Any) -> None:
        self.paid.append(charge)


@pytest.mark.parametrize("experiment", CENTRAL, ids=lambda e: e.method)
def test_nothing_but_releases_reaches_what_a_server_shows(experiment: Experiment) -> None:
    """Whatever the clients send, and however many of them answer."""
    method = method_of(experiment)
    assert isinstance(method, CentralMethod)
    plan = method.server_plan(experiment, 5)
    found = []
    for seed, answers in ((1, 5), (2, 3)):
        source = torch.Generator().manual_seed(seed)
        seen, account = Seen(), _Open(plan)
        state = method.load_server_state(None, experiment)
        means = []
        with seen.watching():
            for number in range(3):
                updates = [
                    {"w": 3 * torch.rand(4, generator=source, dtype=torch.float64)}
                    for _ in range(answers)
                ]
                context = ServerContext(method.name, number, SecureNoise(), account, 5)  # type: ignore[arg-type]
                mean, state = method.server_step(context, experiment, plan, updates, state)
                means.append(mean["w"].tolist())
        found.append((means, state, seen.released, account.paid))
    assert found[0] == found[1]
