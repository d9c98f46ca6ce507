"""What one unit can do to each released sum, measured on the real steps, for records and groups.

A step is run twice, with a unit drawn and with it contributing nothing, and everything that would
get noise is caught on its way out, together with the noise it would get. The change must be within
the sensitivity the step has declared and paid for, and the noise no less than declared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import xcal.dp.distributed
import xcal.dp.mechanism
from fuzzing import LONG
from support import tiny
from xcal.dp.accounting import joint_sigma
from xcal.dp.clipping import ClippingEngine
from xcal.dp.filter import RenyiFilter
from xcal.dp.noise import NoiseKey, SecureNoise, SeededNoise
from xcal.experiments import experiment_type, make_experiment
from xcal.explain.signal import Components, SignalSettings, batch_score
from xcal.methods.adaptive_clip import centered_count
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS, CentralMethod
from xcal.methods.client_data import Batch, LocalData, mean_by_unit
from xcal.methods.context import Optimizer, StepContext
from xcal.methods.dp_fedavg import ServerContext
from xcal.methods.registry import METHODS, method_of
from xcal.methods.xcal_steered import centered_sum
from xcal.models.backbone import split_backbone

CLASSES, PIXELS, UNITS, EXPECTED = 3, 16, 200, 8
SHAPE = {"epsilon": 5.0, "delta": 1e-5, "batch": EXPECTED, "rounds": 2, "unit": "record"}


def choices(key: str) -> tuple[str, ...]:
    """The words that a key of an experiment can have; none where it is a number."""
    kind = experiment_type().model_fields[key].annotation
    return get_args(kind) if get_origin(kind) is Literal else ()


# Keys that say what a step releases, each with other values than its default. All other keys of
# a method are numbers and words for what is done with a unit's score, or with releases.
OPTIONS = {
    "signal_source": choices("signal_source")[1:],
    "geometry": choices("geometry")[1:],
    "clipping": choices("clipping")[1:],
    "signal_fraction": (0.5,),
    "rho": (0.0,),
    "count_noise": (30.0,),
    "steering": choices("steering")[1:],
    "noise_kind": choices("noise_kind")[1:],
}
# Inside a score; what released scores are held against; what a step's cost is a share of.
UNRELEASED = {"fill", "cover", "reference", "shares"}
LEVELS = {"level"}  # at the client or at the server: both are here
GEOMETRY = {"protected": 0.3, "protection": 4.0}
# Every method there is, and every option that it knows, one at a time: nothing is named twice.
CASES = {
    "xcal with parts": {"method": "xcal-steered", "geometry": "importance", "clipping": "quantile"}
} | {
    method.name if key is None else f"{method.name} {key} = {value}": {
        "method": method.name,
        **({} if key is None else {key: value}),
    }
    for method in METHODS.values()
    if method.private
    for key, values in {None: (None,), **OPTIONS}.items()
    if key is None or key in method.uses
    for value in values
}


@lru_cache(maxsize=64)
def plan_of(case: str):
    experiment = make_experiment({**SHAPE, **CASES[case]})
    return method_of(experiment).plan(experiment, UNITS, 2)


def test_every_method_is_looked_at_or_promises_nothing():
    for method in METHODS.values():
        experiments = [
            make_experiment({**SHAPE, "method": method.name, "level": level})
            for level in (choices("level") if "level" in method.uses else choices("level")[:1])
        ]
        for experiment in experiments:
            one = method_of(experiment)
            if isinstance(one, CentralMethod):
                assert experiment in CENTRAL
            elif one.private:
                assert one.name in CASES
            else:
                assert one.plan(experiment, UNITS, 2) is None  # and stands at infinity
        words = {key for key in method.uses - COMMON_KEYS - PRIVATE_KEYS if choices(key)}
        assert words <= OPTIONS.keys() | UNRELEASED | LEVELS


# A batch of tensors is no smaller for being shrunk.
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Paid:
    """An account that remembers the charge."""

    filter: RenyiFilter
    charge: dict = field(default_factory=dict)

    def pay(self, round_number, step, **charge):
        self.filter = self.filter.after(charge["cost"])
        self.charge = charge


@dataclass
class GivenDraw:
    """Data whose every draw is the given batch: what else was drawn is the same for neighbors."""

    batch: Batch
    units: int = UNITS

    def draw(self, rate, noise, key):
        return self.batch


@dataclass
class Caught:
    """What one step would have released, before noise, with the noise's deviation."""

    charge: dict = field(default_factory=dict)
    sums: dict = field(default_factory=dict)
    noise: dict = field(default_factory=dict)

    @property
    def gradient(self) -> torch.Tensor:
        return self.sums["gradient"]

    @property
    def declared(self) -> dict:
        return {release.name: release for release in self.charge["releases"]}

    def watching(self, patch: pytest.MonkeyPatch) -> None:
        """Watch the functions that add noise."""

        def tensors(sums, scale, noise, key):
            self.sums[key.block] = torch.cat([v.flatten().double() for v in sums.values()])
            self.noise[key.block] = scale
            return {name: torch.zeros_like(value) for name, value in sums.items()}

        def scalar(value, scale, noise, key):
            self.sums[key.block], self.noise[key.block] = value, scale
            return value

        patch.setattr(xcal.dp.mechanism, "release_tensors", tensors)
        patch.setattr(xcal.dp.mechanism, "release_scalar", scalar)

        def whole(value, part, grid, noise, key):
            found = torch.from_numpy(grid.whole(part, value)) / grid.fineness(part)
            self.sums[key.block] = found if part.name == "gradient" else float(found)
            self.noise[key.block] = grid.scale / grid.fineness(part)
            return np.zeros(part.size)

        patch.setattr(xcal.dp.distributed, "release_whole", whole)


