"""Layers and uses of parameters that networks from elsewhere bring: exact, one unit at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from against_reference import assert_exact
from xcal.dp.clipping import ClippingEngine, Geometry
from xcal.dp.clipping.reference import one_at_a_time
from xcal.errors import UserError

CLASSES = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shaken(model, seed=0):
    """In float64, with weights that are all different."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count):
    return torch.arange(count) % CLASSES


class Tokens(nn.Module):
    """(B, T, 6) through a body, then the mean over places and a linear layer."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).flatten(1, -2).mean(1))


class Attention(nn.Module):
    def __init__(self, *, cross=False, weights=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, **options)
        self.cross, self.weights, self.options = cross, weights, options

    def forward(self, x):
        first = self.options.get("batch_first", False)
        other = torch.tanh(x[:, 1:]) if self.cross else x
        if self.options.get("kdim"):
            other = other[..., : self.options["kdim"]]
        query, key = (x, other) if first else (x.transpose(0, 1), other.transpose(0, 1))
        if not self.cross:
            key = query
        y, _ = self.attention(query, key, key, need_weights=self.weights)
        return y if first else y.transpose(0, 1)


class ScaledDot(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Class(nn.Module):
    """Class token and position embedding, added in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.token = nn.Parameter(torch.zeros(1, 1, 6))
        self.places = nn.Parameter(torch.zeros(1, 8, 6))

    def forward(self, x):
        places = self.places
        token = self.token.expand(len(x), -1, -1)
        if self.way == "repeat":
            token = self.token.repeat(len(x), 1, 1)
        elif self.way == "flat":
            token, places = self.token[0, 0].expand(len(x), 1, -1), places[0]
        elif self.way == "early":
            token = token + places[:, :1]
        elif self.way == "resized":
            places = F.interpolate(places.mT, 16, mode="linear").mT[:, ::2]
        elif self.way == "like":
            token = self.token.expand_as(x[:, :1])
        x = torch.cat((token, x), dim=1)
        x += places[..., : x.shape[1], :]
        return x


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6))
        self.temperature = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(2, 6))
        self.column = nn.Parameter(torch.ones(5, 1))
        self.register_buffer("sign", torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0]))

    def forward(self, x):
        x = self.gamma * x + (self.shift * self.sign).sum(0) / self.shift.norm()
        x = torch.where(x > 0, x, self.gamma.view(1, 1, 6) * x)
        return (1 - x) / self.temperature.exp() * self.column.expand(5, 6) - self.shift[1]


class ByHand(nn.Module):
    """Weights of one's own in matrix products and functional layers, some made anew every pass."""

    def __init__(self):
        super().__init__()
        self.right = nn.Parameter(torch.ones(6, 6))
        self.both = nn.Parameter(torch.ones(2, 6, 6))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        x = torch.tanh(x @ self.right)
        x = torch.tanh(F.linear(x, self.both.view(12, 6)))
        x = F.linear(x[..., :6], self.both[0], self.both[1, 0]) + x[..., 6:]
        return self.normed(x)


class Tied(nn.Module):
    """Words in and words out by one table."""

    def __init__(self, ways=2):
        super().__init__()
        self.words = nn.Embedding(CLASSES, 6, padding_idx=1)
        self.places = nn.Embedding(5, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, CLASSES, bias=False)
        if ways == 2:
            self.out.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.out(torch.tanh(self.mix(x)).mean(1))


TOKENS = {
    "linear on places": lambda: [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6, bias=False)],
    "layer norm": lambda: [nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm([5, 6], bias=False)],
    "rms norm": lambda: [nn.RMSNorm(6), nn.Linear(6, 6), nn.RMSNorm([5, 6], eps=1e-6)],
    "self-attention": lambda: [Attention(batch_first=True)],
    "attention, time first": lambda: [Attention(weights=True)],
    "cross-attention": lambda: [Attention(cross=True, batch_first=True, bias=False)],
    "attention of other widths": lambda: [Attention(cross=True, kdim=4, vdim=4, batch_first=True)],
    "encoder layer": lambda: [nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)],
    "scaled dot product": lambda: [ScaledDot()],
    "class token": lambda: [Class("expand")],
    "class token, repeated": lambda: [Class("repeat")],
    "class token, flat": lambda: [Class("flat")],
    "class token, with its place": lambda: [Class("early")],
    "class token, like the batch": lambda: [Class("like")],
    "places, resized": lambda: [Class("resized")],
    "scales": lambda: [Scales()],
    "by hand": lambda: [ByHand()],
    "prelu": lambda: [nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 6), nn.PReLU(5)],
}


@pytest.mark.parametrize("case", TOKENS)
def test_layers_of_transformers(case):
    model = shaken(Tokens(*TOKENS[case]()))
    assert_exact(model, drawn(6, 5, 6), labels(6))


