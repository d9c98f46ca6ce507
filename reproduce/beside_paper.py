"""One table of three: what the paper prints, ours at its settings, ours where models learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reproduce.analysis import Place, Series
from reproduce.paper import printed
from reproduce.scales import SMALLER_RATE
from reproduce.store import CellResult, unpack
from reproduce.wording import figure
from xcal.report.words import NOTHING, Table, epsilon_text
from xcal.studies.statistics import Summary

METHODS = ("centralized", "fl", "fl-dp", "agp", "xcal-paper", "xcal")
AS_PRINTED = 0.01
"""Differences of macro F1 below this are not called any."""


def beside_the_paper(at_its_settings: Sequence[Series], at_probe: Sequence[Series]) -> Table | None:
    """A row a set, ε and method that the paper prints and either scale has run."""
    columns = {
        "at its settings": _by_row(at_its_settings),
        f"at {SMALLER_RATE}": _by_row(at_its_settings, SMALLER_RATE),
        "at `probe`": _by_row(at_probe),
    }
    rows = []
    for row in sorted(set().union(*columns.values()), key=_order):
        data, epsilon, method = row
        value = printed("macro_f1", data, method, epsilon)
        if value is None:
            continue
        found = {where: series.get(row) for where, series in columns.items()}
        ours = [figure(_f1(one)) for one in found.values()]
        named = (data, epsilon_text(epsilon), f"`{method}`", f"{value:.3f}")
        rows.append((*named, *ours, _said(value, found)))
    if not rows:
        return None
    head = ("set", "ε", "method", "the paper", *columns, "in words")
    note = (
        "Macro F1, mean ± standard deviation over (n) seeds. Its settings: EfficientNet-B0 whole,"
        " batches of 32, η = 10⁻³, C = 1, 30 rounds, from published weights, and once more with"
        " η = 10⁻⁴; `probe`: a head on its middle stages, whole sets at 128 pixels. The paper has"
        " one method of its own; here it stands beside the published rule, `xcal-paper`, and beside"
        " `xcal`. Dermoscopy stands in for the paper's melanoma set and any finding for its"
        " pneumonia; blood cells are split by picture."
    )
    return Table("The paper's figures and ours", head, tuple(rows), note)


Row = tuple[str, float | None, str]


def _order(row: Row) -> tuple[str, float, int]:
    data, epsilon, method = row
    return data, float("inf") if epsilon is None else epsilon, METHODS.index(method)


def _by_row(series: Sequence[Series], variant: str = "") -> dict[Row, Series]:
    """Of the paper's main table: three clients alike, EfficientNet-B0, an image as the unit."""
    found = {}
    for one in series:
        p = one.place
        usual = p == Place(p.data, p.network, p.epsilon, 3, "iid", "record")
        if one.method in METHODS and one.variant == variant and usual and p.network != "resnet18":
            found[p.data, p.epsilon, one.method] = one
    return found


def _f1(series: Series | None) -> Summary | None:
    return None if series is None else series.summary("macro_f1")


def _said(value: float, found: Mapping[str, Series | None]) -> str:
    parts = []
    for where, series in found.items():
        if series is None:
            continue
        if all(map(_one_class, series.cells.values())):
            ranked = series.summary("auroc")
            told = "" if ranked is None else f" (AUROC {ranked.mean:.2f})"
            parts.append(f"{where} every image gets the same class{told}")
        else:
            parts.append(f"{where} {_beside(value, _f1(series))}")
    said = "; ".join(parts)
    return said[0].upper() + said[1:] if said else NOTHING


def _one_class(cell: CellResult) -> bool:
    return len(np.unique(unpack(cell.values["predicted"]))) == 1


def _beside(value: float, found: Summary | None) -> str:
    assert found is not None  # every finished cell has it
    more = found.mean - value
    if abs(more) < AS_PRINTED:
        return "as printed"
    return f"{abs(more):.2f} {'above' if more > 0 else 'below'} the printed figure"
