"""What one unit can do to each released sum, measured on the real steps, for records and groups.

A step is run twice, with a unit drawn and with it contributing nothing, and everything that would
get noise is caught on its way out, together with the noise it would get. The change must be within
the sensitivity the step has declared and paid for, and the noise no less than declared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import xcal.privacy.mechanism
from xcal.config import make_experiment
from xcal.explain.signal import Components, SignalSettings, batch_score
from xcal.methods.adaptive_clip import ADAPTIVE_CLIP
from xcal.methods.agp_dp import AGP_DP
from xcal.privacy.accounting import joint_sigma
from xcal.privacy.calibration import PlanShape, plan_paper, plan_static, plan_xcal
from xcal.privacy.filter import RenyiFilter
from xcal.privacy.noise import SeededNoise
from xcal.training.adaptive import QuantileRule, centred_count
from xcal.training.clipping import ClippingEngine
from xcal.training.geometry import ChannelRule
from xcal.training.local import Batch, Bench, Optimiser, mean_by_unit
from xcal.training.steps import dp_step
from xcal.training.xcal import (
    PaperRule,
    PaperState,
    XcalRule,
    XcalState,
    centred_sum,
    paper_step,
    xcal_step,
)

CLASSES, PIXELS, UNITS, EXPECTED = 3, 16, 200, 8
SHAPE = PlanShape(5.0, 1e-5, units=UNITS, batch=EXPECTED, rounds=2)
PLANS = {
    "fl-dp": plan_static(SHAPE),
    "xcal": plan_xcal(SHAPE, kappa=5.0, w=0.5),
    "xcal-paper": plan_paper(SHAPE, rho=0.1, band=0.2),
    "agp-dp": plan_static(SHAPE, "agp-dp"),
    "adaptive-clip": ADAPTIVE_CLIP.plan(
        make_experiment({"epsilon": 5.0, "batch": EXPECTED, "unit": "record"}), UNITS, 2
    ),
    "xcal with parts": plan_xcal(SHAPE, kappa=5.0, w=0.5, kappa_b=5.0),
}


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
    """Data whose every draw is the given batch: what else was drawn is the same for neighbours."""

    batch: Batch
    units: int = UNITS

    def draw(self, rate, noise, key):
        return self.batch


@dataclass
class Caught:
    """What one step would have released, before noise, with the noise's deviation."""

    charge: dict
    gradient: torch.Tensor
    gradient_noise: float
    signal: float | None
    signal_noise: float | None
    count: float | None
    count_noise: float | None


def run_step(method: str, model, batch: Batch, clip: float, signal: SignalSettings, **rule):
    """One real step; the two functions that add noise are watched."""
    plan = PLANS[method]
    caught: dict = {"signal": None, "signal_noise": None, "count": None, "count_noise": None}

    def watch_tensors(sums, scale, noise, key):
        caught["gradient"] = torch.cat([v.flatten().double() for v in sums.values()])
        caught["gradient_noise"] = scale
        return {name: torch.zeros_like(value) for name, value in sums.items()}

    def watch_scalar(value, scale, noise, key):
        caught[key.block], caught[f"{key.block}_noise"] = value, scale
        return value

    account = Paid(RenyiFilter(plan.order, plan.budget))
    bench = Bench(
        client="0",
        method=method,
        round=0,
        first_step=0,
        model=model,
        engine=ClippingEngine(model),
        data=GivenDraw(batch),
        noise=SeededNoise(1),
        account=account,
        optimiser=Optimiser(model, "sgd", 0.1, 0.0),
        batch=EXPECTED,
        clip=clip,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xcal.privacy.mechanism, "release_tensors", watch_tensors)
        patch.setattr(xcal.privacy.mechanism, "release_scalar", watch_scalar)
        experiment = make_experiment({"clip": clip, "protected": 0.3, "protection": 4.0})
        if method == "fl-dp":
            dp_step(bench, 0, sigma=plan.sigma_ref)
        elif method == "xcal":
            xcal_step(bench, 0, XcalRule(plan, signal, **rule), XcalState())
        elif method == "xcal with parts":
            parts = {"channels": ChannelRule(0.3, 4.0), "quantile": QuantileRule(start=clip)}
            xcal_step(bench, 0, XcalRule(plan, signal, **parts), XcalState())
        elif method == "agp-dp":
            AGP_DP.step(bench, 0, experiment, plan, AGP_DP.load_state(None))
        elif method == "adaptive-clip":
            ADAPTIVE_CLIP.step(bench, 0, experiment, plan, ADAPTIVE_CLIP.load_state(None))
        else:
            paper_step(bench, 0, PaperRule(plan, signal), PaperState())
    return Caught(account.charge, **caught)


