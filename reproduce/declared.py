"""The studies: every table and figure of the paper as a grid, and what it left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from reproduce.probe import RATE_SEEDS, RATES
from reproduce.scales import METHODS, WITHOUT_EPSILON, Scale, get_scale, make_cell
from xcal.config import nearest
from xcal.errors import UserError
from xcal.experiments import KEYS
from xcal.methods.registry import METHODS as KNOWN_METHODS
from xcal.methods.registry import get_method
from xcal.studies.grid import PROBE, Cell, Grid, without_repetition

BASELINE = "fl-dp"
# Kaggle's blood cells by picture, and with every file a record of its own, as Kaggle splits them.
LEAK_FREE, AS_SHIPPED = "blood-cells", "blood-cells-as-shipped"

# The paper's seven configurations (α, β, γ).
WEIGHTS: Mapping[str, tuple[float, float, float]] = {
    "balanced": (1.0, 1.0, 1.0),
    "logit change only": (1.0, 0.0, 0.0),
    "margin only": (0.0, 1.0, 0.0),
    "logit change ×2": (2.0, 1.0, 1.0),
    "margin ×2": (1.0, 2.0, 1.0),
    "concentration damped": (1.0, 1.0, 0.5),
    "concentration amplified": (1.0, 1.0, 2.0),
}
REPLACED = ("decay", "rise", "constant", "noise")
# What the paper did not vary, one key at a time around the defaults.
VARIED: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "xcal-steered": {
        "w": (0.25, 0.8),
        "contrast": (0.02, 0.5),
        "kappa": (2.0, 10.0),
        "tau": (0.02, 0.2),
        "q": (0.1, 0.4),
        "signal_every": (1, 16),
    },
    "xcal-paper": {
        "band": (0.1, 0.4),
        "rho": (0.02, 0.3),
        "tau": (0.05, 0.5),
        "q": (0.1, 0.4),
    },
}
# Levers against static noise, tried once each with paired seeds. A signal that rises with training
# spends early where it is held against its own past, and late where it is held against a constant.
ABSOLUTE: Mapping[str, Any] = {"reference": "absolute"}
LEVERS: Mapping[str, Mapping[str, Any]] = {
    "reference = absolute, w = 0.8": {**ABSOLUTE, "w": 0.8},
    "eager": {"signal_every": 1, "tau": 0.2, "slow_tau": 0.05, "contrast": 0.02},
    "eager, w = 0.8": {
        "w": 0.8,
        "signal_every": 1,
        "tau": 0.2,
        "slow_tau": 0.05,
        "contrast": 0.02,
    },
    "geometry": {"geometry": "importance"},
}


@dataclass(frozen=True)
class Choice:
    """What the user asks of a study; what is not given the scale decides."""

    data: tuple[str, ...] | None = None
    networks: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    epsilons: tuple[float, ...] | None = None
    seeds: int | None = None


def _seeds(scale: Scale, network: str, choice: Choice) -> range:
    return range(scale.seeds.get(network, 3) if choice.seeds is None else choice.seeds)


def _chosen(given: Sequence[Any] | None, offered: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(offered if given is None else given)


def _places(scale: Scale, choice: Choice) -> Iterator[tuple[str, str]]:
    """Sets and networks, the set first: one set complete is worth more than a little of each."""
    for data in _chosen(choice.data, scale.data):
        for network in _chosen(choice.networks, scale.networks):
            if network not in scale.by_network:
                raise UserError(
                    f"The scale {scale.name!r} has no settings for the network {network!r}: choose"
                    f" {', '.join(scale.by_network)}."
                )
            yield data, network


def _by_seed(
    scale: Scale,
    choice: Choice,
    methods: Sequence[str],
    epsilons: Sequence[float],
    main: bool = False,
) -> list[Cell]:
    """Seed by seed and ε by ε, all methods of a pair together: partial results are comparable."""
    cells = []
    for data, network in _places(scale, choice):
        for seed in _seeds(scale, network, choice):
            for epsilon in epsilons:
                for method in methods:
                    if not _suits(scale, method, network):
                        continue
                    own = None if method in WITHOUT_EPSILON else epsilon
                    values = scale.values(method, data, network, own, seed)
                    cells.append(make_cell(scale.name, values, scale.explains(data, seed)))
                    if main:
                        cells += [
                            make_cell(scale.name, other, scale.explains(data, seed), variant)
                            for variant, other in scale.also(method, values).items()
                        ]
    if not cells:
        raise UserError(
            f"Nothing is left to run: {', '.join(methods)} needs a network whose explained map is"
            f" made by layers that train, and {PROBE} is none."
        )
    return cells


def _suits(scale: Scale, method: str, network: str) -> bool:
    """The laptop's grids were declared when AGP spared channels of trained convolutions only."""
    return not (scale.name == "laptop" and network == PROBE and method in ("agp", "agp-dp"))