def run_step(case: str, model, data, clip: float, signal: SignalSettings, rows: int = 0, **tools):
    """One real step of a method, on data or on a given draw."""
    score = {"q": signal.q, "alpha": signal.alpha, "beta": signal.beta, "gamma": signal.gamma}
    keys = {**SHAPE, "clip": clip, **GEOMETRY, **score, **CASES[case]}
    experiment = make_experiment(keys)
    method, plan = method_of(experiment), plan_of(case)
    account = Paid(RenyiFilter(plan.order, plan.budget))
    context = StepContext(
        client="0",
        method=method.name,
        round=0,
        first_step=0,
        model=model,
        engine=ClippingEngine(model, rows=rows),
        data=GivenDraw(data) if isinstance(data, Batch) else data,
        noise=SeededNoise(1),
        account=account,
        optimizer=Optimizer(model, "sgd", 0.1, 0.0),
        batch=EXPECTED,
        clip=clip,
        rows=rows,
        discrete=experiment.discrete,
        **tools,
    )
    caught = Caught()
    with pytest.MonkeyPatch.context() as patch:
        caught.watching(patch)
        state = method.begin_round(method.load_state(None))
        method.step(context, 0, experiment, plan, state)
    caught.charge = account.charge
    return caught


@st.composite
def batches(draw, unit: str):
    """Images from dull to outrageous; units of one row, or of one to four images or views."""
    n_units = draw(st.integers(1, 6))
    sizes = [1 if unit == "record" else draw(st.integers(1, 4)) for _ in range(n_units)]
    units = torch.repeat_interleave(torch.arange(n_units), torch.tensor(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(units), 3, PIXELS, PIXELS)
    images = torch.randn(shape, generator=generator)
    for i in range(len(units)):
        kind = draw(st.sampled_from(["plain", "plain", "large", "flat", "huge", "nan", "inf"]))
        if kind == "large":
            images[i] *= 1e3
        elif kind == "flat":
            images[i] = 0.7
        elif kind == "huge":
            images[i] *= 1e30
        elif kind in ("nan", "inf"):
            images[i, 1, 3, 5] = float(kind)
    labels = torch.randint(0, CLASSES, (len(units),), generator=generator)
    if draw(st.integers(0, 9)) == 0:
        labels[0] = CLASSES  # no class
    plain = None
    if unit == "views":  # the first row of a unit is its image, the others are views of it
        plain = torch.cat([torch.ones(1, dtype=torch.bool), units.diff() > 0])
    return Batch(images, labels, units, n_units, plain)


class Tiny(nn.Module):
    """Two convolutions, GroupNorm, average pooling, one linear layer; a 4×4 map to explain with."""

    cam_layer = "features"
    head_layer = "head"

    def __init__(self, generator: torch.Generator, times: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, CLASSES)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, times, generator=generator)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.features(images)).flatten(1))


