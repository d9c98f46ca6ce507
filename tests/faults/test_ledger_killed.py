"""Processes that are killed or compete: what was released was paid for, durably, by one payer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import Terms, read_rows, verify
from xcal.errors import UserError

COMMON = """
import sys
from pathlib import Path
from xcal.dp.account import Account
from xcal.dp.accounting import budget_at, step_cost
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Release, RunTerms

path = Path(sys.argv[1])
order, rate, sigma = 8.0, 0.01, 4.0
terms = RunTerms("run", "fl-dp", "record", 3.0, 1e-5, order, budget_at(order, 3.0, 1e-5), 100)
cost = step_cost(rate, sigma, order)

def pay(account, step):
    releases = (Release("gradient", sigma, 1.0),)
    account.pay(0, step, rate=rate, sigma=sigma, cost=cost, releases=releases, inputs=None)

def say(text):
    print(text, flush=True)
"""

# A real training step. Its noise source stops the process where the gradient would be released.
STEP = """
import numpy as np, torch
from xcal.data.images import Images
from xcal.explain.signal import SignalSettings
from xcal.models.small import small
from xcal.dp.calibration import PlanShape, plan_xcal
from xcal.dp.noise import SecureNoise
from xcal.dp.clipping import ClippingEngine
from xcal.methods.context import StepContext, LocalData, Optimizer
from xcal.methods.xcal_steered import SteeredRule, SteeredState, steered_step

torch.set_num_threads(1)

class Stopping(SecureNoise):
    def normals(self, key, count):
        say("about to release")
        sys.stdin.readline()
        return super().normals(key, count)

class Watched(Optimizer):
    def step(self, gradient):
        super().step(gradient)
        say("released")

rng = np.random.default_rng(1)
images = Images(
    rng.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8),
    rng.integers(0, 3, 60),
    np.arange(60),
    np.array([str(i) for i in range(60)]),
)
model = small(3, seed=1, widths=(4, 4, 4, 4), groups=2)
plan = plan_xcal(PlanShape(5.0, 1e-5, units=60, batch=6, rounds=4), kappa=5.0, w=0.5)
terms = RunTerms(
    "run", "xcal-steered", "record", plan.epsilon, plan.delta, plan.order, plan.budget, plan.steps
)
with Ledger(path) as ledger:
    context = StepContext(
        client="0", method="xcal-steered", round=0, first_step=0, model=model,
        engine=ClippingEngine(model), data=LocalData(images, unit="record", images_per_unit=1),
        noise=Stopping(), account=Account(ledger, terms, replayable=False),
        optimizer=Watched(model, "sgd", 0.1, 0.0), batch=6, clip=1.0,
    )
    steered_step(context, 0, SteeredRule(plan, SignalSettings()), SteeredState())
"""


class Client:
    """A real process at a ledger, that says where it is."""

    def __init__(self, code: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMON + textwrap.dedent(code), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> list[str]:
        """Kill −9; what it had said until then and was not heard yet."""
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGKILL)
        # not communicate(): it would pass over what readline() has taken in already
        rest = self._process.stdout.read()
        self._process.wait()
        assert self._process.returncode == -signal.SIGKILL
        return rest.split("\n")[:-1]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def path(tmp_path) -> Path:
    place = tmp_path / "ledger.sqlite"
    create(place, Terms("people", "record", 10.0, 1e-4))
    return place


def charges(path: Path) -> list[dict]:
    return [row.body for row in read_rows(path) if row.kind == "charge"]


@pytest.mark.slow
def test_killed_between_charge_and_release(path):
    with Client(STEP, path) as client:
        assert client.hear() == "about to release"
        # The row is there for other processes before anything is released …
        assert [body["step"] for body in charges(path)] == [0]
        assert "released" not in client.kill()
    # … and stays, after the process: over-counted, never under-counted.
    assert [body["step"] for body in charges(path)] == [0]
    assert [name for name, _, _ in charges(path)[0]["releases"]] == ["gradient", "signal"]
    assert verify(path).ok
    with Ledger(path) as ledger:
        assert len(ledger.charges("run")) == 1


@pytest.mark.slow
def test_killed_while_appending(path):
    code = """
    with Ledger(path) as ledger:
        account = Account(ledger, terms, replayable=False)
        say("ready")
        for step in range(100_000):
            pay(account, step)
            say("paid")
    """
    confirmed = 0
    for pause in (0.013, 0.05, 0.11):
        with Client(code, path) as client:
            assert client.hear() == "ready"
            time.sleep(pause)
            confirmed += client.kill().count("paid")
        with Ledger(path) as ledger:  # opens again: chain and head hold
            recorded = len(ledger.charges("run"))
        assert recorded >= confirmed
    assert confirmed > 0
    # At most one step a kill was paid for without the client having known.
    assert recorded <= confirmed + 3
    assert verify(path).ok


def test_one_spender_at_a_time(path):
    code = """
    with Ledger(path) as ledger:
        account = Account(ledger, terms, replayable=False)
        pay(account, 0)
        say("holding")
        sys.stdin.readline()
    """
    with Client(code, path) as client:
        assert client.hear() == "holding"
        before = read_rows(path)
        with pytest.raises(UserError, match="is in use by another process") as refusal:
            Ledger(path)
        assert "\n" not in str(refusal.value)
        assert read_rows(path) == before
        assert verify(path).ok  # reading takes no lock
        client.kill()
    with Ledger(path) as ledger:  # a killed process holds nothing
        assert len(ledger.charges("run")) == 1