@st.composite
def batches(draw, unit: str):
    """Images from dull to outrageous; units of one image, or of one to four."""
    n_units = draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 4)) if unit == "group" else 1 for _ in range(n_units)]
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
    return Batch(images, labels, units, n_units)


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
    positive_only=st.booleans(),
)


def keep(batch: Batch, kept: list[int]) -> Batch:
    """The draw in which only these units were drawn."""
    number = torch.full((batch.n_units,), -1)
    number[kept] = torch.arange(len(kept))
    there = number[batch.units] >= 0
    return Batch(batch.images[there], batch.labels[there], number[batch.units[there]], len(kept))


def without_unit(batch: Batch, unit: int) -> Batch:
    return keep(batch, [u for u in range(batch.n_units) if u != unit])


def with_null_unit(batch: Batch, unit: int) -> Batch:
    """The same draw with one unit's data replaced by a null unit, which keeps its place."""
    images = batch.images.clone()
    images[batch.units == unit] = math.nan
    return Batch(images, batch.labels, batch.units, batch.n_units)


@pytest.mark.parametrize("unit", ["record", "group"])
@pytest.mark.parametrize("method", PLANS)
@settings(max_examples=10, deadline=None, phases=UNSHRUNK)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    weights_times=st.sampled_from([0.3, 1.0, 20.0]),
    clip=st.sampled_from([0.01, 1.0, 50.0]),
    signal=signal_settings,
)
def test_one_unit_moves_every_release_by_at_most_what_was_paid_for(
    method, unit, data, seed, weights_times, clip, signal
):
    batch = data.draw(batches(unit))
    changed = data.draw(st.integers(0, batch.n_units - 1))
    null = data.draw(st.sampled_from([without_unit, with_null_unit]))

    def caught(drawn: Batch) -> Caught:
        return run_step(method, network(seed, weights_times), drawn, clip, signal)

    both, without = caught(batch), caught(null(batch, changed))
    assert both.charge == without.charge  # fixed before the draw
    declared = {r.name: r for r in both.charge["releases"]}
    assert bool(torch.isfinite(both.gradient).all())

    # Gradient: in float32, over all parameters together, by at most C (in the scaled space).
    moved = float((both.gradient - without.gradient).norm())
    assert declared["gradient"].sensitivity == clip
    assert moved <= clip
    assert both.gradient_noise >= declared["gradient"].noise * (1 - 1e-12)
    # Alone in its draw the same bound holds for the whole sum, and nobody gives exactly 0.
    alone = caught(keep(batch, [changed]))
    assert float(alone.gradient.norm()) <= clip
    assert float(caught(keep(batch, [])).gradient.abs().max()) == 0

    # Signal: Σ(u − ½) by ½, s_raw by 1. Count: Σ(1[norm ≤ C] − ½) by ½.
    scalars = {
        "xcal": {"signal": 0.5},
        "xcal-paper": {"signal": 1.0},
        "adaptive-clip": {"count": 0.5},
        "xcal with parts": {"signal": 0.5, "count": 0.5},
    }.get(method, {})
    assert set(declared) == {"gradient", *scalars}
    for name, bound in scalars.items():
        assert declared[name].sensitivity == bound
        assert abs(getattr(both, name) - getattr(without, name)) <= bound + 1e-9
        assert getattr(both, f"{name}_noise") == declared[name].noise
        assert abs(getattr(alone, name)) <= bound + 1e-9
    # All together are the one Gaussian that was charged for.
    joint = joint_sigma(*(r.noise / r.sensitivity for r in declared.values()))
    assert both.charge["sigma"] == pytest.approx(joint, rel=1e-12)
    assert both.charge["rate"] == EXPECTED / UNITS