def network(seed: int, weights_times: float) -> Tiny:
    # Torch fills new layers from the global state, which is left as it was.
    with torch.random.fork_rng(devices=[]):
        return Tiny(torch.Generator().manual_seed(seed), weights_times)


signal_settings = st.builds(
    SignalSettings,
    q=st.sampled_from([0.2, 0.5, 1.0]),
    alpha=st.sampled_from([0.0, 1.0, 1e3]),
    beta=st.sampled_from([0.0, 1.0, 1e3]),
    gamma=st.sampled_from([0.0, 1.0]),
)


def keep(batch: Batch, kept: list[int]) -> Batch:
    """The draw in which only these units were drawn."""
    number = torch.full((batch.n_units,), -1)
    number[kept] = torch.arange(len(kept))
    there = number[batch.units] >= 0
    some = batch.only(there)
    return replace(some, units=number[some.units], n_units=len(kept))


def without_unit(batch: Batch, unit: int) -> Batch:
    return keep(batch, [u for u in range(batch.n_units) if u != unit])


def with_null_unit(batch: Batch, unit: int) -> Batch:
    """The same draw with one unit's data replaced by a null unit, which keeps its place."""
    images = batch.images.clone()
    images[batch.units == unit] = math.nan
    return replace(batch, inputs=images)


@pytest.mark.parametrize("unit", ["record", "group", "views"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20 if LONG else 5, deadline=None, phases=UNSHRUNK)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    weights_times=st.sampled_from([0.3, 1.0, 20.0]),
    clip=st.sampled_from([0.01, 1.0, 50.0]),
    signal=signal_settings,
)
def test_one_unit_moves_every_release_by_at_most_what_was_paid_for(
    case, unit, data, seed, weights_times, clip, signal
):
    batch = data.draw(batches(unit))
    changed = data.draw(st.integers(0, batch.n_units - 1))
    # Which drawn units enter a signal of some of them is decided by their places in the draw.
    in_place = "signal_fraction" in CASES[case]
    null = (
        with_null_unit if in_place else data.draw(st.sampled_from([without_unit, with_null_unit]))
    )

    def caught(drawn: Batch) -> Caught:
        return run_step(case, network(seed, weights_times), drawn, clip, signal)

    both, without = caught(batch), caught(null(batch, changed))
    check_moves(case, both, without, clip)
    # Alone in its draw the same bound holds for the whole sum, and nobody gives exactly 0.
    alone, nobody = caught(keep(batch, [changed])), caught(keep(batch, []))
    check_moves(case, alone, nobody, clip)
    assert float(nobody.gradient.abs().max()) == 0
    assert all(value == 0 for name, value in nobody.sums.items() if name != "gradient")


