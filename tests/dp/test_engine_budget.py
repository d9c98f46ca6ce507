"""The ledger, the budget, saving and resuming, empty draws, schedulers: as a user meets them."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
import xcal.dp.engine
from commands import xcal_forked
from private_loop import N, data, network, private, train
from support import ROOT
from xcal.dp.engine import Private
from xcal.dp.ledger.rows import read_rows, verify
from xcal.dp.refusals import Refused
from xcal.errors import UserError


def weights(made: Private) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in made.module.parameters()])


def charges(path: Path) -> int:
    return sum(row.kind == "charge" for row in read_rows(path / "ledger.sqlite"))


def resumed(path: Path, **keys: Any) -> tuple[xcal.PrivacyEngine, Private]:
    module = network(seed=77)
    return xcal.PrivacyEngine.resume(
        path,
        **{
            "module": module,
            "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
            "data_loader": DataLoader(data(), batch_size=8, shuffle=True),
            **keys,
        },
    )


def test_the_docstring_of_the_engine_tells_the_truth() -> None:
    found = doctest.testmod(xcal.dp.engine)
    assert (found.attempted > 5, found.failed) == (True, 0)


def test_importing_xcal_imports_no_torch() -> None:
    code = "import sys, xcal; assert 'torch' not in sys.modules; xcal.PrivacyEngine"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_trained_after_the_ledger_was_closed(tmp_path: Path) -> None:
    engine = xcal.PrivacyEngine(ledger=tmp_path / "ledger")
    made = private(engine)
    assert train(made, most=1) == 1
    before = [p.detach().clone() for p in made.module.parameters()]
    engine.close()
    with pytest.raises(UserError, match="was closed: nothing more can be charged"):
        train(made)
    assert all(map(torch.equal, before, made.module.parameters()))
    assert verify(tmp_path / "ledger" / "ledger.sqlite").ok
    assert charges(tmp_path / "ledger") == 1


def test_every_step_is_on_record_before_its_batch_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ward-7"
    found = []

    class Watched(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            found.append(charges(path))
            return super().__getitem__(index)

        __getitems__ = None  # one by one

    monkeypatch.delattr(Watched, "__getitems__")
    with xcal.PrivacyEngine(ledger=path) as engine:
        made = private(engine, loader=DataLoader(Watched(*data()[:]), batch_size=8))
        seen = 0
        for number, (x, y) in enumerate(made.data_loader, start=1):
            assert set(found[seen:]) <= {number}
            seen = len(found)
            made.optimizer.zero_grad()
            made.criterion(made.module(x), y).backward()
            made.optimizer.step()
        assert seen > 10
        assert charges(path) == engine.steps == 5
    assert verify(path / "ledger.sqlite").ok


def test_a_ledger_outlives_the_training_and_refuses_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ward-7"
    with xcal.PrivacyEngine(ledger=path) as engine:
        made = private(engine, groups=[f"patient {i // 2}" for i in range(N)])
        train(made, epochs=2)
        assert engine.get_epsilon(1e-3) <= 5.0
        told = " ".join(engine.statement().split())
        assert "(5, 0.001)-differentially private for all records that share one id" in told
        assert str(path) in engine.statement()
        assert "20" in engine.statement()  # units
        with pytest.raises(UserError, match="in use"):
            private(xcal.PrivacyEngine(ledger=path), groups=[i // 2 for i in range(N)])
    before = (path / "ledger.sqlite").read_bytes()
    for keys in ({}, {"groups": [i // 2 for i in range(N)]}):  # another unit; nothing left
        with pytest.raises(UserError):
            private(xcal.PrivacyEngine(ledger=path), **keys)
    assert (path / "ledger.sqlite").read_bytes() == before
    done = xcal_forked("ledger", "verify", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_ledger_that_was_made_for_more_takes_several_trainings(tmp_path: Path) -> None:
    path = tmp_path / "ward-7"
    done = xcal_forked(
        *f"ledger create {path} --population ward-7 --unit record --epsilon 8 --delta 3e-3".split()
    )
    assert done.returncode == 0, done.stderr
    for epsilon in (5.0, 2.0):
        with xcal.PrivacyEngine(ledger=path) as engine:
            train(private(engine, target_epsilon=epsilon))
    with pytest.raises(UserError, match="epsilon = 1 left of 8"):
        private(xcal.PrivacyEngine(ledger=path), target_epsilon=2.0)
    with pytest.raises(UserError, match="noise"):
        private(xcal.PrivacyEngine(ledger=path, seed=1), target_epsilon=1.0)
    assert verify(path / "ledger.sqlite").ok


def test_the_loader_ends_with_the_budget() -> None:
    module = network()
    engine = xcal.PrivacyEngine(seed=0)
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        target_epsilon=4.0,
        target_delta=1e-3,
    )
    with pytest.warns(UserWarning, match="budget is spent"):
        steps = train(made, epochs=20)
    assert 5 < steps < 100
    assert 3.5 < engine.get_epsilon(1e-3) <= 4.0
    # One more step would have passed it.
    from xcal.dp.pld import delta_bound

    assert delta_bound(0.2, 1.0, steps, 4.0) <= 1e-3 < delta_bound(0.2, 1.0, steps + 1, 4.0) / 0.98


def test_without_a_budget_nothing_stops_and_epsilon_is_told() -> None:
    module = network()
    engine = xcal.PrivacyEngine()
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=8),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    assert engine.get_epsilon(1e-5) == 0.0
    assert train(made, epochs=3) == 15
    opacus = pytest.importorskip("opacus.accountants").PRVAccountant()
    opacus.history = [(2.0, 0.2, 15)]
    assert engine.get_epsilon(1e-5) == pytest.approx(opacus.get_epsilon(1e-5), rel=0.02)
    assert "No budget was set" in engine.statement()


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_the_noise_is_that_of_the_plan(accountant: str) -> None:
    engine = xcal.PrivacyEngine(accountant=accountant)
    made = private(engine)
    train(made, epochs=2)
    assert engine.get_epsilon(1e-3) <= 5.0
    from xcal.dp.calibration import calibrate, calibrate_fixed

    find = calibrate if accountant == "rdp" else calibrate_fixed
    assert engine.noise_multiplier == find(5.0, 1e-3, 0.2, 10).sigma


def test_noise_has_the_size_that_is_charged() -> None:
    module = nn.Linear(50, 40)
    images = torch.zeros(N, 50)
    found = []
    for seed in range(30):
        made = xcal.PrivacyEngine(seed=seed).make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            criterion=lambda o, t: 0 * o.sum(1),
            data_loader=DataLoader(TensorDataset(images, torch.zeros(N)), batch_size=8),
            noise_multiplier=3.0,
            max_grad_norm=0.5,
        )
        x, y = next(iter(made.data_loader))
        made.criterion(made.module(x), y).backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
        module.zero_grad()
    values = torch.cat(found)
    assert float(values.std()) == pytest.approx(3.0 * 0.5 / 8, rel=0.02)
    assert abs(float(values.mean())) < 0.005


def test_secure_noise_is_new_each_time_and_seeded_is_not() -> None:
    def trained(**keys: Any) -> torch.Tensor:
        made = private(xcal.PrivacyEngine(**keys))
        train(made)
        return weights(made)

    assert not torch.equal(trained(), trained())
    assert torch.equal(trained(seed=4), trained(seed=4))
    assert not torch.equal(trained(seed=4), trained(seed=5))

    def generated(number: int) -> torch.Tensor:
        made = private(xcal.PrivacyEngine(), noise_generator=torch.Generator().manual_seed(number))
        train(made)
        return weights(made)

    assert torch.equal(generated(1), generated(1))
    assert not torch.equal(generated(1), generated(2))


def test_empty_draws_are_steps_of_noise_alone() -> None:
    images, labels = data()[:]
    images, labels = images[:6], labels[:6]
    module = network()
    engine = xcal.PrivacyEngine(seed=3)
    made = private(
        engine,
        module=module,
        loader=DataLoader(TensorDataset(images, labels), batch_size=1),
        optimizer=torch.optim.Adam(module.parameters()),
        epochs=5,
    )
    empty = 0
    for _ in range(5):
        for x, y in made.data_loader:
            before = weights(made)
            made.optimizer.zero_grad()
            output = made.module(x)
            assert output.shape == (len(x), 3)
            assert x.shape[1:] == (1, 6, 6)
            assert y.dtype == torch.int64
            made.criterion(output, y).backward()
            made.optimizer.step()
            assert not torch.equal(before, weights(made))
            empty += not len(x)
    assert engine.steps == 30
    assert 3 <= empty <= 25


def test_batches_are_drawn_by_patient() -> None:
    numbers = torch.arange(N).float().view(N, 1, 1, 1).expand(N, 1, 6, 6).clone()
    ids = [f"p{i % 10}" for i in range(N)]
    made = private(
        loader=DataLoader(TensorDataset(numbers, data()[:][1]), batch_size=8), groups=ids
    )
    sizes = []
    for x, y in made.data_loader:
        drawn = [int(v) for v in x[:, 0, 0, 0]]
        for patient in {i % 10 for i in drawn}:
            assert {i for i in drawn if i % 10 == patient} == set(range(patient, N, 10))
        sizes.append(len(drawn))
        made.optimizer.zero_grad()
        made.criterion(made.module(x), y).backward()
        made.optimizer.step()
    assert len(set(sizes)) > 1


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_any_optimizer_and_scheduler(kind: Any) -> None:
    module = network()
    made = private(module=module, optimizer=kind(module.parameters(), lr=0.1))
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, T_max=2),
        torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda e: 1 / (1 + e)),
    ]
    rates = []
    for _ in range(2):
        train(made)
        rates.append(made.optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    assert rates[0] > rates[1] > 0
    assert isinstance(made.optimizer, torch.optim.Optimizer)


def test_a_closure_is_called_once() -> None:
    made = private()
    x, y = next(iter(made.data_loader))
    calls = []

    def closure() -> Any:
        calls.append(1)
        made.optimizer.zero_grad()
        loss = made.criterion(made.module(x), y)
        loss.backward()
        return loss

    assert made.optimizer.step(closure).item() > 0
    assert calls == [1]


def test_worker_processes_draw_the_same_batches() -> None:
    found = []
    for workers in (0, 1):
        engine = xcal.PrivacyEngine(seed=6)
        made = private(
            engine, loader=DataLoader(data(), batch_size=8, num_workers=workers), epochs=1
        )
        assert train(made) == engine.steps == 5
        found.append(weights(made))
    assert torch.equal(*found)


# Saving and resuming.


def test_a_resumed_experiment_comes_out_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    made = private(xcal.PrivacyEngine(seed=8), optimizer=None)
    train(made, epochs=2)
    want = weights(made)
    engine = xcal.PrivacyEngine(seed=8)
    made = private(engine)
    assert train(made, most=3) == 3
    engine.save(tmp_path / "saved.pt")
    engine, made = resumed(tmp_path / "saved.pt")
    assert engine.steps == 3
    assert train(made) == 2  # the rest of the epoch
    assert train(made) == 5
    assert torch.equal(want, weights(made))
    with pytest.warns(UserWarning, match="spent after 10"):
        assert train(made) == 0


def test_a_resumed_training_cannot_spend_twice(tmp_path: Path) -> None:
    """Steps after the last save were paid for: resumed again and again, ten are made in all."""
    path, saved = tmp_path / "ward-7", tmp_path / "saved.pt"
    with xcal.PrivacyEngine(ledger=path) as engine:
        made = private(engine)
        train(made, most=2)
        engine.save(saved)
        train(made, most=3)  # lost: the process dies here
    with pytest.raises(UserError):  # nor by beginning anew
        private(xcal.PrivacyEngine(ledger=path))
    total = 5
    engine, made = resumed(saved)
    with engine:
        assert engine.steps == total
        total += train(made, most=2)
    engine, made = resumed(saved)
    with engine:
        assert engine.steps == total
        with pytest.warns(UserWarning, match="spent after 10"):
            total += train(made, epochs=3)
    assert total == charges(path) == 10
    engine, made = resumed(saved)
    with engine:
        with pytest.warns(UserWarning, match="spent after 10"):
            assert train(made, epochs=3) == 0
        with pytest.raises(Refused) as caught:
            made.optimizer.step()
        assert caught.value.code == "budget"
        assert engine.get_epsilon(1e-3) <= 5.0
    assert verify(path / "ledger.sqlite").ok


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import xcal
from private_loop import data, private
from torch.utils.data import DataLoader, TensorDataset

class Dies(TensorDataset):
    step = 0
    def __getitem__(self, index):
        if Dies.step == 4:  # paid for and drawn, and nothing of it released
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

folder = Path(sys.argv[1])
engine = xcal.PrivacyEngine(ledger=folder / "ward-7")
made = private(engine, loader=DataLoader(Dies(*data()[:]), batch_size=8))
for x, y in made.data_loader:
    made.optimizer.zero_grad()
    made.criterion(made.module(x), y).backward()
    made.optimizer.step()
    Dies.step += 1
    if Dies.step == 2:
        engine.save(folder / "saved.pt")
"""


