"""What a file among the results must be before anything is read from it, copied or called done.

Results come from other machines and other people: a file is taken for what it says only where it
is a cell's result in form, and its name is the digest of its keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcal.studies.grid import Cell
from xcal.studies.store import STATUSES, Damaged, unpack

SET_NAME = re.compile(r"[^./\\\0][^/\\\0]*")  # it becomes a file's name: no folder, no way up
BY_CLIENT = ("share", "sigma")
ROUNDS = ("f1", "road", "seconds", *BY_CLIENT)


def check_cell(values: Mapping[str, Any], scale: str, name: str) -> None:
    """Refuse what is not the result of the cell that the file's name says."""
    for key, kind in (("id", str), ("keys", dict), ("status", str), ("explained", int)):
        _has(values, key, kind)
    for key, kind in (("versions", dict), ("command", str), ("commit", str)):
        _has(values, key, kind)
    _check_keys(values["keys"])
    # The name is a digest: it leads nowhere else, and nobody's result takes another's place.
    if not values["id"] == name == Cell(scale, values["keys"], values["explained"]).id:
        raise Damaged("its id is not the digest of its keys")
    if values["status"] not in STATUSES:
        raise Damaged(f"its status is neither {' nor '.join(STATUSES)}")
    if values["status"] == "finished":
        _check_measured(values)


def _check_keys(keys: Mapping[str, Any]) -> None:
    for key in ("method", "data", "network"):
        _has(keys, key, str)
    for key in ("seed", "rounds", "pixels"):
        _has(keys, key, int)
    _may_have(keys, "clients", int)
    for key in ("partition", "unit", "head_reads"):
        _may_have(keys, key, str)
    _number_or_none(keys, "epsilon")


def _check_measured(values: Mapping[str, Any]) -> None:
    if not isinstance(values.get("macro_f1"), (int, float)):
        raise Damaged("'macro_f1' is not a number")
    for key in ("road", "auroc", "road_logit_percent", "mean_sigma", "seconds_in_all"):
        _number_or_none(values, key)
    check_set_name(_has(values, "test_set", str))
    for client in _has(values, "clients", list):
        _is(client, dict, "a client", "an object")
        for key in ("share_spent", "steps", "halted", "units"):
            if not _is_number_or_none(client.get(key, "")):
                raise Damaged(f"a client's {key!r} is missing or no number")
    _check_rounds(_has(values, "rounds", dict))
    for entry in values.get("maps") or []:
        _check_map(_is(entry, dict, "a map", "an object"))


def _check_rounds(rounds: Mapping[str, Any]) -> None:
    """As many entries of each measurement as there were rounds, those of clients in lists."""
    lines = [_has(rounds, key, list) for key in ROUNDS]
    entries = [v for line in lines for each in line for v in _flat(each)]
    if len({len(line) for line in lines}) != 1 or not all(map(_is_number_or_none, entries)):
        raise Damaged("'rounds' are not numbers, as many of each as there were rounds")
    if not all(isinstance(each, list) for key in BY_CLIENT for each in rounds[key]):
        raise Damaged("'rounds' has not a list of the clients' numbers for each round")


def _flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number_or_none(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _check_map(entry: Mapping[str, Any]) -> None:
    for key in ("image", "predicted"):
        _has(entry, key, int)
    _has(entry, "confidence", float)
    shape = _has(entry, "shape", list)
    if not all(isinstance(side, int) for side in shape) or len(shape) != 2:
        raise Damaged("a map's 'shape' is not two numbers")
    if len(unpacked(entry, "map")) != shape[0] * shape[1]:
        raise Damaged("a map is not of its shape")


def check_against_set(values: Mapping[str, Any], labels: NDArray[np.int64], classes: int) -> None:
    """Refuse answers that are not those to the test set's images."""
    predicted = unpacked(values, "predicted")
    if len(predicted) != len(labels) or not _within(predicted, classes):
        raise Damaged("'predicted' has not one known class for each test image")
    if "ranks" in values:
        ranks = unpacked(values, "ranks")
        if len(ranks) not in (len(labels), classes * len(labels)):
            raise Damaged("'ranks' has not one rank for each test image and class")
    if values.get("road") is not None:
        images, scores = unpacked(values, "road_images"), unpacked(values, "road_scores")
        if len(images) != len(scores) or not _within(images, len(labels)):
            raise Damaged("'road_scores' are not those of 'road_images', images of the test set")


def check_set(values: Mapping[str, Any], name: str) -> None:
    if check_set_name(_has(values, "name", str)) != name:
        raise Damaged("it has another's name")
    _has(values, "group_name", str)
    classes = _has(values, "classes", list)
    labels, groups = unpacked(values, "labels"), unpacked(values, "groups")
    known = _within(labels, len(classes)) and _within(groups, len(groups))
    if len(labels) != len(groups) or len(labels) == 0 or not known:
        raise Damaged("'labels' and 'groups' are not a known class and a group for each image")


def check_set_name(name: str) -> str:
    if not SET_NAME.fullmatch(name):
        raise Damaged(f"{name!r} is not a test set's name")
    return name


def unpacked(values: Mapping[str, Any], key: str) -> NDArray[Any]:
    """A packed array of whole numbers."""
    try:
        found = unpack(_has(values, key, str))
    except (ValueError, TypeError, SyntaxError, OverflowError, MemoryError):
        raise Damaged(f"{key!r} cannot be unpacked") from None
    if found.dtype.kind not in "iu":
        raise Damaged(f"{key!r} holds no whole numbers")
    return found


def _within(values: NDArray[Any], count: int) -> bool:
    return len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < count)


def _has(values: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in values:
        raise Damaged(f"it has no {key!r}")
    return _is(values[key], kind, repr(key), _KINDS[kind])


_KINDS = {str: "text", dict: "an object", list: "a list", int: "a whole number", float: "a number"}


def _is(value: Any, kind: type, what: str, said: str) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (kind in (int, float) and isinstance(value, bool)):
        raise Damaged(f"{what} is not {said}")
    return value


def _may_have(values: Mapping[str, Any], key: str, kind: type) -> None:
    if key in values:
        _has(values, key, kind)


def _number_or_none(values: Mapping[str, Any], key: str) -> None:
    if values.get(key) is not None:
        _has(values, key, float)
