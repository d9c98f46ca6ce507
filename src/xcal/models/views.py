"""A network that reads the mean of an image's views: turned and mirrored, or moved a little.

A cell or a mole looks as well turned by 90 degrees. What a published network makes of the turns
differs, and the mean of it varies less from image to image of one class. The mean is a function of
one image, so it costs no privacy, and a backbone that does not train is asked once per view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcal.errors import UserError
from xcal.models.backbone import segments_to_map, trains

SIXTEENTHS = 16


@dataclass(frozen=True)
class FixedView:
    """One way to show images: mirrored, turned, moved right or cut closer by sixteenths."""

    mirrored: bool = False
    turns: int = 0
    right: int = 0
    closer: int = 0

    def of(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) in this view; what a shift uncovers repeats the edge."""
        shown = _turned(x.flip(3) if self.mirrored else x, self.turns)
        height, width = x.shape[2:]
        if self.right:
            columns = torch.arange(width, device=x.device) - self.right * max(
                1, width // SIXTEENTHS
            )
            shown = shown[..., columns.clamp(0, width - 1)]
        if self.closer:
            edge = self.closer * max(1, height // SIXTEENTHS)
            inside = shown[..., edge : height - edge, edge : width - edge]
            shown = F.interpolate(inside, size=(height, width), mode="bilinear")
        return shown.contiguous()

    def undo(self, maps: Tensor) -> Tensor:
        """Maps of such images as they lie on the plain ones: turned and mirrored back.

        A sixteenth of the side, by which views are moved or cut, is at most half a cell of the
        maps that are explained here, and stays.
        """
        back = _turned(maps, -self.turns % 4)
        return back.flip(3) if self.mirrored else back


def _turned(x: Tensor, turns: int) -> Tensor:
    """By so many quarter turns, of transposes and flips alone: exports know these."""
    if turns == 2:
        return x.flip(2, 3)
    if turns in (1, 3):
        return x.transpose(2, 3).flip(2 if turns == 1 else 3)
    return x


POOLED: dict[str, tuple[FixedView, ...]] = {
    # No upper side: the turns of the square, or all of its symmetries at twice the passes.
    "turns": tuple(FixedView(turns=turns) for turns in range(4)),
    "mirrored-turns": tuple(FixedView(m, turns) for m in (False, True) for turns in range(4)),
    # An upper side: mirrored, moved, closer.
    "shifts": (
        FixedView(),
        FixedView(mirrored=True),
        FixedView(right=1),
        FixedView(right=-1),
        FixedView(closer=1),
    ),
}
"""The views that `pool_views` names, the plain one first."""


class OverViews(nn.Module):
    """A network whose explained map is the mean of its maps over an image's views.

    Each view's map is turned back before the mean, so that its cells lie where they lie in the
    image; the rest of the network, which follows the map, runs once. Averages over cells commute
    with turns: the head reads the mean over the views of what it would read of each.
    """

    cam_layer: str = "map"

    def __init__(self, network: nn.Module, kind: str) -> None:
        super().__init__()
        if kind not in POOLED:
            raise UserError(f"pool_views is {kind!r}: choose none, {' or '.join(POOLED)}")
        self.network = network
        self.map = nn.Identity()
        self.views = POOLED[kind]
        head = getattr(network, "head_layer", None)
        self.head_layer = None if head is None else f"network.{head}"
        self._before = segments_to_map(network)
        if not self._before:
            raise UserError(
                "pool_views needs a network that is a sequence up to its cam_layer, which"
                f" {type(network).__name__} does not say it is: leave pool_views out, or give it a"
                " method segments() of which one ends at the cam_layer."
            )

    def forward(self, images: Tensor, view: int | None = None) -> Tensor:
        """Logits by all views, or by the one of this number alone."""
        x = images
        for segment in self.segments(view):
            x = segment(x)
        return x

    def segments(self, view: int | None = None) -> list[nn.Module]:
        """Modules that, one after the other, are the network.

        What is frozen and leads is one of them, and holds one view's maps at a time.
        """
        views = self.views if view is None else (self.views[view],)
        parts = list(self.network.segments())  # type: ignore[operator]
        looking, after = parts[: self._before], parts[self._before :]
        frozen = 0
        while frozen < len(looking) and not trains(looking[frozen]):
            frozen += 1
        if frozen == len(looking):
            return [_Pooled(views, looking), self.map, *after]
        return [
            _Shown(views, looking[:frozen]),
            *(_EachView([part]) for part in looking[frozen:]),
            _Merged(views),
            self.map,
            *after,
        ]


class _Pooled(nn.Module):
    """Images (N, 3, H, W) to the mean of their views' maps, one view after the other."""

    def __init__(self, views: Sequence[FixedView], parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.views = tuple(views)
        self.parts = nn.Sequential(*parts)

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor | None = None
        for view in self.views:
            turned = view.undo(self.parts(view.of(images)))
            total = turned if total is None else total + turned
        assert total is not None
        return total / len(self.views)


class _Shown(nn.Module):
    """Images (N, 3, H, W) to what the frozen parts make of each view, (N, V, C, H, W)."""

    def __init__(self, views: Sequence[FixedView], parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.views = tuple(views)
        self.parts = nn.Sequential(*parts)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.parts(view.of(images)) for view in self.views], dim=1)


class _EachView(nn.Module):
    """A part that trains, called once for each view: its gradients add up within the image."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.parts(one) for one in x.unbind(1)], dim=1)


class _Merged(nn.Module):
    """Maps (N, V, C, H, W) turned back and averaged."""

    def __init__(self, views: Sequence[FixedView]) -> None:
        super().__init__()
        self.views = tuple(views)

    def forward(self, x: Tensor) -> Tensor:
        back = [view.undo(one) for view, one in zip(self.views, x.unbind(1), strict=True)]
        return torch.stack(back).mean(0)
