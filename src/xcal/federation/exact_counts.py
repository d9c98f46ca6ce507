"""Exact counts of held-out people, each below a floor withheld: no noise, no charge, no guarantee.

Where `policy.toml` sets `evaluation_floor`, they go to the lead instead of charged tables with
noise (`disclosure.py`). Of each run one table is sent, written into the ledger before it leaves:
a row that costs no ε and says that no ε covers it. The certificate, `xcal site show` and
`xcal site check` read it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcal.data.images import Images
from xcal.dp.ledger.rows import OWN_LOOP, Row, exact_of, read_rows
from xcal.dp.sampling import UnitTable
from xcal.errors import UserError
from xcal.federation.admission import check_population
from xcal.federation.disclosure import COUNTS, held_ledger, own_name
from xcal.federation.held_out import HeldOut
from xcal.federation.loaded_site import remember_head
from xcal.federation.logbook import note, now
from xcal.federation.messages import Disclosure
from xcal.federation.partition_record import check_never_else
from xcal.federation.request_refusals import Refused
from xcal.federation.site_directory import SiteDirectory

NO_GUARANTEE = "no guarantee (ε = ∞) covers held-out people for these"


@dataclass(frozen=True)
class Sent:
    """What left a site of one run's final model."""

    run: str
    floor: int
    time: str
    about: str  # digest of the model
    data: str  # and of the data set
    counts: tuple[int | None, ...]


def people_by_class(
    images: Images, probabilities: NDArray[np.float64], classes: int
) -> NDArray[np.int64]:
    """People (groups) by true and predicted class, each counted once.

    A person's true class is that of most of their images, the first of several; the prediction is
    the likeliest class by the mean of the probabilities of their images of that class.
    """
    counts = np.zeros((classes, classes), dtype=np.int64)
    table = UnitTable.groups(images.groups)
    shown = np.nan_to_num(probabilities, nan=0.0)  # as one image of such a network is called
    for own in np.split(table.images, table.starts[1:-1]):
        true = np.bincount(images.labels[own], minlength=classes).argmax()
        counts[true, shown[own[images.labels[own] == true]].mean(axis=0).argmax()] += 1
    return counts


def above(counts: NDArray[np.int64], floor: int) -> tuple[int | None, ...]:
    """Cell by cell, by that cell alone: what is below the floor, 0 as well, is None."""
    return tuple(int(c) if c >= floor else None for c in counts.ravel())


# --- at the site ----------------------------------------------------------------------------------


def counts_sent(site_dir: Path) -> list[Sent]:
    """What has left this site, oldest first."""
    path = site_dir / "ledger.sqlite"
    return sent_by(read_rows(path)) if path.exists() else []


def sent_by(rows: Sequence[Row]) -> list[Sent]:
    """What these rows of a ledger tell of."""
    return _sent(exact_of(rows))


def _sent(exact: Mapping[str, Mapping[str, Any]]) -> list[Sent]:
    return [
        Sent(name.removesuffix(own_name("", COUNTS)), **{**told, "counts": tuple(told["counts"])})
        for name, told in exact.items()
    ]


def sent_text(sent: Sequence[Sent]) -> str:
    """One sentence without its full stop; empty where nothing was sent."""
    if not sent:
        return ""
    runs = ", ".join(f"{one.run} (floor {one.floor})" for one in sent)
    return f"exact counts of held-out people were sent for {runs}: {NO_GUARANTEE}"


def send_counts(
    site: SiteDirectory,
    run: str,
    about: str,
    held: HeldOut,
    probabilities: NDArray[np.float64],
) -> Disclosure | None:
    """The table of a run's final model, written down; None where the policy allows no more of them.

    The same question again gets what was sent; one about another model (`about`) is refused.

    Guarantee: none for held-out people. The ledger's covers those who are trained on, and nobody is
    both: refused where that is not known.
    """
    if not held.people:
        why = (
            f"a group of them is a {held.who}, which is no person" if held.apart else "nobody says"
        )
        raise Refused(
            "data",
            f"Whose the held-out images are must be known, and is not ({why}): no exact counts are"
            " sent of them.",
        )
    floor, limit = site.policy.evaluation_floor, site.policy.evaluation_tables
    with held_ledger(site) as ledger:  # two processes do not both send
        check_population(site.owner, ledger)
        earlier = _sent(ledger.exact)
        for one in earlier:
            if one.run == run:
                if (one.about, one.floor) != (about, floor):
                    raise _answered(run)
                return Disclosure(site.name, run, {}, counts=one.counts, floor=one.floor)
        if ledger.charges(own_name(run, "evaluation")):
            raise _answered(run)
        if ledger.terms.of_real_people:
            check_never_else(site.path, held.data.digest)
            if any(one.method == OWN_LOOP for one in ledger.runs.values()):
                raise Refused(
                    "data",
                    "The ledger was charged by a training loop of the site's own, and nobody knows"
                    " whether people who are held out were trained on there: no exact counts are"
                    " sent of them.",
                )
        if len(earlier) >= limit:
            detail = f"evaluation_tables = {limit} in policy.toml, and so many were sent"
            note(site.path, "not-disclosed", run=run, detail=detail)
            return None
        made = above(people_by_class(held.images, probabilities, len(held.classes)), floor)
        told = {"floor": floor, "time": now(), "about": about, "data": held.data.digest}
        told["counts"] = list(made)
        ledger.record_exact(own_name(run, COUNTS), told)
        remember_head(site.path, ledger.head)
    return Disclosure(site.name, run, {}, counts=made, floor=floor)


def _answered(run: str) -> Refused:
    return Refused(
        "round-other-weights",
        f"Of {run!r} a table was sent already, of another model or by another policy: of each run"
        " there is one.",
    )


# --- at the lead ----------------------------------------------------------------------------------


def read_counts(sent: Disclosure, classes: Sequence[str]) -> dict[str, Any]:
    """What the lead makes of a site's counts: each number lies between a least and a most.

    None where every count is below the floor.
    """
    size = len(classes)
    if sent.counts is None or sent.floor is None or len(sent.counts) != size**2:
        raise UserError(f"{sent.client} sent counts of another shape.")
    rows = [list(sent.counts[size * k : size * (k + 1)]) for k in range(size)]
    least = np.array([[c or 0 for c in row] for row in rows])
    most = np.array([[sent.floor - 1 if c is None else c for c in row] for row in rows])
    # A hit more raises accuracy and F1, a miss more lowers them: these tables are the two ends.
    hits = np.eye(size, dtype=bool)
    ends = np.where(hits, least, most), np.where(hits, most, least)
    told = bool(least.any())
    return {
        "classes": list(classes),
        "counts": rows,
        "floor": sent.floor,
        "units": [int(least.sum()), int(most.sum())],
        "accuracy": [float(np.trace(end) / end.sum()) for end in ends] if told else None,
        "macro_f1": [mean_f1(end) for end in ends] if told else None,
        "epsilon": None,  # as a ledger says it: no guarantee
    }


def mean_f1(table: NDArray[Any]) -> float | None:
    """F1 over the classes that occur or are predicted, from units by true and predicted class."""
    mentions = table.sum(axis=0) + table.sum(axis=1)
    there = mentions > 0
    return float((2 * np.diag(table)[there] / mentions[there]).mean()) if there.any() else None