def _available(methods: Sequence[str]) -> tuple[str, ...]:
    """Of the methods a study names by itself, those that this version has."""
    return tuple(m for m in methods if m in KNOWN_METHODS)


def _methods(choice: Choice, offered: Sequence[str]) -> tuple[str, ...]:
    return _available(offered) if choice.methods is None else choice.methods


def privacy_utility(scale: Scale, choice: Choice) -> Grid:
    methods = _methods(choice, scale.methods)
    epsilons = _chosen(choice.epsilons, scale.epsilons)
    return Grid(
        "privacy-utility",
        scale.name,
        without_repetition(_by_seed(scale, choice, methods, epsilons, main=True)),
        question="Does noise steered by explanations give better models and explanations than"
        " static noise at the same ε?",
    )


def rates(scale: Scale, choice: Choice) -> Grid:
    """Every method at the few rates of one grid: validation images choose (`reproduce rates`)."""
    epsilons = _chosen(choice.epsilons, scale.epsilons)
    cells = []
    for data, network in _places(scale, choice):
        for epsilon in epsilons:
            for method in _methods(choice, scale.methods):
                if not _suits(scale, method, network) or method == "xcal":  # which is as fl-dp
                    continue
                own = None if method in WITHOUT_EPSILON else epsilon
                for seed in range(choice.seeds or RATE_SEEDS.get(method, 1)):
                    values = scale.values(method, data, network, own, seed)
                    tried = {"": values, **scale.also(method, values)}
                    for (variant, keys), lr in product(tried.items(), RATES.get(own, ())):
                        name = f"{variant}, lr = {lr:g}" if variant else f"lr = {lr:g}"
                        cells.append(make_cell(scale.name, {**keys, "lr": lr}, 0, name))
    return Grid(
        "rates",
        scale.name,
        without_repetition(cells),
        question="Which rate do methods learn best with, by validation images?",
    )


def clients(scale: Scale, choice: Choice) -> Grid:
    smoke = scale.name == "smoke"
    methods = _methods(choice, scale.beside_static)
    networks = choice.networks or tuple(
        n for n in ("efficientnet_b0", "resnet18") if n in scale.by_network
    )
    choice = Choice(
        choice.data, networks or scale.networks, choice.methods, choice.epsilons, choice.seeds
    )
    counts = (2,) if smoke else (3, 10, 50)
    shifts = ("iid", "label") if smoke else ("iid", "label", "covariate")
    cells = []
    for data, network in _places(scale, choice):
        for seed in _seeds(scale, network, choice):
            bound = scale.values("centralized", data, network, None, seed)
            cells.append(make_cell(scale.name, bound, scale.explains(data, seed), "bound"))
            for count in counts:
                for shift in shifts:
                    for epsilon in _chosen(choice.epsilons, scale.client_epsilons):
                        for method in methods:
                            own = None if method in WITHOUT_EPSILON else epsilon
                            values = scale.values(method, data, network, own, seed)
                            here = scale.at_clients(values, count) | {"partition": shift}
                            road = (
                                scale.explains(data, seed)
                                if here == values
                                else scale.explains_beside("clients", data, seed)
                            )
                            variant = f"N = {count}, {shift}"
                            cells.append(make_cell(scale.name, here, road, variant))
    return Grid(
        "clients",
        scale.name,
        without_repetition(cells),
        question="What do more clients, and clients that are unlike, do to it?",
    )


