"""What a study is made of: cells, each one experiment with one seed; and grids of them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xcal.config import Experiment, nearest, read_toml, toml_value
from xcal.errors import UserError
from xcal.experiments import KEYS, make_experiment
from xcal.first_edition import BEFORE_THE_KEY, RENAMED, names_of_today
from xcal.methods.registry import XCAL_STEERED, get_method

FAILED, BUSY = 2, 75  # a cell's exit codes: refused with a sentence; another process is at it
PROBE = "probe"  # what tables call a network of which only a head on several stages trains
STEERED = XCAL_STEERED.name
EVERY_IMAGE = 10**6  # "all test images" as a number of images to explain
# A cell's process decides these by itself; they change no result on one kind of device.
_BY_THE_PROCESS = {"threads": 1, "road_test_images": 0}


def network_of(keys: Mapping[str, Any]) -> str:
    """What tables call the network of a cell with these keys."""
    return str(keys["network"]) if keys.get("head_reads", "last") == "last" else PROBE


def _of_today(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's keys under today's names; `xcal` has a key `steering` since it is another method."""
    found = names_of_today(keys)
    if found.get("method") == "xcal" and "steering" not in found:
        found["method"] = STEERED
    return found


@dataclass(frozen=True, eq=False)
class Cell:
    """One experiment of a grid. `keys` pins all that counts; `variant` is what tables call it."""

    scale: str  # a size of declared studies; "" in a grid of one's own
    keys: Mapping[str, Any]
    explained: int  # test images explained at the end, every group present
    variant: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.keys, Mapping):  # what else a damaged file has is told where it is read
            object.__setattr__(self, "keys", _of_today(self.keys))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and (self.id, self.variant) == (other.id, other.variant)

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        """The cell's name for ever: a digest of its scale's measuring and of its keys.

        Keys go by the names that they had when the first cells were kept.
        """
        old = {new: old for old, new in RENAMED.items()}
        keys = {old.get(k, k): v for k, v in dict(self.keys).items()}
        if keys.get("method") == STEERED:
            keys["method"] = "xcal"
        text = json.dumps([self.scale, self.explained, keys], sort_keys=True)
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

    def experiment(self, changes: Mapping[str, Any] | None = None) -> Experiment:
        """The experiment to run; `changes` is what this machine does in its own way.

        They are taken for keys that the cell pins (where published weights are) and for `device`.
        A cell that pins no `accountant` is one by the Rényi filter, whatever its method: it was
        made before there was another.
        """
        own = {k: v for k, v in (changes or {}).items() if k in self.keys or k == "device"}
        values = {**BEFORE_THE_KEY, **self.keys, **_BY_THE_PROCESS, **own}
        return make_experiment(values, f"the study's cell ({self.title})")


def make_cell(
    scale: str,
    values: Mapping[str, Any],
    explained: int,
    variant: str = "",
    uses: frozenset[str] | None = None,
) -> Cell:
    """A cell that pins of `values` what its method says it uses."""
    values = names_of_today(values)
    used = get_method(str(values["method"])).uses if uses is None else uses
    kept = {k: v for k, v in sorted(values.items()) if k in used and v is not None}
    return Cell(scale, kept, explained, variant)


@dataclass(frozen=True)
class Grid:
    """A study: its cells, in the order in which they are worth running."""

    study: str
    scale: str
    cells: tuple[Cell, ...]
    one_at_a_time: bool = False  # where time itself is measured
    question: str = ""


def without_repetition(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Cells that several parts of a grid share stand in it once, under their first name."""
    seen: dict[str, Cell] = {}
    for cell in cells:
        seen.setdefault(cell.id, cell)
    return tuple(seen.values())


# --- grids of one's own ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnGrid:
    """An experiment with axes: every combination of their values, each with its cell."""

    axes: Mapping[str, tuple[Any, ...]]
    settings: tuple[tuple[Mapping[str, Any], Cell], ...]

    @property
    def grid(self) -> Grid:
        return Grid("cells", "", without_repetition([cell for _, cell in self.settings]))

    @property
    def compared(self) -> str | None:
        """The axis whose values are compared, each with the first: the first but `seed`."""
        return next((k for k, v in self.axes.items() if k != "seed" and len(v) > 1), None)


def read_axis(word: str) -> tuple[str, tuple[Any, ...]]:
    """`key=a,b,c` as the command line gives it; each value is read as TOML, else as text."""
    key, sign, text = word.partition("=")
    pieces = [piece.strip() for piece in text.split(",")]
    if not sign or not key.strip() or not all(pieces):
        raise UserError(f"An axis is written key=a,b,c, not {word!r}.")
    return key.strip(), tuple(map(toml_value, pieces))


def own_grid(path: Path, words: Sequence[str] = (), seeds: int | None = None) -> OwnGrid:
    """The grid of an experiment file: its table `[axes]`, axes given as words, so many seeds."""
    values = names_of_today(read_toml(path))
    found = values.pop("axes", {})
    if not isinstance(found, dict) or not all(isinstance(v, list) and v for v in found.values()):
        raise UserError(f"[axes] of {path} holds lists of values, as `epsilon = [1, 8]`.")
    make_experiment(values, str(path))  # so that an error in the file names the file
    of_file = names_of_today({k: tuple(v) for k, v in found.items()})
    axes = {**of_file, **names_of_today(dict(map(read_axis, words)))}
    for key in axes:
        if key not in KEYS:
            raise UserError(f"No experiment has the key {key!r}.{nearest(key, KEYS)}")
    if seeds is not None:
        axes["seed"] = tuple(range(seeds))
    # Seed by seed: what is finished early can be compared early.
    order = sorted(axes, key=lambda key: key != "seed")
    settings = []
    for combination in itertools.product(*(axes[key] for key in order)):
        at = dict(zip(order, combination, strict=True))
        settings.append((at, _own_cell({**values, **at}, at)))
    return OwnGrid(axes, tuple(settings))


def _own_cell(values: Mapping[str, Any], at: Mapping[str, Any]) -> Cell:
    experiment = make_experiment(values, "the study")
    if experiment.sites is not None:
        raise UserError(
            "A study is a simulation, and `sites` would charge real ledgers: leave it out."
        )
    resolved = {k: v for k, v in experiment.resolved().items() if k not in _BY_THE_PROCESS}
    if "paired" not in values and experiment.noise_source == "seeded":
        resolved["paired"] = True  # the same draws and noise: what differs is the method
    named = ("method", "data", "network", "epsilon", "seed")
    variant = ", ".join(f"{k} = {v}" for k, v in at.items() if k not in named)
    explained = experiment.road_test_images
    return make_cell("", resolved, EVERY_IMAGE if explained is None else explained, variant)
