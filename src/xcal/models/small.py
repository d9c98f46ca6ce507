"""`small`: a network for quick runs under strong noise.

Noise of a private step grows with the number of parameters and does not shrink with their use, so
the network has few; it has no BatchNorm, whose statistics would mix the units of a batch. A
private run also takes few steps, so what makes a small network learn in few steps counts: every
image is brought to mean 0 and deviation 1 on its own, and the last feature map starts sparse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from xcal.models.layers import laid_out

_LAST_SCALE = 4.0


class Small(nn.Module):
    """Standardized input, four 3×3 convolutions with GroupNorm, average pooling, one linear layer.

    The feature map that explanations use has an eighth of the image's side: 8×8 at 64 pixels.
    """

    cam_layer = "features"
    head_layer = "head"

    def __init__(self, classes: int, widths: tuple[int, int, int, int], groups: int) -> None:
        super().__init__()
        # One group a channel and nothing to learn: each channel of each image by itself.
        self.standardize = nn.GroupNorm(3, 3, affine=False)
        layers: list[nn.Module] = []
        before = 3
        for width, stride in zip(widths, (2, 2, 2, 1), strict=True):
            # No bias: the GroupNorm that follows has one.
            layers += [
                nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
                nn.GroupNorm(groups, width),
                nn.ReLU(),
            ]
            before = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.features(self.standardize(images))).flatten(1))
        return logits

    def segments(self) -> list[nn.Module]:
        """Modules that, one after the other, are the network."""
        pool = nn.Sequential(self.pool, nn.Flatten(1))
        return [self.standardize, self.features, pool, self.head]


def small(
    classes: int,
    *,
    seed: int | None = None,
    widths: tuple[int, int, int, int] = (16, 32, 32, 32),
    groups: int = 8,
) -> Small:
    """Build the network.

    With a seed the weights are a function of it alone (and of torch's version); without one they
    come from the operating system's entropy. The global random state is left as it was.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    network = laid_out(lambda: Small(classes, widths, groups))
    last_norm = [m for m in network.features if isinstance(m, nn.GroupNorm)][-1]
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                fan_in = module.weight[0].numel()
                module.weight.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
            elif isinstance(module, nn.GroupNorm) and module.affine:
                module.weight.fill_(1.0)
                module.bias.zero_()
            elif isinstance(module, nn.Linear):
                # Not zero: the class weights of the first explanations come from this layer.
                bound = 1.0 / math.sqrt(module.in_features)
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.zero_()
        # Only what stands out by 1.5 deviations passes the last ReLU. Pooled features then have a
        # small common mean, which otherwise outweighs what tells the classes apart.
        last_norm.weight.fill_(_LAST_SCALE)
        last_norm.bias.fill_(-1.5 * _LAST_SCALE)
    return network