def ablation(scale: Scale, choice: Choice) -> Grid:
    """Replacements of the signal first: they decide whether the signal does anything."""
    smoke = scale.name == "smoke"
    weights = dict(list(WEIGHTS.items())[:2]) if smoke else WEIGHTS
    methods = _methods(choice, ("xcal-steered",) if smoke else ("xcal-steered", "xcal-paper"))
    epsilons = _chosen(choice.epsilons, scale.epsilons[:2])
    parts: list[list[Cell]] = [[], [], [], []]
    for data, network in _places(scale, choice):
        for seed in _seeds(scale, network, choice):
            for epsilon in epsilons:

                def cell(
                    method: str,
                    variant: str,
                    changes: Mapping[str, Any],
                    at: tuple[Any, ...] = (data, network, epsilon, seed),
                ) -> Cell:
                    values = scale.values(method, *at)
                    here = values | dict(changes)
                    road = (
                        scale.explains(at[0], at[3])
                        if here == values
                        else scale.explains_beside("ablation", at[0], at[3])
                    )
                    return make_cell(scale.name, here, road, variant)

                parts[0].append(cell(BASELINE, "", {}))
                if "xcal-steered" in methods:
                    parts[0].append(cell("xcal-steered", "", {}))
                    parts[0] += [
                        cell("xcal-steered", f"signal: {kind}", {"signal_source": kind})
                        for kind in REPLACED
                    ]
                    parts[0].append(cell("xcal-steered", "reference = absolute", ABSOLUTE))
                    covers = scale.covers(
                        scale.values("xcal-steered", data, network, epsilon, seed)
                    )
                    if covers:
                        static = scale.values(BASELINE, data, network, epsilon, seed)
                        for name, keys in scale.also(BASELINE, static).items():
                            parts[0].append(
                                make_cell(scale.name, keys, scale.explains(data, seed), name)
                            )
                    parts[0] += [cell("xcal-steered", name, keys) for name, keys in covers.items()]
                if not smoke and "xcal-steered" in methods:
                    parts[1] += [
                        cell("xcal-steered", name, keys)
                        for name, keys in LEVERS.items()
                        if set(keys) <= set(KEYS)
                    ]
                for method in methods:
                    parts[2].append(cell(method, "", {}))  # before its twin, the balanced weights
                    for name, (a, b, c) in weights.items():
                        changes = {"alpha": a, "beta": b, "gamma": c}
                        parts[2].append(cell(method, name, changes))
                    if smoke:
                        continue
                    for key, others in VARIED.get(method, {}).items():
                        parts[3] += [cell(method, f"{key} = {v}", {key: v}) for v in others]
    return Grid(
        "ablation",
        scale.name,
        without_repetition([c for part in parts for c in part]),
        question="Does the signal do anything that a constant, noise or a fixed schedule of the"
        " same cost would not?",
    )


def efficiency(scale: Scale, choice: Choice) -> Grid:
    """The same runs as the main tables, read round by round."""
    offered = (BASELINE, "agp", "xcal-paper", "xcal-steered")
    methods = _methods(choice, (BASELINE, "xcal-steered") if scale.name == "smoke" else offered)
    epsilons = _chosen(choice.epsilons, scale.epsilons[:2])
    return Grid(
        "efficiency",
        scale.name,
        without_repetition(_by_seed(scale, choice, methods, epsilons)),
        question="How much F1 and ROAD does each share of the budget buy, and when does each peak?",
    )


