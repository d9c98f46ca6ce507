"""From finished cells to what can be said: figures over seeds, paired differences, sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduce.paper import printed
from reproduce.scales import PAPER_NETWORK
from reproduce.store import CellResult, Results
from xcal.metrics.classification import balanced_accuracy
from xcal.studies.grid import Cell, Grid
from xcal.studies.statistics import Difference, Measure, Summary, Verdict, compare, summarize

BASELINE = "fl-dp"
METHOD_ORDER = ("centralized", "fl", "fl-dp", "agp", "agp-dp", "xcal-paper", "xcal-steered")


@dataclass(frozen=True)
class Place:
    """Where methods are compared: the same data, network, federation and ε."""

    data: str
    network: str
    epsilon: float | None
    clients: int
    partition: str
    unit: str

    def at(self, epsilon: float | None) -> Place:
        return Place(self.data, self.network, epsilon, self.clients, self.partition, self.unit)


@dataclass(frozen=True)
class Series:
    """One method, in one variant, at one place: its finished seeds."""

    place: Place
    method: str
    variant: str
    cells: Mapping[int, CellResult]

    @property
    def name(self) -> str:
        return f"{self.method}, {self.variant}" if self.variant else self.method

    @property
    def promises(self) -> bool:
        """Whether its ε is a guarantee: that of `agp` is only what its noise was chosen for."""
        return all(
            c.values.get("epsilon_target") is not None or c.values.get("epsilon_client") is not None
            for c in self.cells.values()
        )

    def summary(self, measure: Measure) -> Summary | None:
        values = [
            c.values[measure] for c in self.cells.values() if c.values.get(measure) is not None
        ]
        return summarize(values) if values else None


@dataclass(frozen=True)
class Comparison:
    """A series against a reference over the seeds that both have."""

    series: Series
    reference: Series
    f1: Difference
    road: Difference | None
    auroc_by_seed: tuple[float, ...] = ()
    auroc: Difference | None = None  # where both kept how they rank the test images


def place_of(cell: Cell) -> Place:
    keys = cell.keys
    return Place(
        str(keys["data"]),
        cell.network,
        cell.epsilon,
        int(keys.get("clients", 3)),
        str(keys.get("partition", "iid")),
        str(keys.get("unit", "record")),
    )


def series_of(found: Mapping[Cell, CellResult]) -> list[Series]:
    """Finished cells by place, method and variant, in the order they are always shown."""
    groups: dict[tuple[Place, str, str], dict[int, CellResult]] = {}
    for cell, result in found.items():
        if result.finished:
            variant = "" if cell.variant.startswith(("N = ", "unit", "bound")) else cell.variant
            groups.setdefault((place_of(cell), cell.method, variant), {})[cell.seed] = result
    series = [Series(p, m, v, dict(sorted(c.items()))) for (p, m, v), c in groups.items()]

    def rank(one: Series) -> tuple[Any, ...]:
        p = one.place
        order = METHOD_ORDER.index(one.method) if one.method in METHOD_ORDER else len(METHOD_ORDER)
        epsilon = float("inf") if p.epsilon is None else p.epsilon
        return (p.data, p.network, p.clients, p.partition, p.unit, epsilon, order, one.method)

    return sorted(series, key=rank)


def find(series: Iterable[Series], place: Place, method: str, variant: str = "") -> Series | None:
    for one in series:
        if (one.place, one.method, one.variant) == (place, method, variant):
            return one
    return None


def against(ours: Series, reference: Series | None, results: Results) -> Comparison | None:
    """The paired comparison; None without a common seed."""
    if reference is None or ours is reference:
        return None
    seeds = [s for s in ours.cells if s in reference.cells]
    if not seeds:
        return None
    a = [ours.cells[s] for s in seeds]
    b = [reference.cells[s] for s in seeds]
    test = results.test_set(a[0].values["test_set"])
    both = [
        (one.values.get("auroc"), other.values.get("auroc"))
        for one, other in zip(a, b, strict=True)
    ]
    by_seed = tuple(x - y for x, y in both if x is not None and y is not None)
    auroc = None
    if len(by_seed) == len(a) and all(c.ranks is not None for c in [*a, *b]):
        auroc = compare(a, b, test, "auroc")
    road = explained(ours, reference, results, "road")
    return Comparison(ours, reference, compare(a, b, test), road, by_seed, auroc)


def balanced(series: Series, results: Results) -> Summary:
    """Balanced accuracy over seeds, from what each cell's model predicts of the test images."""
    each = []
    for cell in series.cells.values():
        test = results.test_set(cell.values["test_set"])
        each.append(balanced_accuracy(test.labels, cell.predicted, len(test.classes)))
    return summarize(each)


def explained(
    ours: Series, reference: Series, results: Results, measure: Measure
) -> Difference | None:
    """The paired difference over the seeds whose maps were measured; None where none was."""
    pairs = [(c, reference.cells[s]) for s, c in ours.cells.items() if s in reference.cells]
    told = [p for p in pairs if all(c.values.get(measure) is not None for c in p)]
    if not told:
        return None
    test = results.test_set(told[0][0].values["test_set"])
    return compare([a for a, _ in told], [b for _, b in told], test, measure)


