"""`fix`: batch norms out, everything else as it was, and a list of what changed."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from xcal.dp.clipping import ClippingEngine
from xcal.dp.fix import fix
from xcal.errors import UserError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), self.norm, nn.ReLU(), nn.Conv2d(8, 8, 3), self.norm
        )
        self.instance = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.flat = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.flat(self.instance(self.body(x)).mean((2, 3))))


def images(count=3):
    return torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def test_batch_norms_become_group_norms_and_the_given_network_stays():
    model = Net()
    with torch.no_grad():
        model.norm.weight.copy_(torch.arange(8.0))
    fixed, changes = fix(model)
    assert [(c.module, c.was, c.now) for c in changes] == [
        ("norm", "BatchNorm2d", "GroupNorm(2, 8)"),
        ("instance", "InstanceNorm2d", "InstanceNorm2d without running statistics"),
        ("flat", "BatchNorm1d", "GroupNorm(1, 8)"),
    ]
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert fixed.norm is fixed.body[1] is fixed.body[4]
    assert torch.equal(fixed.norm.weight, torch.arange(8.0))
    found = ClippingEngine(fixed.train()).clipped_sum(images(), torch.arange(3), clip=1.0)
    assert not found.dropped.any()
    assert fix(fixed)[1] == []


def test_frozen_statistics_stay_frozen():
    model = Net()
    model(images(16))  # statistics of public images
    model.instance = nn.Identity()
    expected = model.eval()(images())
    fixed, changes = fix(model.train(), batch_norm="frozen")
    assert [c.module for c in changes] == ["norm", "flat"]
    fixed.train()
    torch.testing.assert_close(fixed(images()), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(fixed)).train()(images()), expected)
    ClippingEngine(fixed).clipped_sum(images(), torch.arange(3), clip=1.0)
    torch.testing.assert_close(fixed(images()), expected)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm2d(6), (3, 6, 4, 4)), (nn.BatchNorm1d(6), (3, 6))]
)
def test_a_frozen_norm_has_the_values_and_gradients_of_batch_norm(norm, shape, trained):
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    for parameter in norm.parameters():
        parameter.requires_grad_(trained)
    frozen = fix(norm, batch_norm="frozen")[0].train()
    batch, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
    with torch.no_grad():
        alone = frozen(batch)
    assert torch.equal(alone, norm.eval()(batch))
    ours, theirs = frozen(batch), norm.eval()(batch)
    torch.testing.assert_close(ours, theirs)
    reads = [batch, *norm.parameters()] if trained else [batch]
    mine = [batch, *frozen.parameters()] if trained else [batch]
    for a, b in zip(
        torch.autograd.grad(ours, mine, gradient),
        torch.autograd.grad(theirs, reads, gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_frozen_norm_keeps_the_precision_of_what_it_is_given():
    norm = nn.BatchNorm2d(6).requires_grad_(False)
    frozen = fix(norm, batch_norm="frozen")[0]
    batch = torch.randn(3, 6, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(frozen(batch), norm.eval()(batch))


def test_a_network_that_is_a_batch_norm():
    assert isinstance(fix(nn.BatchNorm2d(4))[0], nn.GroupNorm)


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("layer", "way"),
    [
        (nn.BatchNorm2d(4), "layer"),
        (nn.BatchNorm2d(4, track_running_stats=False), "frozen"),
        (nn.LazyBatchNorm2d(), "group"),
        (WithActivation(4), "group"),
    ],
)
def test_what_cannot_be_fixed_is_refused(layer, way):
    with pytest.raises(UserError):
        fix(nn.Sequential(layer), batch_norm=way)
