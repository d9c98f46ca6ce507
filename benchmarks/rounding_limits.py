"""How far floating point carries one unit past C: `python benchmarks/rounding_limits.py`.

Weights are constructed against the clipping engine, as a server would that knows the machine. What
one unit contributes by itself must stay below C. What one more unit does to the sum of the others
need not where passes are as large as the draw: libraries round differently for batches of other
sizes, and where nothing but rounding is left of what a network computes, the others' gradients
turn. In passes of one fixed size, which real sites have, they do not (SECURITY.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from xcal.config import SECURE_ROWS
from xcal.dp.clipping import ClippingEngine
from xcal.federation.folder import commit
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.small import small

RESULTS = Path(__file__).parent / "results" / "rounding-limits.md"
# Pairs of equal activations whose float32 inner products are rounded the same way, by a search.
COHERENT = {128: (3.947321891784668, 3.9571900367736816), 512: (1.8997864723205566,
            1.9089128971099854), 1280: (3.5492467880249023, 3.5775938034057617)}  # fmt: skip


def total(engine: ClippingEngine, images: Tensor) -> Tensor:
    labels = torch.zeros(len(images)).long()
    found = engine.clipped_sum(images, labels, clip=1.0)
    return torch.cat([g.double().flatten() for g in found.gradients.values()])


def moved(
    name: str, network: nn.Module, images: Tensor, counts: Sequence[int]
) -> Iterator[tuple[str, float]]:
    """What the n-th image does to the clipped sum of the n - 1 before it, in multiples of C."""
    for rows, passes in ((0, "as drawn"), (SECURE_ROWS, f"of {SECURE_ROWS}")):
        engine = ClippingEngine(network, rows=rows)
        for n in counts:
            by = float((total(engine, images[:n]) - total(engine, images[: n - 1])).norm())
            yield f"{name}, image {n} beside {n - 1}, passes {passes}", by


def by_itself(channels: int) -> float:
    """One image, one pointwise layer, two pixels whose contributions nearly cancel."""
    conv = nn.Conv2d(channels, channels, 1, bias=False)
    head = nn.Linear(2 * channels, 2, bias=False).requires_grad_(False)
    signs = torch.tensor([1.0, -1.0]).repeat(channels)
    with torch.no_grad():
        conv.weight.zero_()
        head.weight.copy_(torch.stack([signs, -signs]))
    image = torch.tensor(COHERENT[channels]).expand(1, channels, 1, 2).contiguous()
    return float(total(ClippingEngine(nn.Sequential(conv, nn.Flatten(), head)), image).norm())


def canceling_efficientnet() -> nn.Module:
    """Constants reach the last convolution, whose rows cancel them but for rounding."""
    network = efficientnet_b0(2, norm="group", trainable="head", seed=0)
    conv, norm = network.features[8][0], network.features[8][1]
    last = network.features[7][0].block[-1][1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(1 + torch.rand(320))
        c = last.bias.double()
        rows = torch.randn(50_000, 320) * 1e12
        for _ in range(3):
            rows = (rows.double() - (rows.double() @ c)[:, None] * c / (c @ c)).float()
        constant = last.bias.view(1, 320, 1, 1)

        def seen(batch: int) -> Tensor:
            x = constant.expand(batch, -1, 1, 1)
            parts = [torch.conv2d(x, w[:, :, None, None])[0, :, 0, 0] for w in rows.split(1280)]
            return torch.cat(parts)

        order = (seen(15) - seen(16)).argsort()
        chosen = torch.stack([order[:640], order[-640:]], 1).flatten()
        conv.weight.copy_(rows[chosen][:, :, None, None])
        norm.weight.fill_(1e3)
        norm.bias.zero_()
        network.classifier[1].weight.zero_()
        network.classifier[1].bias.zero_()
    return network


def canceling_small() -> nn.Module:
    """The head's rows cancel under the gradient of equal logits, but for rounding."""
    network = small(3, seed=0)
    with torch.no_grad():
        g = torch.zeros(1, 3).softmax(1)
        g[0, 0] -= 1
        w = torch.randn(3, 400_000) * 1e9
        w[0] = (w[1] + w[2]) / 2
        three, four = ((g.expand(n, 3).contiguous() @ w)[0] for n in (3, 4))
        turned = torch.minimum(three.abs(), four.abs()) * (three.sign() != four.sign())
        network.head.weight.copy_(w[:, turned.argsort()[-32:]])
        network.head.bias.zero_()
        norm = [m for m in network.features if isinstance(m, nn.GroupNorm)][-1]
        norm.weight.zero_()
        norm.bias.fill_(1e-30)
    return network


def many_equal_units(count: int) -> float:
    """The sum is a float32: what one more equal unit adds to many, at nine values of C."""
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    head.weight.requires_grad_(False)
    engine, images = ClippingEngine(nn.Sequential(nn.Flatten(), head)), torch.zeros(count, 1, 1, 1)
    labels, worst = torch.zeros(count).long(), 0.0
    for clip in torch.linspace(0.1, 0.35, 9).tolist():
        here = engine.clipped_sum(images, labels, clip=clip).gradients["1.bias"].double()
        less = engine.clipped_sum(images[:-1], labels[:-1], clip=clip).gradients["1.bias"].double()
        worst = max(worst, float((here - less).norm()) / clip)
    return worst


def main() -> None:
    torch.set_num_threads(1)
    lines = ["# What floating point does to the bound C", ""]
    lines.append(f"`python benchmarks/rounding_limits.py`, one thread, commit {commit()}.")
    lines += ["", "| what | moved, in C |", "|---|---:|"]
    for channels in COHERENT:
        lines.append(f"| one image by itself, {channels} channels | {by_itself(channels):.4f} |")
    for count in (16_385, 32_800, 65_600):
        lines.append(f"| one of {count:,} equal units | {many_equal_units(count):.4f} |")
    torch.manual_seed(0)
    network, images = canceling_efficientnet(), torch.rand(16, 3, 32, 32)
    found = list(moved("EfficientNet-B0", network, images, (15, 16)))
    torch.manual_seed(0)
    network = canceling_small()
    image = torch.rand(1, 3, 28, 28).expand(5, -1, -1, -1).contiguous()
    found += moved("`small`", network, image, (3, 4, 5))
    lines += [f"| {what} | {by:.2f} |" for what, by in found]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
