"""What every data set is, once it is read: three splits of square RGB images with groups."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECORD_GROUPS = "record"
"""`ImageData.group_name` of a set that does not say which images belong to one person."""


@dataclass(frozen=True)
class Images:
    """One split.

    Guaranteed after construction: all arrays have the same length, `pixels` is uint8 of shape
    (N, H, W, 3) and may be memory-mapped and read-only, `labels` and `groups` are int64,
    `masks`, where there are any, is bool of shape (N, H, W). Labels are one class number an image,
    or, where an image may show several findings, a 0 or 1 for each: (N, findings).
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64]
    ids: NDArray[np.str_]
    masks: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        for name in ("pixels", "labels", "groups", "ids"):
            if not isinstance(getattr(self, name), np.ndarray):
                kind = type(getattr(self, name)).__name__
                raise ValueError(f"{name} must be a numpy array, not {kind}")
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
            first = len(shape) == 4 and shape[1] == 3
            raise ValueError(
                f"pixels must be uint8 of shape (N, H, W, 3), not {self.pixels.dtype} of "
                f"shape {shape}" + (": colors come last" if first else "")
            )
        if len(self.pixels) and shape[1] != shape[2]:
            raise ValueError(f"pixels must be square images, not {shape[1]}×{shape[2]}")
        n = len(self.pixels)
        several = self.labels.ndim == 2 and self.labels.dtype == np.int64 and len(self.labels) == n
        if several and not np.isin(self.labels, (0, 1)).all():
            raise ValueError("labels of several findings must be 0 or 1 for each of them")
        one_each = ({} if several else {"labels": self.labels}) | {"groups": self.groups}
        for name, array in one_each.items():
            if array.dtype != np.int64 or array.shape != (n,):
                raise ValueError(
                    f"{name} must be int64 of shape ({n},), one for each image, not {array.dtype} "
                    f"of shape {array.shape}"
                )
        if self.ids.dtype.kind != "U" or self.ids.shape != (n,):
            raise ValueError(
                f"ids must be strings of shape ({n},), one for each image, not {self.ids.dtype} of "
                f"shape {self.ids.shape}"
            )
        if self.masks is not None and (
            self.masks.dtype != np.bool_ or self.masks.shape != self.pixels.shape[:3]
        ):
            raise ValueError("masks must be bool, one value per pixel of every image")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        """Whether an image may show several findings at once, or none."""
        return self.labels.ndim == 2

    def of_class(self, number: int) -> NDArray[np.bool_]:
        """Which images are of this class, or show this finding."""
        if self.multi_label:
            return self.labels[:, number] == 1
        return self.labels == number

    def per_class(self, classes: int) -> NDArray[np.int64]:
        """How many images there are of each class, or show each finding."""
        if self.multi_label:
            return self.labels.sum(axis=0)
        return np.bincount(self.labels, minlength=classes)

    def take(self, indices: NDArray[Any]) -> Images:
        """The images at `indices`, in that order, as arrays of their own."""
        return Images(
            pixels=np.asarray(self.pixels[indices]),
            labels=self.labels[indices],
            groups=self.groups[indices],
            ids=self.ids[indices],
            masks=None if self.masks is None else np.asarray(self.masks[indices]),
        )


@dataclass(frozen=True)
class ImageData:
    """A data set: what its classes and groups are called, and its three splits.

    A group id means the same group in every split, so a group that stood in two of them would be
    seen; none does in what this package reads unless its own documentation says so.
    """

    name: str
    classes: tuple[str, ...]
    group_name: str
    license: str
    train: Images
    validation: Images
    test: Images
    ungrouped_images: int = 0
    """Images of which the source names no group, in a set that has groups: each has its own id."""
    groups_declared: bool = False
    """Whether somebody declared by hand that no two images show one person."""

    def __post_init__(self) -> None:
        for name in ("name", "group_name", "license"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, not {getattr(self, name)!r}")
        if not self.group_name.strip():
            raise ValueError("group_name must say what a group is, or 'record' if nobody knows")
        if type(self.ungrouped_images) is not int or self.ungrouped_images < 0:
            raise ValueError(
                f"ungrouped_images must be a number of images, not {self.ungrouped_images!r}"
            )
        if not isinstance(self.classes, tuple) or len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes must be a tuple of different names, not {self.classes!r}")
        for split, images in self.splits():
            if not isinstance(images, Images):
                raise ValueError(f"{split} must be Images, not {type(images).__name__}")
            if images.multi_label:
                if images.labels.shape[1] != len(self.classes) or not self.train.multi_label:
                    raise ValueError(
                        f"the labels of {self.name}/{split} are of {images.labels.shape[1]}"
                        f" findings, and the set has {len(self.classes)}; all splits have labels of"
                        " one kind"
                    )
                continue
            if self.train.multi_label:
                raise ValueError(f"the labels of {self.name}/{split} are not of several findings")
            if len(images) and not 0 <= images.labels.min() <= images.labels.max() < len(
                self.classes
            ):
                raise ValueError(
                    f"a label of {self.name}/{split} names none of the {len(self.classes)} classes:"
                    f" labels run from {images.labels.min()} to {images.labels.max()}"
                )

        if self.groups_declared:
            groups = np.concatenate([images.groups for _, images in self.splits()])
            if len(np.unique(groups)) < len(groups):
                raise ValueError(
                    "groups_declared says that no two images show one person, and some images have"
                    " one number in groups: leave it out"
                )

    @cached_property
    def digest(self) -> str:
        """A fingerprint of every image of every split, its label, group and name."""
        state = hashlib.sha256()
        for split, images in self.splits():
            state.update(f"{split} {images.pixels.shape}\n".encode())
            for array in (images.pixels, images.labels, images.groups, images.ids):
                for start in range(0, len(array), 1024):  # images may lie on disk
                    state.update(np.ascontiguousarray(array[start : start + 1024]).tobytes())
        return state.hexdigest()

    def splits(self) -> tuple[tuple[str, Images], ...]:
        """The three splits with their names, in the order they are always shown."""
        return (("train", self.train), ("validation", self.validation), ("test", self.test))

    @property
    def multi_label(self) -> bool:
        """Whether the classes are findings, of which an image may show several, or none."""
        return self.train.multi_label

    @property
    def groups_known(self) -> bool:
        """Whether images with one group id are all images of one person, picture or lesion."""
        return self.group_name != RECORD_GROUPS and not self.ungrouped_images

    @property
    def shared_groups(self) -> int:
        """How many groups of the training images also stand in validation or test."""
        if self.group_name == RECORD_GROUPS:
            return 0
        public = np.concatenate([self.validation.groups, self.test.groups])
        return len(np.intersect1d(self.train.groups, public))
