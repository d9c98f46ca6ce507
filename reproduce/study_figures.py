"""The studies' figures: F1 and ROAD by ε, scaling, ablation, efficiency."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.analysis import BASELINE, Comparison, Series, against, find, printed_gain
from reproduce.efficiency import course_of, lowess
from reproduce.store import Results
from reproduce.tables import StudyView
from xcal.report.figures import Figure, Line, figure_id, tone
from xcal.report.words import epsilon_text
from xcal.studies.statistics import Measure

MEASURES: tuple[tuple[Measure, str], ...] = (
    ("macro_f1", "macro F1"),
    ("road", "ROAD, −0.5 to 0.5"),
)


def _grouped(series: Sequence[Series]) -> dict[tuple[str, str], list[Series]]:
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        groups.setdefault((one.place.data, one.place.network), []).append(one)
    return groups


def by_epsilon(view: StudyView) -> list[Figure]:
    """F1 and ROAD against ε, one line a method; methods without noise are level lines."""
    made = []
    for (data, network), group in _grouped(view.series).items():
        finite = sorted({s.place.epsilon for s in group if s.place.epsilon is not None})
        if not finite:
            continue
        for measure, label in MEASURES:
            lines, words = [], []
            for method in dict.fromkeys(s.method for s in group):
                own = [s for s in group if s.method == method]
                found = [(s, s.summary(measure)) for s in own]
                known = [(s, f) for s, f in found if f is not None]
                if not known:
                    continue
                if known[0][0].place.epsilon is None:
                    level = known[0][1].mean
                    ends = (finite[0] / 1.5, finite[-1] * 1.5)
                    lines.append(
                        Line(method, ends, (level, level), tone(method), style=1, mode="lines")
                    )
                    words.append(f"{method} (no noise) {level:.3f}")
                    continue
                spread = tuple(f.deviation or 0.0 for _, f in known)
                lines.append(
                    Line(
                        method,
                        tuple(s.place.epsilon for s, _ in known),
                        tuple(f.mean for _, f in known),
                        tone(method),
                        spread,
                        spread,
                        style=0 if all(s.promises for s, _ in known) else 1,
                    )
                )
                points = (f"{f.mean:.3f} at ε {epsilon_text(s.place.epsilon)}" for s, f in known)
                words.append(f"{method} {', '.join(points)}")
            if lines:
                made.append(
                    Figure(
                        figure_id("epsilon", data, network, measure),
                        f"{label.split(',')[0]} by ε: {data}, {network}",
                        f"{label} against ε on a logarithmic axis. {'; '.join(words)}.",
                        "ε",
                        label,
                        tuple(lines),
                        x_log=True,
                        x_ticks=tuple(finite),
                        caption="Bars are standard deviations over seeds; dashed lines have no"
                        " guarantee.",
                    )
                )
    return made


def scaling(view: StudyView) -> list[Figure]:
    """F1 and ROAD against the number of clients, one line a method and shift."""
    made = []
    for (data, network), group in _grouped(view.series).items():
        for epsilon in sorted({s.place.epsilon for s in group if s.place.epsilon is not None}):
            for measure, label in MEASURES:
                lines = []
                for shift_number, shift in enumerate(("iid", "label", "covariate")):
                    for method in dict.fromkeys(s.method for s in group):
                        own = [
                            s
                            for s in group
                            if (s.method, s.place.partition) == (method, shift)
                            and s.place.epsilon in (epsilon, None)
                            and method != "centralized"
                        ]
                        points = [(s.place.clients, s.summary(measure)) for s in own]
                        known = [(n, f) for n, f in points if f is not None]
                        if known:
                            spread = tuple(f.deviation or 0.0 for _, f in known)
                            lines.append(
                                Line(
                                    method,
                                    tuple(n for n, _ in known),
                                    tuple(f.mean for _, f in known),
                                    tone(method),
                                    spread,
                                    spread,
                                    style=shift_number,
                                    label=f"{method}, {shift}",
                                )
                            )
                counts = sorted({n for line in lines for n in line.x})
                if len(counts) > 1:  # of one N there is no course to draw
                    made.append(
                        Figure(
                            figure_id("scaling", data, network, epsilon, measure),
                            f"{label.split(',')[0]} by clients: {data}, {network}, ε = {epsilon:g}",
                            f"{label} for {counts[0]} to {counts[-1]} clients, by method and by"
                            " how unlike the clients are; the numbers are in the table.",
                            "clients",
                            label,
                            tuple(lines),
                            x_log=True,
                            x_ticks=tuple(counts),
                            caption="Solid: alike clients; dashed: label shift; dotted: covariate"
                            " shift.",
                        )
                    )
    return made


def differences(found: Sequence[Comparison]) -> Figure | None:
    """Every comparison with static noise in one figure, beside the gains that the paper prints."""
    # Where both models give every image the same class there is nothing to compare.
    shown = [c for c in found if not c.f1.same]
    if not shown:
        return None
    where = {
        p: f"{p.data}, {p.network}, ε = {epsilon_text(p.epsilon)}"
        for p in dict.fromkeys(c.series.place for c in shown)
    }
    lines = []
    for method in dict.fromkeys(c.series.method for c in shown):
        own = [c for c in shown if c.series.method == method]
        lines.append(
            Line(
                method,
                tuple(where[c.series.place] for c in own),
                tuple(c.f1.mean for c in own),
                tone(method),
                tuple(c.f1.mean - c.f1.low for c in own),
                tuple(c.f1.high - c.f1.mean for c in own),
                mode="markers",
            )
        )
    gains = [(name, gain) for p, name in where.items() if (gain := printed_gain(p)) is not None]
    if gains:
        names, values = zip(*gains, strict=True)
        lines.append(
            Line("gain printed in the paper", names, values, tone("fl"), mode="markers", style=1)
        )
    words = "; ".join(
        f"{c.series.method} on {where[c.series.place]} {c.f1.mean:+.3f} ({c.f1.verdict})"
        for c in shown
    )
    return Figure(
        "differences",
        "Macro F1 less that of static noise at the same ε",
        f"Paired difference of macro F1 from {BASELINE}: {words}.",
        f"macro F1 − {BASELINE}",
        "",
        tuple(lines),
        across=True,
        zero=True,
        apart=True,
        caption="Paired by seed, 95 % intervals; what crosses zero shows no difference.",
    )


def not_scaled(view: StudyView) -> str:
    """A sentence on the places where one number of clients was run, so that nothing is drawn."""
    only: dict[int, list[str]] = {}
    groups = _grouped([s for s in view.series if s.method != "centralized"])
    for (data, network), group in groups.items():
        counts = {s.place.clients for s in group}
        if len(counts) == 1:
            only.setdefault(counts.pop(), []).append(f"{data} with {network}")
    if not only:
        return ""
    if len(only) == 1 and sum(map(len, only.values())) == len(groups):
        return f"Only N = {next(iter(only))} was run, so no figure by the number of clients."
    parts = [f"only N = {n} was run on {', '.join(places)}" for n, places in sorted(only.items())]
    return f"No figure by the number of clients where {'; '.join(parts)}."


def ablation(view: StudyView, results: Results) -> list[Figure]:
    """Every variant's paired difference of F1 from static noise, with its interval."""
    made = []
    places = dict.fromkeys(s.place for s in view.series)
    for place in places:
        group = [s for s in view.series if s.place == place]
        base = find(group, place, BASELINE)
        lines, words = [], []
        for method in dict.fromkeys(s.method for s in group if s is not base):
            names, means, lows, highs = [], [], [], []
            for one in (s for s in group if s.method == method):
                found = against(one, base, results)
                if found is None:
                    continue
                d = found.f1
                # An interval of one seed knows nothing of other seeds.
                names.append(one.name if d.seeds > 1 else f"{one.name} (one seed)")
                means.append(d.mean)
                lows.append(d.mean - d.low)
                highs.append(d.high - d.mean)
                words.append(f"{one.name} {d.mean:+.3f} ({d.verdict})")
            if names:
                lines.append(
                    Line(
                        method,
                        tuple(names),
                        tuple(means),
                        tone(method),
                        tuple(lows),
                        tuple(highs),
                        mode="markers",
                    )
                )
        if lines:
            where = f"{place.data}, {place.network}, ε = {epsilon_text(place.epsilon)}"
            made.append(
                Figure(
                    figure_id("ablation", where),
                    f"Difference from static noise: {where}",
                    f"Paired difference of macro F1 from {BASELINE}: {'; '.join(words)}.",
                    f"macro F1 − {BASELINE}",
                    "",
                    tuple(lines),
                    across=True,
                    zero=True,
                    caption="95 % intervals; what crosses zero shows no difference.",
                )
            )
    return made


