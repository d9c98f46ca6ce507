"""`xcal data show`: what a set holds and how many people stand behind it, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xcal.data.catalog import load
from xcal.data.image_store import DatasetInfo, SplitCounts, count_split, read_info
from xcal.data.images import RECORD_GROUPS, ImageData


@dataclass(frozen=True)
class Description:
    """A set as `data show` tells it: the images, and for an imported set where they came from."""

    data: ImageData
    splits: dict[str, SplitCounts]
    info: DatasetInfo | None
    """None for a set that is made on the spot."""

    def to_text(self) -> str:
        """Some lines for people."""
        side = self.data.train.pixels.shape[1]
        lines = [
            f"{self.data.name}: {side}×{side} pixels, {len(self.data.classes)} classes, "
            f"license: {self.data.license}",
            self.people(),
            "",
        ]
        width = max(12, *(len(name) for name in self.data.classes))
        heading = "".join(f"{split:>12}" for split in self.splits)
        lines.append(" " * width + heading)
        for number, name in enumerate(self.data.classes):
            counts = "".join(f"{c.per_class[number]:>12,}" for c in self.splits.values())
            lines.append(f"{name:<{width}}" + counts)
        lines.append(
            f"{'images':<{width}}" + "".join(f"{c.images:>12,}" for c in self.splits.values())
        )
        if self.data.group_name != RECORD_GROUPS:
            groups = "".join(f"{c.groups:>12,}" for c in self.splits.values())
            largest = "".join(f"{c.largest_group:>12,}" for c in self.splits.values())
            lines.append(f"{self.data.group_name + 's':<{width}}" + groups)
            lines.append(f"{'most of one':<{width}}" + largest)
        if self.info is not None:
            sizes = ", ".join(f"{size} ({n:,})" for size, n in self.info.original_sizes[:3])
            lines += ["", f"from {self.info.source} ({self.info.kind}, task: {self.info.task})"]
            lines.append(f"original sizes: {sizes}")
            lines += list(self.info.notes)
            if self.info.skipped:
                lines.append(
                    f"{len(self.info.skipped):,} files could not be used and were left out."
                )
        return "\n".join(lines)

    def people(self) -> str:
        """How many people or pictures stand behind the training images: what `unit` means here."""
        train = self.splits["train"]
        group = self.data.group_name
        if group == RECORD_GROUPS:
            return (
                f"The {train.images:,} training images are not known to belong together: a "
                "guarantee per image is one per person only if nobody has two (if so, import with "
                "--one-image-per-person), and unit = 'group' is refused."
            )
        if self.data.groups_declared:
            return (
                f"The {train.images:,} training images are of as many {group}s: declared by hand "
                "at the import, as nothing in the set says so."
            )
        if not self.data.groups_known:
            return (
                f"{self.data.ungrouped_images:,} images name no {group}: a guarantee per image "
                f"(unit = record) does not cover a {group}, and unit = 'group' is refused."
            )
        if train.largest_group == 1 and not self.data.shared_groups:
            return (
                f"The {train.images:,} training images come from as many {group}s: a guarantee per "
                f"image and one per {group} (unit = group) are the same here."
            )
        covers = "unit = group does."
        if self.data.shared_groups:
            covers = (
                f"unit = 'group' is refused, as {self.data.shared_groups:,} of them also stand in "
                f"validation or test (split by {group}, or import with --all-train)."
            )
        return (
            f"The {train.images:,} training images come from {train.groups:,} {group}s, up to "
            f"{train.largest_group:,} from one: a guarantee per image (unit = record) does not "
            f"cover a {group}; {covers}"
        )


def show_dataset(
    name: str, *, pixels: int | None = None, seed: int = 0, **options: Any
) -> Description:
    """Open the set called `name` and count what it holds."""
    data = load(name, pixels=pixels, seed=seed, **options)
    made_here = name == "smear" or ":" in name
    return Description(
        data=data,
        splits={
            split: count_split(images.labels, images.groups, len(data.classes))
            for split, images in data.splits()
        },
        info=None if made_here else read_info(name, pixels),
    )