# --- sentences ------------------------------------------------------------------------------------


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def interval(d: Difference, digits: int = 3) -> str:
    return f"{signed(d.mean, digits)} [{signed(d.low, digits)}, {signed(d.high, digits)}]"


def printed_gain(place: Place, measure: Measure = "macro_f1") -> float | None:
    """What the paper's method gains over static noise, as printed; ROAD in the paper's percent."""
    theirs, static = (
        printed(
            measure,
            place.data,
            method,
            place.epsilon,
            network=place.network,
            clients=place.clients,
            partition=place.partition,
        )
        for method in ("xcal-steered", BASELINE)
    )
    return None if theirs is None or static is None else theirs - static


def beside_the_paper(found: Comparison, *, name_clients: bool = False) -> str | None:
    """In plain words: what the paper prints of this pair, what came out here."""
    place, d = found.series.place, found.f1
    gain = printed_gain(place)
    if gain is None:
        return None
    clients = f"N = {place.clients}, {place.partition}, " if name_clients else ""
    where = f"{place.data}, {place.network}, {clients}ε = {place.epsilon:g}"
    other = "" if place.network in PAPER_NETWORK else " (with EfficientNet-B0)"
    seeds = f"{d.seeds} seed{'s' if d.seeds > 1 else ''}"
    said = (
        f"{where}: the paper prints an F1 difference of {signed(gain)}{other} between XCal-FL and"
        " static noise; "
    )
    ours, reference = f"`{found.series.method}`", f"`{found.reference.method}`"
    if d.same:
        said += f"{ours} and {reference} give the same answers here over {seeds}, which says"
        return said + " nothing about it." + _road_beside_the_paper(found)
    said += f"{ours} minus {reference} is {interval(d)} here over {seeds}"
    if d.seeds < 2:
        return said + ": too few for a verdict."
    if d.verdict is Verdict.NOT_SHOWN:
        ruled_out = gain > d.high or gain < d.low
        tail = ", and one as large as printed is outside the interval" if ruled_out else ""
        said += f": no difference shown{tail}."
    else:
        said += f": {_direction(gain, d)}."
    return said + _road_beside_the_paper(found)


def _road_beside_the_paper(found: Comparison) -> str:
    """The same of ROAD. Its scales differ, so only the direction is compared."""
    gain, d = printed_gain(found.series.place, "road"), found.road
    if gain is None or d is None or d.seeds < 2 or d.same:
        return ""
    shown = d.verdict.shows
    said = (
        f" Of ROAD it prints a difference of {signed(gain, 1)} on its own scale; on ours it is"
        f" {interval(d)}"
    )
    return said + (f": {_direction(gain, d)}." if shown else ": no difference shown.")


def _direction(gain: float, d: Difference) -> str:
    return "the same direction" if (gain > 0) == (d.mean > 0) else "the opposite direction"


def answer(comparisons: Sequence[Comparison], what: str) -> str:
    """The short answer over all places of a study."""
    said = [c for c in comparisons if c.f1.seeds >= 2]
    if not said:
        return f"No comparison {what} has the two seeds that a verdict needs yet."
    verdicts = [c.f1.verdict for c in said]
    others = {
        "AUROC": [c.auroc.verdict for c in said if c.auroc is not None],
        "ROAD": [c.road.verdict for c in said if c.road is not None],
    }

    def count(words: Sequence[Verdict]) -> str:
        better, worse = words.count(Verdict.BETTER), words.count(Verdict.WORSE)
        rest = len(words) - better - worse
        return f"better in {better}, worse in {worse}, no difference shown in {rest}"

    comparisons_text = f"{len(said)} comparison{'s' if len(said) > 1 else ''}"
    text = f"In {comparisons_text} {what}: macro F1 {count(verdicts)}"
    for name, words in others.items():
        text += f"; {name} {count(words)}" if words else ""
    return text + "."


def not_run_yet(series: Iterable[Series]) -> str:
    """What an answer about more clients, and clients that are unlike, cannot know yet."""
    places = [s.place for s in series if s.method != "centralized"]
    counts, alike = {p.clients for p in places}, {p.partition for p in places} == {"iid"}
    if len(counts) == 1:
        unlike = ", nor clients with shifted data" if alike else ""
        n = min(counts)
        return f" This is all with N = {n}: no other number of clients has been run yet{unlike}."
    return " All of these clients are alike: unlike ones have not been run yet." if alike else ""


def round_seconds(series: Series) -> list[float]:
    """A client's seconds a round, one value a run: its quickest round but for the first, which
    warms up. What else a machine does only ever adds."""
    result = []
    for cell in series.cells.values():
        seconds = cell.values["rounds"]["seconds"][1:] or cell.values["rounds"]["seconds"]
        result.append(min(seconds) / int(cell.keys.get("clients", 1)))
    return result


def of_grid(grid: Grid, results: Results) -> list[Series]:
    return series_of(results.of_grid(grid))
