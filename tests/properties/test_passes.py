"""In passes of one size nobody's numbers depend on who else was drawn, to the last bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from made_sites import tiny_site
from step_tools import tiny_bench
from wire import a_request, ask, real
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.reference import one_at_a_time
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.explain.gradcam import closed_form_maps, forward_with_features
from xcal.explain.signal import SignalSettings, image_components
from xcal.federation.messages import Reply
from xcal.methods.passes import is_batch_invariant, is_cache_exact
from xcal.methods.step_parts import clipped_sum
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18
from xcal.models.small import small

NETWORKS = {
    "small": lambda: small(5, seed=0),
    "resnet18": lambda: resnet18(5, norm="group", trainable="all", seed=0),
    "efficientnet_b0": lambda: efficientnet_b0(
        5, norm="frozen", trainable="last:2", output_stride=16, seed=0
    ),
}

SOME = ["small", *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n != "small")]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some_images(count: int, dtype: torch.dtype = torch.float32, pixels: int = 32) -> Any:
    source = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, pixels, pixels, generator=source, dtype=dtype)
    return images, torch.randint(0, 5, (count,), generator=source)


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_known_of_a_unit_is_the_same_beside_any_others(network: str) -> None:
    model = NETWORKS[network]()
    engine = ClippingEngine(model, rows=8)
    images, labels = some_images(19)

    def seen(first: int, count: int) -> Any:
        here = slice(first, first + count)
        return engine.clipped_sum(images[here], labels[here], clip=1.0, capture=model.cam_layer)

    whole = seen(0, 19)
    for first, count in ((18, 1), (11, 8), (5, 14), (3, 9)):
        part, there = seen(first, count), slice(first, first + count)
        assert torch.equal(part.norms, whole.norms[there])
        assert torch.equal(part.logits, whole.logits[there])
        assert torch.equal(part.features, whole.features[there])


@pytest.mark.parametrize("network", SOME)
def test_so_it_is_with_units_of_several_images(network: str) -> None:
    model = NETWORKS[network]()
    engine = ClippingEngine(model, rows=16)
    images, labels = some_images(24)
    of_image = torch.tensor(
        [0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 5, 6, 6, 7, 7, 7, 8, 9, 9, 10, 11, 11, 11]
    )

    def norms(chosen: list[int]) -> Tensor:
        own = torch.cat([torch.nonzero(of_image == unit).flatten() for unit in chosen])
        _, units = torch.unique(of_image[own], return_inverse=True)
        return engine.clipped_sum(images[own], labels[own], clip=1.0, units=units).norms

    whole = norms(list(range(12)))
    for chosen in ([0], [3], [2, 5], [1, 3, 4, 8], [0, 4, 7, 11], list(range(3, 12))):
        assert torch.equal(norms(chosen), whole[chosen])


@pytest.mark.parametrize("network", SOME)
def test_shipped_networks_keep_rows_apart_here(network: str) -> None:
    model = NETWORKS[network]()
    before = torch.random.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert is_batch_invariant(model, (3, 32, 32), 32) == 32
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(before, torch.random.get_rng_state())


class Uneven(nn.Module):
    """Rounds what it is given by the place in the batch, as a library's kernel might."""

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)
        self._places = torch.tensor(places)

    def extra_repr(self) -> str:
        return str(self._places.tolist())

    def forward(self, images: Tensor) -> Tensor:
        wrong = torch.isin(torch.arange(len(images)), self._places)
        means = images.mean(dim=(2, 3))
        return self.head(torch.where(wrong[:, None], means * (1 + 2**-23), means))


def test_where_rows_do_not_keep_apart_each_goes_alone() -> None:
    assert is_batch_invariant(Uneven(15, 31), (3, 32, 32), 32) == 1
    assert is_batch_invariant(Uneven(15, 31), (3, 32, 32), 8) == 8
    assert is_batch_invariant(Uneven(15, 31), (3, 32, 32), 0) == 0


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_no_places_that_are_rounded_in_their_own_way_go_unnoticed(size: int) -> None:
    for first in range(0, 32, size):
        network = Uneven(*range(first, first + size))
        assert is_batch_invariant(network, (3, 32, 32), 32) == 1, first


class Neighborly(Uneven):
    """Rounds by what stands beside an image."""

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean(dim=(2, 3))
        high = means.roll(1, 0).sum(dim=1, keepdim=True) > 0
        return self.head(torch.where(high, means * (1 + 2**-23), means))


