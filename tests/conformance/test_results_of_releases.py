"""What the code does with the results of its releases, and in which order it comes to them.

Here both release functions answer with numbers that have nothing to do with what they were given.
Whatever is still different between two clients' private images did not come from a release.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xcal
import xcal.privacy.mechanism
from support import TINY, tiny
from xcal.audit.alone import RUN, Trained, train_alone
from xcal.config import Experiment, make_experiment
from xcal.data.images import Images
from xcal.federation.files import read_tensors
from xcal.methods.base import CentralMethod
from xcal.methods.registry import METHODS, method_of, plan_for
from xcal.privacy.ledger import Ledger
from xcal.privacy.ledger_rows import charges_of, read_rows, runs_of
from xcal.privacy.noise import NoiseKey, SecureNoise, SeededNoise
from xcal.training.central import ServerBench
from xcal.training.clipping import ClippingEngine
from xcal.training.local import LocalData

SHAPE = {
    "network": "support:micro",
    "pixels": 16,
    "clients": 1,
    "batch": 6,
    "rounds": 3,
    "epsilon": 8.0,
    "delta": 1e-3,
    "threads": 1,
    "signal_every": 1,
}
# Options that are rarely on. Each private method is tried with those it knows, all at once; keys
# with several alternatives one by one.
COMMON = {"optimizer": "momentum", "average_steps": 0.5, "views": 2, "unit": "group"}
RARE = {
    "clipping": "quantile",
    "geometry": "importance",
    "signal_fraction": 0.5,
    "clip_factor": 1.0,
}
PRIVATE = [m for m in METHODS.values() if m.private]
CASES = [
    pytest.param({"method": m.name, **options}, id=m.name + label)
    for m in PRIVATE
    for label, options in (
        ("", {}),
        (" with options", COMMON | {k: v for k, v in RARE.items() if k in m.uses}),
    )
]


def images(seed: int) -> Images:
    """24 images in groups of three; pixels and labels are those of a seed, all else is the same."""
    rng = np.random.default_rng(seed)
    some = tiny(train=24).train
    pixels = rng.integers(0, 256, some.pixels.shape, dtype=np.uint8)
    return replace(some, pixels=pixels, labels=rng.integers(0, 3, len(some.labels)))


def local_data(experiment: Experiment, seed: int) -> LocalData:
    return LocalData(
        images(seed),
        unit=experiment.unit,
        images_per_unit=2,
        views=experiment.views,
        augment=experiment.augment,
    )


class Everybody(SecureNoise):
    """Draws every unit, or none."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._value = 1 - rate

    def uniforms(self, key: NoiseKey, count: int) -> Any:
        return np.full(count, self._value * (1 - 2.0**-53))


class Seen:
    """Everything that one client's training shows, and what its releases were asked for."""

    def __init__(self) -> None:
        self.clipped: list[tuple[float, str]] = []  # C and D of every sum
        self.released: list[tuple[str, int, int, float]] = []  # what, round, step, deviation
        self.keys: list[NoiseKey] = []
        self._numbers = itertools.count()

    def tensors(self, sums: dict[str, Tensor], scale: float, _: Any, key: NoiseKey) -> Any:
        self._note(scale, key)
        source = torch.Generator().manual_seed(next(self._numbers))
        return {
            name: scale * torch.randn(value.shape, generator=source).to(value.dtype)
            for name, value in sums.items()
        }

    def scalar(self, value: float, scale: float, _: Any, key: NoiseKey) -> float:
        self._note(scale, key)
        return scale * math.sin(next(self._numbers))

    def _note(self, scale: float, key: NoiseKey) -> None:
        self.released.append((key.block, key.round, key.step, scale))
        self.keys.append(key)

    @contextmanager
    def watching(self) -> Iterator[None]:
        real = ClippingEngine.clipped_sum

        def clipped_sum(engine: Any, *args: Any, **options: Any) -> Any:
            self.clipped.append((options["clip"], options["geometry"].digest()))
            return real(engine, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xcal.privacy.mechanism, "release_tensors", self.tensors)
            patch.setattr(xcal.privacy.mechanism, "release_scalar", self.scalar)
            patch.setattr(ClippingEngine, "clipped_sum", clipped_sum)
            yield


def shown(keys: dict[str, Any], home: Path, seed: int, noise: Any = None) -> dict[str, Any]:
    """All that a lone client lets out or keeps beside its data, with releases that say nothing."""
    experiment = make_experiment({**SHAPE, **keys})
    seen = Seen()
    with seen.watching():
        trained = train_alone(
            experiment, local_data(experiment, seed), 3, noise=noise or SecureNoise(), home=home
        )
    found = read_tensors(home / "runs" / RUN / "reply.safetensors")
    assert found is not None
    kept = {p.relative_to(home).as_posix() for p in home.rglob("*") if p.is_file()}
    assert len(seen.keys) == len(set(seen.keys))  # no two releases share their noise
    return {
        "weights": [w.tolist() for w in trained.rounds],
        "trace": trained.trace,
        "charges": trained.charges,
        "reply": {name: value.tolist() for name, value in found[0].items()},
        "state and report": found[1],
        "files": kept,
        "remembered": (home / "answered.json").read_bytes(),
        "clipped to": seen.clipped,
        "released": seen.released,
    }


