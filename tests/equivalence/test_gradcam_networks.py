"""Every network keeps the contract that explanations rest on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from support import image_scores
from xcal.explain.gradcam import forward_with_features, gradcam_maps
from xcal.explain.signal import SignalSettings
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18
from xcal.models.small import small

torch.set_num_threads(1)


@pytest.mark.parametrize("build", [small, resnet18, efficientnet_b0])
def test_closed_form_equals_autograd_on_real_networks(build: Callable[..., nn.Module]) -> None:
    network = build(4, seed=0).double()
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()
    assert network.head_layer is not None
    closed = gradcam_maps(network, images)
    network.eval()
    with torch.no_grad():
        logits, features = forward_with_features(network, images)
    scores = image_scores(network, images, logits, features, SignalSettings())
    network.head_layer = None
    torch.testing.assert_close(closed, gradcam_maps(network, images), rtol=1e-10, atol=1e-14)
    general = image_scores(network, images, logits, features, SignalSettings())
    torch.testing.assert_close(scores, general, rtol=0, atol=1e-10)
