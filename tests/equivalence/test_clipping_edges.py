"""What the engine does at the edges: nothing drawn, nothing finite, nothing it knows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xcal.dp.clipping import ClippingEngine, rule_check
from xcal.dp.clipping.reference import norm, one_at_a_time, unit_gradients
from xcal.errors import UserError
from xcal.models.resnet import resnet18


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_network(seed=0):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 5, padding=2, groups=8),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def batch(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(9)
    images = torch.randn(count, 3, 12, 12, generator=generator, dtype=dtype)
    return images, torch.randint(0, 4, (count,), generator=generator)


def largest_difference(found, expected):
    return max(float((found[name] - part).abs().max()) for name, part in expected.items())


def test_copies_of_a_network_are_looked_at_once_and_not_kept(monkeypatch):
    looks, look, kept = [], rule_check._agree_somehow, []
    monkeypatch.setattr(rule_check, "_seen", set())
    monkeypatch.setattr(rule_check, "_agree_somehow", lambda *args: looks.append(1) or look(*args))
    for forward in (None, lambda model: model, lambda model: model):
        model = small_network()
        images, labels = batch(2)
        way = None if forward is None else forward(model)
        ClippingEngine(model).clipped_sum(images, labels, clip=1.0, forward=way)
        kept.append(weakref.ref(model))
    del model, way
    gc.collect()
    assert len(looks) == 1
    assert [ref() for ref in kept] == [None, None, None]


@pytest.mark.parametrize("n_units", [None, 0, 3])
def test_an_empty_draw_gives_zeros_of_the_right_shapes(n_units):
    model = small_network()
    images, labels = batch(0)
    units = None if n_units is None else torch.zeros(0, dtype=torch.long)
    found = ClippingEngine(model).clipped_sum(
        images, labels, clip=1.0, units=units, n_units=n_units, capture="6"
    )
    assert {n: g.shape for n, g in found.gradients.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert all((gradient == 0).all() for gradient in found.gradients.values())
    assert found.logits.shape == (0, 4)
    assert found.features is not None
    assert found.features.shape == (0, 12, 3, 3)
    assert found.norms.shape == found.dropped.shape == (n_units or 0,)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("chunk", [2, 256])
def test_a_unit_that_is_not_finite_contributes_exactly_nothing(value, chunk):
    model = small_network()
    images, labels = batch(6)
    units = torch.tensor([0, 1, 1, 1, 2, 2])
    spoiled = images.clone()
    spoiled[2, 0, 5, 5] = value
    engine = ClippingEngine(model, chunk=chunk)
    found = engine.clipped_sum(spoiled, labels, clip=0.5, units=units)
    with torch.no_grad():
        finite = bool(torch.isfinite(model(spoiled)).all())
    if finite:  # normalization tames even a huge pixel: then it is a unit like any other
        expected = one_at_a_time(model, spoiled, labels, clip=0.5, units=units)
        assert found.dropped.tolist() == [False, False, False]
    else:
        others = units != 1
        expected = one_at_a_time(
            model, images[others], labels[others], clip=0.5, units=torch.tensor([0, 1, 1])
        )
        assert found.dropped.tolist() == [False, True, False]
    assert largest_difference(found.gradients, expected) < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(found.logits, model(spoiled), equal_nan=True)


def test_a_batch_of_nothing_finite_gives_zeros():
    model = small_network()
    images, labels = batch(3)
    found = ClippingEngine(model).clipped_sum(images * float("nan"), labels, clip=1.0)
    assert found.dropped.all()
    assert all((gradient == 0).all() for gradient in found.gradients.values())


def test_a_gradient_beyond_float32_is_dropped():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    images = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1e30, 1.0, 1.0, 1.0], [1e38, 1e38, 0.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    found = ClippingEngine(model).clipped_sum(images, labels, clip=1.0)
    assert all(torch.isfinite(gradient).all() for gradient in found.gradients.values())
    assert norm(found.gradients) <= 3.0


def test_a_label_that_is_no_class_drops_its_unit():
    model = small_network()
    images, labels = batch(3)
    wrong = labels.clone()
    wrong[1] = 4
    found = ClippingEngine(model).clipped_sum(images, wrong, clip=0.5)
    kept = torch.tensor([0, 2])
    expected = one_at_a_time(model, images[kept], labels[kept], clip=0.5)
    assert found.dropped.tolist() == [False, True, False]
    assert largest_difference(found.gradients, expected) < 1e-12


def test_the_network_is_left_as_found():
    model = small_network().train()
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images, labels = batch(5)
    images.requires_grad_(True)
    state = torch.get_rng_state()
    ClippingEngine(model, chunk=2).clipped_sum(images, labels, clip=1.0, capture="4")
    assert torch.equal(torch.get_rng_state(), state)
    assert (model[0].weight.grad == 7.0).all()
    assert images.grad is None
    assert all(p.grad is None for n, p in model.named_parameters() if n != "0.weight")
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert all(p.requires_grad and not p._backward_hooks for p in model.parameters())


def test_it_works_where_gradients_are_switched_off():
    model = small_network()
    images, labels = batch(3)
    with torch.no_grad():
        found = ClippingEngine(model).clipped_sum(images, labels, clip=1.0)
    expected = one_at_a_time(model, images, labels, clip=1.0)
    assert largest_difference(found.gradients, expected) < 1e-12
    assert not any(g.requires_grad for g in found.gradients.values())


class Tied(nn.Module):
    """One convolution used three times, and one linear weight used by hand as well."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.conv(x))
        x = torch.tanh(self.conv(F.avg_pool2d(x, 2)))
        x = self.conv(F.avg_pool2d(x, 3)).mean((2, 3))
        return self.head(F.linear(x, self.head.weight))