@pytest.mark.parametrize("keys", CASES)
def test_nothing_but_releases_reaches_what_a_client_shows(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    one, other = (shown(keys, tmp_path / str(seed), seed) for seed in (1, 2))
    assert one["trace"]
    for name in one:
        assert one[name] == other[name], name


@pytest.mark.parametrize("keys", CASES)
def test_an_empty_draw_is_nothing_special(keys: dict[str, Any], tmp_path: Path) -> None:
    """As many charges, as many releases of as much noise: nobody can tell that nobody was drawn."""
    full, empty = (
        shown(keys, tmp_path / str(rate), 1, Everybody(rate)) for rate in (1.0, 0.0)
    )
    for name in full:
        assert full[name] == empty[name], name


@pytest.mark.parametrize("keys", CASES)
def test_an_empty_draw_gets_noise_on_every_coordinate(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    experiment = make_experiment({**SHAPE, **keys})
    data = local_data(experiment, 1)
    trained = train_alone(experiment, data, 3, noise=Everybody(0.0), home=tmp_path / "home")
    steps = experiment.rounds * -(-data.units // experiment.batch)
    assert len(trained.trace) == len(trained.charges) == steps
    assert bool((trained.final != trained.first).all())


@pytest.mark.parametrize("keys", CASES)
def test_a_step_is_paid_for_then_drawn_then_released(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paid is what stands on disk. The rate drawn, charged and planned is one number."""
    experiment = make_experiment({**SHAPE, **keys})
    data = local_data(experiment, 1)
    events: list[tuple[Any, ...]] = []
    path = tmp_path / "home" / "ledger.sqlite"
    real_draw = LocalData.draw

    def draw(self: LocalData, rate: float, noise: Any, key: NoiseKey) -> Any:
        paid = charges_of(read_rows(path), RUN)
        assert (paid[-1].round, paid[-1].step) == (key.round, key.step)
        events.append(("draw", key.round, key.step, rate))
        return real_draw(self, rate, noise, key)

    real_charge = Ledger.charge

    def charge(self: Ledger, what: Any) -> None:
        real_charge(self, what)
        assert charges_of(read_rows(path), RUN)[-1] == what
        events.append(("pay", what.round, what.step, what.rate))

    for name in ("release_tensors", "release_scalar"):
        real = getattr(xcal.privacy.mechanism, name)

        def release(value: Any, scale: float, noise: Any, key: NoiseKey, real: Any = real) -> Any:
            events.append(("release", key.round, key.step, key.block))
            return real(value, scale, noise, key)

        monkeypatch.setattr(xcal.privacy.mechanism, name, release)
    monkeypatch.setattr(LocalData, "draw", draw)
    monkeypatch.setattr(Ledger, "charge", charge)
    trained = train_alone(experiment, data, 3, noise=SecureNoise(), home=tmp_path / "home")
    expected: list[tuple[Any, ...]] = []
    assert trained.plan is not None
    rate = trained.plan.sample_rate
    assert rate == experiment.batch / data.units
    for paid in trained.charges:
        place = paid.round, paid.step
        expected += [("pay", *place, rate), ("draw", *place, rate)]
        names = {r.name for r in paid.releases}
        got = [e for e in events if e[0] == "release" and e[1:3] == place]
        assert {e[3] for e in got} == names
        assert len(got) == len(names)
        expected += got
    assert events == expected


@pytest.mark.parametrize("method", [m.name for m in PRIVATE])
def test_what_a_run_says_it_spent_is_what_its_ledger_says(method: str, tmp_path: Path) -> None:
    keys = {**TINY, "clients": 2, "road_images": 0, "road_test_images": 0}
    result = xcal.run(tmp_path / "run", **{**keys, "method": method})
    for client in result["clients"]:
        rows = read_rows(tmp_path / "run" / "clients" / client["id"] / "ledger.sqlite")
        (run,) = runs_of(rows)
        spent = math.fsum(c.cost for c in charges_of(rows, run))
        plan = plan_for(make_experiment({**keys, "method": method}), client["units"])
        assert client["epsilon_spent"] == pytest.approx(plan.odometer(spent), rel=1e-9)
        assert client["share_spent"] == pytest.approx(spent / plan.budget, rel=1e-9)


# --- at a trusted server --------------------------------------------------------------------------

CENTRAL = [
    experiment
    for name in METHODS
    for level in ("record", "client")
    if level == "record" or "level" in METHODS[name].uses
    for experiment in [make_experiment({**SHAPE, "method": name, "level": level})]
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
                bench = ServerBench(method.name, number, SecureNoise(), account, 5)  # type: ignore[arg-type]
                mean, state = method.server_step(bench, experiment, plan, updates, state)
                means.append(mean["w"].tolist())
        found.append((means, state, seen.released, account.paid))
    assert found[0] == found[1]


# --- the look itself ------------------------------------------------------------------------------


def test_it_looks_at_steps_that_move(tmp_path: Path) -> None:
    """Real releases of the same two clients do differ: the tests above have something to hide."""
    experiment = make_experiment({**SHAPE, "method": "xcal", "clipping": "quantile"})
    traces: list[Trained] = [
        train_alone(
            experiment,
            local_data(experiment, seed),
            3,
            noise=SeededNoise(1),
            home=tmp_path / str(seed),
        )
        for seed in (1, 2)
    ]
    one, other = ([asdict(step) for step in trained.trace] for trained in traces)
    assert one[0]["clip"] == other[0]["clip"]
    assert one[-1]["clip"] != other[-1]["clip"]
    assert not torch.equal(traces[0].final, traces[1].final)

