"""What a study is made of: cells, each one experiment at one scale with one seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from xcal.config import Experiment, nearest
from xcal.errors import UserError
from xcal.experiments import BEFORE_THE_KEY, make_experiment

# Methods whose noise no ε decides: one run serves every ε.
WITHOUT_EPSILON = ("centralized", "fl")
WITH_SIGNAL = ("xcal-paper", "xcal")
# A scale's own name for a network of which a head on several stages is trained, and no other part.
COLUMNS = "columns"
FAILED, BUSY = 2, 75  # a cell's exit codes: refused with a sentence; another process is at it

# Which keys make a cell what it is, by method. A study pins all of them, so that a default that
# changes later cannot turn finished cells into something else under the same name.
_ALWAYS = frozenset(
    "method data pixels train_images network clients rounds local_epochs average partition"
    " batch lr clip optimizer unit validation_images road_images road_every seed paired".split()
)
_NETWORK = frozenset({"norm", "output_stride", "head_reads", "train", "weights"})
_PRIVATE = frozenset({"epsilon", "delta", "accountant"})
_SIGNAL = frozenset({"q", "alpha", "beta", "gamma", "tau"})
_PAPER = frozenset({"rho", "band"})
_OURS = frozenset(
    "w kappa slow_tau reference contrast signal_every signal_fraction signal_source geometry"
    " clipping".split()
)
_CLIENTS = frozenset({"clients", "partition"})


def keys_that_count(method: str, network: str) -> frozenset[str]:
    """The pinned keys that can make a difference to a cell of this method and network."""
    keys = _ALWAYS | frozenset({"concentration", "units_per_client", "views", "images_per_unit"})
    if network != "small":
        keys |= _NETWORK
    if method not in WITHOUT_EPSILON:
        keys |= _PRIVATE
    else:
        keys -= {"clip"}
    if method == "centralized":
        keys -= _CLIENTS
    if method in WITH_SIGNAL:
        keys |= _SIGNAL
    if method == "xcal-paper":
        keys |= _PAPER
    if method == "xcal":
        keys |= _OURS
    if ":" in method:  # a method of the user's own may use anything
        keys |= _SIGNAL | _PAPER | _OURS
    return keys


def network_of(keys: Mapping[str, Any]) -> str:
    """What tables call the network of a cell with these keys."""
    return str(keys["network"]) if keys.get("head_reads", "last") == "last" else COLUMNS


@dataclass(frozen=True, eq=False)
class Cell:
    """One experiment of a grid. `keys` pins all that counts; `variant` is what tables call it."""

    scale: str
    keys: Mapping[str, Any]
    explained: int  # test images explained at the end, every group present
    variant: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and (self.id, self.variant) == (other.id, other.variant)

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        """The cell's name for ever: a digest of its scale's measuring and of its keys."""
        text = json.dumps([self.scale, self.explained, dict(self.keys)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def method(self) -> str:
        return str(self.keys["method"])

    @property
    def network(self) -> str:
        return network_of(self.keys)

    @property
    def epsilon(self) -> float | None:
        """The target ε; None for methods that have none."""
        return self.keys.get("epsilon")

    @property
    def seed(self) -> int:
        return int(self.keys["seed"])

    @property
    def title(self) -> str:
        parts = [str(self.keys["data"]), self.network, self.method]
        if self.epsilon is not None:
            parts.append(f"ε {self.epsilon:g}")
        if self.variant:
            parts.append(self.variant)
        return ", ".join([*parts, f"seed {self.seed}"])

    def experiment(self, weights: Path | None = None, device: str = "cpu") -> Experiment:
        """The experiment to run; `weights` is where this machine has the published ones.

        A cell that pins no `accountant` is one by the Rényi filter, whatever its method: then and
        now the same cell, and all methods of a study under one accountant.
        """
        values = {
            **BEFORE_THE_KEY,
            **self.keys,
            "threads": 1,
            "road_test_images": 0,
            "device": device,
        }
        if values.get("weights") is not None:
            if weights is None:
                raise UserError(
                    f"The cell ({self.title}) starts from published weights: say where they are"
                    " with --weights FILE."
                )
            values["weights"] = str(weights)
        return make_experiment(values, f"the study's cell ({self.title})")


def make_cell(scale: str, values: Mapping[str, Any], explained: int, variant: str = "") -> Cell:
    """A cell that keeps of `values` what counts for its method and network."""
    counted = keys_that_count(str(values["method"]), str(values["network"]))
    kept = {k: v for k, v in sorted(values.items()) if k in counted and v is not None}
    return Cell(scale, kept, explained, variant)


@dataclass(frozen=True)
class Choice:
    """What the user asks of a study; what is not given the scale decides."""

    data: tuple[str, ...] | None = None
    networks: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    epsilons: tuple[float, ...] | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class Grid:
    """A study at a scale: its cells, in the order in which they are worth running."""

    study: str
    scale: str
    cells: tuple[Cell, ...]
    one_at_a_time: bool = False  # where time itself is measured
    question: str = ""
    columns: tuple[str, ...] = field(default=("data", "network", "method", "epsilon", "variant"))


def only_variants(grid: Grid, beginnings: Sequence[str]) -> Grid:
    """The grid's plain cells and those whose variant begins with one of these words."""
    known = dict.fromkeys(cell.variant for cell in grid.cells if cell.variant)
    for word in beginnings:
        if not any(variant.startswith(word) for variant in known):
            raise UserError(
                f"No variant of {grid.study} begins with {word!r}.{nearest(word, tuple(known))}"
                f" Known: {'; '.join(known) or 'none'}."
            )
    chosen = tuple(
        c for c in grid.cells if not c.variant or c.variant.startswith(tuple(beginnings))
    )
    return replace(grid, cells=chosen)


def without_repetition(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Cells that several parts of a grid share stand in it once, under their first name."""
    seen: dict[str, Cell] = {}
    for cell in cells:
        seen.setdefault(cell.id, cell)
    return tuple(seen.values())
