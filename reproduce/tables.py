"""A study's tables, as rows of text: the same for the terminal, the documents and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reproduce.analysis import (
    BASELINE,
    Comparison,
    Place,
    Series,
    against,
    answer,
    balanced,
    beside_the_paper,
    find,
    interval,
    not_run_yet,
    of_grid,
    round_seconds,
    signed,
)
from reproduce.declared import AS_SHIPPED, LEAK_FREE
from reproduce.efficiency import (
    course_of,
    efficiency_answer,
    efficiency_table,
    without_course,
)
from reproduce.overview import (
    RIVALS,
    clients_overview,
    methods_overview,
    over_all_pairs,
    printed_gains,
    variants_overview,
)
from reproduce.paper import PRINTED_OVERHEAD
from reproduce.probe import PLAIN, PROBE_SCALE
from reproduce.probe_tables import what_helps, what_methods_add, without_noise
from reproduce.scales import PAPER_NETWORK
from reproduce.store import Results
from reproduce.wording import (
    COMPARED,
    RANKED,
    auroc_difference,
    difference,
    figure,
    judged,
    printed_text,
    verdict,
    where,
)
from xcal.report.words import NOTHING, Table, epsilon_text
from xcal.studies.grid import Grid
from xcal.studies.statistics import summarize


@dataclass(frozen=True)
class StudyView:
    """What a study has to say: the question, the answer, tables, sentences, what is missing."""

    study: str
    scale: str
    question: str
    answer: str
    tables: tuple[Table, ...]
    sentences: tuple[str, ...]
    finished: int
    total: int
    series: tuple[Series, ...]
    overviews: tuple[Table, ...] = ()  # the tables in one or two, where there are many
    comparisons: tuple[Comparison, ...] = ()  # with static noise, of which the answer speaks

    @property
    def missing(self) -> str:
        if self.finished == self.total:
            return f"All {self.total} cells of the grid are finished."
        return (
            f"{self.finished} of the grid's {self.total} cells are finished; `python -m reproduce"
            f" study {self.study} --scale {self.scale}` goes on with the others."
        )


def comparisons_of(
    series: Sequence[Series], results: Results, methods: Sequence[str] | None = None
) -> list[Comparison]:
    """Every series against static noise at its own place."""
    found = []
    for one in series:
        if one.place.epsilon is None or (methods is not None and one.method not in methods):
            continue
        made = against(one, find(series, one.place, BASELINE), results)
        if made is not None:
            found.append(made)
    return found


def comparison_table(
    title: str, series: Sequence[Series], results: Results, *, with_paper: bool = True
) -> Table:
    head = ["method", "ε", "macro F1", "F1 − static", "verdict"]
    head += ["ROAD", "ROAD − static", "verdict", "ROAD, matched", "AUROC", "AUROC − static"]
    head += ["balanced accuracy"]
    head += ["paper F1", "paper ROAD %"] if with_paper else []
    rows = []
    for one in series:
        base = None if one.place.epsilon is None else find(series, one.place, BASELINE)
        made = against(one, base, results)
        f1, road = (made.f1, made.road) if made is not None else (None, None)
        row = [
            f"`{one.method}`" + (f", {one.variant}" if one.variant else ""),
            epsilon_text(one.place.epsilon),
            figure(one.summary("macro_f1")),
            difference(f1),
            verdict(f1),
            figure(one.summary("road")),
            difference(road),
            verdict(road),
            figure(one.summary("road_matched")),
            figure(one.summary("auroc")),
            auroc_difference(made),
            figure(balanced(one, results)),
        ]
        if with_paper:
            row += [printed_text(one, "macro_f1", 3), printed_text(one, "road", 1)]
        rows.append(tuple(row))
    return Table(title, tuple(head), tuple(rows), f"{COMPARED} {RANKED}")


def _by_place(series: Sequence[Series]) -> dict[tuple[str, str, int, str, str], list[Series]]:
    places: dict[tuple[str, str, int, str, str], list[Series]] = {}
    for one in series:
        p = one.place
        key = (p.data, p.network, p.clients, p.partition, p.unit)
        places.setdefault(key, []).append(one)
    return places


def privacy_utility_view(grid: Grid, results: Results) -> StudyView:
    series = of_grid(grid, results)
    tables = []
    for group in _by_place(series).values():
        place = group[0].place
        note = "" if place.network in PAPER_NETWORK else " The paper's figures: EfficientNet-B0."
        made = comparison_table(where(place), group, results)
        tables.append(Table(made.title, made.head, made.rows, made.note + note))
    pairs = comparisons_of(series, results, RIVALS)
    ours = [c for c in pairs if c.series.method == "xcal-steered"]
    paper = [c for c in pairs if c.series.method == "xcal-paper"]
    steered = [c for c in pairs if c.series.method in ("xcal-steered", "xcal-paper")]
    sentences = [s for s in map(beside_the_paper, steered) if s is not None]
    said = (
        answer(ours, "of `xcal-steered` with static noise at the same ε")
        + " "
        + answer(paper, "of the published rule, `xcal-paper`, with it")
        + printed_gains(ours)
    )
    overviews: tuple[Table | None, ...] = methods_overview(series, pairs), over_all_pairs(pairs)
    if grid.scale == PROBE_SCALE.name:
        helped, added = what_helps(series, results), what_methods_add(series, results)
        overviews = helped, added, without_noise(series), over_all_pairs(pairs)
    return replace(
        _view(grid, series, said, tables, sentences, overviews), comparisons=tuple(pairs)
    )


def clients_view(grid: Grid, results: Results) -> StudyView:
    series = of_grid(grid, results)
    tables = [
        comparison_table(where(group[0].place), group, results)
        for group in _by_place(series).values()
    ]
    pairs = comparisons_of(series, results, ("xcal-paper", "xcal-steered"))
    told = (beside_the_paper(c, name_clients=True) for c in pairs)
    sentences = [s for s in told if s is not None]
    said = answer(pairs, "of a steered method with static noise") + not_run_yet(series)
    return _view(grid, series, said, tables, sentences, (clients_overview(series, results),))


def ablation_view(grid: Grid, results: Results) -> StudyView:
    """Each variant against the method as it is, and the replaced signals against the model's."""
    series = of_grid(grid, results)
    tables = []
    all_to_default: list[Comparison] = []
    all_to_static: list[Comparison] = []
    places: dict[Place, list[Series]] = {}
    for one in series:
        places.setdefault(one.place, []).append(one)
    for place, group in places.items():
        rows = []
        for one in group:
            plain = one.variant.startswith(PLAIN)  # compared with static noise without the recipe
            default = find(group, place, one.method)
            to_default = against(one, default, results) if one.variant and not plain else None
            static = find(group, place, BASELINE, PLAIN if plain else "")
            to_static = against(one, static, results)
            all_to_default += [to_default] if to_default is not None else []
            all_to_static += [to_static] if to_static is not None else []
            rows.append(
                (
                    f"`{one.method}`" + (f", {one.variant}" if one.variant else ""),
                    figure(one.summary("macro_f1")),
                    judged(to_default.f1 if to_default else None),
                    judged(to_static.f1 if to_static else None),
                    figure(one.summary("road")),
                    judged(to_default.road if to_default else None),
                    auroc_difference(to_default),
                    auroc_difference(to_static),
                )
            )
        title = f"{where(place)}, ε = {epsilon_text(place.epsilon)}"
        head = ["variant", "macro F1", "F1 − default", "F1 − static", "ROAD", "ROAD − default"]
        head += ["AUROC − default", "AUROC − static"]
        tables.append(Table(title, tuple(head), tuple(rows), f"{COMPARED} {RANKED}"))
    replaced = [c for c in all_to_default if c.series.variant.startswith("signal:")]
    enough = [c for c in replaced if c.f1.seeds >= 2]
    if not enough:
        said = "Too few finished cells to say what the signal does: two seeds at least."
    else:
        shown = [c for c in enough if c.f1.verdict.shows]
        said = (
            f"In {len(enough)} comparisons the signal was replaced by something independent"
            f" of the images, at the same cost: a difference of F1 was shown in {len(shown)}."
        )
        if not shown:
            said += " So far nothing shows that it matters what the signal says."
    sentences = [
        f"{where(c.series.place)}, ε = {epsilon_text(c.series.place.epsilon)}: with the"
        f" {c.series.variant.replace('signal: ', '')} in the signal's place F1 changes by"
        f" {interval(c.f1)} ({c.f1.verdict})."
        for c in enough
    ]
    overviews = (variants_overview(all_to_static, all_to_default),)
    return _view(grid, series, said, tables, sentences, overviews)