def check_moves(
    case: str, both: Caught, without: Caught, clip: float, rounding: float = 1e-6
) -> None:
    """Everything released moved by no more than was declared, and has the noise declared.

    `rounding`: scores are float32, and in passes as large as the draw others' round differently.
    """
    assert both.charge == without.charge  # fixed before the draw
    declared, experiment = both.declared, make_experiment({**SHAPE, **CASES[case]})
    # Gradient: in float32, over all parameters together, by at most C (in the scaled space).
    assert bool(torch.isfinite(both.gradient).all())
    # In whole numbers by what rounding may add, too, which is what is declared.
    room = 1 + 1.01 / 990 if experiment.discrete else 1
    most = {name: release.sensitivity for name, release in declared.items()}
    assert clip <= most["gradient"] <= clip * room
    assert float((both.gradient - without.gradient).norm()) <= most["gradient"]
    # Signal: Σ(u − ½) by ½, s_raw by 1. Count: Σ(1[norm ≤ C] − ½) by ½.
    bounds = {"signal": 1.0 if experiment.method == "xcal-paper" else 0.5, "count": 0.5}
    assert both.sums.keys() == without.sums.keys() == declared.keys()
    for name in declared.keys() - {"gradient"}:
        assert bounds[name] <= most[name] <= bounds[name] * room
        assert abs(both.sums[name] - without.sums[name]) <= most[name] + rounding
    for name, release in declared.items():
        assert both.noise[name] >= release.noise * (1 - 1e-12)
        if not (name == "gradient" and experiment.method == "xcal-paper"):  # may add more
            assert both.noise[name] == without.noise[name] == release.noise
    # All together are the one Gaussian that was charged for.
    joint = joint_sigma(*(r.noise / r.sensitivity for r in declared.values()))
    assert both.charge["sigma"] == pytest.approx(joint, rel=1e-12)
    assert both.charge["rate"] == EXPECTED / UNITS


def ordinary(count: int, seed: int = 3) -> Batch:
    source = torch.Generator().manual_seed(seed)
    images = torch.randn((count, 3, PIXELS, PIXELS), generator=source)
    labels = torch.randint(0, CLASSES, (count,), generator=source)
    return Batch(images, labels, torch.arange(count), count)


@pytest.mark.parametrize("case", CASES)
def test_a_unit_within_c_counts_a_half_and_one_beyond_it_minus_a_half(case):
    """What was charged for is all that there is, and none of it is left out.

    To the bit, or in whole numbers to half of one.
    """
    exact = "noise_kind" not in CASES[case]
    for clip, count in ((1e6, 0.5), (1e-6, -0.5)):
        found = run_step(case, network(1, 1.0), ordinary(1), clip, SignalSettings())
        if "count" in found.declared:
            assert found.sums["count"] == pytest.approx(count, rel=0 if exact else 1e-3, abs=0)
            four = run_step(case, network(1, 1.0), ordinary(4), clip, SignalSettings())
            expected = pytest.approx(4 * count, rel=0 if exact else 1e-3, abs=0)
            assert four.sums["count"] == expected


def test_some_units_give_the_signal_that_they_give_among_all():
    """Whoever enters a signal of some of the units enters as he is, not in others' place."""
    batch = ordinary(6)
    for seed in range(3):

        def signal(case: str, drawn: Batch, seed: int = seed) -> float:
            return run_step(case, network(seed, 1.0), drawn, 1.0, SignalSettings()).sums["signal"]

        alone = [signal("xcal-steered", keep(batch, [unit])) for unit in range(6)]
        some = signal("xcal-steered signal_fraction = 0.5", batch)
        subsets = product((0.0, 1.0), repeat=6)
        sums = [math.fsum(a * b for a, b in zip(alone, one, strict=True)) for one in subsets]
        assert signal("xcal-steered", batch) == pytest.approx(math.fsum(alone), abs=1e-5)
        assert min(abs(some - one) for one in sums) < 1e-5


# --- as a client draws them: views, feature cache, passes of one size --------------------------


class Beginning(Tiny):
    """`Tiny` with a frozen first layer; the map to explain with lies behind it."""

    cam_layer = "features.4"

    def segments(self):
        return (
            self.features[:3],
            self.features[3:],
            nn.Sequential(self.pool, nn.Flatten(), self.head),
        )


class Behind(Beginning):
    """The same, but that the rest of the network does not show the map."""

    cam_layer = "features"