@pytest.mark.parametrize("count", [5, 1])
@pytest.mark.parametrize("case", ["class token", "class token, with its place", "scales"])
def test_as_many_samples_as_places(case, count):
    """Sizes that happen to be equal are not taken for one another."""
    assert_exact(shaken(Tokens(*TOKENS[case]())), drawn(count, 5, 6), labels(count))


@pytest.mark.parametrize("width", [6, 40])
def test_many_places_of_wide_layers(width):
    """By Gram matrices and by gradients, whichever is cheaper."""
    model = shaken(Tokens(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)))
    for places in (1, 2, 30):
        assert_exact(model, drawn(5, places, 3, 6), labels(5))


class Pixels(nn.Module):
    """(B, 4, …) through a body, then the mean over pixels and a linear layer."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).flatten(2).mean(2))


CONVOLUTIONS = {
    "plain": lambda kind, up: [kind(4, 12, 3, padding=1), nn.Tanh(), kind(12, 4, 1)],
    "strided": lambda kind, up: [kind(4, 6, 2, stride=2, bias=False), nn.Tanh(), kind(6, 4, 1, 2)],
    "wide": lambda kind, up: [kind(4, 40, 3, 2, dilation=1), nn.Tanh(), kind(40, 4, 2, padding=1)],
    "grouped": lambda kind, up: [kind(4, 8, 3, 2, 2, 2, groups=2), nn.Tanh(), kind(8, 4, 1)],
    "depthwise": lambda kind, up: [kind(4, 4, 3, padding="same", groups=4)],
    "same": lambda kind, up: [kind(4, 4, 2, padding="same", dilation=3)],
    "circular": lambda kind, up: [kind(4, 4, 3, padding=1, padding_mode="circular")],
    "up": lambda kind, up: [up(4, 6, 2, stride=2), nn.Tanh(), up(6, 4, 1, 2, bias=False)],
    "up, padded": lambda kind, up: [up(4, 4, 3, 2, 1, 1), nn.Tanh(), up(4, 4, 3, 2, 0, 0)],
    "up, grouped": lambda kind, up: [up(4, 8, 3, padding=1, groups=2), nn.Tanh(), kind(8, 4, 1)],
    "up, wide": lambda kind, up: [kind(4, 40, 3), nn.Tanh(), up(40, 4, 2)],
    "up, spread": lambda kind, up: [up(4, 4, 2, 1, 1, 2, dilation=3), nn.Tanh(), kind(4, 4, 1)],
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_of_lines_images_and_volumes(case, dims):
    kind = getattr(nn, f"Conv{dims}d")
    up = getattr(nn, f"ConvTranspose{dims}d")
    model = shaken(Pixels(*CONVOLUTIONS[case](kind, up)))
    assert_exact(model, drawn(5, 4, *[5, 4, 6][:dims]), labels(5))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("tracks", [False, True])
def test_norms_of_lines_images_and_volumes(dims, tracks):
    kind, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
    instance = norm(4, affine=True, track_running_stats=tracks).eval()
    model = shaken(Pixels(kind(4, 4, 1), nn.GroupNorm(2, 4), kind(4, 4, 1), instance))
    assert_exact(model, drawn(5, 4, *[5, 4, 6][:dims]), labels(5))


@pytest.mark.parametrize("ways", [1, 2])
def test_embeddings(ways):
    model = shaken(Tied(ways))
    ids = torch.randint(0, CLASSES, (6, 5), generator=torch.Generator().manual_seed(0))
    assert_exact(model, ids, labels(6))


def test_embeddings_that_look_at_others_are_refused():
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        model = nn.Sequential(nn.Embedding(4, 2, **options), nn.Flatten(), nn.Linear(4, 3))
        with pytest.raises(UserError, match=r"'0\.weight'"):
            ClippingEngine(model).clipped_sum(torch.ones(2, 2).long(), labels(2), clip=1.0)


def head():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))


LOSSES = {
    "soft targets": (None, drawn(4, CLASSES).softmax(1)),
    "several labels": (
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction="none").mean(1),
        (drawn(4, CLASSES) > 0).double(),
    ),
    "regression": (lambda y, t: (y[:, 0] - t).square(), torch.tensor([0.2, 0.7, -1.5, 0.0])),
    "focal": (lambda y, t: (1 - y.softmax(1)[range(len(y)), t]).square(), labels(4)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_any_loss_of_a_sample(case):
    loss, targets = LOSSES[case]
    targets = targets.double() if targets.is_floating_point() else targets
    assert_exact(shaken(head()), drawn(4, 3, 4), targets, loss=loss)


def test_a_class_at_every_place():
    model = shaken(nn.Conv2d(2, CLASSES, 3, padding=1))
    wanted = torch.randint(0, CLASSES, (4, 5, 5), generator=torch.Generator().manual_seed(0))
    assert_exact(model, drawn(4, 2, 5, 5), wanted)
    wrong = wanted.clone()
    wrong[2, 0, 0] = CLASSES
    found = ClippingEngine(model).clipped_sum(drawn(4, 2, 5, 5), wrong, clip=1.0)
    assert found.dropped.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (None, torch.tensor([0.5, 1.0, 2.0])),  # never truncated
        (None, labels(3)[:, None]),
        (lambda y, t: F.cross_entropy(y, t), labels(3)),
        (lambda y, t: F.cross_entropy(y, t, reduction="none") / len(y), labels(3)),
        (lambda y, t: F.cross_entropy(y - y.mean(0), t, reduction="none"), labels(3)),
        (lambda y, t: 1.0, labels(3)),
    ],
)
def test_losses_that_are_not_of_each_sample_are_refused(loss, targets):
    with pytest.raises(UserError):
        ClippingEngine(shaken(head())).clipped_sum(drawn(3, 12), targets, clip=1.0, loss=loss)


class Answer:
    def __init__(self, logits):
        self.logits = logits


def test_an_output_with_logits_is_taken_by_them():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = head()

        def forward(self, x):
            return Answer(self.inner(x))

    assert_exact(shaken(Wrapped()), drawn(4, 12), labels(4))


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return torch.einsum("bti,io->bto", self.inner(x), self.weight)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(6, 6, batch_first=True, **options)

    def forward(self, x):
        every, last = self.layer(x)
        last = last[0] if isinstance(last, tuple) else last
        return every + last[-1].unsqueeze(1)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 6)

    def forward(self, x):
        return self.layer(x, torch.tanh(x))


WITHOUT_RULE = {
    "einsum": (Einsum, ("vmap", "loop")),
    "bilinear": (Pairs, ("vmap", "loop")),
    "lstm": (lambda: Recurrent(nn.LSTM), ("loop",)),
    "gru of two layers": (lambda: Recurrent(nn.GRU, num_layers=2), ("loop",)),
}


@pytest.mark.parametrize("case", WITHOUT_RULE)
def test_what_has_no_rule_is_exact_by_the_fallback(case):
    build, ways = WITHOUT_RULE[case]
    model = shaken(Tokens(build(), nn.Linear(6, 6)))
    with pytest.raises(UserError, match=r"fallback='vmap'"):
        ClippingEngine(model).clipped_sum(drawn(4, 5, 6), labels(4), clip=1.0)
    for way in ways:
        assert_exact(model, drawn(4, 5, 6), labels(4), fallback=way)
    assert not any("forward" in vars(module) for module in model.modules())


class Swapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 6)

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


def test_a_fallback_that_cannot_tell_samples_apart_is_refused():
    model = shaken(Tokens(Swapped(), nn.Linear(6, 6)))
    with pytest.raises(UserError, match="keep the batch first"):
        ClippingEngine(model, fallback="loop").clipped_sum(drawn(4, 5, 6), labels(4), clip=1.0)
    model = shaken(Tokens(Recurrent(nn.LSTM)))
    with pytest.raises(UserError, match=r"'body.0.layer'.*fallback='loop'"):
        ClippingEngine(model, fallback="vmap").clipped_sum(drawn(4, 5, 6), labels(4), clip=1.0)
    with pytest.raises(UserError, match="'jacobian'"):
        ClippingEngine(model, fallback="jacobian")


def test_dropout_is_drawn_for_every_sample_by_itself():
    """Norm and sum are of the same draw; without dropout=True it is refused."""
    model = shaken(Tokens(nn.Dropout(0.5), nn.Linear(6, 6), Attention(dropout=0.3))).train()
    images, wanted = drawn(1, 5, 6).expand(6, 5, 6), torch.zeros(6, dtype=torch.long)
    with pytest.raises(UserError, match=r"'body.0'"):
        ClippingEngine(model)
    engine = ClippingEngine(model, dropout=True)
    torch.manual_seed(0)
    found = engine.clipped_sum(images, wanted, clip=1e-3)
    assert len(set(found.norms.tolist())) == 6  # six draws for six equal images
    for _ in range(6):
        alone = engine.clipped_sum(images[:1], wanted[:1], clip=1e-3)
        squares = [float(g.square().sum()) for g in alone.gradients.values()]
        assert sum(squares) ** 0.5 == pytest.approx(1e-3, rel=1e-9)


class TurnedAbout(nn.Module):
    """Linear layers on (time, batch, features): right only while nobody clips by rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("places", [3, 4, 5])