def efficiency_view(grid: Grid, results: Results) -> StudyView:
    series = of_grid(grid, results)
    courses = [c for c in map(course_of, series) if c is not None]
    tables = [efficiency_table(courses)] if courses else []
    return _view(grid, series, efficiency_answer(courses), tables, without_course(series))


def overhead_view(grid: Grid, results: Results) -> StudyView:
    series = of_grid(grid, results)
    rows: list[tuple[str, ...]] = []
    more: dict[str, list[str]] = {}  # by place: each method's mean over static noise
    for one in series:
        base = find(series, one.place, BASELINE, one.variant)
        seconds = round_seconds(one)
        ratio = NOTHING
        if base is not None and base is not one:
            common = [s for s in one.cells if s in base.cells]
            ours = dict(zip(one.cells, seconds, strict=True))
            theirs = dict(zip(base.cells, round_seconds(base), strict=True))
            each = [100 * (ours[s] / theirs[s] - 1) for s in common]
            if each:
                ratio = figure(summarize(each), 0) + " %"
                told = f"`{one.method}` {signed(float(np.mean(each)), 0)} %"
                more.setdefault(where(one.place), []).append(told)
        rows.append((f"`{one.method}`", where(one.place), figure(summarize(seconds), 2), ratio))
    low, high, top = (round(100 * v) for v in PRINTED_OVERHEAD)
    note = (
        f"The paper: 2·F_inf/(3F + O(P)), which is {low} to {high} % with F_inf = 0.5 to 0.7 F,"
        f" measured up to {top} %. "
    )
    if grid.scale == PROBE_SCALE.name:
        note += (
            "Only a head trains here, on features from the cache, so a round of static noise takes"
            " hundredths of a second. The signal is taken from cached maps in every step, of an"
            " eighth of the images drawn (`xcal-paper`: of all); `xcal` has none."
        )
    else:
        note += (
            "Ours computes a signal every fourth step (with `probe` in every step, of half the"
            " images) and takes the first forward pass from training. With `probe` only a head"
            " trains, on features from the cache: static noise costs next to nothing there, and"
            " covered images are all that goes through the network."
        )
    head = ("method", "where", "seconds a client and round", "over static noise")
    said = (
        "A client's round against static noise, in time: "
        + "; ".join(f"{place}: {', '.join(told)}" for place, told in more.items())
        + "."
        if more
        else "No finished pairs yet."
    )
    return _view(grid, series, said, [Table("Time", head, tuple(rows), note)] if rows else [], [])