@dataclass
class Chosen:
    """Real data whose draws are made of the given units."""

    data: LocalData
    drawn: list[int]
    units: int = UNITS

    def draw(self, rate, noise, key):
        return self.data.draw(rate, _Drawing(self.drawn), key)


class _Drawing(SeededNoise):
    def __init__(self, drawn: list[int]) -> None:
        super().__init__(2)
        self._drawn = drawn

    def uniforms(self, key: NoiseKey, count: int):
        if key.block != "draw":
            return super().uniforms(key, count)
        found = np.ones(count)
        found[self._drawn] = 0.0
        return found


@pytest.mark.parametrize("kind", [Beginning, Behind])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=12 if LONG else 4, deadline=None, phases=UNSHRUNK)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    unit=st.sampled_from(["record", "group"]),
    views=st.sampled_from([1, 3]),
    augment=st.sampled_from(["turns", "shifts"]),
    rows=st.sampled_from([0, 4]),
    megabytes=st.sampled_from([0, 8]),
    clip=st.sampled_from([0.01, 1.0]),
)
def test_so_it_is_as_a_client_draws_and_computes(
    case, kind, data, seed, unit, views, augment, rows, megabytes, clip
):
    """Units of several views, images chosen at random, feature cache, passes of one size."""
    images = tiny(train=18, seed=seed % 7).train
    own = LocalData(images, unit=unit, images_per_unit=2, views=views, augment=augment)
    drawn = data.draw(st.lists(st.integers(0, own.units - 1), min_size=1, unique=True).map(sorted))
    # Which units enter a signal of some of them is decided by their places: the last one leaves.
    places = st.just(-1) if "signal_fraction" in CASES[case] else st.integers(0, len(drawn) - 1)
    changed = data.draw(places)

    def caught(units: list[int]) -> Caught:
        with torch.random.fork_rng(devices=[]):
            model = kind(torch.Generator().manual_seed(seed), 1.0)
        model.features[:3].requires_grad_(False)
        split = split_backbone(model)
        assert own.cache_features(split, megabytes, rows) == bool(megabytes)
        tools = {"split": split if megabytes else None, "chunk": 16}
        given = Chosen(own, units)
        return run_step(case, model, given, clip, SignalSettings(), rows=rows, **tools)

    both = caught(drawn)
    # Passes of one size: to the bit. In others each drawn unit's score, a float32, rounds anew.
    exact = 1e-9 if rows else 1e-6 * len(drawn)
    check_moves(case, both, caught([u for u in drawn if u != drawn[changed]]), clip, exact)
    check_moves(case, caught([drawn[changed]]), caught([]), clip, exact)


# --- at a trusted server: one client is the unit --------------------------------------------------

CENTRAL = [
    experiment
    for method in METHODS.values()
    for level in (choices("level") if "level" in method.uses else choices("level")[:1])
    for experiment in [make_experiment({**SHAPE, "method": method.name, "level": level})]
    if isinstance(method_of(experiment), CentralMethod)
]


