"""Committed results: every file is checked to the last entry, and other machines' are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reproduce.checks import check_against_set, check_cell, check_set
from xcal.errors import UserError
from xcal.studies import store
from xcal.studies.store import ROAD_STEP, CellResult, TestSet, pack, table_text, unpack

__all__ = [
    "ROAD_STEP",
    "CellResult",
    "Merged",
    "Results",
    "TestSet",
    "merge",
    "pack",
    "table_text",
    "unpack",
]


class Results(store.Results):
    """A folder of results of several scales, such as `results/` in a checkout."""

    def check_cell(self, values: Mapping[str, Any], scale: str, name: str) -> None:
        check_cell(values, scale, name)

    def check_against_set(self, result: CellResult, test: TestSet) -> None:
        check_against_set(result.values, test.labels, len(test.classes))

    def check_set(self, values: Mapping[str, Any], name: str) -> None:
        check_set(values, name)

    def has_set(self, name: str) -> bool:
        return self._set_path(name).exists()

    def scales(self) -> list[str]:
        folder = self.path / "cells"
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    def all(self, scale: str) -> list[CellResult]:
        folder = self.path / "cells" / scale
        return [self._read(scale, p) for p in sorted(folder.glob("*.json"))]


@dataclass(frozen=True)
class Merged:
    added: int
    known: int
    different: tuple[str, ...]  # cells that both sides have, with unlike results


def merge(into: Results, others: Iterable[Results]) -> Merged:
    """Take over the cells that others have and we have not. Ours are never overwritten.

    All that is there is looked at before anything is copied: one file that is no result, and
    nothing changes.
    """
    new, known, different = dict[tuple[str, str], tuple[Results, CellResult]](), 0, list[str]()
    sets = dict[str, Results]()  # whose description of a test set counts: ours, or the first
    for other in others:
        if not other.scales():
            raise UserError(f"{other.path} holds no results: name a folder with cells in it.")
        for scale in other.scales():
            for result in other.all(scale):
                ours = into.read(scale, result.id)
                if ours is None and (scale, result.id) in new:  # of a folder named before
                    ours = new[scale, result.id][1]
                if ours is None:
                    new[scale, result.id] = (other, result)
                    if result.finished:
                        name = str(result.values["test_set"])
                        _same_set(
                            sets.setdefault(name, into if into.has_set(name) else other),
                            other,
                            name,
                        )
                else:
                    known += 1
                    if _outcome(ours) != _outcome(result):
                        different.append(result.id)
    for (scale, _), (other, result) in new.items():
        if result.finished:
            into.write(scale, result.values, other.test_set(result.values["test_set"]))
        else:
            into.write(scale, result.values, None)
    return Merged(len(new), known, tuple(different))


def _same_set(ours: Results, other: Results, name: str) -> None:
    """Refuse cells measured on other images than ours of that name: they compare nothing."""
    if ours is not other and ours.test_set(name).as_dict() != other.test_set(name).as_dict():
        raise UserError(
            f"The test set {name} of {other.path} is not the one of {ours.path}: their cells were"
            " measured on other images and cannot be merged."
        )


def _outcome(result: CellResult) -> tuple[Any, ...]:
    return tuple(result.values.get(k) for k in ("status", "macro_f1", "road", "predicted"))