def test_neighbors_that_change_how_an_image_is_rounded_are_noticed() -> None:
    assert is_batch_invariant(Neighborly(), (3, 32, 32), 32) == 1


class OddMaps(nn.Module):
    """Only its map depends on the place, as maps by a product of matrices did."""

    cam_layer, head_layer = "features", None

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(_TurnedBack.apply(self.features(images)).mean(dim=(2, 3)))


class _TurnedBack(torch.autograd.Function):
    """Nothing forward; backward, the fourth image's gradient is rounded otherwise."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        turned = gradient.clone()
        turned[3::4] *= 1 + 2**-20
        return turned


def test_maps_are_looked_at() -> None:
    assert is_batch_invariant(OddMaps().requires_grad_(False), (3, 9, 9), 32) == 1


@pytest.mark.parametrize("cells", [9, 25, 49, 121, 225])
@pytest.mark.parametrize("channels", [32, 512, 1280])
def test_a_map_is_the_same_in_every_place(cells: int, channels: int) -> None:
    """Maps of an odd number of cells were rounded by the place in the pass."""
    side = math.isqrt(cells)
    source = torch.Generator().manual_seed(0)
    features = torch.randn(32, channels, side, side, generator=source)
    weight, classes = torch.randn(3, channels, generator=source), torch.arange(32) % 3
    maps = closed_form_maps(features, weight, classes)
    for shift in range(1, 32):
        moved = closed_form_maps(features.roll(shift, 0), weight, classes.roll(shift))
        assert torch.equal(moved, maps.roll(shift, 0))


def test_norms_in_doubt_are_the_same_however_many_others_are() -> None:
    """Measured anew in float64 together, they differed by a bit from those measured alone."""
    network = nn.Sequential(
        nn.Conv2d(3, 256, 1, bias=False).requires_grad_(False),
        nn.Conv2d(256, 256, 3, padding=1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 3).requires_grad_(False),
    )
    source = torch.Generator().manual_seed(0)
    images = 1 + 0.3 * torch.randn(12, 3, 7, 7, generator=source)
    labels = torch.randint(0, 3, (12,), generator=source)
    engine = ClippingEngine(network, rows=12)
    for one in range(4):
        images[one] *= 1e-12  # so small that float32 leaves a doubt
        before = engine.clipped_sum(images[:11], labels[:11], clip=1.0).norms
        second = images.clone()
        second[11] *= 1e-12
        after = engine.clipped_sum(second, labels, clip=1.0).norms
        assert torch.equal(before, after[:11])


@pytest.mark.parametrize("network", ["resnet18", "efficientnet_b0"])
def test_kept_activations_change_no_number(network: str) -> None:
    model = NETWORKS[network]()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    [*model.modules()][-1].requires_grad_(True)
    assert is_cache_exact(model, (3, 32, 32), 8)
    assert is_cache_exact(model, (3, 32, 32), 0)


@pytest.mark.parametrize("units", [None, [4, 0, 0, 2, 4, 4, 4, 1, 1, 5, 5]])
def test_filling_up_changes_no_sum(units: list[int] | None) -> None:
    """Units of several images too, one of them larger than a pass, and one that was not drawn."""
    model = small(5, seed=0).double()
    images, labels = some_images(11, dtype=torch.float64)
    given = {} if units is None else {"units": torch.tensor(units)}
    for rows in (1, 3, 32):
        found = ClippingEngine(model, rows=rows).clipped_sum(images, labels, clip=0.3, **given)
        expected = one_at_a_time(model, images, labels, clip=0.3, **given)
        for name, value in expected.items():
            assert torch.allclose(found.gradients[name], value, rtol=1e-9, atol=1e-12), (rows, name)
        assert len(found.logits) == 11
        assert len(found.norms) == (11 if units is None else 6)


def test_broken_units_and_empty_draws() -> None:
    """The first image is the one that passes are filled up with."""
    model = small(5, seed=0)
    images, labels = some_images(5)
    images[0] = float("nan")
    engine = ClippingEngine(model, rows=8)
    found = engine.clipped_sum(images, labels, clip=1.0)
    rest = engine.clipped_sum(images[1:], labels[1:], clip=1.0)
    assert found.dropped.tolist() == [True, False, False, False, False]
    assert all(torch.equal(found.gradients[n], rest.gradients[n]) for n in rest.gradients)
    nobody = engine.clipped_sum(images[:0], labels[:0], clip=1.0)
    assert not any(value.any() for value in nobody.gradients.values())
    assert len(nobody.logits) == 0


def test_units_that_are_left_out_do_not_change_how_the_others_are_summed() -> None:
    model = small(3, seed=0)
    context = tiny_bench(model, engine=ClippingEngine(model, rows=8), rows=8)
    batch = context.draw(0)
    assert batch.n_units > 8
    bad = torch.arange(batch.n_units) == 3
    whole, rest = clipped_sum(context, batch), clipped_sum(context, batch.without(bad))
    assert float(rest.norms[3]) == 0
    assert torch.equal(rest.norms[~bad], whole.norms[~bad])


def canceling() -> nn.Module:
    """The head's rows cancel under the gradient of equal logits, but for rounding.

    Rows are chosen whose rounding differs between products of three and of four images.
    """
    network = small(3, seed=0)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gradient = torch.tensor([[-2 / 3, 1 / 3, 1 / 3]])
        rows = torch.randn(3, 100_000, generator=source) * 1e9
        rows[0] = (rows[1] + rows[2]) / 2
        three, four = ((gradient.expand(n, 3).contiguous() @ rows)[0] for n in (3, 4))
        turned = torch.minimum(three.abs(), four.abs()) * (three.sign() != four.sign())
        network.head.weight.copy_(rows[:, turned.argsort()[-32:]])
        network.head.bias.zero_()
        norm = [m for m in network.features if isinstance(m, nn.GroupNorm)][-1]
        norm.weight.zero_()
        norm.bias.fill_(1e-30)
    return network


def test_constructed_weights_do_not_turn_the_others() -> None:
    """Without a fixed size the fourth image moved the sum of three by 6 C."""
    images = torch.rand(1, 3, 28, 28).expand(9, -1, -1, -1).contiguous()
    engine = ClippingEngine(canceling(), rows=8)
    before = None
    for count in range(1, 10):
        labels = torch.zeros(count).long()
        sums = engine.clipped_sum(images[:count], labels, clip=1.0).gradients
        now = torch.cat([value.double().flatten() for value in sums.values()])
        assert before is None or float((now - before).norm()) <= 1.0
        before = now


@pytest.mark.parametrize(
    ("network", "pixels"), [("small", 32), ("small", 40), ("small", 56), ("resnet18", 32),
                            ("efficientnet_b0", 32)],
)  # fmt: skip
def test_the_score_of_an_image_is_the_same_beside_any_others(network: str, pixels: int) -> None:
    model = NETWORKS[network]()
    images, _ = some_images(11, pixels=pixels)
    with torch.no_grad():
        logits, features = forward_with_features(model, images)

    def found(some: Tensor) -> list[Tensor]:
        given = images[some], logits[some], features[some]
        parts = image_components(model, *given, SignalSettings(), rows=8)
        return [parts.logit_drop, parts.margin, parts.concentration]

    whole = found(torch.arange(11))
    for some in (torch.tensor([10]), torch.tensor([9, 2, 4]), torch.arange(2, 11)):
        for one, all_of_them in zip(found(some), whole, strict=True):
            assert torch.equal(one, all_of_them[some])
    assert [len(values) for values in found(torch.arange(0))] == [0, 0, 0]


def test_real_clients_have_passes_of_one_size_and_simulated_ones_need_not() -> None:
    assert make_experiment({"noise": "secure"}).rows == 32
    assert make_experiment({"noise": "seeded"}).rows == 0
    assert make_experiment({"noise": "secure", "pass_rows": 0}).rows == 0
    assert make_experiment({"noise": "seeded", "pass_rows": 16}).rows == 16
    with pytest.raises(UserError, match="pass_rows"):  # the signal takes 64 at once at most
        make_experiment({"pass_rows": 65})


@pytest.mark.parametrize(("simulated", "rows"), [(False, 32), (True, 0)])
def test_a_site_clips_in_passes_of_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: bool, rows: int
) -> None:
    site_dir = tiny_site(tmp_path) if simulated else real(tiny_site(tmp_path))
    make, sizes = ClippingEngine.__init__, []

    def watched(engine: ClippingEngine, *args: Any, rows: int | None = None, **given: Any) -> None:
        if rows is not None:  # one that is made to train, not to look at a network
            sizes.append(rows)
        make(engine, *args, rows=rows or 0, **given)

    monkeypatch.setattr(ClippingEngine, "__init__", watched)
    assert isinstance(ask(site_dir, a_request()), Reply)
    assert sizes == [rows]
