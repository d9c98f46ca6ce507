"""The rows of a ledger: what they say, how they are read, and whether they hold together.

Reading takes no lock and changes nothing, so an auditor can do it beside a running client.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcal.dp.accounting import budget_at, joint_sigma, reference_cost
from xcal.dp.pld import SIGMA_SLACK, reference_delta
from xcal.errors import UserError

SCHEMA = 1
GENESIS = "0" * 64
UNITS = ("record", "group", "client")
RULES = ("sum", "renyi")
ACCOUNTANTS = ("renyi", "pld")
OWN_LOOP = "dp-sgd"  # the method of every training loop of one's own
NOISE_KINDS = ("gaussian", "discrete")
UNREADABLE = (sqlite3.Error, ValueError, TypeError, OverflowError, RecursionError)
"""What reading a damaged database and its JSON can raise."""


@dataclass(frozen=True)
class Head:
    """Where a ledger stands: how many rows it has and the hash of the last."""

    count: int
    hash: str


@dataclass(frozen=True)
class Row:
    seq: int
    kind: str
    body: dict[str, Any]
    prev: str
    hash: str


@dataclass(frozen=True)
class Terms:
    """What a ledger was created for; never changed afterwards.

    `rule = "sum"`: every run reserves its whole (ε_i, δ_i), and they may sum to (epsilon, delta).
    `rule = "renyi"`: all charges of all runs are summed at `order`. `epsilon = None`: a throw-away
    ledger of a simulation without a guarantee.
    """

    population: str
    unit: str
    epsilon: float | None
    delta: float | None
    rule: str = "sum"
    order: float | None = None
    simulated: bool = False  # made by a simulation for itself: seeded noise may be charged to it

    @property
    def of_real_people(self) -> bool:
        """Whether it limits what a real population's data pay."""
        return self.epsilon is not None and not self.simulated


@dataclass(frozen=True)
class RunTerms:
    """One run's own target and filter, reserved before its first step.

    `accountant = "renyi"`: Σρ at `order` stays within `budget`, which (ε, δ) allows. `"pld"`: at
    most `steps` steps, each at `rate` and with `sigma` at least; `budget` is what they all cost at
    `order`, for the odometer and a lifetime's rule.
    """

    run: str
    method: str
    unit: str
    epsilon: float | None  # None: the method has no guarantee
    delta: float | None
    order: float | None
    budget: float | None
    steps: int
    noise: str = "secure"
    accountant: str = "renyi"
    rate: float | None = None
    sigma: float | None = None
    honest: int | None = None  # sites that share its noise under masks; None: all of it is its own
    noise_kind: str = "gaussian"  # of its own noise; shared noise is discrete anyway

    @property
    def whole_orders(self) -> bool:
        """Whether its costs are proved at whole orders only: noise in whole numbers."""
        return self.honest is not None or self.noise_kind == "discrete"


@dataclass(frozen=True)
class Release:
    """One quantity that a step releases: its name, noise deviation and sensitivity."""

    name: str
    noise: float
    sensitivity: float


@dataclass(frozen=True)
class Charge:
    """What one step pays: a Poisson-subsampled Gaussian of multiplier `sigma`, at rate `rate`."""

    run: str
    round: int
    step: int
    rate: float
    sigma: float
    cost: float  # at the run's order
    releases: tuple[Release, ...]
    inputs: str | None = None  # digest of all that determines the release, under seeded noise only


@dataclass(frozen=True)
class Verification:
    """The result of reading a ledger from the first row to the last."""

    ok: bool
    rows: int
    problem: str | None = None
    row: int | None = None


def canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def row_hash(seq: int, kind: str, body: str, prev: str) -> str:
    return hashlib.sha256(f"{seq}\n{kind}\n{prev}\n{body}".encode()).hexdigest()


def head_path(path: Path) -> Path:
    return path.with_suffix(".head")


