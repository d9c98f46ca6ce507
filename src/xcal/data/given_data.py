"""Data sets that are handed over as objects: torch Datasets or arrays become `ImageData`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from xcal.data.decode import as_rgb, squared
from xcal.data.images import RECORD_GROUPS, ImageData, Images
from xcal.data.listing import SPLITS
from xcal.dp.sampling import ids_in_order, plain_ids
from xcal.errors import UserError

_SHAPES = (
    "a PIL image, uint8 (height, width[, 3]), a uint8 tensor (1 or 3, height, width), or a float"
    " tensor of that shape in [0, 1]"
)


def image_data(
    data: Any,
    *,
    classes: Sequence[str] | int | None = None,
    groups: Any = None,
    pixels: int | None = None,
) -> ImageData:
    """`(train, validation, test)` as a data set of square images, `pixels` a side.

    A split is a torch Dataset of (image, label) or (image, label, group), a tuple of arrays
    (images, labels) or (images, labels, groups), or None where there is none. `groups` names whose
    the training images are, or those of all three splits. `pixels` may be left out where images are
    square and of one size. The classes are not counted in the labels, which are private: without
    names the training set's own `classes` are taken.
    """
    if isinstance(data, ImageData):
        return data
    if not isinstance(data, tuple | list) or len(data) != 3:
        raise UserError(
            "data is given as (train, validation, test), each a Dataset, a tuple of arrays"
            " (images, labels) or None."
        )
    names = _class_names(classes if classes is not None else getattr(data[0], "classes", None))
    if groups is not None and not (isinstance(groups, tuple) and len(groups) == 3):
        groups = (groups, None, None)
    found = [
        _split(split, name, pixels, None if groups is None else groups[i], len(names))
        for i, (split, name) in enumerate(zip(data, SPLITS, strict=True))
    ]
    side = pixels or _one_side([pictures for pictures, _, _ in found])
    grouped = found[0][2] is not None
    numbers = _numbers([ids for _, _, ids in found], [len(labels) for _, labels, _ in found])
    none = np.zeros((0, len(names)), np.int64) if found[0][1].ndim == 2 else found[0][1][:0]
    splits = [
        Images(
            np.stack(pictures) if pictures else np.zeros((0, side, side, 3), np.uint8),
            labels if pictures else none,
            own,
            np.array([f"{name}-{i}" for i in range(len(labels))], dtype=np.str_),
        )
        for (pictures, labels, _), own, name in zip(found, numbers, SPLITS, strict=True)
    ]
    if not len(splits[0]):
        raise UserError("data has no training images: its first part is empty.")
    group_name = "group" if grouped else RECORD_GROUPS
    try:
        return ImageData(
            "given data", names, group_name, "not stated", splits[0], splits[1], splits[2]
        )
    except ValueError as problem:
        raise UserError(f"data cannot be used: {problem}.") from None


def _class_names(classes: Any) -> tuple[str, ...]:
    if isinstance(classes, int) and not isinstance(classes, bool):
        classes = [str(i) for i in range(classes)]
    if classes is None or isinstance(classes, str) or len(classes) < 2:
        raise UserError(
            "data as objects needs classes, two names or more or their number: they are not counted"
            " in the labels, which are private."
        )
    if len(set(map(str, classes))) < len(classes):
        raise UserError("classes has one name twice: give different ones.")
    return tuple(map(str, classes))


def _split(
    split: Any, name: str, pixels: int | None, groups: Any, classes: int
) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64], list[Any] | None]:
    """Pictures, labels and ids of groups; None where nobody names any."""
    items = _items(split, name)
    pictures, found = [], []
    labels: list[int | list[int]] = []
    for i, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise UserError(
                f"Item {i} of {name} is no (image, label) or (image, label, group): give one."
            )
        try:
            pictures.append(_square(item[0], pixels))
            labels.append(_label(item[1], classes))
        except ValueError as problem:
            raise UserError(f"Item {i} of {name} {problem}.") from None
        if type(labels[-1]) is not type(labels[0]):
            raise UserError(
                f"Item {i} of {name} has one class for a label and others have several findings:"
                " all must have labels of one kind."
            )
        if isinstance(labels[-1], int) and not 0 <= labels[-1] < classes:
            raise UserError(
                f"Item {i} of {name} has a label that names none of the {classes} classes: they"
                " count from 0."
            )
        found += [item[2]] if len(item) == 3 else []
    if found and len(found) != len(pictures):
        raise UserError(f"Some items of {name} name a group and some do not: all must, or none.")
    if groups is not None:
        try:
            found = ids_in_order(groups)
        except ValueError as problem:
            raise UserError(f"groups {problem}.") from None
        if len(found) != len(pictures):
            raise UserError(
                f"groups has {len(found)} ids for {len(pictures)} images of {name}: give one each."
            )
    return pictures, np.array(labels, dtype=np.int64), found or None


def _items(split: Any, name: str) -> Any:
    if split is None:
        return ()
    if isinstance(split, tuple):
        lengths = {len(part) for part in split if part is not None}
        if len(split) not in (2, 3) or len(lengths) != 1:
            raise UserError(
                f"{name} is given as arrays (images, labels) or (images, labels, groups), all of"
                " one length."
            )
        return zip(*split, strict=True)
    if not hasattr(split, "__getitem__") or not hasattr(split, "__len__"):
        raise UserError(
            f"{name} is a {type(split).__name__}: give a Dataset with a length, arrays, or None."
        )
    return (split[i] for i in range(len(split)))


def _square(image: Any, pixels: int | None) -> NDArray[np.uint8]:
    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
        if image.ndim == 3 and image.shape[0] in (1, 3):
            image = image.transpose(1, 2, 0)
    if isinstance(image, np.ndarray):
        if image.dtype.kind == "f":
            if not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
                raise ValueError(
                    "has values outside of [0, 1]: give images before they are normalized, which"
                    " is done here with public constants"
                )
            image = np.round(image * 255).astype(np.uint8)
        if image.ndim == 3 and image.shape[2] == 1:
            image = image[:, :, 0]
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.size == 0:
            raise ValueError(
                f"has an image of {image.dtype} and shape {image.shape}: give {_SHAPES}"
            )
        if image.ndim == 3 and image.shape[2] != 3:
            raise ValueError(f"has an image of shape {image.shape}: give {_SHAPES}")
        image = Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise ValueError(f"has a {type(image).__name__} for an image: give {_SHAPES}")
    if pixels is None:
        if image.width != image.height:
            raise ValueError(
                f"is {image.width}×{image.height} pixels: give pixels, the side that all images are"
                " brought to"
            )
        pixels = image.width
    return squared(as_rgb(image), pixels)


def _label(label: Any, classes: int) -> int | list[int]:
    """A class number; or a 0 or 1 for each of several findings."""
    if isinstance(label, Tensor):
        label = label.detach().cpu().numpy()
    if not isinstance(label, np.ndarray | list | tuple) or np.ndim(label) == 0 or classes < 2:
        return _whole(label)
    values = [_whole(one) for one in np.asarray(label).reshape(-1)]
    if len(values) == 1:  # a class number in a tensor of its own
        return values[0]
    if len(values) != classes or not set(values) <= {0, 1}:
        raise ValueError(
            f"has {len(values)} numbers for a label: give the number of a class, or a 0 or 1 for"
            f" each of the {classes} findings that classes names"
        )
    return values


def _whole(label: Any) -> int:
    try:
        number = int(label)
        if number == label:
            return number
    except (TypeError, ValueError):
        pass
    raise ValueError(f"has the label {label!r}, which is no whole number")


def _one_side(splits: list[list[NDArray[np.uint8]]]) -> int:
    sides = {picture.shape[0] for pictures in splits for picture in pictures}
    if len(sides) > 1:
        raise UserError("The images differ in size: give pixels, the side they are brought to.")
    return sides.pop() if sides else 0


def _numbers(ids: list[list[Any] | None], lengths: list[int]) -> list[NDArray[np.int64]]:
    """A number for each group, the same in every split; an image without one has its own."""
    try:
        plain = iter(plain_ids(one for found in ids for one in found or ()))
    except ValueError as problem:
        raise UserError(f"groups {problem}; or give no groups.") from None
    known: dict[Any, int] = {}
    numbers = [
        None if found is None else [known.setdefault(next(plain), len(known)) for _ in found]
        for found in ids
    ]
    first, made = len(known), []
    for own, length in zip(numbers, lengths, strict=True):
        if own is None:
            own = list(range(first, first + length))
            first += length
        made.append(np.array(own, dtype=np.int64))
    return made
