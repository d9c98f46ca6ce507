"""Random small networks of every supported layer, for property tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

CLASSES = 3


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


class Places(nn.Module):
    """Pixels as places of a transformer, beside a class token, and back."""

    def __init__(self, channels, kind):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}.get(kind, nn.Identity)(channels)
        self.mix = nn.Linear(channels, channels, bias=kind != "rms")
        self.attention = None
        if kind == "attention":
            self.attention = nn.MultiheadAttention(channels, 1, batch_first=True)

    def forward(self, x):
        places = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).mT], dim=1)
        places = self.mix(self.norm(places)) + self.shift
        if self.attention is not None:
            places = places + self.attention(places, places, places)[0]
        return x + (places[:, 1:] * places[:, :1]).mT.reshape(x.shape)


class Scale(nn.Module):
    """Layer scale, and a weight that is made anew in every pass."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.table = nn.Parameter(torch.ones(channels, channels, 1, 1))

    def forward(self, x):
        normed = self.table / (1 + self.table.square().sum(1, keepdim=True))
        return self.gamma.view(1, -1, 1, 1) * F.conv2d(x, normed)


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
        kinds = ["conv", "conv", "residual", "gate", "twice", "places", "scale", "transposed"]
        kind = draw(st.sampled_from(kinds))
        if kind == "conv":
            layers.append(draw(convolutions(channels)))
            channels = layers[-1].out_channels
        elif kind == "residual":
            layers.append(Residual(draw(convolutions(channels, keeps_shape=True))))
        elif kind == "gate":
            layers.append(Gate(channels))
        elif kind == "places":
            inside = draw(st.sampled_from(["plain", "layer", "rms", "attention"]))
            layers.append(Places(channels, inside))
        elif kind == "scale":
            layers.append(Scale(channels))
        elif kind == "transposed":
            stride = draw(st.sampled_from([1, 2]))
            kernel, outputs = draw(st.sampled_from([1, 3])), draw(st.integers(2, 5))
            layers.append(
                nn.ConvTranspose2d(channels, outputs, kernel, stride, output_padding=stride - 1)
            )
            channels = outputs
        else:
            layers.append(Twice(draw(convolutions(channels, keeps_shape=True))))
        after = draw(st.sampled_from(["none", "group", "frozen"]))
        if after == "group":
            # torch refuses a group of one number, which a map of one pixel may come to.
            divisors = [g for g in range(1, channels) if channels % g == 0] or [1]
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