def test_a_killed_training_has_paid_for_what_it_drew(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    call = [sys.executable, "-c", KILLED, str(tmp_path), str(ROOT / "tests")]
    done = subprocess.run(call, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert charges(tmp_path / "ward-7") == 5
    engine, made = resumed(tmp_path / "saved.pt")
    with engine:
        assert engine.steps == 5
        with pytest.warns(UserWarning, match="spent after 10"):
            assert train(made, epochs=4) == 5


def test_state_of_the_optimizer_comes_back(tmp_path: Path) -> None:
    module = network()
    engine = xcal.PrivacyEngine(seed=1)
    made = private(engine, module=module, optimizer=torch.optim.Adam(module.parameters(), lr=0.3))
    train(made, most=4)
    engine.save(tmp_path / "saved.pt")
    other = network(seed=9)
    adam = torch.optim.Adam(other.parameters())
    _, again = resumed(tmp_path / "saved.pt", module=other, optimizer=adam)
    assert adam.param_groups[0]["lr"] == 0.3
    assert {float(s["step"]) for s in adam.state.values()} == {4.0}
    assert torch.equal(weights(made), weights(again))


def test_what_does_not_fit_a_saved_training_is_refused(tmp_path: Path) -> None:
    path, saved = tmp_path / "ward-7.sqlite", tmp_path / "saved.pt"
    with xcal.PrivacyEngine(ledger=path) as engine:
        made = private(engine)
        early = path.read_bytes(), path.with_suffix(".head").read_bytes()
        train(made, most=2)
        engine.save(saved)
    other = nn.Linear(2, 2)
    for keys in (
        {"groups": [0] * N},
        {"data_loader": DataLoader(data(), batch_size=4)},
        {"module": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)},
    ):
        with pytest.raises(Refused) as caught:
            resumed(saved, **keys)
        assert caught.value.code == "resume"
    for damaged in (b"", b"not a file of torch", saved.read_bytes()[:-100]):
        (tmp_path / "damaged.pt").write_bytes(damaged)
        with pytest.raises(Refused) as caught:
            resumed(tmp_path / "damaged.pt")
        assert caught.value.code == "resume"
    with pytest.raises(Refused):
        resumed(tmp_path / "nowhere.pt")
    # An older ledger put in the newer one's place is noticed.
    for extra in tmp_path.glob("ward-7*"):
        extra.unlink()
    path.write_bytes(early[0])
    path.with_suffix(".head").write_bytes(early[1])
    with pytest.raises(UserError, match="ledger"):
        resumed(saved)
    path.unlink()
    with pytest.raises(UserError, match="ledger"):
        resumed(saved)
    other_engine = xcal.PrivacyEngine(seed=0)
    private(other_engine)
    with pytest.raises(UserError, match="folder"):
        other_engine.save(tmp_path / "no folder" / "saved.pt")