@settings(max_examples=10, deadline=None, phases=UNSHRUNK)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_fraction_of_the_units_in_the_signal_has_the_same_sensitivity(data, seed):
    batch = data.draw(batches("group"))
    changed = data.draw(st.integers(0, batch.n_units - 1))
    sums = [
        run_step("xcal", network(seed, 1.0), b, 1.0, SignalSettings(), signal_fraction=0.5).signal
        for b in (batch, with_null_unit(batch, changed))
    ]
    assert abs(sums[0] - sums[1]) <= 0.5 + 1e-9


@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_broken_unit_contributes_exactly_nothing(data, seed):
    """Not to the gradient, and not even its −½ to the signal."""
    batch = data.draw(batches("group"))
    broken = data.draw(st.integers(0, batch.n_units - 1))
    first = int(torch.nonzero(batch.units == broken)[0])
    batch.images[first, 0, 0, 0] = math.nan
    one = run_step("xcal", network(seed, 1.0), keep(batch, [broken]), 1.0, SignalSettings())
    assert float(one.gradient.abs().max()) == 0
    assert one.signal == 0


def test_a_drawn_unit_without_images_contributes_exactly_nothing():
    """It is a null unit. No draw makes one as long as every declared unit has an image."""
    nobody = keep(Batch(torch.zeros(1, 3, PIXELS, PIXELS), *torch.zeros(2, 1).long(), 1), [])
    drawn = Batch(nobody.images, nobody.labels, nobody.units, 3)
    caught = run_step("xcal", network(1, 1.0), drawn, 1.0, SignalSettings())
    assert caught.signal == 0


def test_an_empty_draw_is_charged_like_any_other():
    empty = Batch(
        torch.zeros(0, 3, PIXELS, PIXELS),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        0,
    )
    for method in PLANS:
        caught = run_step(method, network(1, 1.0), empty, 1.0, SignalSettings())
        assert float(caught.gradient.abs().max()) == 0
        assert caught.signal in (None, 0.0)
        assert caught.count in (None, 0.0)
        assert caught.charge["cost"] > 0


# --- the parts ------------------------------------------------------------------------------------

any_number = st.floats(allow_nan=False, allow_infinity=False, width=64)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(any_number, st.booleans()), min_size=1, max_size=20), st.data())
def test_centred_sum_moves_by_half(units, data):
    values = np.array([value for value, _ in units])
    counted = np.array([drawn for _, drawn in units])
    fewer = counted.copy()
    fewer[data.draw(st.integers(0, len(units) - 1))] = False
    assert abs(centred_sum(values, counted) - centred_sum(values, fewer)) <= 0.5 + 1e-12


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e300), st.booleans()), min_size=1, max_size=20),
    st.floats(1e-6, 1e6),
    st.data(),
)
def test_centred_count_moves_by_half(units, clip, data):
    norms = np.array([value for value, _ in units])
    counted = np.array([drawn for _, drawn in units])
    fewer = counted.copy()
    fewer[data.draw(st.integers(0, len(units) - 1))] = False
    one, other = (centred_count(norms, clip, mask) for mask in (counted, fewer))
    assert abs(one - other) <= 0.5
    assert centred_count(norms, clip, np.zeros_like(counted)) == 0


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
