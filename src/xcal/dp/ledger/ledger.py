"""The durable record of what a population's data have paid.

One SQLite file, append-only, each row chained to the one before it by a hash, committed and synced
*before* the release it pays for. A process killed at any moment may have paid for a release that
never happened, never the reverse. The head (row count and hash) is also kept in a second file
beside it and travels with every reply, so that a missing, shortened or older ledger is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.filter import BudgetExhausted, RenyiFilter, add_up
from xcal.dp.ledger.head import check_clock, write_head
from xcal.dp.ledger.rows import (
    GENESIS,
    RULES,
    SCHEMA,
    UNITS,
    UNREADABLE,
    Charge,
    Head,
    LedgerBusy,
    LedgerOlder,
    LedgerRefusal,
    Row,
    RunTerms,
    Terms,
    canonical,
    charges_of,
    check_chain,
    check_head,
    check_rows,
    connect,
    covers,
    exact_of,
    head_path,
    how_to_cover,
    load,
    read_head,
    refuse,
    row_hash,
    runs_of,
    sums_within,
    terms_of,
)
from xcal.durable import sync_folder
from xcal.errors import UserError

_TABLES = """
CREATE TABLE rows (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL,
                   prev TEXT NOT NULL, hash TEXT NOT NULL) STRICT;
