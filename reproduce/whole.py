"""A study as it stands: what it declares by itself, and all else that was ever asked of it.

Users add seeds, methods, values of ε, sets and networks. What is finished of it stays in the
study's table and report, whatever the next command asks for.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from reproduce.declared import BASELINE, STUDIES, Choice, declare
from reproduce.scales import WITHOUT_EPSILON, get_scale
from reproduce.store import CellResult, Results
from xcal.errors import UserError
from xcal.studies.grid import Cell, Grid, network_of

ONE_SEED = ("panel",)  # studies that look at seed 0 alone


def whole_grids(scale: str, results: Results) -> dict[str, Grid]:
    """Every study of a scale with the finished cells that belong to it."""
    grids = _by_default(scale)
    declared = {cell.id for grid in grids.values() for cell in grid.cells}
    found = results.all(scale)
    return {study: _widened(grid, declared, found, results) for study, grid in grids.items()}


def whole_grid(study: str, scale: str, results: Results) -> Grid:
    """One study with the finished cells that belong to it."""
    return whole_grids(scale, results)[study]


@cache
def _by_default(scale: str) -> Mapping[str, Grid]:
    return {study: declare(study, scale) for study in STUDIES}


def _widened(grid: Grid, declared: set[str], found: Iterable[CellResult], results: Results) -> Grid:
    """The grid and what it would declare of the others if it were asked for them.

    Studies share cells, so that alone would put each study's cells into the tables of the others.
    A cell beyond the grid belongs to it where it was asked for here, where no other study declares
    it either, or where it is what such a cell is compared with.
    """
    own = {cell.id for cell in grid.cells}
    plain_study = not any(cell.variant for cell in grid.cells)
    listed = _listed(grid, results)
    joined, others = list[Cell](), list[Cell]()
    for result in found:
        cell = None if result.id in own else _as_cell_of(grid.study, grid.scale, result)
        if cell is None:
            continue
        asked = result.id in listed or _made_by(result, grid.study)
        strange = result.id not in declared and (plain_study or cell.variant != "")
        (joined if asked or strange else others).append(cell)
    needed = {_beside(cell, method) for cell in joined for method in (cell.method, BASELINE)}
    joined += [cell for cell in others if _beside(cell, cell.method) in needed]
    return replace(grid, cells=(*grid.cells, *joined))


def _as_cell_of(study: str, scale: str, result: CellResult) -> Cell | None:
    """The cell under the name that the study gives it; None where it would never declare it."""
    keys = result.keys
    if study in ONE_SEED and keys["seed"] != 0:
        return None
    shapes = _shapes(
        study,
        scale,
        str(keys["data"]),
        network_of(keys),
        str(keys["method"]),
        None if keys["method"] in WITHOUT_EPSILON else keys.get("epsilon"),
    )
    variant = shapes.get(_shape(keys, int(result.values["explained"])))
    if variant is None:
        return None
    return Cell(scale, keys, int(result.values["explained"]), variant)


@cache
def _shapes(
    study: str, scale: str, data: str, network: str, method: str, epsilon: float | None
) -> Mapping[str, str]:
    """What the study declares of this place and method, whatever the seed: variants by shape.

    The study itself and not `declare`: a method of somebody else's own is named in their results,
    and is not to be loaded for that.
    """
    epsilons = None if epsilon is None else (epsilon,)
    try:
        grid = STUDIES[study](
            get_scale(scale), Choice((data,), (network,), (method,), epsilons, seeds=1)
        )
    except UserError:  # the scale has no such network, or nothing to run there
        return {}
    return {_shape(cell.keys, cell.explained): cell.variant for cell in grid.cells}


def _shape(keys: Mapping[str, Any], explained: int) -> str:
    return json.dumps([explained, {k: v for k, v in keys.items() if k != "seed"}], sort_keys=True)


def _beside(cell: Cell, method: str) -> tuple[Any, ...]:
    """Where a cell of this method stands that the given one is compared with."""
    return cell.keys["data"], cell.network, cell.epsilon, cell.seed, method


def _made_by(result: CellResult, study: str) -> bool:
    """Whether the command that made the cell names the study."""
    words = _words(str(result.values["command"]))
    return "study" in words and study in words[words.index("study") + 1 :]


@cache
def _words(command: str) -> Sequence[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _listed(grid: Grid, results: Results) -> set[str]:
    """The cells that the study's table has: once asked for, they stay in it."""
    try:
        with results.table_path(grid.study, grid.scale).open(encoding="utf-8", newline="") as file:
            return {row.get("id") or "" for row in csv.DictReader(file)}
    except (OSError, ValueError, csv.Error):
        return set()
