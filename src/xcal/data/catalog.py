"""Data sets by name, and what they hold in words and numbers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xcal.config import nearest
from xcal.data.image_store import DatasetInfo, SplitCounts, count_split, open_dataset, read_info
from xcal.data.images import RECORD_GROUPS, ImageData, Images
from xcal.data.synthetic import smear
from xcal.errors import UserError
from xcal.plugins import error_words, load_object

__all__ = ["RECORD_GROUPS", "ImageData", "Images", "load"]


def load(name: str, *, pixels: int | None = None, seed: int = 0, **options: Any) -> ImageData:
    """The data set called `name`, at `pixels` a side (None: the set's own default).

    `smear` is drawn from `seed`. Another plain name is that of an imported set, which is what it
    is, whatever the seed. `package.module:name` is a function of your own: it is called
    with `pixels`, `seed` and the options, and returns an `ImageData`. Which code runs is thus
    decided by who runs it; never pass a name that came over the network.
    """
    if not _made_here(name):
        if options:
            raise UserError(
                f"The imported data set {name!r} has no option {next(iter(options))!r}."
            )
        return open_dataset(name, pixels)
    given = {"seed": seed, **options} | ({} if pixels is None else {"pixels": pixels})
    function = smear if name == "smear" else load_object(name, "data set")
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UserError(
            f"{name!r} is not a function that makes a data set: {WHAT_IT_MUST_GIVE}."
        ) from None
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for option in given:
        if option not in known and not takes_any:
            hint = nearest(option, tuple(known)) or f" It knows {', '.join(known)}."
            raise UserError(f"The data set {name!r} has no option {option!r}.{hint}")
    if name == "smear":
        return _smear(**given)
    try:
        data = function(**given)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # code of the user's own
        raise UserError(
            f"The function {name!r} made no data set ({error_words(error)}): {WHAT_IT_MUST_GIVE}."
        ) from error
    return _checked(data, name, pixels)


WHAT_IT_MUST_GIVE = "docs/data.md says what such a function must give"
_OF_A_HOSPITAL = ("csv", "folders")  # layouts that published sets do not come in


def is_public(name: str) -> bool:
    """Whether a set's validation and test images may be taken for public without asking.

    Embedded and published sets are; of a set of one's own somebody says so. A function's set is
    its author's word.
    """
    return _made_here(name) or read_info(name).kind not in _OF_A_HOSPITAL


def _made_here(name: str) -> bool:
    return name == "smear" or ":" in name


# Drawing takes some seconds, and several runs of one process want the same images.
_smear = lru_cache(maxsize=2)(smear)


def _checked(data: object, name: str, pixels: int | None) -> ImageData:
    """What a function of the user's own returned, if it is a data set of what was asked for."""
    wrong = None
    if not isinstance(data, ImageData):
        wrong = f"{type(data).__name__} instead of ImageData"
    elif len(data.classes) < 2:
        count = f"{len(data.classes)} class{'' if data.classes else 'es'}"
        wrong = f"a data set of {count}, and to tell apart there must be two or more"
    else:
        for split, images in data.splits():
            side = images.pixels.shape[1]
            wanted = pixels or data.train.pixels.shape[1]
            if len(images) and side != wanted:
                wrong = f"{split} images of {side} pixels a side, and {wanted} were asked for"
                wrong += " (pixels)" if pixels else " by those of training"
                break
    if wrong is not None:
        raise UserError(f"The function {name!r} returned {wrong}: {WHAT_IT_MUST_GIVE}.")
    assert isinstance(data, ImageData)
    return data


# --- `xcal data show` -----------------------------------------------------------------------------


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
        counts = self.splits.values()
        rows = [
            (name, [c.per_class[i] for c in counts]) for i, name in enumerate(self.data.classes)
        ]
        rows.append(("images", [c.images for c in counts]))
        if self.data.group_name != RECORD_GROUPS:
            rows.append((f"{self.data.group_name}s", [c.groups for c in counts]))
            rows.append(("most of one", [c.largest_group for c in counts]))
        lines.append(" " * width + "".join(f"{split:>12}" for split in self.splits))
        lines += [f"{name:<{width}}" + "".join(f"{n:>12,}" for n in row) for name, row in rows]
        if self.info is not None:
            sizes = ", ".join(f"{size} ({n:,})" for size, n in self.info.original_sizes[:3])
            lines += ["", f"from {self.info.source} ({self.info.kind}, task: {self.info.task})"]
            lines.append(f"original sizes: {sizes}")
            lines += list(self.info.notes)
            if skipped := self.info.skipped:
                lines.append(f"{len(skipped):,} files could not be used and were left out.")
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


def show_dataset(name: str, *, pixels: int | None = None, **options: Any) -> Description:
    """Open the set called `name` and count what it holds."""
    data = load(name, pixels=pixels, **options)
    splits = {
        split: count_split(images.labels, images.groups, len(data.classes))
        for split, images in data.splits()
    }
    return Description(data, splits, None if _made_here(name) else read_info(name, pixels))