def test_parameters_used_several_times_are_right():
    torch.manual_seed(0)
    model = Tied().double()
    images, labels = batch(4)
    labels = labels % 3
    for units in (None, torch.tensor([0, 1, 0, 2])):
        found = ClippingEngine(model).clipped_sum(images, labels, clip=0.05, units=units)
        expected = one_at_a_time(model, images, labels, clip=0.05, units=units)
        assert largest_difference(found.gradients, expected) < 1e-12


class Sneaky(nn.Module):
    """Uses a linear layer's weight in a way that has no rule."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(432, 4))

    def forward(self, x):
        return self.body(x) + torch.einsum("bi,oi->bo", x.flatten(1), self.body[1].weight)


class Reshuffling(nn.Module):
    """Hides the batch among the pixels."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(432, 4)

    def forward(self, x):
        return self.head(self.mix(x.reshape(-1, 12)).view(len(x), -1))


REFUSED = {
    "sums of embeddings": (nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 4)), "'0'"),
    "recurrence": (nn.Sequential(nn.Flatten(), nn.LSTM(432, 4)), "'1'"),
    "batch norm": (nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(432, 4)), "'0'"),
    "batch norm without statistics": (
        nn.Sequential(
            nn.BatchNorm2d(3, track_running_stats=False).eval(), nn.Flatten(), nn.Linear(432, 4)
        ),
        "'0'",
    ),
    "half precision": (nn.Sequential(nn.Flatten(), nn.Linear(432, 4).half()), "'1.weight'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rule_is_refused_by_name_at_the_start(case):
    model, name = REFUSED[case]
    with pytest.raises(UserError, match=name):
        ClippingEngine(model)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Sneaky(), "'body.1.weight'"),
        (Reshuffling(), "'mix.weight'"),
        (
            nn.Sequential(nn.LayerNorm([3, 3, 12, 12]), nn.Flatten(), nn.Linear(432, 4)),
            "'0.weight'",
        ),
    ],
)
def test_what_only_shows_in_use_is_refused_by_name(model, name):
    images, labels = batch(3, torch.float32)
    with pytest.raises(UserError, match=name):
        ClippingEngine(model).clipped_sum(images, labels, clip=1.0)


class Doubled(nn.Module):
    """A layer of two inputs, given one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


def test_frozen_layers_without_a_rule_may_stay():
    torch.manual_seed(0)
    model = nn.Sequential(
        Doubled(nn.Bilinear(12, 12, 12)), nn.Flatten(), nn.Linear(432, 4)
    ).double()
    model[0].requires_grad_(False)
    images, labels = batch(3)
    found = ClippingEngine(model).clipped_sum(images, labels, clip=0.1)
    expected = one_at_a_time(model, images, labels, clip=0.1)
    assert largest_difference(found.gradients, expected) < 1e-12


def test_a_batch_norm_switched_to_training_later_is_refused():
    model = nn.Sequential(nn.BatchNorm2d(3).eval(), nn.Flatten(), nn.Linear(432, 4))
    engine = ClippingEngine(model)
    model.train()
    images, labels = batch(3, torch.float32)
    with pytest.raises(UserError, match="evaluation mode"):
        engine.clipped_sum(images, labels, clip=1.0)
    assert model[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": float("nan")},
        {"clip": -1.0},
        {"clip": 1.0, "units": torch.tensor([0, 1])},
        {"clip": 1.0, "units": torch.tensor([0, 1, 2]), "n_units": 2},
        {"clip": 1.0, "units": torch.tensor([0, -1, 1])},
        {"clip": 1.0, "n_units": 5},
        {"clip": 1.0, "capture": "nowhere"},
    ],
)
def test_wrong_requests_are_refused(wrong):
    images, labels = batch(3)
    with pytest.raises(UserError):
        ClippingEngine(small_network()).clipped_sum(images, labels, **wrong)


def test_gram_norms_hold_on_activations_with_a_large_mean():
    """Nearly all of the norm cancels: it may be overstated, never understated."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(1, 64), nn.Flatten())
    model.append(nn.Linear(1024, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    for mean in (0.0, 10.0, 100.0, 1000.0):
        images = mean + torch.randn(6, 32, 4, 4, generator=generator)
        labels = torch.randint(0, 4, (6,), generator=generator)
        found = ClippingEngine(model).clipped_sum(images, labels, clip=0.01)
        factors = (0.01 / (1 + 1e-3) / found.norms).clamp_max(1)
        for factor, gradient in zip(factors, unit_gradients(model, images, labels), strict=True):
            assert float(factor) * norm(gradient) <= 0.01
        assert norm(found.gradients) <= 0.06


def test_batches_of_any_size_through_one_engine():
    """Poisson batches differ every step; nothing may be remembered from one to the next."""
    model = resnet18(4, trainable="last:1", seed=0).double()
    engine = ClippingEngine(model, chunk=2)
    for count in (2, 0, 3, 1):
        images, labels = batch(count)
        found = engine.clipped_sum(images, labels, clip=0.7)
        expected = one_at_a_time(model, images, labels, clip=0.7)
        assert largest_difference(found.gradients, expected) < 1e-10
