"""Results on disk: one small file a finished cell, one a test set; tables are drawn from them.

A cell's file is written whole or not at all, under the cell's own name, so that nobody can repeat,
halve or overwrite a result, and results of several machines are merged by copying files.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcal.errors import UserError
from xcal.federation.files import write_bytes
from xcal.first_edition import RENAMED, names_of_today
from xcal.studies.grid import Cell, Grid

ROAD_STEP = 1e-4  # scores of images are kept to this
STATUSES = ("finished", "diverged")


class Damaged(Exception):
    """Why a file is not what it should be, in a few words."""


def pack(values: NDArray[Any]) -> str:
    """An integer array as text: its type, then its compressed bytes."""
    small = np.ascontiguousarray(values)
    text = base64.b64encode(zlib.compress(small.tobytes(), 9)).decode("ascii")
    return f"{small.dtype.str}:{text}"


def unpack(text: str) -> NDArray[Any]:
    """What `pack` was given, flat; ValueError of any other text."""
    kind, _, body = text.partition(":")
    try:
        plain = zlib.decompress(base64.b64decode(body, validate=True))
        return np.frombuffer(plain, dtype=np.dtype(kind))
    except (zlib.error, TypeError, SyntaxError) as error:
        raise ValueError("no packed array") from error


def rank_images(probabilities: NDArray[Any]) -> NDArray[Any]:
    """Images (N, classes) ranked by each class's probability, from 0, equal ones alike.

    All that AUROC needs, and exactly. Of two classes one ranking says it all.
    """
    scores = np.nan_to_num(np.asarray(probabilities, float))
    columns = scores.T[1:] if scores.shape[1] == 2 else scores.T
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in columns])
    return ranks.astype(np.uint16 if len(scores) < 2**16 else np.uint32)


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
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

    @property
    def road_matched_scores(self) -> NDArray[np.float64]:
        """ROAD of the same images after temperature scaling on public validation images."""
        return unpack(self.values["road_matched_scores"]).astype(np.float64) * ROAD_STEP


class Results:
    """A folder of results, such as `results/` in a checkout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sets: dict[str, TestSet] = {}
        self._cells: dict[Path, tuple[tuple[int, int], CellResult]] = {}  # as long as files stay

    def _cell_path(self, scale: str, cell: str) -> Path:
        return self.path / "cells" / scale / f"{cell}.json"

    def has(self, cell: Cell) -> bool:
        return self._cell_path(cell.scale, cell.id).exists()

    def write(self, scale: str, values: Mapping[str, Any], test: TestSet | None) -> None:
        """The set first: a cell's file never names a set that is not there."""
        if test is not None:  # training that diverged was not measured on any
            write_atomically(self._set_path(test.name), test.as_dict())
            self._sets.pop(test.name, None)
        write_atomically(self._cell_path(scale, str(values["id"])), values)

    def read(self, scale: str, cell: str) -> CellResult | None:
        """A cell's result; a file that is none is refused in a sentence."""
        path = self._cell_path(scale, cell)
        return self._read(scale, path) if path.exists() else None

    def _read(self, scale: str, path: Path) -> CellResult:
        about = path.stat()
        state = (about.st_mtime_ns, about.st_size)
        if path not in self._cells or self._cells[path][0] != state:
            self._cells[path] = (state, self._checked(scale, path))
        return self._cells[path][1]

    def _checked(self, scale: str, path: Path) -> CellResult:
        try:
            values = read_object(path)
            # The name is a digest: nobody's result takes another's place.
            if not values["id"] == path.stem == Cell(scale, values["keys"], values["explained"]).id:
                raise Damaged("its id is not the digest of its keys")
            self.check_cell(values, scale, path.stem)
            result = CellResult(values)
            if result.finished:
                self.check_against_set(result, self.test_set(values["test_set"]))
        except (Damaged, LookupError, TypeError, ValueError) as why:
            raise UserError(
                f"{path} is not a cell's result ({why}): remove it, and the study runs the cell"
                " again."
            ) from None
        return result

    def check_cell(self, values: Mapping[str, Any], scale: str, name: str) -> None:
        """Raises `Damaged` where the values are not those of a cell."""
        if values["status"] not in STATUSES:
            raise Damaged(f"its status is neither {' nor '.join(STATUSES)}")

    def check_against_set(self, result: CellResult, test: TestSet) -> None:
        """Raises `Damaged` where answers are not those to the test set's images."""
        answers = result.predicted
        if len(answers) != len(test.labels) or not 0 <= answers.max() < len(test.classes):
            raise Damaged("'predicted' has not one known class for each test image")

    def _set_path(self, name: str) -> Path:
        return self.path / "sets" / f"{name}.json"

    def check_set(self, values: Mapping[str, Any], name: str) -> None:
        """Raises `Damaged` where the values describe no test set of this name."""
        if values["name"] != name:
            raise Damaged("it has another's name")

    def test_set(self, name: str) -> TestSet:
        """Read once: every cell on it is held against it."""
        if name not in self._sets:
            path = self._set_path(name)
            try:
                values = read_object(path)
                self.check_set(values, name)
                self._sets[name] = TestSet.of(values)
            except (Damaged, LookupError, TypeError, ValueError) as why:
                raise UserError(
                    f"{path} describes no test set ({why}): remove it together with the cells"
                    " measured on it, and the study runs them again."
                ) from None
        return self._sets[name]

    def of_grid(self, grid: Grid) -> dict[Cell, CellResult]:
        """What is there of a grid."""
        found = {cell: self.read(cell.scale, cell.id) for cell in grid.cells}
        return {cell: result for cell, result in found.items() if result is not None}

    def table_path(self, study: str, scale: str) -> Path:
        return self.path / (f"{study}-{scale}.csv" if scale else f"{study}.csv")

    def write_table(self, grid: Grid) -> Path:
        """The grid's finished cells as CSV, one row each: a view of the cells' files."""
        path = self.table_path(grid.study, grid.scale)
        write_text(path, table_text(self.of_grid(grid)))
        return path


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged("it is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise Damaged("it is not JSON") from None
    if not isinstance(values, dict):
        raise Damaged("the file is not an object")
    return values


COLUMNS = (
    "data network method epsilon variant seed status macro_f1 road road_logit_percent auroc"
    " epsilon_target epsilon_paper delta unit mean_sigma share_spent steps halted"
    " clients partition rounds batch lr clip seconds commit versions command id"
).split()


def table_row(cell: Cell, result: CellResult) -> dict[str, Any]:
    values = result.values
    clients = values.get("clients", [])
    shares = [c["share_spent"] for c in clients if c["share_spent"] is not None]
    keys = names_of_today(result.keys)
    row = {name: values.get(name, keys.get(RENAMED.get(name, name))) for name in COLUMNS}
    row |= {
        "method": cell.method,
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

    def setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
        epsilon = math.inf if row["epsilon"] is None else row["epsilon"]
        named = (row[name] for name in ("method", "variant", "seed"))
        return (row["data"], row["network"], epsilon, *named)

    for row in sorted(rows, key=setting):
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


def group_numbers(groups: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups counted from 0: whose they are does not matter here."""
    return np.unique(np.asarray(groups), return_inverse=True)[1].astype(np.int64)
