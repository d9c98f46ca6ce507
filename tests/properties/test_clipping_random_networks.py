"""Random small networks of every supported layer: the engine equals one unit at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from xcal.training.clipping import ClippingEngine
from xcal.training.clipping.reference import norm, one_at_a_time, unit_gradients

CLASSES = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Residual(nn.Module):
    """x + body(x), where the body keeps the shape."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels):
        super().__init__()
        self.down = nn.Conv2d(channels, 2, 1)
        self.up = nn.Conv2d(2, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(torch.tanh(self.down(x.mean((2, 3), keepdim=True)))))


class Twice(nn.Module):
    """One module used twice, the second time on a smaller map."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(F.avg_pool2d(self.body(x), 2, ceil_mode=True))


@st.composite
def convolutions(draw, channels, keeps_shape=False):
    groups = draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == 0]))
    kernel = draw(st.sampled_from([1, 3, 5]))
    dilation = draw(st.sampled_from([1, 2]))
    bias = draw(st.booleans())
    if keeps_shape:
        return nn.Conv2d(
            channels, channels, kernel, dilation=dilation, padding="same", groups=groups, bias=bias
        )
    outputs = groups * draw(st.integers(1, 3)) if groups > 1 else draw(st.integers(2, 9))
    return nn.Conv2d(
        channels,
        outputs,
        (kernel, draw(st.sampled_from([1, 2, 3]))),
        stride=draw(st.sampled_from([1, 2, (2, 1)])),
        padding=(dilation * (kernel // 2), draw(st.integers(0, 2)) + dilation),
        dilation=dilation,
        groups=groups,
        bias=bias,
        padding_mode=draw(st.sampled_from(["zeros", "zeros", "replicate"])),
    )


def frozen_norm(channels, generator):
    layer = nn.BatchNorm2d(channels).eval()
    layer.running_mean.normal_(generator=generator)
    layer.running_var.uniform_(0.5, 2.0, generator=generator)
    return layer


@st.composite
def networks(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    channels, layers = 2, []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv", "conv", "residual", "gate", "twice"]))
        if kind == "conv":
            layers.append(draw(convolutions(channels)))
            channels = layers[-1].out_channels
        elif kind == "residual":
            layers.append(Residual(draw(convolutions(channels, keeps_shape=True))))
        elif kind == "gate":
            layers.append(Gate(channels))
        else:
            layers.append(Twice(draw(convolutions(channels, keeps_shape=True))))
        after = draw(st.sampled_from(["none", "group", "frozen"]))
        if after == "group":
            divisors = [g for g in range(1, channels + 1) if channels % g == 0]
            layers.append(nn.GroupNorm(draw(st.sampled_from(divisors)), channels))
        elif after == "frozen":
            layers.append(frozen_norm(channels, generator))
        layers.append(draw(st.sampled_from([nn.Identity(), nn.Tanh(), nn.SiLU(inplace=True)])))
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    if draw(st.booleans()):
        layers += [nn.Linear(4 * channels, 6, bias=draw(st.booleans())), nn.Softplus()]
        layers += [nn.Linear(6, CLASSES)]
    else:
        layers += [nn.Linear(4 * channels, CLASSES)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
            parameter.requires_grad_(draw(st.integers(0, 5)) > 0)  # some are frozen
    model[-1].weight.requires_grad_(True)
    return model


@settings(max_examples=40, deadline=None)
@given(
    model=networks(),
    count=st.integers(1, 6),
    pixels=st.integers(5, 11),
    grouped=st.booleans(),
    chunk=st.sampled_from([2, 100]),
    quantile=st.floats(0.0, 1.2),
    seed=st.integers(0, 2**31),
)
def test_equals_one_unit_at_a_time(model, count, pixels, grouped, chunk, quantile, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 2, pixels, pixels, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    units = torch.randint(0, 3, (count,), generator=generator) if grouped else None
    lengths = [norm(g) for g in unit_gradients(model, images, labels, units)]
    clip = max(lengths) * quantile + 1e-3
    engine = ClippingEngine(model, chunk=chunk)
    found = engine.clipped_sum(images, labels, clip=clip, units=units)
    expected = one_at_a_time(model, images, labels, clip=clip, units=units)
    assert set(found.gradients) == set(expected)
    scale = max([1.0, *(float(part.abs().max()) for part in expected.values())])
    for name, part in expected.items():
        assert found.gradients[name].shape == part.shape
        assert float((found.gradients[name] - part).abs().max()) <= 1e-10 * scale, name
    for length, measured in zip(lengths, found.norms.tolist(), strict=True):
        assert abs(length - measured) <= 1e-10 * max(1.0, length)


@settings(max_examples=40, deadline=None)
@given(
    model=networks(),
    mean=st.sampled_from([0.0, 10.0, 1e3]),
    spread=st.sampled_from([1e-2, 1.0, 1e2]),
    clip=st.floats(1e-3, 10.0),
    seed=st.integers(0, 2**31),
)
def test_in_float32_no_unit_exceeds_the_clip(model, mean, spread, clip, seed):
    model = model.float()
    generator = torch.Generator().manual_seed(seed)
    images = mean + spread * torch.randn(5, 2, 9, 9, generator=generator)
    labels = torch.randint(0, CLASSES, (5,), generator=generator)
    units = torch.tensor([0, 1, 1, 2, 3])
    engine = ClippingEngine(model)
    for unit in range(4):
        own = units == unit
        alone = engine.clipped_sum(
            images[own], labels[own], clip=clip, units=torch.zeros(int(own.sum()), dtype=torch.long)
        )
        assert norm(alone.gradients) <= clip