def units_view(grid: Grid, results: Results) -> StudyView:
    series = of_grid(grid, results)
    rows = [
        (
            f"`{s.method}`",
            where(s.place),
            epsilon_text(s.place.epsilon),
            s.place.unit,
            figure(s.summary("macro_f1")),
            figure(s.summary("road")),
            str(max(c["units"] for r in s.cells.values() for c in r.values["clients"])),
        )
        for s in series
    ]
    head = ("method", "where", "ε", "unit", "macro F1", "ROAD", "units at the largest client")
    tables = [Table("Record and group", head, tuple(rows))] if rows else []
    twins = []
    for one in series:
        twin = [
            s
            for s in series
            if (s.method, s.place.epsilon, s.place.data, s.place.network, s.place.unit)
            == (one.method, one.place.epsilon, one.place.data, one.place.network, "group")
        ]
        ours = one.summary("macro_f1")
        theirs = twin[0].summary("macro_f1") if twin else None
        if one.place.unit == "record" and ours is not None and theirs is not None:
            twins.append(
                f"{ours.mean:.3f} and {theirs.mean:.3f} with `{one.method}` on {where(one.place)}"
                f" at ε = {epsilon_text(one.place.epsilon)}"
            )
    said = (
        "Macro F1 when the promise covers one image, and when it covers a whole group: "
        + "; ".join(twins)
        + "."
        if twins
        else "No pair of twins is finished yet."
    )
    return _view(grid, series, said, tables, [])


def shipped_view(grid: Grid, results: Results) -> StudyView:
    """The printed figure, ours by the published protocol, and ours without its leak."""
    series = of_grid(grid, results)
    rows, worth = [], list[float]()
    for one in series:
        if one.place.data != AS_SHIPPED:
            continue
        there = replace(one.place, data=LEAK_FREE)
        clean = find(series, there, one.method, one.variant)
        flattered = one.summary("macro_f1")
        honest = clean.summary("macro_f1") if clean is not None else None
        if flattered is None or honest is None:
            continue
        worth.append(flattered.mean - honest.mean)
        rows.append(
            (
                f"`{one.name}`",
                epsilon_text(one.place.epsilon),
                printed_text(one, "macro_f1", 3),
                figure(flattered),
                figure(honest),
                signed(worth[-1]),
            )
        )
    head = ("method", "ε", "the paper", "as shipped", "by picture", "difference")
    note = (
        "Macro F1, mean ± standard deviation over (n) seeds. As shipped: Kaggle's TRAIN and TEST"
        " with all their copies, files spread over clients at random; by picture: no picture in"
        " both training and test, nor at two clients."
    )
    said = (
        f"Copies of training pictures in the test set are worth {signed(min(worth))} to"
        f" {signed(max(worth))} of macro F1, by method and ε."
        if worth
        else "No pair of twins is finished yet."
    )
    table = Table("The published split, and one without its leak", head, tuple(rows), note)
    tables = [table] if rows else []
    return _view(grid, series, said, tables, [], tables)


def _view(
    grid: Grid,
    series: Sequence[Series],
    said: str,
    tables: Sequence[Table],
    sentences: Sequence[str],
    overviews: Sequence[Table | None] = (),
) -> StudyView:
    there = sum(len(s.cells) for s in series)
    return StudyView(
        grid.study,
        grid.scale,
        grid.question,
        said,
        tuple(tables),
        tuple(sentences),
        there,
        len(grid.cells),
        tuple(series),
        tuple(table for table in overviews if table is not None),
    )


_VIEWS = {
    "privacy-utility": privacy_utility_view,
    "clients": clients_view,
    "ablation": ablation_view,
    "efficiency": efficiency_view,
    "overhead": overhead_view,
    "units": units_view,
    "panel": privacy_utility_view,
    "shipped": shipped_view,
}


def view(grid: Grid, results: Results) -> StudyView:
    """What the finished cells of a grid say."""
    return _VIEWS[grid.study](grid, results)