def read_head(path: Path) -> Head | None:
    """The newest complete line of the head file beside a ledger; None where there is none."""
    try:
        text = head_path(path).read_text(errors="replace")
    except FileNotFoundError:
        return None
    for line in reversed(text.split("\n")[:-1]):  # a line without its newline was cut off
        parts = line.split()
        if len(parts) == 2 and parts[0].isdigit() and len(parts[1]) == 64:
            return Head(int(parts[0]), parts[1])
    return None


class LedgerRefusal(UserError):
    """The ledger cannot be used, or does not admit what was asked."""


class LedgerBusy(LedgerRefusal):
    """Another process holds the ledger."""


class LedgerOlder(LedgerRefusal):
    """It lacks rows that somebody saw: an older copy was put back, or another ledger."""


def refuse(path: Path, what: str, kind: type[LedgerRefusal] = LedgerRefusal) -> LedgerRefusal:
    return kind(f"The ledger {path} {what}")


def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    if read_only and not path.with_name(path.name + "-wal").exists():
        uri += "&immutable=1"  # nobody is writing: read it even where nothing may be written
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)
    if not read_only:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
    return connection


def load(connection: sqlite3.Connection, path: Path) -> list[Row]:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise refuse(
            path,
            f"was written by a newer version (schema {version}, this one knows {SCHEMA}):"
            " update xcal and try again.",
        )
    rows = connection.execute("SELECT seq, kind, body, prev, hash FROM rows ORDER BY seq")
    found = [Row(q, k, json.loads(b), p, h) for q, k, b, p, h in rows]
    if not all(isinstance(row.body, dict) for row in found):
        raise ValueError("a row's body is not a table")
    return found


def read_rows(path: Path) -> list[Row]:
    """All rows, without taking the lock and whether or not they follow from one another."""
    if not path.exists():
        raise refuse(path, "does not exist: check the path.")
    try:
        with contextlib.closing(connect(path, read_only=True)) as connection:
            rows = load(connection, path)
    except UNREADABLE as error:
        raise refuse(
            path, "cannot be read: it is not a ledger or is damaged, or the disk is full."
        ) from error
    check = check_rows(rows)
    if not check.ok:
        raise refuse(path, f"cannot be read: row {check.row} {check.problem}.")
    return rows


def _is_number(value: object, *, above: float, most: float = math.inf) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return above < value <= most and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _says_what_it_should(row: Row) -> bool:
    """Whether a row has the fields of its kind, with values that such a row can have."""
    body = row.body
    if row.kind == "create":
        terms = Terms(**body["terms"])
        limits = (terms.epsilon, terms.delta, terms.order)
        return (
            (terms.unit in UNITS and terms.rule in RULES and isinstance(terms.population, str))
            and all(v is None or _is_number(v, above=0.0) for v in limits)
            and (terms.epsilon is None) == (terms.delta is None)
            and (terms.rule == "sum" or None not in limits)
        )
    if not isinstance(body["run"], str):
        return False
    if row.kind == "run":
        run = RunTerms(**body)
        promise = (run.epsilon, run.delta, run.order, run.budget)
        whole = all(_is_number(v, above=0.0) for v in promise)
        planned = (run.rate, run.sigma)
        if run.noise_kind not in NOISE_KINDS:
            return False
        if run.accountant == "pld":
            fixed = _is_number(run.rate, above=0.0, most=1.0) and _is_number(run.sigma, above=0.0)
            return run.unit in UNITS and whole and fixed and _is_count(run.steps)
        return (
            (run.unit in UNITS and run.accountant in ACCOUNTANTS)
            and planned == (None, None)
            and (whole or promise == (None,) * 4)
        )
    if row.kind == "charge":
        charge = charge_of(row)
        noises = [v for r in charge.releases for v in (r.noise, r.sensitivity)]
        return (
            (_is_count(charge.round) and _is_count(charge.step) and len(noises) > 0)
            and _is_number(charge.rate, above=0.0, most=1.0)
            and all(_is_number(v, above=0.0) for v in (charge.sigma, *noises))
            and all(_is_number(v, above=-1.0) for v in (charge.cost, body.get("lifetime_cost", 0)))
        )
    return row.kind in ("halt", "unbounded") and _is_count(body["round"])