@pytest.mark.parametrize("experiment", CENTRAL, ids=lambda e: f"{e.method}")
@settings(max_examples=30, deadline=None, phases=UNSHRUNK)
@given(
    seed=st.integers(0, 1000),
    scales=st.lists(
        st.sampled_from([0.0, 1e-3, 1.0, 1e6, 1e200, math.nan, math.inf]), min_size=1, max_size=5
    ),
    clip=st.sampled_from([1e-3, 1.0, 1e3]),
    null=st.sampled_from(["silent", "broken", "zero"]),
)
def test_one_client_moves_a_server_s_releases_by_at_most_what_was_paid_for(
    experiment, seed, scales, clip, null
):
    experiment = experiment.model_copy(update={"max_grad_norm": clip})
    method = method_of(experiment)
    plan = method.server_plan(experiment, 5)
    rng = np.random.default_rng(seed)
    updates = [{"w": torch.from_numpy(rng.normal(size=6) * s)} for s in scales]
    others = updates[1:]
    nothing = {"silent": [], "broken": [{"w": torch.full((6,), math.nan).double()}],
               "zero": [{"w": torch.zeros(6).double()}]}[null]  # fmt: skip
    if not others and not nothing:
        return  # a server that nobody answers has no round
    found, means = [], []
    for answers in (updates, [*nothing, *others]):
        account = Paid(RenyiFilter(plan.order, plan.budget))
        context = ServerContext(method.name, 0, SecureNoise(), account, 5)
        caught = Caught()
        with pytest.MonkeyPatch.context() as patch:
            caught.watching(patch)
            state = method.load_server_state(None, experiment)
            means.append(method.server_step(context, experiment, plan, answers, state)[0])
        caught.charge = account.charge
        found.append(caught)
    both, without = found
    assert both.charge == without.charge
    assert both.charge["rate"] == 1.0  # who takes part is known
    declared = both.declared
    assert both.sums.keys() == declared.keys() == {"update"} | ({"count"} & declared.keys())
    assert declared["update"].sensitivity == clip
    moved = float((both.sums["update"] - without.sums["update"]).norm())
    assert moved <= clip * (1 + 1e-9)
    if "count" in declared:
        # A zero update is one that answered: within S, like a small one.
        assert declared["count"].sensitivity == 0.5
        assert abs(both.sums["count"] - without.sums["count"]) <= (1.0 if null == "zero" else 0.5)
    for name, release in declared.items():
        assert both.noise[name] == without.noise[name] == release.noise
    joint = joint_sigma(*(r.noise / r.sensitivity for r in declared.values()))
    assert both.charge["sigma"] == pytest.approx(joint, rel=1e-12)


@pytest.mark.parametrize("experiment", CENTRAL, ids=lambda e: f"{e.method}")
@pytest.mark.parametrize("answers", [1, 3, 5])
def test_a_server_divides_by_how_many_were_asked(experiment, answers, monkeypatch):
    method = method_of(experiment)
    plan = method.server_plan(experiment, 5)
    context = ServerContext(
        method.name, 0, SecureNoise(), Paid(RenyiFilter(plan.order, plan.budget)), 5
    )
    patched = xcal.dp.mechanism
    monkeypatch.setattr(patched, "release_tensors", lambda sums, *_: {"w": torch.ones(6).double()})
    monkeypatch.setattr(patched, "release_scalar", lambda value, *_: 1.0)
    updates = [{"w": torch.ones(6).double()} for _ in range(answers)]
    state = method.load_server_state(None, experiment)
    mean, after = method.server_step(context, experiment, plan, updates, state)
    assert mean["w"].tolist() == [0.2] * 6
    if after is not None:  # b̃ = ½ + 1/5 of those asked
        step = -experiment.clip_rate * (0.7 - experiment.quantile)
        assert after.clip == pytest.approx(experiment.max_grad_norm * math.exp(step))


# --- what contributes nothing ---------------------------------------------------------------------


@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_broken_unit_contributes_exactly_nothing(data, seed):
    """Not to the gradient, and not even its −½ to the signal."""
    batch = data.draw(batches("group"))
    broken = data.draw(st.integers(0, batch.n_units - 1))
    first = int(torch.nonzero(batch.units == broken)[0])
    batch.images[first, 0, 0, 0] = math.nan
    one = run_step("xcal-steered", network(seed, 1.0), keep(batch, [broken]), 1.0, SignalSettings())
    assert float(one.gradient.abs().max()) == 0
    assert one.sums["signal"] == 0


def test_a_drawn_unit_without_images_contributes_exactly_nothing():
    """It is a null unit. No draw makes one as long as every declared unit has an image."""
    nobody = keep(Batch(torch.zeros(1, 3, PIXELS, PIXELS), *torch.zeros(2, 1).long(), 1), [])
    drawn = Batch(nobody.images, nobody.labels, nobody.units, 3)
    caught = run_step("xcal-steered", network(1, 1.0), drawn, 1.0, SignalSettings())
    assert caught.sums["signal"] == 0