def efficiency(view: StudyView) -> list[Figure]:
    """F1 and ROAD against the share of the budget spent, points and LOWESS."""
    made = []
    for (data, network), group in _grouped(view.series).items():
        for epsilon in dict.fromkeys(s.place.epsilon for s in group):
            courses = [
                c for c in map(course_of, (s for s in group if s.place.epsilon == epsilon)) if c
            ]
            for measure, label in (("f1", "validation macro F1"), ("road", "validation ROAD")):
                lines, words = [], []
                for c in courses:
                    if measure == "f1":
                        x, y = c.share, c.f1
                    elif c.road is not None:
                        x, y = c.road.share, c.road.values
                    else:
                        continue
                    method = c.series.method
                    lines.append(
                        Line(
                            method,
                            tuple(x.tolist()),
                            tuple(y.tolist()),
                            tone(method),
                            mode="markers",
                        )
                    )
                    smooth = lowess(x, y)
                    lines.append(
                        Line(
                            method,
                            tuple(x.tolist()),
                            tuple(smooth.tolist()),
                            tone(method),
                            mode="lines",
                            label=f"{method}, smoothed",
                        )
                    )
                    words.append(f"{method} from {y[0]:.3f} to {y[-1]:.3f}, highest {y.max():.3f}")
                if lines:
                    made.append(
                        Figure(
                            figure_id("efficiency", data, network, epsilon, measure),
                            f"{label} by budget: {data}, {network}, ε = {epsilon_text(epsilon)}",
                            f"{label} against the share of the privacy budget spent:"
                            f" {'; '.join(words)}.",
                            "share of the budget spent, Σρ/R",
                            label,
                            tuple(lines),
                            caption="Means over seeds, by round; lines: LOWESS, for the eye.",
                        )
                    )
    return made


def figures_of(view: StudyView, results: Results) -> list[Figure]:
    match view.study:
        case "privacy-utility":
            return by_epsilon(view)
        case "clients":
            return scaling(view)
        case "ablation":
            return ablation(view, results)
        case "efficiency":
            return efficiency(view)
        case _:
            return []