def test_as_many_places_as_samples_do_not_pass_for_the_batch(places):
    model = shaken(Tokens(TurnedAbout()))
    with pytest.raises(UserError):
        ClippingEngine(model).clipped_sum(drawn(places, places, 6), labels(places), clip=1.0)


class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_a_network_that_mixes_samples_is_refused():
    model = shaken(Tokens(nn.Linear(6, 6), Mean()))
    with pytest.raises(UserError, match="one sample at a time"):
        ClippingEngine(model).clipped_sum(drawn(4, 5, 6), labels(4), clip=1.0)


class Everything(nn.Module):
    """Each kind of use once, for weights of channels."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 6)
        self.up = nn.ConvTranspose1d(6, 8, 2)
        self.volume = nn.Conv3d(1, 2, 2)
        self.both = nn.Parameter(torch.ones(2, 6, 8))
        self.norm = nn.LayerNorm(6)
        self.token = nn.Parameter(torch.ones(1, 1, 6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids):
        x = torch.tanh(self.up(self.words(ids).mT)).mT
        x = x + self.volume(x.unflatten(-1, (2, 4)).unsqueeze(1)).mean((1, 2, 3, 4)).view(-1, 1, 1)
        x = F.linear(x, self.both[0]) + F.linear(x, self.both[1])
        x = torch.cat([self.token.expand(len(x), -1, -1), self.norm(x)], dim=1)
        return self.head(x.mean(1))


@pytest.mark.parametrize("whole", [True, False])
def test_scaled_geometry_reaches_every_kind_of_use(whole):
    model = shaken(Everything())
    ids = torch.randint(0, 4, (5, 6), generator=torch.Generator().manual_seed(2))
    weights = {
        name: (2.0,) if whole else tuple(1.0 + 0.5 * i for i in range(len(p)))
        for name, p in model.named_parameters()
    }
    geometry = Geometry(weights)
    for units in (None, torch.tensor([0, 1, 1, 2, 0])):
        found = ClippingEngine(model).clipped_sum(
            ids, labels(5), clip=1.5, geometry=geometry, units=units
        )
        expected = one_at_a_time(model, ids, labels(5), clip=1.5, geometry=geometry, units=units)
        for name, part in expected.items():
            assert float((found.gradients[name] - part).abs().max()) < 1e-10, name


class ReadTwice(nn.Module):
    """A linear layer that is called on places, on vectors and by its matrix alone."""

    def __init__(self, ways):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.ways = ways

    def forward(self, x):
        x = torch.tanh(self.first(x)) if "places" in self.ways else x
        x = x.mean(1)
        x = torch.tanh(self.first(x)) if "vectors" in self.ways else x
        return F.linear(x, self.first.weight) if "matrix" in self.ways else x


@pytest.mark.parametrize(
    "ways", ["vectors", "places", "matrix", "places vectors", "places vectors matrix"]
)
def test_weights_of_inputs_reach_a_linear_layer_however_it_is_read(ways):
    model = shaken(ReadTwice(ways))
    x = drawn(5, 3, 6)
    geometry = Geometry(
        {"first.weight": tuple(1.0 + 0.2 * i for i in range(6))},
        {"first.weight": tuple(0.5 + 0.4 * i for i in range(6))},
    )
    for units in (None, torch.tensor([0, 1, 1, 2, 0])):
        for clip in (0.05, 100.0):
            found = ClippingEngine(model).clipped_sum(
                x, labels(5), clip=clip, geometry=geometry, units=units
            )
            expected = one_at_a_time(model, x, labels(5), clip=clip, geometry=geometry, units=units)
            for name, part in expected.items():
                assert float((found.gradients[name] - part).abs().max()) < 1e-10, name
    back = geometry.undo(geometry.scaled({"first.weight": torch.ones(6, 6)}))
    torch.testing.assert_close(back["first.weight"], torch.ones(6, 6))


def test_weights_of_inputs_are_for_the_matrix_of_a_linear_layer_only():
    model = Everything()
    for name, many, why in (
        ("words.weight", 6, "no linear layer"),
        ("head.bias", 1, "no linear layer"),
        ("head.weight", 5, "5 weights of inputs"),
        ("nothing", 1, "not a parameter"),
    ):
        with pytest.raises(ValueError, match=why):
            Geometry(inputs={name: (2.0,) * many}).check(model)


def test_a_network_with_shared_modules_and_tied_weights_gets_its_own_weights_back():
    shared = nn.Linear(6, 6)
    model = Tokens(shared, nn.Tanh(), shared, nn.Linear(6, 6))
    model.body[3].weight = shared.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = [id(p) for p in model.parameters()]
    ClippingEngine(model).clipped_sum(drawn(4, 5, 6).float(), labels(4), clip=1.0)
    assert [id(p) for p in model.parameters()] == ids
    assert model.body[0].weight is model.body[3].weight
    assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())