def overhead(scale: Scale, choice: Choice) -> Grid:
    """Rounds without measuring, one cell at a time: here time is the result."""
    offered = (BASELINE, "agp", "xcal-paper", "xcal-steered")
    ours = ("xcal",) if "xcal" in scale.beside_static else ()
    methods = _methods(choice, (*offered, *ours))
    cells = []
    for data, network in _places(scale, choice):
        seeds = 3 if choice.seeds is None and scale.name != "smoke" else choice.seeds or 1
        for seed in range(seeds):
            for method in methods:
                if not _suits(scale, method, network):
                    continue
                epsilon = _chosen(choice.epsilons, scale.epsilons[:1])[0]
                own = None if method in WITHOUT_EPSILON else epsilon
                values = scale.values(method, data, network, own, seed)
                values |= {"rounds": 3, "validation_images": 0, "road_images": 0}
                cells.append(make_cell(scale.name, values, 0, "timing"))
    return Grid(
        "overhead",
        scale.name,
        without_repetition(cells),
        one_at_a_time=True,
        question="How much longer does a client's round take than with static noise?",
    )


def panel(scale: Scale, choice: Choice) -> Grid:
    """One seed of the main grid: every cell keeps its maps of the same few images."""
    narrowed = Choice(choice.data, choice.networks, choice.methods, choice.epsilons, 1)
    main = privacy_utility(scale, narrowed)
    return Grid("panel", scale.name, main.cells, question="Where do the models look?")


def units(scale: Scale, choice: Choice) -> Grid:
    """Each set once with whole groups as the unit of privacy, beside its record-level twin."""
    methods = _methods(choice, (BASELINE, "xcal-steered"))
    epsilons = _chosen(choice.epsilons, scale.epsilons[1:2] or scale.epsilons)
    cells = []
    for data, network in _places(scale, choice):
        for seed in range(1 if choice.seeds is None else choice.seeds):
            for epsilon in epsilons:
                for method in methods:
                    values = scale.values(method, data, network, epsilon, seed)
                    cells.append(make_cell(scale.name, values, scale.explains(data, seed)))
                    whole = scale.with_groups(values)
                    cells.append(
                        make_cell(scale.name, whole, scale.explains(data, seed), "unit = group")
                    )
    return Grid(
        "units",
        scale.name,
        without_repetition(cells),
        question="What is left when the promise covers a whole patient, lesion or picture?",
    )


def shipped(scale: Scale, choice: Choice) -> Grid:
    """Blood cells as published results have them, each cell beside its leak-free twin."""
    methods = _methods(choice, (BASELINE, "xcal", "xcal-paper", "fl"))
    epsilons = _chosen(choice.epsilons, scale.epsilons)
    main = privacy_utility(
        scale, replace(choice, data=(LEAK_FREE,), methods=methods, epsilons=epsilons)
    )
    cells = []
    for cell in main.cells:
        twin = {**cell.keys, "data": AS_SHIPPED}
        cells += [cell, make_cell(scale.name, twin, 0, cell.variant)]
    return Grid(
        "shipped",
        scale.name,
        without_repetition(cells),
        question="What is it worth that copies of one picture stand in training and test?",
    )


STUDIES: Mapping[str, Callable[[Scale, Choice], Grid]] = {
    "privacy-utility": privacy_utility,
    "rates": rates,
    "clients": clients,
    "ablation": ablation,
    "efficiency": efficiency,
    "overhead": overhead,
    "panel": panel,
    "units": units,
    "shipped": shipped,
}


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


def declare(study: str, scale: str, choice: Choice | None = None) -> Grid:
    """The grid of a study. Unknown names are refused with the nearest known one."""
    if study not in STUDIES:
        raise UserError(
            f"Unknown study {study!r}.{nearest(study, tuple(STUDIES))} Known: {', '.join(STUDIES)}."
        )
    for method in (choice or Choice()).methods or ():
        get_method(method)  # an unknown name is refused, with the nearest known one
    return STUDIES[study](get_scale(scale), choice or Choice())


__all__ = ["METHODS", "STUDIES", "declare"]