def check_rows(rows: Sequence[Row]) -> Verification:
    """Whether every row can be understood: editors and writers unlike ours may have been there."""
    for position, row in enumerate(rows, start=1):
        try:
            fine = _says_what_it_should(row) and (row.kind == "create") == (position == 1)
        except (KeyError, TypeError, ValueError):
            fine = False
        if not fine:
            return Verification(False, len(rows), "says nothing that can be understood", position)
    return Verification(True, len(rows))


def check_chain(rows: Sequence[Row]) -> Verification:
    """Whether every row follows from the one before it."""
    previous = GENESIS
    for position, row in enumerate(rows, start=1):
        try:
            expected = row_hash(position, row.kind, canonical(row.body), previous)
        except ValueError:  # an edited row may hold what no writer of ours lets through
            return Verification(False, len(rows), "holds a number that is not finite", position)
        if row.seq != position or row.prev != previous or row.hash != expected:
            return Verification(False, len(rows), "does not follow from the row before", position)
        previous = row.hash
    return Verification(True, len(rows))


def check_head(rows: Sequence[Row], head: Head | None) -> Verification:
    """Whether the rows contain the head on record: a ledger may be ahead of it, never behind."""
    if head is None:
        return Verification(False, len(rows), "has lost its head file", len(rows))
    if head.count > len(rows):
        return Verification(
            False, len(rows), f"is shorter than its head file says ({head.count} rows)", len(rows)
        )
    if head.count and rows[head.count - 1].hash != head.hash:
        return Verification(False, len(rows), "is not the one its head file tells of", head.count)
    return Verification(True, len(rows))


def terms_of(rows: Sequence[Row]) -> Terms:
    return Terms(**rows[0].body["terms"])


def runs_of(rows: Sequence[Row]) -> dict[str, RunTerms]:
    return {r.body["run"]: RunTerms(**r.body) for r in rows if r.kind == "run"}


def charge_of(row: Row) -> Charge:
    body = {k: v for k, v in row.body.items() if k != "lifetime_cost"}
    return Charge(**{**body, "releases": tuple(Release(*r) for r in body["releases"])})


def charges_of(rows: Sequence[Row], run: str) -> list[Charge]:
    return [charge_of(r) for r in rows if r.kind == "charge" and r.body["run"] == run]


def exact_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What left without a guarantee of people whom no charge covers, by name, oldest first."""
    return {
        r.body["run"]: r.body["exact"]
        for r in rows
        if r.kind == "unbounded" and isinstance(r.body.get("exact"), dict)
    }


def as_planned(run: RunTerms, rate: float, sigma: float) -> bool:
    """Whether a step is one of the run's fixed plan; any step is where nothing was fixed."""
    if run.accountant != "pld":
        return True
    assert run.rate is not None and run.sigma is not None
    return rate == run.rate and sigma >= run.sigma * (1 - SIGMA_SLACK)


def _keeps_its_promise(run: RunTerms) -> bool:
    """Whether all planned steps of a run by PLD are within its (ε, δ), by dp-accounting alone."""
    assert run.rate is not None and run.sigma is not None
    assert run.epsilon is not None and run.delta is not None
    sigma = run.sigma * (1 - SIGMA_SLACK)
    return reference_delta(run.rate, sigma, run.steps, run.epsilon) <= run.delta