def test_an_empty_draw_is_charged_like_any_other():
    empty = Batch(
        torch.zeros(0, 3, PIXELS, PIXELS),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        0,
    )
    for case in CASES:
        caught = run_step(case, network(1, 1.0), empty, 1.0, SignalSettings())
        assert float(caught.gradient.abs().max()) == 0
        assert caught.sums.get("signal", 0.0) == 0
        assert caught.sums.get("count", 0.0) == 0
        assert caught.charge["cost"] > 0


# --- the parts ------------------------------------------------------------------------------------

any_number = st.floats(allow_nan=False, allow_infinity=False, width=64)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(any_number, st.booleans()), min_size=1, max_size=20), st.data())
def test_centered_sum_moves_by_half(units, data):
    values = np.array([value for value, _ in units])
    counted = np.array([drawn for _, drawn in units])
    fewer = counted.copy()
    fewer[data.draw(st.integers(0, len(units) - 1))] = False
    assert abs(centered_sum(values, counted) - centered_sum(values, fewer)) <= 0.5 + 1e-12


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e300), st.booleans()), min_size=1, max_size=20),
    st.floats(1e-6, 1e6),
    st.data(),
)
def test_centered_count_moves_by_half(units, clip, data):
    norms = np.array([value for value, _ in units])
    counted = np.array([drawn for _, drawn in units])
    fewer = counted.copy()
    fewer[data.draw(st.integers(0, len(units) - 1))] = False
    one, other = (centered_count(norms, clip, mask) for mask in (counted, fewer))
    assert abs(one - other) <= 0.5
    assert centered_count(norms, clip, np.zeros_like(counted)) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=30))
def test_the_mean_of_a_unit_stays_in_its_range_and_among_its_own(pairs):
    units = torch.tensor([unit for unit, _ in pairs], dtype=torch.int64)
    values = torch.tensor([value for _, value in pairs], dtype=torch.float64)
    means = mean_by_unit(values, units, 6)
    for unit in range(6):
        own = [value for u, value in pairs if u == unit]
        assert means[unit] == pytest.approx(sum(own) / len(own) if own else 0.0, abs=1e-12)
        assert 0 <= means[unit] <= 1 + 1e-12


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_batch_score_moves_by_one(data):
    """Whatever one image's components are, and also as the only one."""
    wild = st.one_of(any_number, st.sampled_from([math.nan, math.inf, -math.inf]))
    n = data.draw(st.integers(1, 8))
    columns = [data.draw(st.lists(wild, min_size=n, max_size=n)) for _ in range(3)]
    parts = [torch.tensor(column, dtype=torch.float64) for column in columns]
    weights = data.draw(st.tuples(*[st.sampled_from([0.0, 1.0, 1e6])] * 3))
    whole = batch_score(Components(*parts), *weights)
    fewer = batch_score(Components(*(part[1:] for part in parts)), *weights)
    assert 0 <= whole <= 1
    assert 0 <= fewer <= 1
    assert abs(whole - fewer) <= 1


def test_one_image_of_a_group_can_move_a_sum_by_more_than_the_group_was_charged_for():
    """Why a ledger of single images takes no charges of a run of groups."""
    head = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.zero_()
    network = nn.Sequential(nn.Flatten(), head)
    engine = ClippingEngine(network)
    images = torch.zeros(2, 2, 1, 1)
    images[0, 0], images[1, 0] = 100.0, 300.0
    labels = torch.tensor([0, 1])
    both = engine.clipped_sum(images, labels, clip=1.0, units=torch.zeros(2).long(), n_units=1)
    one = engine.clipped_sum(images[:1], labels[:1], clip=1.0)
    moved = torch.linalg.vector_norm(both.gradients["1.weight"] - one.gradients["1.weight"])
    assert float(moved) == pytest.approx(2.0, abs=0.01)