CREATE TRIGGER no_update BEFORE UPDATE ON rows BEGIN SELECT RAISE(ABORT, 'append only'); END;
CREATE TRIGGER no_delete BEFORE DELETE ON rows BEGIN SELECT RAISE(ABORT, 'append only'); END;
"""


_NOTHING = 1e-9  # of a limit: no run could be made of it
_USED_UP = "its lifetime limit is used up, and no further run is admitted"


class LedgerExhausted(LedgerRefusal):
    """A lifetime limit has no room for the run: `ran_out` names epsilon, delta or both."""

    def __init__(self, text: str, ran_out: tuple[str, ...]) -> None:
        super().__init__(text)
        self.ran_out = ran_out


def check_terms(terms: Terms) -> None:
    """Refuse, in one sentence, terms that no ledger can carry."""
    if terms.unit not in UNITS or terms.rule not in RULES:
        raise UserError(
            f"A ledger's unit is one of {', '.join(UNITS)} and its rule one of {', '.join(RULES)},"
            f" not {terms.unit!r} and {terms.rule!r}."
        )
    if not terms.population:
        raise UserError("A ledger needs the name of its population: give --population NAME.")
    if terms.rule != "renyi" and terms.order is not None:
        raise UserError(
            f"An order is what the rule renyi sums at, and the rule is {terms.rule}: add --rule"
            " renyi, or leave out --order."
        )
    if terms.rule == "renyi":
        if terms.order is None or terms.epsilon is None or terms.delta is None:
            raise UserError("A ledger with the rule renyi needs epsilon, delta and --order A.")
        if (
            not 1 < terms.order < math.inf
            or budget_at(terms.order, terms.epsilon, terms.delta) <= 0
        ):
            raise UserError(
                f"Order {terms.order:g} leaves no budget for epsilon = {terms.epsilon:g} and"
                f" delta = {terms.delta:g}: choose a larger order or epsilon."
            )


def create(path: Path, terms: Terms) -> None:
    """Make a new ledger. Refused where one stands, or once stood and is missing."""
    check_terms(terms)
    if path.exists():
        raise refuse(path, "exists already: a ledger is never replaced.")
    head = read_head(path)
    if head is not None and head.count > 1:
        raise refuse(
            path, f"is missing, but {head_path(path)} says it had {head.count} rows: restore it."
        )
    body = canonical({"schema": SCHEMA, "terms": asdict(terms)})
    digest = row_hash(1, "create", body, GENESIS)
    scratch = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(scratch, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA user_version={SCHEMA}")
            connection.execute(
                "INSERT INTO rows VALUES (1, 'create', ?, ?, ?)", (body, GENESIS, digest)
            )
        write_head(path, Head(1, digest))
        os.replace(scratch, path)
        sync_folder(path.parent)
    except (OSError, sqlite3.Error) as error:
        raise refuse(
            path, "cannot be created: is the folder writable and the disk not full?"
        ) from error


class Ledger:
    """A ledger opened for spending: locked, its chain and head checked.

    Use as a context manager. Every method that appends has committed and synced when it returns.
    """

    def __init__(self, path: Path, *, expected: Head | None = None) -> None:
        self.path = path
        if not os.path.exists(path):  # False also for a name that no file can have
            head = read_head(path)
            raise refuse(
                path,
                "does not exist: `xcal ledger create` makes one."
                if head is None
                else f"is missing, but its head file says it had {head.count} rows: restore it.",
            )
        try:
            self._lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise refuse(path, "cannot be locked: is its folder writable?") from error
        try:
            self._take_lock()
            self._open(expected)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refuse(
                self.path,
                "is in use by another process: wait until it ends, or stop it.",
                LedgerBusy,
            ) from error

    def _open(self, expected: Head | None) -> None:
        check_clock(self.path)
        head = read_head(self.path)
        try:
            self._connection = connect(self.path, read_only=False)
            rows = load(self._connection, self.path)
        except UNREADABLE as error:
            raise refuse(
                self.path,
                "cannot be opened for writing: it is damaged or read-only, or the disk is full.",
            ) from error
        for check in (check_chain(rows), check_head(rows, head), check_rows(rows)):
            if not check.ok:
                raise refuse(
                    self.path,
                    f"is refused: row {check.row} {check.problem}. Restore the newest copy.",
                )
        self._rows = rows
        if expected is not None:
            self.check_holds(expected, "its run or server")
        self.terms = terms_of(rows)
        self._runs = runs_of(rows)
        self._lifetime_costs: dict[tuple[float, float], float] = {}
        self._lifetime = self._lifetime_filter()
        try:
            write_head(self.path, self.head)
            self._head_log = open(head_path(self.path), "a")  # noqa: SIM115 - lives as long as this
        except OSError as error:
            raise refuse(
                self.path,
                "cannot be opened for writing: its head file is read-only, or the disk is full.",
            ) from error

    def _lifetime_filter(self) -> RenyiFilter | None:
        terms = self.terms
        if terms.rule != "renyi":
            return None
        assert terms.order is not None and terms.epsilon is not None and terms.delta is not None
        spent = 0.0
        for row in self._rows:
            if row.kind == "charge":
                spent = add_up(spent, row.body["lifetime_cost"])
        return RenyiFilter(terms.order, budget_at(terms.order, terms.epsilon, terms.delta), spent)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, even where a Ctrl-C comes in between. Safe to call twice."""
        try:
            self._tidy_head()
        finally:
            try:
                connection = getattr(self, "_connection", None)
                if connection is not None:
                    connection.close()
                    self._connection = None  # type: ignore[assignment]
            finally:
                if self._lock >= 0:
                    os.close(self._lock)
                    self._lock = -1

    def __del__(self) -> None:
        """A Ctrl-C may come before anyone could close it: the lock goes with the object."""
        if getattr(self, "_lock", -1) >= 0:
            os.close(self._lock)

    def _tidy_head(self) -> None:
        """One line instead of many: what the head must say was appended row by row.

        A ledger that is ahead of its head is in order, so this may fail.
        """
        log = getattr(self, "_head_log", None)
        if log is not None:
            self._head_log = None  # type: ignore[assignment]
            with contextlib.suppress(OSError):
                log.close()
                write_head(self.path, self.head)

    @property
    def head(self) -> Head:
        return Head(len(self._rows), self._rows[-1].hash)

    @property
    def runs(self) -> Mapping[str, RunTerms]:
        """The terms of every run that reserved something, by name."""
        return self._runs

    def check_holds(self, head: Head, who: str) -> None:
        """Refuse where the rows do not contain a head that somebody remembers."""
        if not check_head(self._rows, head).ok:
            raise refuse(
                self.path,
                f"is older than what {who} remembers of it ({head.count} rows), or another: put the"
                " newest one back.",
                LedgerOlder,
            )

    def charges(self, run: str) -> list[Charge]:
        """The charges of one run, in the order they were made."""
        return charges_of(self._rows, run)

    def halted_at(self, run: str) -> tuple[int, int] | None:
        """Round and step at which the run's filter halted it for good; None if it did not."""
        for row in self._rows:
            if row.kind == "halt" and row.body["run"] == run:
                return row.body["round"], row.body["step"]
        return None

    def _append(self, kind: str, body: dict[str, Any]) -> None:
        if self._connection is None:
            raise refuse(self.path, "was closed: nothing more can be charged, open it again.")
        text = canonical(body)
        seq, previous = len(self._rows) + 1, self._rows[-1].hash
        digest = row_hash(seq, kind, text, previous)
        try:
            self._connection.execute(
                "INSERT INTO rows VALUES (?, ?, ?, ?, ?)", (seq, kind, text, previous, digest)
            )
            self._rows.append(Row(seq, kind, json.loads(text), previous, digest))
            self._head_log.write(f"{seq} {digest}\n")
            self._head_log.flush()
        except (OSError, sqlite3.Error) as error:
            raise refuse(
                self.path, "could not be written (disk full or read-only?): nothing was released."
            ) from error

    def reserve(self, run: RunTerms) -> None:
        """Enter a run. The same terms again are accepted, others under its name refused."""
        self.check(run)
        if run.run not in self._runs:
            body = asdict(run)
            if run.honest is None:  # as rows were before there were masks
                del body["honest"]
            if run.noise_kind == "gaussian":
                del body["noise_kind"]
            self._append("run", body)
            self._runs[run.run] = run

    def check(self, run: RunTerms) -> None:
        """Refuse, in one sentence, what `reserve` would refuse; nothing is written."""
        known = self._runs.get(run.run)
        if known is not None:
            if known != run:
                raise refuse(
                    self.path,
                    f"knows a run named {run.run!r} with other terms: name the new run otherwise.",
                )
            return
        limited = self.terms.epsilon is not None
        if run.noise != "secure" and self.terms.of_real_people:
            raise refuse(
                self.path,
                "protects a real population, and the run's noise comes from a seed: set noise ="
                " 'secure'.",
            )
        if run.epsilon is None and limited:
            raise refuse(
                self.path,
                f"carries a limit, and the method {run.method!r} has no guarantee:"
                " choose a method with one, or run without this site.",
            )
        if run.whole_orders and self.terms.order is not None and self.terms.order % 1:
            instead = "noise_kind = 'gaussian'" if run.honest is None else "trust = 'site'"
            raise refuse(
                self.path,
                f"sums costs at order {self.terms.order:g}, and those of discrete noise are proved"
                f" at whole orders: choose {instead}.",
            )
        if run.epsilon is not None and not covers(self.terms.unit, run.unit):
            raise refuse(
                self.path,
                f"protects a {self.terms.unit}, and the run a {run.unit}:"
                f" {how_to_cover(self.terms.unit)}.",
            )
        if limited and self.terms.rule == "sum":
            if not sums_within(self.terms, [*self._runs.values(), run]):
                raise self._exhausted(run)

    def _exhausted(self, run: RunTerms) -> LedgerExhausted:
        """What ran out of the lifetime limit, what is left of it and what the run asks for."""
        ran_out, told, used_up = [], [], False
        for name in ("epsilon", "delta"):
            limit, asked = getattr(self.terms, name), getattr(run, name)
            reserved = [getattr(r, name) or 0.0 for r in self._runs.values()]
            if math.fsum([*reserved, asked]) > limit * (1 + 1e-12):
                ran_out.append(name)
                left = max(limit - math.fsum(reserved), 0.0)
                told.append(f"{name} = {left:.6g} left of {limit:g} and the run asks for {asked:g}")
                used_up |= left <= limit * _NOTHING
        what = _USED_UP if used_up else f"lower the run's {' and '.join(ran_out)}"
        return LedgerExhausted(
            f"The ledger {self.path} has {'; '.join(told)}: {what}.", tuple(ran_out)
        )

    def check_step(self, rate: float, sigma: float) -> None:
        """Refuse a run of which the population's lifetime rule could not pay one such step."""
        if self.lifetime_admits(rate, sigma):
            return
        assert self._lifetime is not None
        left, budget = self._lifetime.left, self._lifetime.budget
        what = _USED_UP if left <= budget * _NOTHING else "lower the run's epsilon or batch"
        raise LedgerExhausted(
            f"The ledger {self.path} has {left:.6g} left of {budget:.6g} at order"
            f" {self._lifetime.order:g}, and one step of the run costs"
            f" {self._lifetime_cost(rate, sigma):.6g}: {what}.",
            ("epsilon",),
        )

    def lifetime_admits(self, rate: float, sigma: float) -> bool:
        """Whether the population's lifetime rule has room for one more step."""
        return self._lifetime is None or self._lifetime.admits(self._lifetime_cost(rate, sigma))

    def _lifetime_cost(self, rate: float, sigma: float) -> float:
        assert self._lifetime is not None
        key = (rate, sigma)
        if key not in self._lifetime_costs:
            if len(self._lifetime_costs) > 100_000:
                self._lifetime_costs.clear()
            self._lifetime_costs[key] = step_cost(rate, sigma, self._lifetime.order)
        return self._lifetime_costs[key]

    def charge(self, charge: Charge) -> None:
        """Record one step's payment, durably. Call before anything of the step is released."""
        if charge.run not in self._runs:
            raise ValueError(f"run {charge.run!r} was never reserved in this ledger")
        body = {**asdict(charge), "releases": [list(asdict(r).values()) for r in charge.releases]}
        if self._lifetime is not None:
            cost = self._lifetime_cost(charge.rate, charge.sigma)
            after = self._lifetime.after(cost)  # raises BudgetExhausted, nothing written
            self._append("charge", {**body, "lifetime_cost": cost})
            self._lifetime = after
        else:
            self._append("charge", body)

    def record_unbounded(self, run: str, round_number: int) -> None:
        """Record a round of a method without a guarantee: its cost is infinite."""
        if self.terms.epsilon is not None:
            raise BudgetExhausted("this ledger carries a limit")
        self._append("unbounded", {"run": run, "round": round_number, "cost": "inf"})

    def record_exact(self, name: str, exact: Mapping[str, Any]) -> None:
        """Record, durably, what leaves of people whom no charge covers: its cost is infinite.

        Of those that this ledger charges for it must say nothing; whoever calls sees to that.
        """
        self._append("unbounded", {"run": name, "round": 0, "cost": "inf", "exact": dict(exact)})

    @property
    def exact(self) -> dict[str, dict[str, Any]]:
        """What was recorded so, by name."""
        return exact_of(self._rows)

    def recorded_unbounded(self, run: str, round_number: int) -> bool:
        """Whether a round stands there already: one that is taken up is no new one."""
        asked = (run, round_number)
        return any(
            row.kind == "unbounded" and (row.body["run"], row.body["round"]) == asked
            for row in reversed(self._rows)
        )

    def halt(self, run: str, round_number: int, step: int) -> None:
        """Record that a run's filter halted it for good. Once is enough."""
        if self.halted_at(run) is None:
            self._append("halt", {"run": run, "round": round_number, "step": step})