def check_spending(rows: Sequence[Row]) -> Verification:
    """Recompute every charge with dp-accounting alone, and every total against its limit."""
    terms, runs = terms_of(rows), runs_of(rows)
    totals: dict[str, float] = {}
    paid: dict[str, int] = {}
    lifetime = 0.0

    def bad(row: Row, what: str) -> Verification:
        return Verification(False, len(rows), what, row.seq)

    halted: set[str] = set()
    for row in rows:
        if row.kind == "halt":
            halted.add(row.body["run"])
        if row.kind != "charge":
            continue
        charge = charge_of(row)
        run = runs.get(charge.run)
        if run is None or run.order is None or run.budget is None:
            return bad(row, "charges a run that was never reserved")
        if charge.run in halted:
            return bad(row, "charges a run that had halted")
        joint = joint_sigma(*(r.noise / r.sensitivity for r in charge.releases))
        if not math.isclose(joint, charge.sigma, rel_tol=1e-9):
            return bad(row, "charges other noise than it releases with")
        assert run.epsilon is not None and run.delta is not None
        paid[charge.run] = paid.get(charge.run, 0) + 1
        by_count = run.accountant == "pld"
        if by_count:
            if not as_planned(run, charge.rate, charge.sigma):
                return bad(row, "charges another step than its run's plan fixed")
            if paid[charge.run] > run.steps:
                return bad(row, "charges more steps than its run planned")
            if paid[charge.run] == 1 and not _keeps_its_promise(run):
                return bad(row, "charges a run whose plan exceeds its promise")
        elif run.budget > budget_at(run.order, run.epsilon, run.delta) * (1 + 1e-9):
            return bad(row, "charges a run whose budget exceeds its promise")
        if run.whole_orders and (by_count or run.order != int(run.order)):
            return bad(row, "charges discrete noise otherwise than at a whole order")
        expected = reference_cost(charge.rate, charge.sigma, run.order)
        if charge.cost < expected * (1 - 1e-9):
            return bad(row, "records less than its step costs")
        totals[charge.run] = totals.get(charge.run, 0.0) + expected
        if not by_count and totals[charge.run] > run.budget * (1 + 1e-9):
            return bad(row, "takes its run past its budget")
        if terms.rule == "renyi" and terms.order and terms.epsilon and terms.delta:
            lifetime += reference_cost(charge.rate, charge.sigma, terms.order)
            if lifetime > budget_at(terms.order, terms.epsilon, terms.delta) * (1 + 1e-9):
                return bad(row, "takes the population past its lifetime budget")
    reserved = [r for r in runs.values() if r.epsilon is not None]
    if terms.epsilon is not None and terms.rule == "sum":
        if not sums_within(terms, reserved):
            return Verification(
                False, len(rows), "reserves more than its lifetime limit", len(rows)
            )
    return Verification(True, len(rows))


def sums_within(terms: Terms, runs: Sequence[RunTerms]) -> bool:
    assert terms.epsilon is not None and terms.delta is not None
    epsilon = math.fsum(r.epsilon or 0.0 for r in runs)
    delta = math.fsum(r.delta or 0.0 for r in runs)
    return epsilon <= terms.epsilon * (1 + 1e-12) and delta <= terms.delta * (1 + 1e-12)


def verify(path: Path) -> Verification:
    """Read a ledger from end to end: chain, head, costs and limits."""
    head = read_head(path)  # before the rows: a running client may add some in between
    rows = read_rows(path)
    if not rows:
        return Verification(False, 0, "has no rows", 0)
    for check in (check_chain(rows), check_head(rows, head)):
        if not check.ok:
            return check
    return check_spending(rows)


def covers(ledger_unit: str, run_unit: str) -> bool:
    """Whether a charge for one of the run's units holds for the ledger's: if they are the same.

    A larger unit is no stronger one. In a run of groups a null image in the place of one image
    leaves its group in the draw, with another gradient of norm C: the sum moves by up to 2C, and
    the run is charged for C.
    """
    return run_unit == ledger_unit


def how_to_cover(unit: str) -> str:
    """What to do about a run that protects something else than this unit."""
    if unit == "group":
        return (
            "set unit = 'group', which needs a data set that says whose its images are (`xcal data"
            " import --group-column`); a site made with --unit record takes runs per image"
        )
    return f"set unit = {unit!r}, or name a site that was made with another --unit"
