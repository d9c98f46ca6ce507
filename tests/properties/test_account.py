"""An account: pay once, replay for nothing, never twice with one noise, never past a limit."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, rdp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from xcal.dp.account import Account
from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.filter import BudgetExhausted
from xcal.dp.ledger.ledger import Ledger, LedgerExhausted, create
from xcal.dp.ledger.rows import (
    Release,
    RunTerms,
    Terms,
    charge_of,
    read_rows,
    runs_of,
    verify,
)
from xcal.errors import UserError

RATE, ORDER, DELTA = 0.05, 8.0, 1e-5
SIGMAS = (1.2, 1.5, 2.0, 4.0)
COSTS = {sigma: step_cost(RATE, sigma, ORDER) for sigma in SIGMAS}


def run_terms(
    name="run", *, epsilon=3.0, unit="record", method="xcal-steered", steps=10
) -> RunTerms:
    budget = budget_at(ORDER, epsilon, DELTA)
    return RunTerms(name, method, unit, epsilon, DELTA, ORDER, budget, steps)


def without_guarantee(name="bare") -> RunTerms:
    return RunTerms(name, "fl", "record", None, None, None, None, 0)


def pay(account: Account, round_number: int, step: int, sigma: float = 2.0, inputs="a") -> None:
    account.pay(
        round_number,
        step,
        rate=RATE,
        sigma=sigma,
        cost=COSTS[sigma],
        releases=(Release("gradient", sigma, 1.0),),
        inputs=inputs,
    )


def pay_until_refused(account: Account, sigma: float, round_number: int = 0) -> int:
    """How many steps the account admits."""
    for step in range(10_000):
        try:
            pay(account, round_number, step, sigma)
        except BudgetExhausted:
            return step
    raise AssertionError("the budget has no end")


@pytest.fixture
def site_dir(tmp_path):
    """A ledger with a limit that one run of ε = 3 fits into."""
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 4.0, 1e-4))
    return path


def rows_of(path: Path) -> int:
    return len(read_rows(path))


# --- replay ---------------------------------------------------------------------------------------


def test_replay_with_the_same_inputs_charges_nothing(site_dir):
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        for step in range(3):
            pay(account, 0, step)
        spent = account.filter.spent
    before = rows_of(site_dir)
    with Ledger(site_dir) as ledger:  # another process, after a crash
        account = Account(ledger, run_terms(), replayable=True)
        account.rewind(0, 0)
        assert account.filter.spent == 0
        assert account.spent == spent
        for step in range(3):
            pay(account, 0, step)
        assert account.filter.spent == account.spent == spent
        assert ledger.head.count == before
        pay(account, 0, 3)
        assert ledger.head.count == before + 1
    assert verify(site_dir).ok


@pytest.mark.parametrize(
    "change",
    [{"inputs": "b"}, {"inputs": None}, {"sigma": 4.0}],
    ids=["other digest", "no digest", "other multiplier"],
)
def test_replay_with_other_inputs_is_refused(site_dir, change):
    with Ledger(site_dir) as ledger:
        pay(Account(ledger, run_terms(), replayable=True), 0, 0)
    before = rows_of(site_dir)
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        account.rewind(0, 0)
        with pytest.raises(UserError, match="the same noise must not serve two queries"):
            pay(account, 0, 0, **change)
    assert rows_of(site_dir) == before


def test_secure_noise_always_pays_anew(site_dir):
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=False)
        pay(account, 0, 0, inputs=None)
        once = account.filter.spent
        account.rewind(0, 0)
        assert account.filter.spent == once  # what was paid stays paid
        pay(account, 0, 0, inputs=None)
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=False)
        assert account.filter.spent >= 2 * once
        pay(account, 0, 0, inputs=None)
        assert len(ledger.charges("run")) == 3
    assert verify(site_dir).ok


def test_rewind_shows_the_budget_as_it_stood(site_dir):
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        seen = {}
        for round_number in range(2):
            for step in range(3):
                seen[round_number, step] = account.filter.spent
                pay(account, round_number, step, SIGMAS[step])
        for place, spent in seen.items():
            account.rewind(*place)
            assert account.filter.spent == spent


def test_a_halt_is_for_good(site_dir):
    with Ledger(site_dir) as ledger:
        secure = Account(ledger, run_terms(), replayable=False)
        pay(secure, 0, 0, inputs=None)
        assert not secure.halted_before(0)
        secure.halt(1, 1)
        secure.halt(1, 2)  # once is enough
        assert sum(row.kind == "halt" for row in read_rows(site_dir)) == 1
    with Ledger(site_dir) as ledger:
        assert Account(ledger, run_terms(), replayable=False).halted_before(1)
        replayed = Account(ledger, run_terms(), replayable=True)
        assert not replayed.halted_before(1)  # comes to its halt again by itself
        assert replayed.halted_before(2)


# --- refusals -------------------------------------------------------------------------------------


def test_nothing_is_written_for_a_step_the_filter_refuses(site_dir):
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(epsilon=2.0), replayable=False)
        taken = pay_until_refused(account, 1.2)
        assert taken > 0
        assert len(ledger.charges("run")) == taken
        assert account.spent <= account.terms.budget
        assert account.filter.left < COSTS[1.2]
    assert verify(site_dir).ok


def test_a_method_without_a_guarantee_has_no_account(site_dir):
    with Ledger(site_dir) as ledger, pytest.raises(ValueError, match="no guarantee"):
        Account(ledger, without_guarantee(), replayable=False)
    assert rows_of(site_dir) == 1


def test_a_ledger_with_a_limit_refuses_methods_without_a_guarantee(site_dir):
    with Ledger(site_dir) as ledger:
        with pytest.raises(UserError, match="carries a limit, and the method 'fl' has no"):
            ledger.reserve(without_guarantee())
        with pytest.raises(BudgetExhausted):
            ledger.record_unbounded("bare", 0)
    assert rows_of(site_dir) == 1


def test_a_ledger_without_a_limit_records_them_as_infinite(tmp_path):
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", None, None))
    with Ledger(path) as ledger:
        ledger.reserve(without_guarantee())
        ledger.record_unbounded("bare", 0)
    last = read_rows(path)[-1]
    assert (last.kind, last.body["cost"]) == ("unbounded", "inf")
    assert verify(path).ok


def test_terms_of_a_run_are_fixed(site_dir):
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(steps=10), replayable=True)
        assert rows_of(site_dir) == 1  # a run that pays for nothing reserves nothing
        pay(account, 0, 0)
        Account(ledger, run_terms(steps=10), replayable=True)
        with pytest.raises(UserError, match="with other terms"):
            Account(ledger, run_terms(steps=11), replayable=True)
    assert rows_of(site_dir) == 3


@pytest.mark.parametrize(
    ("ledger_unit", "run_unit", "allowed"),
    [
        ("record", "record", True),
        ("record", "group", False),  # one image of a group may move its sum by 2C
        ("group", "group", True),
        ("group", "record", False),
        ("client", "group", False),
        ("client", "client", True),
    ],
)
def test_unit_of_a_run_must_be_the_unit_of_the_ledger(tmp_path, ledger_unit, run_unit, allowed):
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", ledger_unit, 4.0, 1e-4))
    with Ledger(path) as ledger:
        if allowed:
            pay(Account(ledger, run_terms(unit=run_unit), replayable=False), 0, 0)
        else:
            with pytest.raises(
                UserError, match=f"protects a {ledger_unit}, and the run a {run_unit}"
            ):
                Account(ledger, run_terms(unit=run_unit), replayable=False)
            assert ledger.head.count == 1


# --- lifetime rules -------------------------------------------------------------------------------


def test_rule_sum_reserves_whole_targets(tmp_path):
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 7.0, 3e-5))
    with Ledger(path) as ledger:
        pay(Account(ledger, run_terms("one", epsilon=3.0), replayable=False), 0, 0)
        pay(Account(ledger, run_terms("two", epsilon=4.0), replayable=False), 0, 0)
        with pytest.raises(LedgerExhausted) as refusal:
            Account(ledger, run_terms("three", epsilon=2.0), replayable=False)
        assert refusal.value.ran_out == ("epsilon",)
        assert ledger.head.count == 5
    assert verify(path).ok


def test_rule_sum_counts_deltas_too(tmp_path):
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 100.0, 1.5 * DELTA))
    with Ledger(path) as ledger:
        pay(Account(ledger, run_terms("one"), replayable=False), 0, 0)
        with pytest.raises(LedgerExhausted) as refusal:
            Account(ledger, run_terms("two"), replayable=False)
        assert refusal.value.ran_out == ("delta",)


def test_a_run_that_pays_for_nothing_reserves_nothing(tmp_path):
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 7.0, 3e-5))
    for name in ("one", "two", "three"):
        with Ledger(path) as ledger:
            Account(ledger, run_terms(name, epsilon=7.0), replayable=False)
            assert ledger.head.count == 1
    with Ledger(path) as ledger:  # one that is halted before its first step is entered
        Account(ledger, run_terms("four", epsilon=7.0), replayable=False).halt(0, 0)
        assert set(ledger.runs) == {"four"}
    assert verify(path).ok


def test_rule_renyi_sums_all_runs_at_one_order(tmp_path):
    path, lifetime_order = tmp_path / "ledger.sqlite", 6.0
    create(path, Terms("people", "record", 3.0, DELTA, "renyi", lifetime_order))
    budget = budget_at(lifetime_order, 3.0, DELTA)
    cost = step_cost(RATE, 1.5, lifetime_order)
    with Ledger(path) as ledger:
        first = Account(ledger, run_terms("one", epsilon=2.0), replayable=False)
        taken = pay_until_refused(first, 1.5)
        assert taken * cost < budget  # its own target ended it
        second = Account(ledger, run_terms("two", epsilon=3.0), replayable=False)
        taken += pay_until_refused(second, 1.5)
        assert second.filter.admits(COSTS[1.5])  # the lifetime ended this one
        assert taken == math.floor(budget / cost)
    assert verify(path).ok
    with Ledger(path) as ledger:  # the lifetime total is read back, not started afresh
        account = Account(ledger, run_terms("six", epsilon=2.5), replayable=False)
        with pytest.raises(BudgetExhausted, match="lifetime"):
            pay(account, 0, 0, 1.5)
        assert ledger.charges("six") == []


def test_a_ledger_continues_over_processes(site_dir):
    """Reopening forgets nothing: a run cannot start its budget again."""
    taken = 0
    for round_number in range(100):
        with Ledger(site_dir) as ledger:
            account = Account(ledger, run_terms(epsilon=2.0), replayable=False)
            if not account.filter.admits(COSTS[1.2]):
                break
            pay(account, round_number, 0, 1.2, inputs=None)
            taken += 1
    assert taken == math.floor(budget_at(ORDER, 2.0, DELTA) / COSTS[1.2])


# --- everything at once ---------------------------------------------------------------------------


class Spending(RuleBasedStateMachine):
    """Any order of payments, crashes and resumptions, with honest or changed inputs.

    The steps are done in order, as a client does them, and taken up at any earlier one.
    """

    STEPS_A_ROUND = 4

    @initialize(replayable=st.booleans())
    def open_ledger(self, replayable):
        memory = Path("/dev/shm")  # syncing a real disk a thousand times is another test's business
        self.folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.path = self.folder / "ledger.sqlite"
        self.replayable = replayable
        # Room for a handful of steps, so that the end of the budget is reached.
        self.terms = RunTerms("run", "xcal", "record", 9.0, DELTA, ORDER, 6 * COSTS[1.2], 12)
        create(self.path, Terms("people", "record", 9.0, 1e-4))
        self.ledger = Ledger(self.path)
        self.account = Account(self.ledger, self.terms, replayable=replayable)
        self.next = 0
        self.queries: dict[int, tuple[float, str]] = {}

    @rule(sigma=st.sampled_from(SIGMAS), inputs=st.sampled_from("ab"))
    def pay(self, sigma, inputs):
        charges = len(self.ledger.charges("run"))
        rows = 2 + charges if charges else 1  # the run is entered with its first charge
        assert self.ledger.head.count == rows
        known = self.queries.get(self.next) if self.replayable else None
        try:
            pay(self.account, *divmod(self.next, self.STEPS_A_ROUND), sigma, inputs)
            paid = len(self.ledger.charges("run")) == charges + 1
            outcome = "paid" if paid else "replayed"
            self.queries[self.next] = (sigma, inputs)
            self.next += 1
        except BudgetExhausted:
            outcome = "exhausted"
        except UserError:
            outcome = "refused"
        # One noise serves one query; only a replay of that very query is for nothing.
        if known is None:
            assert outcome in ("paid", "exhausted")
        else:
            assert outcome == ("replayed" if known == (sigma, inputs) else "refused")
        first = outcome == "paid" and not charges
        assert self.ledger.head.count == rows + (outcome == "paid") + first

    @rule(back=st.integers(0, 5))
    def crash_and_resume(self, back):
        self.ledger.close()
        self.ledger = Ledger(self.path)
        self.account = Account(self.ledger, self.terms, replayable=self.replayable)
        self.next = max(0, self.next - back)
        self.account.rewind(*divmod(self.next, self.STEPS_A_ROUND))

    @invariant()
    def never_past_the_budget(self):
        if hasattr(self, "ledger"):
            total = sum(Fraction(c.cost) for c in self.ledger.charges("run"))
            assert total <= Fraction(self.terms.budget)
            assert self.account.filter.spent <= self.account.spent <= self.terms.budget

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            assert verify(self.path).ok
            shutil.rmtree(self.folder)


Spending.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestSpending = Spending.TestCase


def test_a_new_step_after_a_rewind_is_weighed_against_all_that_was_paid(site_dir):
    """A later step than the recorded ones, without replaying those in between."""
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        pay_until_refused(account, 1.2)
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        account.rewind(0, 0)
        with pytest.raises(BudgetExhausted):
            pay(account, 1, 0, 1.2)


def test_a_new_step_before_paid_ones_is_refused(site_dir):
    """A round was cut off with its charges made; then an earlier, unpaid one is asked for."""
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        pay(account, 5, 0)
    before = rows_of(site_dir)
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        account.rewind(4, 0)
        with pytest.raises(UserError, match="lies before steps that were paid for"):
            pay(account, 4, 0)
    assert rows_of(site_dir) == before


def test_the_account_that_made_a_charge_refuses_a_second_query_too(site_dir):
    with Ledger(site_dir) as ledger:
        account = Account(ledger, run_terms(), replayable=True)
        pay(account, 0, 0, inputs="a")
        account.rewind(0, 0)
        with pytest.raises(UserError, match="paid for"):
            pay(account, 0, 0, inputs="b")
        assert len(ledger.charges("run")) == 1


def test_seeded_noise_is_not_for_a_real_population(tmp_path):
    """A limit made by hand protects people; one made by a simulation protects nobody."""
    seeded = replace(run_terms(), noise="seeded")
    for simulated in (True, False):
        path = tmp_path / f"{simulated}.sqlite"
        create(path, Terms("people", "record", 4.0, 1e-4, simulated=simulated))
        with Ledger(path) as ledger:
            if simulated:
                pay(Account(ledger, seeded, replayable=True), 0, 0)
            else:
                with pytest.raises(UserError, match="noise comes from a seed"):
                    Account(ledger, seeded, replayable=True)
                assert ledger.head.count == 1


# --- an auditor's recomputation -------------------------------------------------------------------


@pytest.mark.parametrize("order", [1.5, 4.5, 8.0, 32.0])
def test_the_sum_agrees_with_dp_accounting_on_the_rows(tmp_path, order):
    """From each row's releases alone: no σ, no cost and no code of this package is trusted."""
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("people", "record", 60.0, 1e-4))
    epsilon = 50.0
    budget = budget_at(order, epsilon, DELTA)
    terms = RunTerms("run", "xcal", "record", epsilon, DELTA, order, budget, 60)
    clip, kappa = 1.3, 5.0
    with Ledger(path) as ledger:
        account = Account(ledger, terms, replayable=False)
        for step in range(60):
            sigma_eff = 2.0 + 0.01 * (step * 7 % 60)
            carries_signal = step % 3 != 0
            sigma = sigma_eff * (math.sqrt(1 + 1 / kappa**2) if carries_signal else 1.0)
            releases = [Release("gradient", sigma * clip, clip)]
            if carries_signal:
                releases.append(Release("signal", kappa * 0.5 * sigma, 0.5))
            cost = step_cost(RATE, sigma_eff, order)
            account.pay(
                0,
                step,
                rate=RATE,
                sigma=sigma_eff,
                cost=cost,
                releases=tuple(releases),
                inputs=None,
            )
        spent = account.spent

    rows = read_rows(path)
    run = runs_of(rows)["run"]
    accountant = rdp.RdpAccountant(
        [int(run.order) if run.order.is_integer() else run.order],
        NeighboringRelation.REPLACE_SPECIAL,
    )
    charges = [charge_of(row) for row in rows if row.kind == "charge"]
    assert len(charges) == 60
    for charge in charges:
        inverse_square = sum((r.sensitivity / r.noise) ** 2 for r in charge.releases)
        accountant.compose(
            PoissonSampledDpEvent(charge.rate, GaussianDpEvent(inverse_square**-0.5))
        )
    assert spent == pytest.approx(float(accountant.rdp[0]), rel=1e-9)
    assert spent >= float(accountant.rdp[0]) * (1 - 1e-11)
    assert spent <= run.budget
    assert verify(path).ok
