"""What can be known before a draw is refused before it: nothing is charged for a mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xcal
from private_loop import N, data, network, private, train
from xcal.dp.ledger.rows import read_rows
from xcal.dp.refusals import Refused


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x - x.mean(0))


class Remembering(Mixing):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.head(x.flatten(1))


class Writing(Mixing):
    """Sets its scale by the first batch that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.bias.data.copy_(x.mean() + torch.arange(3))
        return self.head(x.flatten(1))


class Scaled(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return losses / losses.mean()


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target, reduction="none")


def uncopied() -> nn.Module:
    module = network()
    module.kept = module[0].weight * 2
    return module


@pytest.mark.parametrize("groups", [None, [i // 2 for i in range(N)]], ids=["record", "group"])
@pytest.mark.parametrize(
    ("code", "keys"),
    [
        ("reduced-loss", lambda: {"criterion": F.cross_entropy}),
        ("reduced-loss", lambda: {"criterion": lambda o, t: (o, t)}),
        ("criterion", lambda: {"criterion": Scaled()}),
        ("criterion", lambda: {"criterion": Running()}),
        ("network", lambda: {"module": Mixing()}),
        ("network", lambda: {"module": Remembering()}),
        ("network", lambda: {"module": Writing()}),
        ("network", lambda: {"module": uncopied()}),
    ],
    ids=["mean", "no tensor", "scaled", "running", "mixing", "memory", "writing", "uncopied"],
)
def test_what_a_first_draw_would_show(
    code: str, keys: Callable[[], dict[str, Any]], groups: Any, tmp_path: Path
) -> None:
    given = keys()
    before = [p.detach().clone() for p in given.get("module", nn.Module()).parameters()]
    with xcal.PrivacyEngine(ledger=tmp_path / "ward-7") as engine:
        with pytest.raises(Refused) as caught:
            private(engine, groups=groups, **given)
        assert (caught.value.code, engine.steps) == (code, 0)
        assert list(tmp_path.iterdir()) == []  # no ledger was made either
        private(engine, groups=groups)  # mended, it goes on
        assert engine.get_epsilon(1e-3) == 0.0
    if before:
        now = given["module"].parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    if code == "criterion" and isinstance(given["criterion"], Running):
        assert given["criterion"].calls == 0


def charges(path: Path) -> int:
    return sum(row.kind != "create" for row in read_rows(path / "ledger.sqlite"))


def test_a_loop_that_cannot_train_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "ward-7"
    module = network()
    with xcal.PrivacyEngine(ledger=path) as engine:
        made = private(engine, module=module)

        def asked() -> str:
            with pytest.raises(Refused) as caught:
                train(made)
            assert (engine.steps, engine.get_epsilon(1e-3), charges(path)) == (0, 0.0, 0)
            return caught.value.code

        made.module.eval()
        assert asked() == "no-draw"
        made.module.train()
        with torch.no_grad():
            assert asked() == "no-draw"
        module[0].register_module("norm", nn.BatchNorm2d(4))
        assert asked() == "network"
        del module[0].norm
        groups = made.optimizer.param_groups
        groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
        assert asked() == "foreign-parameters"
        groups[0]["params"].pop()
        assert train(made) == engine.steps == 5


def test_evaluation_between_epochs_is_refused_before_the_next_charge() -> None:
    engine = xcal.PrivacyEngine(seed=0)
    made = private(engine)
    train(made)
    made.module.eval()
    with pytest.raises(Refused):
        train(made)
    assert engine.steps == 5


@pytest.mark.parametrize(
    "loader",
    [
        lambda d: DataLoader(TensorDataset(*d, torch.arange(N)), batch_size=8),
        lambda d: DataLoader(TensorDataset(d[0].flatten(1), d[1]), batch_size=8),
        lambda d: DataLoader([{"x": x, "y": y} for x, y in zip(*d, strict=True)], batch_size=8),
        lambda d: DataLoader(TensorDataset((255 * d[0]).byte(), d[1]), batch_size=8),
    ],
    ids=["three", "another shape", "mapping", "bytes"],
)
def test_a_loop_that_is_not_the_plain_one_is_not_guessed_at(loader: Any) -> None:
    assert private(loader=loader(data()[:])).data_loader is not None


def test_targets_that_only_the_loop_gives_a_shape() -> None:
    """One number a sample, as (B, 1) and (B,): the loop will squeeze one of them."""
    x, _ = data()[:]
    for criterion in (nn.MSELoss(), nn.PoissonNLLLoss(), lambda o, t: (o - t).square()):
        made = private(
            module=network(outputs=1),
            criterion=criterion,
            loader=DataLoader(TensorDataset(x, torch.rand(N)), batch_size=8),
        )
        for images, targets in made.data_loader:
            made.optimizer.zero_grad()
            made.criterion(made.module(images).squeeze(1), targets).backward()
            made.optimizer.step()


def test_a_rehearsal_draws_nothing_from_the_loops_generators() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
    loader = DataLoader(data(), batch_size=8)
    torch.manual_seed(5)
    private(module=module, loader=loader)
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))
