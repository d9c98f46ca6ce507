"""Results on disk: one small file a finished cell, one a test set; tables are drawn from them.

A cell's file is written whole or not at all, under the cell's own name, so that nobody can repeat,
halve or overwrite a result, and results of several machines are merged by copying files.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcal.errors import UserError
from xcal.federation.files import write_bytes
from xcal.studies.checks import (
    Damaged,
    check_against_set,
    check_cell,
    check_set,
    no_result,
    no_set,
    read_file,
)
from xcal.studies.grid import Cell, Grid
from xcal.studies.packing import pack, unpack

__all__ = [
    "COLUMNS",
    "ROAD_STEP",
    "CellResult",
    "Merged",
    "Results",
    "TestSet",
    "group_numbers",
    "merge",
    "pack",
    "rank_images",
    "table_row",
    "table_text",
    "unpack",
]

ROAD_STEP = 1e-4  # scores of images are kept to this


def rank_images(probabilities: NDArray[Any]) -> NDArray[Any]:
    """Images (N, classes) ranked by each class's probability, from 0, equal ones alike.

    All that AUROC needs, and exactly. Of two classes one ranking says it all.
    """
    scores = np.nan_to_num(np.asarray(probabilities, float))
    columns = scores.T[1:] if scores.shape[1] == 2 else scores.T
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in columns])
    return ranks.astype(np.uint16 if len(scores) < 2**16 else np.uint32)


@dataclass(frozen=True)
class TestSet:
    """Public facts of a test set that every cell on it shares."""

    __test__ = False  # pytest: this is no test

    name: str
    classes: tuple[str, ...]
    group_name: str
    labels: NDArray[np.int64]
    groups: NDArray[np.int64]  # 0 … G−1

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "classes": list(self.classes),
            "group_name": self.group_name,
            "labels": pack(self.labels.astype(np.uint8)),
            "groups": pack(self.groups.astype(np.int32)),
        }

    @staticmethod
    def of(values: Mapping[str, Any]) -> TestSet:
        return TestSet(
            values["name"],
            tuple(values["classes"]),
            values["group_name"],
            unpack(values["labels"]).astype(np.int64),
            unpack(values["groups"]).astype(np.int64),
        )


@dataclass(frozen=True)
class CellResult:
    """A cell's file, read back."""

    values: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.values["id"])

    @property
    def keys(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.values["keys"]
        return found

    @property
    def finished(self) -> bool:
        """False where training diverged: that is a result too, but there is nothing to measure."""
        return self.values["status"] == "finished"

    @property
    def predicted(self) -> NDArray[np.int64]:
        return unpack(self.values["predicted"]).astype(np.int64)

    @property
    def ranks(self) -> NDArray[np.int64] | None:
        """`rank_images` of the test images, (rankings, N); cells of before do not have it."""
        if "ranks" not in self.values:
            return None
        return unpack(self.values["ranks"]).astype(np.int64).reshape(-1, len(self.predicted))

    @property
    def road_images(self) -> NDArray[np.int64]:
        """Which test images were explained."""
        return unpack(self.values["road_images"]).astype(np.int64)

    @property
    def road_scores(self) -> NDArray[np.float64]:
        return unpack(self.values["road_scores"]).astype(np.float64) * ROAD_STEP


class Results:
    """A folder of results, such as `results/` in a checkout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sets: dict[str, TestSet] = {}

    def _cell_path(self, scale: str, cell: str) -> Path:
        return self.path / "cells" / scale / f"{cell}.json"

    def has(self, cell: Cell) -> bool:
        return self._cell_path(cell.scale, cell.id).exists()

    def write(self, scale: str, values: Mapping[str, Any], test: TestSet) -> None:
        """The set first: a cell's file never names a set that is not there."""
        write_atomically(self._set_path(test.name), test.as_dict())
        self._sets.pop(test.name, None)
        write_atomically(self._cell_path(scale, str(values["id"])), values)

    def write_failed(self, scale: str, values: Mapping[str, Any]) -> None:
        write_atomically(self._cell_path(scale, str(values["id"])), values)

    def read(self, scale: str, cell: str) -> CellResult | None:
        """A cell's result; a file that is none is refused in a sentence."""
        path = self._cell_path(scale, cell)
        return self._read(scale, path) if path.exists() else None

    def _read(self, scale: str, path: Path) -> CellResult:
        try:
            values = read_file(path)
            check_cell(values, scale, path.stem)
            if values["status"] == "finished":
                test = self.test_set(values["test_set"])
                check_against_set(values, test.labels, len(test.classes))
        except Damaged as why:
            raise no_result(path, why) from None
        return CellResult(values)

    def all(self, scale: str) -> list[CellResult]:
        folder = self.path / "cells" / scale
        return [self._read(scale, p) for p in sorted(folder.glob("*.json"))]

    def scales(self) -> list[str]:
        folder = self.path / "cells"
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    def _set_path(self, name: str) -> Path:
        return self.path / "sets" / f"{name}.json"

    def has_set(self, name: str) -> bool:
        return self._set_path(name).exists()

    def test_set(self, name: str) -> TestSet:
        """Read once: every cell on it is held against it."""
        if name not in self._sets:
            path = self._set_path(name)
            try:
                values = read_file(path)
                check_set(values, name)
            except Damaged as why:
                raise no_set(path, why) from None
            self._sets[name] = TestSet.of(values)
        return self._sets[name]

    def of_grid(self, grid: Grid) -> dict[Cell, CellResult]:
        """What is there of a grid."""
        found = {cell: self.read(cell.scale, cell.id) for cell in grid.cells}
        return {cell: result for cell, result in found.items() if result is not None}

    def table_path(self, study: str, scale: str) -> Path:
        return self.path / f"{study}-{scale}.csv"

    def write_table(self, grid: Grid) -> Path:
        """The grid's finished cells as CSV, one row each: a view of the cells' files."""
        path = self.table_path(grid.study, grid.scale)
        write_text(path, table_text(self.of_grid(grid)))
        return path


COLUMNS = (
    "data network method epsilon variant seed status macro_f1 road road_logit_percent auroc"
    " epsilon_target epsilon_paper delta unit mean_sigma share_spent steps halted"
    " clients partition rounds batch lr clip seconds commit versions command id"
).split()


def table_row(cell: Cell, result: CellResult) -> dict[str, Any]:
    values, keys = result.values, result.keys
    clients = values.get("clients", [])
    shares = [c["share_spent"] for c in clients if c["share_spent"] is not None]
    row = {name: values.get(name, keys.get(name)) for name in COLUMNS}
    row |= {
        "network": cell.network,
        "epsilon": cell.epsilon,
        "variant": cell.variant,
        "clients": keys.get("clients", 1),
        "rounds": keys["rounds"],
        "share_spent": round(max(shares), 6) if shares else None,
        "steps": sum(c["steps"] for c in clients),
        "halted": sum(bool(c["halted"]) for c in clients),
        "versions": " ".join(f"{k}={v}" for k, v in values["versions"].items()),
    }
    return row


def table_text(results: Mapping[Cell, CellResult]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    rows = [table_row(cell, result) for cell, result in results.items()]

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        epsilon = row["epsilon"]
        return (
            row["data"],
            row["network"],
            float("inf") if epsilon is None else epsilon,
            row["method"],
            row["variant"],
            row["seed"],
        )

    for row in sorted(rows, key=place):
        writer.writerow({k: "" if v is None else v for k, v in row.items()})
    return stream.getvalue()


def write_atomically(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}.") from error
    write_bytes(path, text.encode())


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
            into.write_failed(scale, result.values)
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


def group_numbers(groups: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups counted from 0: whose they are does not matter here."""
    return np.unique(np.asarray(groups), return_inverse=True)[1].astype(np.int64)
